"""The groups of this broker: finds a group's state machine, and carries out its effects.

* One lock for all groups; a call holds it for microseconds, and does no I/O: it may be made on an
  event loop. Records are queued under it, so that their order in the log is that of the states.
* Answers are given by calling what the caller gave (`reply`), from any thread, after the flush of
  what they rest on.
* At rest it costs nothing: a group is a callback of the broker's one timer, at the time of its next
  deadline. A heartbeat moves deadlines without moving the callback, which looks again when called.
* A group that nobody is in, and that no record mentions, is forgotten.
* Offsets are checked under the same lock under which they are queued (`checking_commit`): a commit
  of an earlier generation is in the log before the later generation's assignment, or refused. The
  lock of the offsets' log is taken first.
* The time in records is the wall clock's, all deadlines the monotonic clock's.

--- records: GroupMetadataKey and GroupMetadataValue (version 3, as Kafka 4 writes) in
`__consumer_offsets`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import structlog

from tierlog.broker.group_coordinator.classic_group import ClassicGroup
from tierlog.broker.group_coordinator.consumer_protocol import decode_subscription
from tierlog.broker.group_coordinator.group_events import (
    NEVER,
    NO_MEMBER,
    Assigned,
    Effects,
    GroupError,
    Identity,
    Join,
    Joined,
    Limits,
    Replaced,
    State,
    Sync,
    Synced,
    Write,
)
from tierlog.record_format.errors import (
    FencedError,
    GroupRefused,
    RecordTooLarge,
    ShuttingDown,
    TierlogError,
)
from tierlog.record_format.kafka_messages import codec
from tierlog.record_format.kafka_messages.messages import (
    GroupMetadataKey,
    GroupMetadataValue,
)
from tierlog.record_format.kafka_messages.source import MessageError

log = structlog.get_logger(__name__)

GROUPS_MAX: Final = 100_000  # with members, or about to have them
CONSUMER: Final = "consumer"  # the protocol type of Kafka's consumers
_VALUE_VERSION: Final = 3

Append = Callable[[str, bytes, bytes | None], "Future[Any]"]
"""(group, key, value): queue a record; it does not wait. It may raise what an append raises."""


class MemberState(NamedTuple):
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes


class GroupState(NamedTuple):
    """A group as it is now. `protocol` and the members' bytes are those of a stable group."""

    name: str
    state: State = State.DEAD
    generation: int = -1
    protocol_type: str = ""
    protocol: str = ""
    leader: str = NO_MEMBER
    members: tuple[MemberState, ...] = ()


class _Entry:
    """`armed_ms`: when the timer calls; `since_ms`: since when it is as it was last written."""

    __slots__ = ("armed_ms", "group", "is_written", "since_ms")

    def __init__(self, group: ClassicGroup) -> None:
        self.group, self.armed_ms = group, NEVER
        self.is_written, self.since_ms = False, -1


