"""What of a share partition is durable, and its records in `__share_group_state`: Kafka's.

* A snapshot replaces what came before it, an update is merged into it: what is written later counts
  (ShareCoordinatorShard). Acquired records are not in it: after a restart they are available.
* A start offset of -1 is not known yet: the first who reads finds it (`share.auto.offset.reset`).
* The topic is no compacted one: one update does not replace another. What lies below the oldest
  snapshot that still counts is deleted, as by Kafka.

--- records: ShareSnapshotKey and -Value, ShareUpdateKey and -Value, version 0. A tombstone of the
snapshot's key deletes both.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import islice
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from tierlog.record_format.checkpoint_files import format_topic_id
from tierlog.record_format.kafka_messages import codec
from tierlog.record_format.kafka_messages import messages as m

UNKNOWN_START: Final = -1
_VERSION: Final = 0
_SNAPSHOT, _UPDATE = 0, 1  # types of records


class DeliveryState(IntEnum):
    """Numbers as in Kafka's records; ACQUIRED is in none."""

    AVAILABLE = 0
    ACQUIRED = 1
    ACKNOWLEDGED = 2
    ARCHIVED = 4

    @property
    def is_final(self) -> bool:
        return self in (DeliveryState.ACKNOWLEDGED, DeliveryState.ARCHIVED)


_Number = Annotated[int, Meta(ge=-1, le=2**63 - 1)]
# Sixteen bytes, as JSON has them.
_TOPIC_ID_PATTERN: Final = "^[A-Za-z0-9+/]{21}[AQgw]==$"


class ShareKey(NamedTuple):
    """A share partition: a partition, as one share group reads it."""

    group: str
    topic_id: Annotated[bytes, Meta(extra_json_schema={"pattern": _TOPIC_ID_PATTERN})]
    partition: _Number

    @property
    def home(self) -> str:
        """What Kafka hashes to find the partition of its state."""
        topic_id = format_topic_id(uuid.UUID(bytes=self.topic_id))
        return f"{self.group}:{topic_id}:{self.partition}"


class StateBatch(NamedTuple):
    """Both offsets inclusive, as in the records."""

    first: _Number
    last: _Number
    state: _Number
    deliveries: _Number


class ShareState(NamedTuple):
    """`complete_count`: of the offsets from the start on, those that nobody will be given again; -1
    if it is not known. `updates`: records since the snapshot. `snapshot_ms`: when it was written.
    """

    start_offset: int
    state_epoch: int = 0
    snapshot_epoch: int = 0
    leader_epoch: int = 0
    complete_count: int = -1
    batches: tuple[StateBatch, ...] = ()
    updates: int = 0
    snapshot_ms: int = 0

    def merged(
        self, changed: Iterable[StateBatch], *, start: int, complete_count: int
    ) -> ShareState:
        start = self.start_offset if start == UNKNOWN_START else start
        return self._replace(
            start_offset=start,
            complete_count=complete_count,
            batches=merge_batches(self.batches, changed, start=start),
            updates=self.updates + 1,
        )


def merge_batches(
    old: Iterable[StateBatch], new: Iterable[StateBatch], *, start: int
) -> tuple[StateBatch, ...]:
    """Those of `new` where it says something, else `old`'s; sorted, from `start` on. Neither has
    two of one offset.
    """
    new = sorted(new)
    found: list[StateBatch] = []
    for batch in sorted([*_without(sorted(old), new), *new]):
        if batch.last < start:
            continue
        batch = batch._replace(first=max(batch.first, start))
        if found and found[-1].last + 1 == batch.first and found[-1][2:] == batch[2:]:
            found[-1] = found[-1]._replace(last=batch.last)
        else:
            found.append(batch)
    return tuple(found)


def _without(batches: Iterable[StateBatch], taken: Sequence[StateBatch]) -> Iterator[StateBatch]:
    """Both are sorted."""
    at = 0
    for batch in batches:
        first = batch.first
        while at < len(taken) and taken[at].last < first:
            at += 1
        for other in islice(taken, at, None):
            if other.first > batch.last:
                break
            if other.first > first:
                yield batch._replace(first=first, last=other.first - 1)
            first = other.last + 1
        if first <= batch.last:
            yield batch._replace(first=first)


# --- what is asked of who keeps them --------------------------------------------------------------


class StateCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a share partition's leader, or its group's coordinator, asks of who keeps the state:
    Kafka's calls on the state of share groups, in one.

    `what`     uses                                                     the answer is the state
    initialize `state_epoch`, `start_offset`                            anew
    read       `leader_epoch`: from now on no lower one may write       as it is
    write      both epochs, and the rest                                after it
    delete                                                              that is gone

    `leader_epoch`: -1 by a broker alone, and by who only looks. `number` rises from write to write
    of a leader: one that comes late counts no more. `batches`: what has changed, or with `is_whole`
    all that there is.
    """

    what: Literal["initialize", "read", "write", "delete"]
    key: ShareKey
    state_epoch: _Number = 0
    leader_epoch: _Number = -1
    number: _Number = 0
    start_offset: _Number = UNKNOWN_START
    complete_count: _Number = -1
    batches: list[StateBatch] = []
    is_whole: bool = False


class StateAnswer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`reason`: Kafka's name of an error, or NONE; then there is the state."""

    reason: str = "NONE"
    detail: str = ""
    state: ShareState | None = None


# --- records --------------------------------------------------------------------------------------


def snapshot_record(key: ShareKey, state: ShareState) -> tuple[bytes, bytes]:
    value = m.ShareSnapshotValue(
        state.snapshot_epoch,
        state.state_epoch,
        state.leader_epoch,
        state.start_offset,
        state.complete_count,
        state.snapshot_ms,
        state.snapshot_ms,
        [m.ShareSnapshotValue.StateBatch(*one) for one in state.batches],
    )
    return _snapshot_key(key), codec.encode_versioned(value, _VERSION)


def update_record(
    key: ShareKey, state: ShareState, changed: Iterable[StateBatch]
) -> tuple[bytes, bytes]:
    """`state`: as it is with what has changed."""
    value = m.ShareUpdateValue(
        state.snapshot_epoch,
        state.leader_epoch,
        state.start_offset,
        state.complete_count,
        [m.ShareUpdateValue.StateBatch(*one) for one in changed],
    )
    return codec.encode_record_key(m.ShareUpdateKey(*key)), codec.encode_versioned(value, _VERSION)


def tombstone(key: ShareKey) -> tuple[bytes, None]:
    return _snapshot_key(key), None


def _snapshot_key(key: ShareKey) -> bytes:
    return codec.encode_record_key(m.ShareSnapshotKey(*key))


class StateView:
    """The newest state of each share partition; `offsets`: where its snapshot lies."""

    def __init__(self) -> None:
        self.states: dict[ShareKey, ShareState] = {}
        self.offsets: dict[ShareKey, int] = {}

    def apply(self, key_data: bytes, data: bytes | None, offset: int) -> None:
        """The next record of a log. Raises MessageError."""
        number = codec.record_type(key_data)
        if number == _SNAPSHOT:
            key = _share_key(codec.decode_record_key(m.ShareSnapshotKey, key_data))
            if data is None:
                self.states.pop(key, None)
                self.offsets.pop(key, None)
            else:
                self.states[key] = _snapshot(codec.decode_versioned(m.ShareSnapshotValue, data))
                self.offsets[key] = offset
        elif number == _UPDATE and data is not None:
            key = _share_key(codec.decode_record_key(m.ShareUpdateKey, key_data))
            self._update(key, codec.decode_versioned(m.ShareUpdateValue, data), offset)

    def _update(self, key: ShareKey, value: m.ShareUpdateValue, offset: int) -> None:
        self.offsets.setdefault(key, offset)
        before = self.states.get(
            key, ShareState(UNKNOWN_START, snapshot_epoch=value.snapshot_epoch)
        )
        changed = [StateBatch(*_fields(one)) for one in value.state_batches]
        now = before.merged(
            changed, start=value.start_offset, complete_count=value.delivery_complete_count
        )
        leader_epoch = max(before.leader_epoch, value.leader_epoch)
        self.states[key] = now._replace(leader_epoch=leader_epoch)


def _share_key(key: m.ShareSnapshotKey | m.ShareUpdateKey) -> ShareKey:
    return ShareKey(key.group_id, key.topic_id, key.partition)


def _snapshot(value: m.ShareSnapshotValue) -> ShareState:
    return ShareState(
        value.start_offset,
        value.state_epoch,
        value.snapshot_epoch,
        value.leader_epoch,
        value.delivery_complete_count,
        tuple(sorted(StateBatch(*_fields(one)) for one in value.state_batches)),
        snapshot_ms=value.write_timestamp,
    )


def _fields(
    one: m.ShareSnapshotValue.StateBatch | m.ShareUpdateValue.StateBatch,
) -> tuple[int, int, int, int]:
    return one.first_offset, one.last_offset, one.delivery_state, one.delivery_count
