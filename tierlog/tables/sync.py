"""Brings a topic's new records into its table: reads the position, plans what follows it, and
commits one step after another.

* A step is about `commit_bytes` of the log, with a share of every partition. Its rows are read and
  written in bounded memory.
* After a conflict, and after a commit that was not answered, the position is read again, and the
  records that follow it: nothing is decided by what was written before.
* A step without rows is not committed. The next commit passes its offsets, too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final, NamedTuple

import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.table import Table

from tierlog.host.retry import backoff_s
from tierlog.record_format.arrow_columns import SCHEMA
from tierlog.spark_reader.arrow_dataset import (
    READAHEAD_BYTES,
    SPLIT_BYTES,
    THREADS_MAX,
    Ahead,
    TopicDataset,
)
from tierlog.spark_reader.jobs.replay_plan import Range, split_into_steps
from tierlog.spark_reader.options import ReadOptions, parse_options
from tierlog.spark_reader.planner import Planner
from tierlog.spark_reader.splits import OffsetRange, Warn
from tierlog.tables.attempts import (
    Attempt,
    abandon_attempt,
    begin_attempt,
    end_attempt,
    mark_attempt,
    remove_lost_attempts,
)
from tierlog.tables.catalog import (
    ATTEMPT,
    RAW,
    Commit,
    CommitUnanswered,
    Name,
    TableConflict,
    commit_files,
    load_table,
    position_of,
)
from tierlog.tables.data_files import DayFiles
from tierlog.tables.position import Position

COMMIT_BYTES: Final = 1 << 30
UNANSWERED_MAX: Final = 5  # in a row

_ROWS: Final = pa.schema([SCHEMA.field(field.name) for field in RAW.fields])


class Synced(NamedTuple):
    """What a run has committed."""

    commits: int = 0
    records: int = 0


class _Written(NamedTuple):
    attempt: Attempt
    files: DayFiles


def read_options(given: Mapping[str, str], topic: str) -> ReadOptions:
    """`given`: options of the Spark source. Records of aborted transactions are left out, unless
    they say otherwise. Raises InvalidOption.
    """
    asked = {"isolationLevel": "read_committed", **given, "subscribe": topic}
    options = parse_options(asked, streaming=False)
    split_bytes = options.limits.split_bytes or SPLIT_BYTES
    return replace(options, limits=options.limits._replace(split_bytes=split_bytes))


def begin_position(options: ReadOptions, topic: str) -> Position:
    """Of a table that has nothing yet of the topic as it is now. Raises UnknownTopic."""
    planner = Planner(options, report=lambda _: None, warn=lambda _: None)
    return Position(topic=topic, topic_id=planner.catalog.partitions()[0].topic_id)


@dataclass(frozen=True, kw_only=True)
class TableSync:
    """`log` is told of what was not as usual, `show` how many records a step has so far."""

    catalog: Catalog
    name: Name
    topic: str
    options: ReadOptions
    commit_bytes: int = COMMIT_BYTES
    log: Warn = print
    show: Callable[[int], None] = lambda _: None
    sleep: Callable[[float], None] = time.sleep

    def sync_table(self) -> Synced:
        """Bring the table to where the log ends now. Raises CatalogUnavailable, CommitUnanswered,
        TableRolledBack, OtherTopic, DataLoss and the errors of reading.
        """
        done, unanswered, failures = Synced(), None, 0
        while True:
            table = load_table(self.catalog, self.name)
            position = position_of(table)
            if unanswered is not None and table.snapshot_by_id(unanswered.snapshot_id) is not None:
                done, failures = Synced(done.commits + 1, done.records + unanswered.records), 0
            unanswered = None
            if removed := remove_lost_attempts(table):
                self.log(f"removed {removed} files of attempts that were not committed")
            try:
                position, steps = self._plan(position)
                for step in steps:
                    table, position, records = self._commit_step(table, position, step)
                    done = Synced(done.commits + bool(records), done.records + records)
                    failures = 0
                return done
            except TableConflict as error:
                self.log(f"going on from the new position: {error}")
            except CommitUnanswered as error:
                unanswered, failures = error, failures + 1
                if failures == UNANSWERED_MAX:
                    raise
                self.log(f"reading the position again: {error}")
                self.sleep(backoff_s(failures, first_s=0.5, max_s=10))

    def _plan(self, position: Position) -> tuple[Position, list[Sequence[OffsetRange]]]:
        """The position with all partitions, and what follows it in steps."""
        planner = Planner(self.options, report=lambda _: None, warn=self.log)
        ranges = planner.ranges({self.topic: position.offsets})
        for one in ranges:
            position.check_topic(self.topic, one.facts.topic_id)
        steps = split_into_steps(
            ranges,
            planner.splits(ranges),
            split_bytes=self.options.limits.split_bytes or SPLIT_BYTES,
            step_bytes=self.commit_bytes,
        )
        begun = position.after({one.facts.partition: one.start_offset for one in ranges})
        return begun, [list(_parts(ranges, step[self.topic])) for step in steps]

    def _commit_step(
        self, table: Table, position: Position, step: Sequence[OffsetRange]
    ) -> tuple[Table, Position, int]:
        """The table and its position after a step, and how many records that had."""
        position = position.after({one.facts.partition: one.end_offset for one in step})
        if (written := self._write_files(table, step)) is None:
            return table, position, 0
        attempt, files = written
        summary = {ATTEMPT: attempt.id, "tierlog.offsets": _in_words(step)}
        try:
            table = commit_files(table, position, Commit(files.paths, summary))
        except TableConflict:
            mark_attempt(table, attempt)  # another run may have removed it, before the last files
            raise
        except CommitUnanswered as error:
            error.records = files.rows
            raise
        end_attempt(table, attempt)
        return table, position_of(table), files.rows

    def _write_files(self, table: Table, step: Sequence[OffsetRange]) -> _Written | None:
        """The rows of a step as files; None if there are none."""
        scan = TopicDataset(self.options, _ROWS, step, ahead=_ahead(), warn=self.log).scanner()
        with closing(scan.to_batches()) as batches:
            rows = (batch for batch in batches if batch.num_rows)
            if (first := next(rows, None)) is None:
                return None
            attempt = begin_attempt(table)
            files = DayFiles(table.io, attempt.folder(table), schema_to_pyarrow(table.schema()))
            try:
                for batch in chain((first,), rows):
                    files.add_rows(_with_all_headers(batch))
                    self.show(files.rows)
                files.close()
            except BaseException:
                files.discard()
                abandon_attempt(table, attempt)
                raise
            return _Written(attempt, files)


def _parts(ranges: Sequence[OffsetRange], step: Mapping[int, Range]) -> Iterator[OffsetRange]:
    for one in ranges:
        if (part := step.get(one.facts.partition)) is not None:
            yield OffsetRange(one.facts, *part)


def _with_all_headers(rows: pa.RecordBatch) -> pa.RecordBatch:
    """With an empty list where there is no header: PyIceberg reads null lists of structs as that,
    and others do not.
    """
    place = rows.schema.get_field_index("headers")
    headers = rows.column(place)
    lists = pa.ListArray.from_arrays(headers.offsets, headers.values)
    return rows.set_column(place, "headers", lists)


def _in_words(step: Sequence[OffsetRange]) -> str:
    """For people: what a snapshot has of each partition, as JSON of [first, end)."""
    return json.dumps(
        {str(one.facts.partition): [one.start_offset, one.end_offset] for one in step}
    )


def _ahead() -> Ahead:
    return Ahead(min(THREADS_MAX, os.cpu_count() or 1), READAHEAD_BYTES)