class GroupCoordinator:
    """Thread-safe. `call_after` is the timer: (milliseconds, callback)."""

    def __init__(
        self,
        append: Append,
        limits: Limits,
        *,
        call_after: Callable[[int, Callable[[], None]], None],
        now_ms: Callable[[], int],
        wall_ms: Callable[[], int],
    ) -> None:
        self._append, self._limits = append, limits
        self._call_after, self._now_ms, self._wall_ms = call_after, now_ms, wall_ms
        self._lock = threading.RLock()  # a record may be durable before its append returns
        self._groups: dict[str, _Entry] = {}
        self._is_closed = False

    # --- members' calls ---------------------------------------------------------------------------

    def join(self, name: str, join: Join, reply: Callable[[Joined], None]) -> None:
        """`reply` is called once, perhaps before this returns."""
        with self._acting() as act:
            entry = self._groups.get(name)
            if entry is None and join.member_id != NO_MEMBER:
                reply(Joined(GroupError.UNKNOWN_MEMBER_ID, join.member_id))
                return
            if self._is_closed or (entry is None and len(self._groups) >= GROUPS_MAX):
                reply(Joined(GroupError.COORDINATOR_NOT_AVAILABLE, join.member_id))
                return
            if entry is None:
                entry = self._groups[name] = _Entry(ClassicGroup(name, self._limits))
            act(entry, entry.group.join(join, reply, self._now_ms()))

    def sync(self, name: str, sync: Sync, reply: Callable[[Synced], None]) -> None:
        with self._acting() as act:
            entry = self._groups.get(name)
            if entry is None or entry.group.state is State.EMPTY:
                reply(Synced(GroupError.UNKNOWN_MEMBER_ID))
                return
            act(entry, entry.group.sync(sync, reply, self._now_ms()))

    def heartbeat(self, name: str, who: Identity, generation: int) -> GroupError:
        with self._lock:
            entry = self._groups.get(name)
            if entry is None:
                return GroupError.UNKNOWN_MEMBER_ID
            error = entry.group.heartbeat(who, generation, self._now_ms())
            self._arm(entry)
            return error

    def leave(self, name: str, leaving: list[Identity]) -> list[GroupError]:
        with self._acting() as act:
            entry = self._groups.get(name)
            if entry is None:
                return [GroupError.UNKNOWN_MEMBER_ID] * len(leaving)
            errors, effects = entry.group.leave(leaving, self._now_ms())
            act(entry, effects)
            return errors

    @contextmanager
    def checking_commit(
        self, name: str, who: Identity, generation: int, *, exists: bool
    ) -> Iterator[None]:
        """What is queued inside is of the generation that was checked. `exists`: the group has
        offsets. Raises GroupRefused.
        """
        with self._lock:
            entry = self._groups.get(name)
            if entry is None:
                unknown = GroupError.UNKNOWN_MEMBER_ID if exists else GroupError.GROUP_ID_NOT_FOUND
                error = GroupError.NONE if generation < 0 else unknown
            else:
                error = entry.group.check_commit(who, generation, self._now_ms())
                self._arm(entry)
            if error is not GroupError.NONE:
                raise GroupRefused(error, f"group {name!r}: {error}")
            yield

    # --- what it shows ----------------------------------------------------------------------------

    @contextmanager
    def holding(self) -> Iterator[None]:
        """No group changes meanwhile. Do not wait for anything in it."""
        with self._lock:
            yield

    def describe(self, name: str) -> GroupState | None:
        """None if there is no such group with members, or that had any."""
        with self._lock:
            entry = self._groups.get(name)
            return None if entry is None else _state_of(entry.group)

    def states(self) -> dict[str, tuple[State, str]]:
        """Each group's state and protocol type."""
        with self._lock:
            return {
                name: (entry.group.state, entry.group.protocol_type or "")
                for name, entry in self._groups.items()
            }

    def subscribed_topics(self, name: str) -> frozenset[str] | None:
        """The topics of a consumer group's members; None if they cannot be known."""
        with self._lock:
            entry = self._groups.get(name)
            return frozenset() if entry is None else _subscribed_topics(entry.group)

    def empty_since_ms(self, name: str) -> int | None:
        """Since when nobody is in it, by the wall clock; None: somebody is. -1: it never had
        members.
        """
        with self._lock:
            entry = self._groups.get(name)
            if entry is None:
                return -1
            return entry.since_ms if entry.group.is_idle else None

    # --- the log ----------------------------------------------------------------------------------

    def load(self, values: Mapping[str, bytes]) -> None:
        """Take over what the log says, at a start. A record that cannot be read is skipped."""
        for name, data in values.items():
            try:
                value = codec.decode_versioned(GroupMetadataValue, data)
            except MessageError as error:
                log.warning("a group's members cannot be read", group=name, error=str(error))
                continue
            with self._acting() as act:
                entry = self._groups[name] = _Entry(ClassicGroup(name, self._limits))
                entry.is_written, entry.since_ms = True, value.current_state_timestamp
                act(entry, entry.group.load(value, self._now_ms()))

    @contextmanager
    def deleting(self, name: str) -> Iterator[bytes | None]:
        """Give the key whose tombstone deletes the group, None if no record mentions it; forget
        the group unless what is inside raises. Raises GroupRefused if somebody is in it.
        """
        with self._acting() as act:
            entry = self._groups.get(name)
            if entry is not None and entry.group.state not in (State.EMPTY, State.DEAD):
                raise GroupRefused(
                    GroupError.NON_EMPTY_GROUP,
                    f"group {name!r} has {len(entry.group.members)} "
                    "members: they have to leave it first",
                )
            yield None if entry is None or not entry.is_written else key_of(name)
            if entry is not None:
                del self._groups[name]
                act(entry, entry.group.unload(GroupError.UNKNOWN_MEMBER_ID, self._now_ms()))

    def forget_all(self, error: GroupError = GroupError.NOT_COORDINATOR) -> None:
        """The log is gone."""
        with self._acting() as act:
            entries, self._groups = list(self._groups.values()), {}
            for entry in entries:
                act(entry, entry.group.unload(error, self._now_ms()))

    def close(self) -> None:
        """Tell whoever waits to look for the coordinator again."""
        with self._lock:
            self._is_closed = True
            self.forget_all()

    # --- effects ----------------------------------------------------------------------------------

    @contextmanager
    def _acting(self) -> Iterator[Callable[[_Entry, Effects], None]]:
        """Hold the lock; answers are given once it is released."""
        done: list[Effects] = []

        def act(entry: _Entry, effects: Effects) -> None:
            done.append(effects)
            for write in effects.writes:
                self._write(entry, write)
            self._arm(entry)
            group = entry.group
            if group.is_idle and not entry.is_written and self._groups.get(group.name) is entry:
                del self._groups[group.name]

        with self._lock:
            yield act
        for effects in done:
            for reply, body in effects.answers:
                reply(body)  # type: ignore[operator]  # it is what join and sync were given

    def _write(self, entry: _Entry, write: Write) -> None:
        value, entry.since_ms = write.value, self._wall_ms()
        value.current_state_timestamp = entry.since_ms
        name, written = entry.group.name, partial(self._written, entry, write.then)
        try:
            data = codec.encode_versioned(value, _VALUE_VERSION)
            future = self._append(name, key_of(name), data)
        except (TierlogError, OSError) as error:
            written(_failed(error))
        else:
            entry.is_written = True
            future.add_done_callback(written)

    def _written(
        self, entry: _Entry, then: Assigned | Replaced | None, future: Future[Any]
    ) -> None:
        cause = future.exception()
        if cause is not None:
            log.warning("a group was not written", group=entry.group.name, error=str(cause))
        error = GroupError.NONE if cause is None else error_of(cause)
        with self._acting() as act:
            if entry.group.state is not State.DEAD:
                act(entry, entry.group.written(then, error, self._now_ms()))

    def _arm(self, entry: _Entry) -> None:
        due_ms = entry.group.due_ms
        if due_ms < entry.armed_ms:
            entry.armed_ms = due_ms
            delay_ms = max(0, int(due_ms) - self._now_ms())
            self._call_after(delay_ms, partial(self._expire, entry, due_ms))

    def _expire(self, entry: _Entry, armed_ms: float) -> None:
        with self._acting() as act:
            if entry.armed_ms != armed_ms or entry.group.state is State.DEAD:
                return  # an earlier callback came since
            entry.armed_ms = NEVER
            act(entry, entry.group.expire(self._now_ms()))


