"""What a table has, and how far it is behind its topic."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from pyiceberg.table import Table

from tierlog.record_format.errors import RequestError
from tierlog.spark_reader.options import ReadOptions
from tierlog.spark_reader.planner import Planner
from tierlog.tables.catalog import MODE, check_state, dotted, stored_position
from tierlog.tables.errors_table import load_errors
from tierlog.tables.position import Position


class PartitionLag(NamedTuple):
    """The log's end is unknown if it was not asked."""

    partition: int
    next_offset: int
    end_offset: int | None
    lag: int | None


class TableStatus(NamedTuple):
    """`problem`: why records are no longer added. `errors`: how many the table of errors has."""

    table: str
    topic: str
    topic_id: str
    mode: str
    location: str
    records: int
    errors: int | None
    files: int
    size_bytes: int
    snapshots: int
    last_commit_ms: int | None
    problem: str | None
    partitions: list[PartitionLag]


def status_of(table: Table, options: ReadOptions | None) -> TableStatus:
    """`options` say where the topic is. Raises CorruptDataError and the errors of reading."""
    position, snapshot = stored_position(table), table.current_snapshot()
    totals, problem, errors = _totals(table), None, None
    try:
        check_state(table, position)
        if (beside := load_errors(table.catalog, table)) is not None:
            errors = int(_totals(beside).get("total-records", 0))
        lags = _lags(position, options)
    except RequestError as error:
        problem, lags = str(error), _lags(position, None)
    return TableStatus(
        table=dotted(table.name()),
        topic=position.topic,
        topic_id=position.topic_id,
        mode=table.properties[MODE],
        location=table.location(),
        records=int(totals.get("total-records", 0)),
        errors=errors,
        files=int(totals.get("total-data-files", 0)),
        size_bytes=int(totals.get("total-files-size", 0)),
        snapshots=len(table.metadata.snapshots),
        last_commit_ms=None if snapshot is None else snapshot.timestamp_ms,
        problem=problem,
        partitions=lags,
    )


def _totals(table: Table) -> Mapping[str, str]:
    snapshot = table.current_snapshot()
    if snapshot is None or snapshot.summary is None:
        return {}
    return snapshot.summary.additional_properties


def _lags(position: Position, options: ReadOptions | None) -> list[PartitionLag]:
    if options is None:
        return [PartitionLag(one, at, None, None) for one, at in sorted(position.offsets.items())]
    found = []
    for facts in Planner(options, report=_ignore, warn=_ignore).catalog.partitions():
        position.check_topic(facts.topic, facts.topic_id)
        end, reached = facts.end_offset, position.offsets.get(facts.partition)
        reached = facts.log_start_offset if reached is None else reached
        found.append(PartitionLag(facts.partition, reached, end, max(0, end - reached)))
    return found


def _ignore(_: str) -> None:
    pass
