"""Which committed offsets of a group have expired: Kafka's rule (OffsetMetadataManager's
`cleanupExpiredOffsets`, ClassicGroup's `offsetExpirationCondition`), a pure decision.

    the group                              an offset expires when
    never had members                      its commit is older than the retention
    is empty                               the group has been empty for so long
    has consumers whose topics are known   its commit is older, and its topic is not among them
    anything else                          never
"""

from __future__ import annotations

from collections.abc import Mapping

from tierlog.broker.data_folder.data_folder import TopicPartition
from tierlog.record_format.consumer_offsets import Commit


def expired_offsets(
    commits: Mapping[TopicPartition, Commit],
    *,
    empty_since_ms: int | None,
    subscribed: frozenset[str] | None,
    retention_minutes: int | None,
    now_ms: int,
) -> list[TopicPartition]:
    """`empty_since_ms`: None if the group has members, -1 if it never had any. `subscribed`: what
    its members read; None if that is not known. `retention_minutes`: None is for ever.
    """
    if retention_minutes is None or subscribed is None:
        return []
    limit_ms = now_ms - retention_minutes * 60_000
    if empty_since_ms is not None and empty_since_ms >= 0:
        return list(commits) if empty_since_ms <= limit_ms else []
    return [
        place
        for place, commit in commits.items()
        if commit.commit_timestamp <= limit_ms and place[0] not in subscribed
    ]