def key_of(name: str) -> bytes:
    return codec.encode_record_key(GroupMetadataKey(group=name))


def error_of(cause: BaseException) -> GroupError:
    """What a member is told if a record could not be written: Kafka's translation."""
    if isinstance(cause, (FencedError, ShuttingDown)):
        return GroupError.NOT_COORDINATOR
    if isinstance(cause, (RecordTooLarge, MessageError)):
        return GroupError.UNKNOWN_SERVER_ERROR
    return GroupError.COORDINATOR_NOT_AVAILABLE


def _failed(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def _state_of(group: ClassicGroup) -> GroupState:
    is_stable = group.state is State.STABLE
    protocol = group.protocol_name if is_stable else None
    members = tuple(
        MemberState(
            one.member_id,
            one.instance_id,
            one.client_id,
            one.client_host,
            one.metadata(protocol),
            one.assignment if is_stable else b"",
        )
        for one in group.members.values()
    )
    return GroupState(
        group.name,
        group.state,
        group.generation,
        group.protocol_type or "",
        protocol or "",
        group.leader or NO_MEMBER,
        members,
    )


def _subscribed_topics(group: ClassicGroup) -> frozenset[str] | None:
    if not group.members:
        return frozenset()
    if group.protocol_type != CONSUMER or group.state is State.PREPARING:
        return None
    found: set[str] = set()
    try:
        for member in group.members.values():
            found |= decode_subscription(member.metadata(group.protocol_name))
    except MessageError:
        return None
    return frozenset(found)
