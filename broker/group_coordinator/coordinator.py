"""The groups of this broker: finds a group's state machine, and carries out its effects.

* One lock for all groups; a call holds it for microseconds, and does no I/O: it may be made on an
  event loop. Records are queued under it, so that their order in the log is that of the states.
* Answers are given by calling what the caller gave (`reply`), from any thread, after the flush of
  what they rest on.
* At rest it costs nothing: a group is a callback of the broker's one timer, at the time of its next
  deadline. A heartbeat moves deadlines without moving the callback, which looks again when called.
* A group that nobody is in, and that no record mentions, is forgotten.
* A consumer group says which records have changed; they are written as the group then is, all or
  none. Those that could not be written are written with the next, before anybody is answered.
* A share group's partitions are initialized by whoever keeps their state (`ShareStates`), without
  the lock; the answer that waits for it follows.
* Offsets are checked under the same lock under which they are queued (`checking_commit`): a commit
  of an earlier generation is in the log before the later generation's assignment, or refused. The
  lock of the offsets' log is taken first.
* The time in records is the wall clock's, all deadlines the monotonic clock's.

--- records: GroupMetadataKey and GroupMetadataValue (version 3, as Kafka 4 writes) in
`__consumer_offsets`; those of consumer and share groups are in `consumer_group_records`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, Protocol

import structlog

from tierlog.broker.group_coordinator.assignors import TopicPartition
from tierlog.broker.group_coordinator.classic_group import ClassicGroup
from tierlog.broker.group_coordinator.consumer_group import ConsumerGroup, ConsumerLimits
from tierlog.broker.group_coordinator.consumer_group_records import (
    CLASSIC_VERSION,
    Records,
    encode_key,
    encode_value,
    load_group,
)
from tierlog.broker.group_coordinator.group_events import (
    HTTP_HOST,
    NEVER,
    NO_MEMBER,
    Answer,
    Assigned,
    Effects,
    GroupError,
    Heartbeat,
    HeartbeatAnswer,
    Identity,
    Join,
    Joined,
    Limits,
    RecordKey,
    RecordKind,
    Replaced,
    Resolution,
    ShareBeat,
    State,
    Sync,
    Synced,
    Write,
    refusal,
)
from tierlog.broker.group_coordinator.group_states import (
    CLASSIC,
    ConsumerGroupState,
    Group,
    GroupState,
    consumer_state_of,
    state_of,
    subscribed_topics,
    type_of,
)
from tierlog.broker.group_coordinator.migration import downgraded, upgraded
from tierlog.broker.group_coordinator.share_group import ShareGroup, ShareGroupLimits
from tierlog.broker.group_coordinator.subscriptions import TopicView
from tierlog.host.threads import failed
from tierlog.record_format.errors import (
    FencedError,
    GroupRefused,
    LeaderUnknown,
    NotLeader,
    RecordTooLarge,
    ShuttingDown,
    TierlogError,
)
from tierlog.record_format.kafka_messages import codec
from tierlog.record_format.kafka_messages.messages import GroupMetadataValue
from tierlog.record_format.kafka_messages.source import MessageError

log = structlog.get_logger(__name__)

GROUPS_MAX: Final = 100_000  # with members, or about to have them


Append = Callable[[str, list[tuple[bytes, bytes | None]]], "Future[Any]"]
"""(group, keys and values): queue records, all or none; it does not wait. It may raise what an
append raises.
"""


class ShareStates(Protocol):
    """Where share groups' partitions are read from, durably."""

    def initialize(
        self,
        group: str,
        places: Iterable[TopicPartition],
        *,
        epoch: int,
        reply: Callable[[BaseException | None], None],
    ) -> None: ...


