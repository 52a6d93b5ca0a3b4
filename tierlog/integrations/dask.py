"""Topics as a Dask DataFrame: each split of a scan is a partition, read where Dask runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dask.dataframe as dd
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from tierlog.spark_reader.arrow_dataset import TopicPart, dataset


def read_topics(
    topics: str | Sequence[str],
    *,
    columns: Sequence[str] | None = None,
    filter: pc.Expression | None = None,  # noqa: A002  Arrow's name
    **options: Any,
) -> dd.DataFrame:
    """Topics as a DataFrame of Arrow's types, in order: by partition, then by offset.

    `options` are those of `tierlog.dataset`. `filter` and `columns` are applied where a partition
    is read, and decide what of the log is fetched.
    """
    rows = dataset(topics, **options)
    empty = _frame(rows.scanner(columns, filter).projected_schema.empty_table())
    parts = rows.parts(columns, filter)
    if not parts:
        return dd.from_pandas(empty, npartitions=1)
    return dd.from_map(_read, parts, meta=empty, label="tierlog")


def _read(part: TopicPart) -> pd.DataFrame:
    return _frame(part.to_table())


def _frame(table: pa.Table) -> pd.DataFrame:
    return table.to_pandas(types_mapper=pd.ArrowDtype)
