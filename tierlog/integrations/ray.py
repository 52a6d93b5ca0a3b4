"""Topics as a Ray dataset: each split of a scan is a read task, run where Ray schedules it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import ray.data
from ray.data.block import BlockMetadata
from ray.data.datasource import Datasource, ReadTask

from tierlog.spark_reader.arrow_dataset import TopicPart, dataset


def read_topics(
    topics: str | Sequence[str],
    *,
    columns: Sequence[str] | None = None,
    filter: pc.Expression | None = None,  # noqa: A002  Arrow's name
    **options: Any,
) -> ray.data.Dataset:
    """Topics as a Ray dataset of Arrow blocks; Ray keeps their order where it is told to
    (`DataContext.execution_options.preserve_order`).

    `options` are those of `tierlog.dataset`. `filter` and `columns` are applied where a split is
    read, and decide what of the log is fetched.
    """
    rows = dataset(topics, **options)
    schema = rows.scanner(columns, filter).projected_schema
    return ray.data.read_datasource(Topics(rows.parts(columns, filter), schema))


class Topics(Datasource):  # type: ignore[misc]
    """The parts of a scan, as what Ray reads."""

    def __init__(self, parts: Sequence[TopicPart], schema: pa.Schema) -> None:
        super().__init__()
        self._parts, self._schema = parts, schema

    def get_name(self) -> str:
        return "tierlog"

    def estimate_inmemory_data_size(self) -> int:
        return sum(part.split.size_bytes for part in self._parts)

    def get_read_tasks(
        self,
        parallelism: int,  # noqa: ARG002  Ray's name
        per_task_row_limit: int | None = None,
        **_: object,
    ) -> list[ReadTask]:
        """One a split, whatever `parallelism` is: a split is what memory was planned for."""
        return [
            ReadTask(
                partial(_read, part),
                BlockMetadata(
                    num_rows=None,
                    size_bytes=part.split.size_bytes,
                    exec_stats=None,
                    input_files=None,
                ),
                schema=self._schema,
                per_task_row_limit=per_task_row_limit,
            )
            for part in self._parts
        ]


def _read(part: TopicPart) -> Iterator[pa.Table]:
    yield part.to_table()