class _Entry:
    """`armed_ms`: when the timer calls; `since_ms`: since when it is as it was last written.
    `unwritten`: keys of records that could not be written; `pending`: the last that was queued.
    `epoch`: the last of a consumer or share group that was counted.
    """

    __slots__ = ("armed_ms", "epoch", "group", "is_written", "pending", "since_ms", "unwritten")

    def __init__(self, group: Group) -> None:
        self.group, self.armed_ms = group, NEVER
        self.is_written, self.since_ms, self.epoch = False, -1, 0
        self.unwritten: dict[RecordKey, None] = {}
        self.pending: Future[Any] | None = None

    def become(self, group: Group) -> None:
        self.group, self.armed_ms = group, NEVER


class GroupCoordinator:
    """Thread-safe. `call_after` is the timer: (milliseconds, callback). `rebalances`: by type,
    since the start, as Kafka counts them: completed ones of classic groups, epochs of the others.
    """

    def __init__(
        self,
        append: Append,
        limits: Limits,
        consumer_limits: Callable[[str], ConsumerLimits],
        *,
        share_limits: Callable[[str], ShareGroupLimits],
        topics: TopicView,
        call_after: Callable[[int, Callable[[], None]], None],
        now_ms: Callable[[], int],
        wall_ms: Callable[[], int],
    ) -> None:
        self._append, self._limits = append, limits
        self._consumer_limits, self._topics = consumer_limits, topics
        self._share_limits = share_limits
        self._call_after, self._now_ms, self._wall_ms = call_after, now_ms, wall_ms
        self._lock = threading.RLock()  # a record may be durable before its append returns
        self._groups: dict[str, _Entry] = {}
        self.rebalances: Counter[str] = Counter()
        self._is_closed = False
        self._resolver = ThreadPoolExecutor(1, "group-patterns")  # a thread once there is work

    # --- members' calls ---------------------------------------------------------------------------

    def join(self, name: str, join: Join, reply: Callable[[Joined], None]) -> None:
        """`reply` is called once, perhaps before this returns."""
        limits = self._limits
        if not (
            limits.min_session_timeout_ms
            <= join.session_timeout_ms
            <= limits.max_session_timeout_ms
        ):
            reply(Joined(GroupError.INVALID_SESSION_TIMEOUT, join.member_id))
            return
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
            elif isinstance(entry.group, ShareGroup):
                reply(Joined(GroupError.INCONSISTENT_GROUP_PROTOCOL, join.member_id))
                return
            elif isinstance(entry.group, ConsumerGroup) and entry.group.is_idle:
                deletion = Effects(keys=entry.group.all_keys())
                entry.become(ClassicGroup(name, self._limits))
                act(entry, deletion)
            assert not isinstance(entry.group, ShareGroup), "it was looked at"
            act(entry, entry.group.join(join, reply, self._now_ms()))

    def beat(self, name: str, beat: Heartbeat, reply: Callable[[HeartbeatAnswer], None]) -> None:
        """The heartbeat of a member of the consumer protocol, which may be its first."""
        with self._acting() as act:
            entry = self._groups.get(name)
            is_new = entry is None and beat.epoch == 0
            if self._is_closed or (is_new and len(self._groups) >= GROUPS_MAX):
                reply(HeartbeatAnswer(GroupError.COORDINATOR_NOT_AVAILABLE))
                return
            try:
                group = self._consumer_group(name, entry, is_joining=beat.epoch == 0)
            except GroupRefused as refused:
                reply(HeartbeatAnswer(GroupError(refused.reason), str(refused)))
                return
            effects = group.beat(beat, reply, self._now_ms())
            if entry is None:
                entry = self._groups[name] = _Entry(group)
            elif entry.group is not group:
                if not effects.confirmed:  # refused: the group stays what it is
                    act(entry, Effects(answers=effects.answers))
                    return
                act(entry, entry.group.unload(GroupError.REBALANCE_IN_PROGRESS, self._now_ms()))
                classic = [RecordKey(RecordKind.CLASSIC)] if entry.is_written else []
                effects.keys[:0] = [*classic, *reversed(group.all_keys())]
                entry.become(group)
            act(entry, effects)

    def _consumer_group(
        self, name: str, entry: _Entry | None, *, is_joining: bool
    ) -> ConsumerGroup:
        """The group that a heartbeat goes to, perhaps instead of a classic one. Raises
        GroupRefused.
        """
        group = None if entry is None else entry.group
        if isinstance(group, ConsumerGroup):
            return group
        if not is_joining:
            detail = f"there is no consumer group {name!r}"
            raise GroupRefused(GroupError.GROUP_ID_NOT_FOUND, detail)
        if isinstance(group, ShareGroup):
            detail = f"group {name!r} is not a consumer group"
            raise GroupRefused(GroupError.GROUP_ID_NOT_FOUND, detail)
        if group is None or group.state is State.EMPTY:
            return ConsumerGroup(name, self._consumer_limits(name), self._topics)
        return upgraded(group, self._consumer_limits(name), self._topics, self._now_ms())

    # --- share groups -----------------------------------------------------------------------------

    def beat_share(
        self,
        name: str,
        beat: ShareBeat,
        states: ShareStates,
        reply: Callable[[HeartbeatAnswer], None],
    ) -> None:
        """The heartbeat of a member of a share group, which may be its first."""
        with self._acting() as act:
            entry = self._groups.get(name)
            is_new = entry is None and beat.epoch == 0
            if self._is_closed or (is_new and len(self._groups) >= GROUPS_MAX):
                reply(HeartbeatAnswer(GroupError.COORDINATOR_NOT_AVAILABLE))
                return
            if entry is None and not is_new:
                detail = f"there is no share group {name!r}"
                reply(HeartbeatAnswer(GroupError.GROUP_ID_NOT_FOUND, detail))
                return
            group = self._new_share_group(name) if entry is None else entry.group
            if not isinstance(group, ShareGroup):
                detail = f"group {name!r} is not a share group"
                reply(HeartbeatAnswer(GroupError.GROUP_ID_NOT_FOUND, detail))
                return
            effects = group.beat(beat, reply, self._now_ms())
            if entry is None:
                entry = self._groups[name] = _Entry(group)
            waiting = effects.confirmed if effects.uninitialized else []
            if waiting:
                effects.confirmed = []
            act(entry, effects)
            if effects.uninitialized:
                places = effects.uninitialized
                done = partial(self._initialized, entry, group, places, waiting)
                states.initialize(name, places, epoch=group.epoch, reply=done)

    def _new_share_group(self, name: str) -> ShareGroup:
        return ShareGroup(name, self._share_limits(name), self._topics)

    def _initialized(
        self,
        entry: _Entry,
        group: ShareGroup,
        places: Sequence[TopicPartition],
        waiting: list[Answer],
        cause: BaseException | None,
    ) -> None:
        with self._acting() as act:
            if cause is None:
                effects = group.mark_initialized(places, self._now_ms())
                effects.confirmed = waiting
            else:
                effects = group.give_up_initializing(places, self._now_ms())
                error = error_of(cause)
                effects.answers = [Answer(to, body._replace(error=error)) for to, body in waiting]
            if entry.group is group and self._groups.get(group.name) is entry:
                act(entry, effects)
            else:  # deleted meanwhile
                act(_Entry(group), Effects(answers=[*effects.answers, *effects.confirmed]))

    def share_group(self, name: str, *, creates: bool = False) -> ShareGroup:
        """Call it while `holding`. Raises GroupRefused. `creates`: one of no member and no record
        otherwise.
        """
        entry = self._groups.get(name)
        if entry is None and creates:
            return self._new_share_group(name)
        group = None if entry is None else entry.group
        if not isinstance(group, ShareGroup):
            what = "there is no" if group is None else "another type has the name of"
            detail = f"{what} share group {name!r}"
            raise GroupRefused(GroupError.GROUP_ID_NOT_FOUND, detail)
        return group

    def share_groups(self) -> list[ShareGroup]:
        with self._lock:
            found = [entry.group for entry in self._groups.values()]
        return [one for one in found if isinstance(one, ShareGroup)]

    def keep_share_group(
        self,
        group: ShareGroup,
        change: Callable[[ShareGroup, int], Effects],
        reply: Callable[[BaseException | None], None],
    ) -> None:
        """Write what an admin changed in a group. `reply` is called once it is durable."""
        with self._acting() as act:
            entry = self._groups.get(group.name)
            if entry is None:
                entry = self._groups[group.name] = _Entry(group)
            now = entry.group if isinstance(entry.group, ShareGroup) else group
            effects = change(now, self._now_ms())
            if not entry.is_written:
                effects.keys.insert(0, RecordKey(RecordKind.SHARE_EPOCH))
            act(entry, effects)
            pending = entry.pending
        if pending is None:
            reply(None)
        else:
            pending.add_done_callback(lambda future: reply(future.exception()))

    # --- members of the classic protocol ----------------------------------------------------------

    def sync(self, name: str, sync: Sync, reply: Callable[[Synced], None]) -> None:
        with self._acting() as act:
            entry = self._groups.get(name)
            group = None if entry is None else entry.group
            is_other = group is None or isinstance(group, ShareGroup)
            if entry is None or is_other or entry.group.state is State.EMPTY:
                reply(Synced(GroupError.UNKNOWN_MEMBER_ID))
                return
            assert not isinstance(entry.group, ShareGroup), "it was looked at"
            act(entry, entry.group.sync(sync, reply, self._now_ms()))

    def heartbeat(self, name: str, who: Identity, generation: int) -> GroupError:
        with self._lock:
            entry = self._groups.get(name)
            if entry is None or isinstance(entry.group, ShareGroup):
                return GroupError.UNKNOWN_MEMBER_ID
            error = entry.group.heartbeat(who, generation, self._now_ms())
            self._arm(entry)
            return error

    def leave(self, name: str, leaving: list[Identity]) -> list[GroupError]:
        with self._acting() as act:
            entry = self._groups.get(name)
            if entry is None or isinstance(entry.group, ShareGroup):
                return [GroupError.UNKNOWN_MEMBER_ID] * len(leaving)
            errors, effects = entry.group.leave(leaving, self._now_ms())
            act(entry, effects)
            return errors

    def distribute_again(self, topic: str) -> None:
        """The topic has other partitions than before. Kafka's consumers notice if they lead their
        group; here for members that leave the assignment to the broker.
        """
        with self._acting() as act:
            for entry in list(self._groups.values()):
                group = entry.group
                if not isinstance(group, ClassicGroup):
                    continue  # which sees it at its next heartbeat
                leader = group.members.get(group.leader or NO_MEMBER)
                is_ours = leader is not None and leader.client_host == HTTP_HOST
                if is_ours and topic in (subscribed_topics(group) or ()):
                    act(entry, group.distribute_again(self._now_ms()))

    @contextmanager
    def checking_commit(
        self,
        name: str,
        who: Identity,
        generation: int,
        *,
        exists: bool,
        in_transaction: bool = False,
        places: Iterable[TopicPartition] = (),
        is_old: bool = False,
    ) -> Iterator[None]:
        """What is queued inside is of the generation that was checked. `exists`: the group has
        offsets. `is_old`: in a version of the call without members' epochs. Raises GroupRefused.
        """
        with self._lock:
            entry = self._groups.get(name)
            if entry is None:
                unknown = GroupError.UNKNOWN_MEMBER_ID if exists else GroupError.GROUP_ID_NOT_FOUND
                error = GroupError.NONE if generation < 0 else unknown
            elif isinstance(entry.group, ShareGroup):
                error = GroupError.GROUP_ID_NOT_FOUND
            elif isinstance(entry.group, ConsumerGroup):
                error = entry.group.check_commit(
                    who, generation, places=places, is_old=is_old, in_transaction=in_transaction
                )
            else:
                error = entry.group.check_commit(
                    who, generation, self._now_ms(), in_transaction=in_transaction
                )
                self._arm(entry)
            if error is not GroupError.NONE:
                raise refusal(name, error)
            yield

    def check_fetch(self, name: str, member_id: str | None, epoch: int) -> None:
        """Raises GroupRefused for a member of a consumer group that may not read its offsets."""
        with self._lock:
            entry = self._groups.get(name)
            group = None if entry is None else entry.group
            if isinstance(group, ShareGroup):
                raise refusal(name, GroupError.GROUP_ID_NOT_FOUND)
            if isinstance(group, ConsumerGroup):
                error = group.check_fetch(member_id, epoch)
                if error is not GroupError.NONE:
                    raise refusal(name, error)

    def follow_config(self, name: str) -> None:
        """The group's own configuration is another."""
        with self._lock:
            entry = self._groups.get(name)
            group = None if entry is None else entry.group
            if isinstance(group, ConsumerGroup):
                group.limits = self._consumer_limits(name)
            elif isinstance(group, ShareGroup):
                group.limits = self._share_limits(name)

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
            return None if entry is None else state_of(entry.group)

    def describe_consumers(self, name: str) -> ConsumerGroupState | None:
        """None if there is no consumer group of that name."""
        with self._lock:
            entry = self._groups.get(name)
            group = None if entry is None else entry.group
            return consumer_state_of(group) if isinstance(group, ConsumerGroup) else None

    def describe_share(self, name: str) -> ConsumerGroupState | None:
        """None if there is no share group of that name."""
        with self._lock:
            entry = self._groups.get(name)
            group = None if entry is None else entry.group
            return consumer_state_of(group) if isinstance(group, ShareGroup) else None

    def count_by_state(self) -> Counter[tuple[str, str]]:
        """How many groups there are, by type and state."""
        with self._lock:
            found = [entry.group for entry in self._groups.values()]
        return Counter((type_of(one), str(one.state)) for one in found)

    def topic_name(self, topic_id: bytes) -> str | None:
        return self._topics.name_of(topic_id)

    def names(self) -> list[str]:
        with self._lock:
            return list(self._groups)

    def subscribed_topics(self, name: str) -> frozenset[str] | None:
        """The topics of a consumer group's members; None if they cannot be known."""
        with self._lock:
            entry = self._groups.get(name)
            return frozenset() if entry is None else subscribed_topics(entry.group)

    def empty_since_ms(self, name: str) -> int | None:
        """Since when nobody is in it, by the wall clock; None: somebody is, or it never goes. -1:
        it never had members, or that does not count, as in a consumer group.
        """
        with self._lock:
            entry = self._groups.get(name)
            if entry is None:
                return -1
            if isinstance(entry.group, ShareGroup):
                return None  # what it has done stays until somebody deletes it
            since_ms = entry.since_ms if isinstance(entry.group, ClassicGroup) else -1
            return since_ms if entry.group.is_idle else None

    # --- the log ----------------------------------------------------------------------------------

    def load(self, groups: Mapping[str, Records]) -> None:
        """Take over what the log says, at a start. A record that cannot be read is skipped."""
        for name, records in groups.items():
            group = ConsumerGroup(name, self._consumer_limits(name), self._topics)
            share = self._new_share_group(name)
            with self._acting() as act:
                if load_group(group, records, self._now_ms()):
                    self._take_over(group, act)
                elif load_group(share, records, self._now_ms()):
                    self._take_over(share, act)
                elif (data := records.get(_classic_key(name))) is not None:
                    self._load_classic(name, data, act)

    def _take_over(
        self, group: ConsumerGroup | ShareGroup, act: Callable[[_Entry, Effects], None]
    ) -> None:
        entry = self._groups[group.name] = _Entry(group)
        entry.is_written, entry.epoch = True, group.epoch
        act(entry, Effects())

    def _load_classic(self, name: str, data: bytes, act: Callable[[_Entry, Effects], None]) -> None:
        try:
            value = codec.decode_versioned(GroupMetadataValue, data)
        except MessageError as error:
            log.warning("a group's members cannot be read", group=name, error=str(error))
            return
        group = ClassicGroup(name, self._limits)
        entry = self._groups[name] = _Entry(group)
        entry.is_written, entry.since_ms = True, value.current_state_timestamp
        act(entry, group.load(value, self._now_ms()))

    @contextmanager
    def deleting(self, name: str) -> Iterator[list[bytes]]:
        """Give the keys whose tombstones delete the group, none if no record mentions it; forget
        the group unless what is inside raises. Raises GroupRefused if somebody is in it.
        """
        with self._acting() as act:
            entry = self._groups.get(name)
            if entry is not None and entry.group.state not in (State.EMPTY, State.DEAD):
                raise refusal(name, GroupError.NON_EMPTY_GROUP)
            yield _keys_of(entry)
            if entry is not None:
                del self._groups[name]
                act(entry, entry.group.unload(GroupError.UNKNOWN_MEMBER_ID, self._now_ms()))

    def forget_groups(self, is_gone: Callable[[str], bool]) -> None:
        """Another broker coordinates them, by their names."""
        with self._acting() as act:
            for name in list(filter(is_gone, self._groups)):
                group = self._groups[name].group
                effects = group.unload(GroupError.NOT_COORDINATOR, self._now_ms())
                act(self._groups.pop(name), effects)

    def close(self) -> None:
        """Tell whoever waits to look for the coordinator again."""
        with self._lock:
            self._is_closed = True
            self._resolver.shutdown(wait=False, cancel_futures=True)
            self.forget_groups(lambda _: True)

    # --- effects ----------------------------------------------------------------------------------

    @contextmanager
    def _acting(self) -> Iterator[Callable[[_Entry, Effects], None]]:
        """Hold the lock; answers are given once it is released."""
        done: list[Answer] = []

        def act(entry: _Entry, effects: Effects) -> None:
            done.extend(effects.answers)
            for write in effects.writes:
                self._write(entry, write)
            if effects.is_downgraded:
                self._downgrade(entry, effects)
            if effects.keys or (effects.confirmed and entry.unwritten):
                self._write_keys(entry, effects.keys)
            done.extend(self._confirmed(entry, effects.confirmed))
            self._arm(entry)
            group = entry.group
            wanted = effects.resolution
            if wanted is not None and isinstance(group, ConsumerGroup) and not self._is_closed:
                self._resolver.submit(self._resolve, entry, group, wanted)
            if group.is_idle and not entry.is_written and self._groups.get(group.name) is entry:
                del self._groups[group.name]

        with self._lock:
            yield act
        for reply, body in done:
            reply(body)  # type: ignore[operator]  # it is what join, sync and beat were given

    def _downgrade(self, entry: _Entry, effects: Effects) -> None:
        assert isinstance(entry.group, ConsumerGroup), "it is what has effects of this kind"
        group = downgraded(entry.group, self._limits, self._now_ms())
        effects.keys.append(RecordKey(RecordKind.CLASSIC))
        entry.become(group)
        if effects.is_rebalanced:
            group.rebalance(self._now_ms())

    def _write(self, entry: _Entry, write: Write) -> None:
        value, entry.since_ms = write.value, self._wall_ms()
        value.current_state_timestamp = entry.since_ms
        name = entry.group.name
        row = partial(codec.encode_versioned, value, CLASSIC_VERSION)
        future = self._queue(entry, lambda: [(_classic_key(name), row())])
        future.add_done_callback(partial(self._written, entry, entry.group, write.then))

    def _write_keys(self, entry: _Entry, keys: Iterable[RecordKey]) -> None:
        """As the group is now. What could not be written before is written with it."""
        keys = list(dict.fromkeys((*entry.unwritten, *keys)))
        entry.unwritten.clear()
        group, entry.since_ms = entry.group, self._wall_ms()
        if not isinstance(group, ClassicGroup) and group.epoch > entry.epoch:
            entry.epoch = group.epoch
            self.rebalances[type_of(group)] += 1

        def rows() -> list[tuple[bytes, bytes | None]]:
            return [
                (encode_key(group.name, key), encode_value(group, key, wall_ms=entry.since_ms))
                for key in keys
            ]

        entry.pending = self._queue(entry, rows)
        entry.pending.add_done_callback(partial(self._keys_written, entry, keys))

    def _queue(
        self, entry: _Entry, rows: Callable[[], list[tuple[bytes, bytes | None]]]
    ) -> Future[Any]:
        try:
            future = self._append(entry.group.name, rows())
        except (TierlogError, OSError) as error:
            return failed(error)
        entry.is_written = True
        return future

    def _written(
        self,
        entry: _Entry,
        group: Group,
        then: Assigned | Replaced | None,
        future: Future[Any],
    ) -> None:
        cause = future.exception()
        if cause is not None:
            log.warning("a group was not written", group=group.name, error=str(cause))
        error = GroupError.NONE if cause is None else error_of(cause)
        with self._acting() as act:
            if isinstance(group, ClassicGroup) and group.state is not State.DEAD:
                self.rebalances[CLASSIC] += cause is None and isinstance(then, Assigned)
                act(entry, group.written(then, error, self._now_ms()))

    def _keys_written(self, entry: _Entry, keys: Iterable[RecordKey], future: Future[Any]) -> None:
        cause = future.exception()
        if cause is not None:
            log.warning("a group was not written", group=entry.group.name, error=str(cause))
            with self._lock:
                entry.unwritten.update(dict.fromkeys(keys))

    def _confirmed(self, entry: _Entry, answers: list[Answer]) -> list[Answer]:
        """Those that may be given at once; the others are, when the records are durable."""
        pending = entry.pending
        if pending is None or (pending.done() and pending.exception() is None):
            return answers

        def give(future: Future[Any]) -> None:
            cause = future.exception()
            for reply, body in answers:
                given = body if cause is None else body._replace(error=error_of(cause))
                reply(given)  # type: ignore[operator]

        if answers:
            pending.add_done_callback(give)
        return []

    # --- time -------------------------------------------------------------------------------------

    def _resolve(self, entry: _Entry, group: ConsumerGroup, wanted: Resolution) -> None:
        """In a thread of its own: it takes its time over all topics."""
        version, found = self._topics.version, None
        try:
            found = wanted.by.resolve(wanted.patterns, self._topics.names())
        except GroupRefused as refused:
            log.warning("patterns were not resolved", group=group.name, error=str(refused))
        with self._acting() as act:
            effects = group.resolved(found, version, self._now_ms())
            if entry.group is group:
                act(entry, effects)

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


def _classic_key(name: str) -> bytes:
    return encode_key(name, RecordKey(RecordKind.CLASSIC))


def _keys_of(entry: _Entry | None) -> list[bytes]:
    """Of all its records."""
    if entry is None or not entry.is_written:
        return []
    group = entry.group
    if isinstance(group, ClassicGroup):
        return [_classic_key(group.name)]
    keys = dict.fromkeys((*entry.unwritten, *group.all_keys()))
    return [encode_key(group.name, key) for key in keys]


def error_of(cause: BaseException) -> GroupError:
    """What a member is told if a record could not be written: Kafka's translation."""
    if isinstance(cause, (FencedError, ShuttingDown, NotLeader, LeaderUnknown)):
        return GroupError.NOT_COORDINATOR
    if isinstance(cause, (RecordTooLarge, MessageError)):
        return GroupError.UNKNOWN_SERVER_ERROR
    return GroupError.COORDINATOR_NOT_AVAILABLE
