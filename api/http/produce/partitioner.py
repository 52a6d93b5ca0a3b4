"""Chooses the partition of each record that is produced to a topic.

The record's own `partition` if given; otherwise by murmur2 of its key, as Kafka's clients do, so
that a key stays in one partition whoever produces it; otherwise one partition for all records of
the request, round robin over requests and the partitions that append.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierlog.api.http.produce.columns import Content, RecordColumns
from tierlog.record_format.encode import Headers
from tierlog.record_format.topic_rules import partition_for_key


def split_by_partition(
    columns: RecordColumns, *, sticky: int, count: int
) -> dict[int, RecordColumns]:
    """The records of each partition, in order. Keys are hashed over `count` partitions; records
    without a key go to `sticky`. A record may name a partition that does not exist.
    """
    targets = _targets(columns, sticky=sticky, count=count)
    rows: dict[int, list[int]] = {}
    for row, target in enumerate(targets):
        rows.setdefault(target, []).append(row)
    if len(rows) == 1:
        return dict.fromkeys(rows, columns)
    return {target: _take(columns, rows[target]) for target in sorted(rows)}


def _targets(columns: RecordColumns, *, sticky: int, count: int) -> list[int]:
    if columns.keys is None:
        targets = [sticky] * len(columns.values)
    else:
        known: dict[Content, int] = {None: sticky}
        targets = []
        for key in columns.keys:
            target = known.get(key)
            if target is None:
                assert key is not None, "`known` has it"
                target = known[key] = partition_for_key(key, count)
            targets.append(target)
    if columns.partitions is None:
        return targets
    return [
        target if chosen is None else chosen
        for target, chosen in zip(targets, columns.partitions, strict=True)
    ]


def _take(columns: RecordColumns, rows: Sequence[int]) -> RecordColumns:
    values, keys, headers, timestamps = columns[:4]
    chosen_keys: list[Content] | None = None if keys is None else [keys[row] for row in rows]
    chosen_headers: list[Headers | None] | None = (
        None if headers is None else [headers[row] for row in rows]
    )
    return RecordColumns(
        [values[row] for row in rows],
        chosen_keys,
        chosen_headers,
        None if timestamps is None else [timestamps[row] for row in rows],
        rows=rows,
        lines=columns.lines,
        has_members=columns.has_members,
    )
