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
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from pyiceberg.catalog import Catalog
from pyiceberg.table import Table

from tierlog.host.retry import backoff_s
from tierlog.record_format.errors import InvalidRequest
from tierlog.spark_reader.arrow_dataset import SPLIT_BYTES
from tierlog.spark_reader.jobs.replay_plan import Range, split_into_steps
from tierlog.spark_reader.options import ReadOptions, parse_options
from tierlog.spark_reader.planner import Planner
from tierlog.spark_reader.splits import OffsetRange, Warn
from tierlog.tables.attempts import end_attempt, mark_attempt, remove_lost_attempts
from tierlog.tables.catalog import (
    ATTEMPT,
    ERRORS,
    ERRORS_MODE,
    MODE,
    Commit,
    CommitUnanswered,
    Name,
    TableConflict,
    commit_files,
    dotted,
    load_table,
    position_of,
)
from tierlog.tables.errors_table import catch_up, caught_up_errors
from tierlog.tables.position import Position
from tierlog.tables.step_files import LocalWriter, StepFiles, StepWriter

COMMIT_BYTES: Final = 1 << 30
NO_MODE: Final = "none"
UNANSWERED_MAX: Final = 5  # in a row


class Synced(NamedTuple):
    """What a run has committed; `errors` are records that did not fit."""

    commits: int = 0
    records: int = 0
    errors: int = 0

    def plus(self, commit: StepFiles | CommitUnanswered) -> Synced:
        return Synced(self.commits + 1, self.records + commit.records, self.errors + commit.errors)


def read_options(given: Mapping[str, str], topic: str | None) -> ReadOptions:
    """`given`: options of the Spark source. Records of aborted transactions are left out, unless
    they say otherwise. Without a topic, of all. Raises InvalidOption.
    """
    of = {"subscribePattern": ".*"} if topic is None else {"subscribe": topic}
    asked = {"isolationLevel": "read_committed", **given, **of}
    options = parse_options(asked, streaming=False)
    split_bytes = options.limits.split_bytes or SPLIT_BYTES
    return replace(options, limits=options.limits._replace(split_bytes=split_bytes))


def begin_tables(options: ReadOptions) -> Iterator[tuple[Position, str]]:
    """Of each topic, the position of a table that has nothing of it yet, and its `iceberg.mode`.
    Raises UnknownTopic.
    """
    for topic in Planner(options, report=lambda _: None, warn=lambda _: None).catalog.topics():
        mode = topic.config.get("iceberg.mode", NO_MODE)
        yield Position(topic=topic.name, topic_id=topic.topic_id), str(mode)


@dataclass(frozen=True, kw_only=True)
class TableSync:
    """`log` is told of what was not as usual."""

    catalog: Catalog
    name: Name
    topic: str
    options: ReadOptions
    commit_bytes: int = COMMIT_BYTES
    writer: StepWriter = field(default_factory=LocalWriter)
    log: Warn = print
    sleep: Callable[[float], None] = time.sleep

    def sync_table(self) -> Synced:
        """Bring the table to where the log ends now. Raises CatalogUnavailable, CommitUnanswered,
        TableRolledBack, OtherTopic, DataLoss and the errors of reading.
        """
        done, unanswered, failures = Synced(), None, 0
        while True:
            table = load_table(self.catalog, self.name)
            position = position_of(table)
            if table.properties[MODE] == ERRORS_MODE:
                raise InvalidRequest(
                    f"{dotted(self.name)} is filled with what does not fit another"
                )
            if unanswered is not None and unanswered.snapshot_id in _snapshots_of(table):
                done, failures = done.plus(unanswered), 0
            unanswered = None
            try:
                errors = caught_up_errors(self.catalog, table)
                if removed := remove_lost_attempts(table, errors=errors):
                    self.log(f"removed {removed} files of attempts that were not committed")
                position, steps = self._plan(position)
                for step in steps:
                    files = self._write_files(table, errors, step)
                    position = position.after({one.facts.partition: one.end_offset for one in step})
                    if files.attempt is not None:
                        table = _commit(files, position, {"tierlog.offsets": _in_words(step)})
                        position = position_of(table)
                        done, failures = done.plus(files), 0
                        errors = None if errors is None else catch_up(table, errors)
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
        for topic in planner.catalog.topics():  # first: of another topic the offsets say nothing
            position.check_topic(topic.name, topic.topic_id)
        ranges = planner.ranges({self.topic: position.offsets})
        steps = split_into_steps(
            ranges,
            planner.splits(ranges),
            split_bytes=self.options.limits.split_bytes or SPLIT_BYTES,
            step_bytes=self.commit_bytes,
        )
        begun = position.after({one.facts.partition: one.start_offset for one in ranges})
        return begun, [list(_parts(ranges, step[self.topic])) for step in steps]

    def _write_files(
        self, table: Table, errors: Table | None, step: Sequence[OffsetRange]
    ) -> StepFiles:
        """The rows of a step as files."""
        files = StepFiles(table, errors, self.options)
        try:
            self.writer.write_step(files, step, self.log)
        except BaseException:
            files.abandon()
            raise
        return files


def _snapshots_of(table: Table) -> set[int]:
    return {one.snapshot_id for one in table.metadata.snapshots}


def _commit(files: StepFiles, position: Position, summary: Mapping[str, str]) -> Table:
    """The table with them."""
    attempt = files.attempt
    assert attempt is not None
    properties = {ERRORS: attempt.id if files.errors else ""} if files.has_columns else {}
    commit = Commit(files.paths, {ATTEMPT: attempt.id, **summary}, properties)
    try:
        table = commit_files(files.change, position, commit)
    except TableConflict:
        mark_attempt(files.table, attempt)  # another run may have removed it, before the last files
        raise
    except CommitUnanswered as error:
        error.records, error.errors = files.records, files.errors
        raise
    end_attempt(table, attempt)
    return table


def _parts(ranges: Sequence[OffsetRange], step: Mapping[int, Range]) -> Iterator[OffsetRange]:
    for one in ranges:
        if (part := step.get(one.facts.partition)) is not None:
            yield OffsetRange(one.facts, *part)


def _in_words(step: Sequence[OffsetRange]) -> str:
    """For people: what a snapshot has of each partition, as JSON of [first, end)."""
    return json.dumps(
        {str(one.facts.partition): [one.start_offset, one.end_offset] for one in step}
    )
