"""The state machine of a share partition (KIP-932): which of its records are with whom, as Kafka's
SharePartition has it.

* What becomes of a record is decided in this file. It does no I/O and reads no clock: a call is
  (state, event, `now_ms`), and returns what is to be written.
* Records in one state are one run (`share_runs`), however many they are; runs of one batch that are
  alike again are one again. There are at most as many as records may be locked.
* `start_offset`: what lies below is done with. `end_offset`: what lies at or above has been given
  to nobody yet.
* What a member says of its records counts once it is durable (`settle`): until then they are in no
  other's hands, and if it could not be written they are the member's again.

    a record is    event                                  it becomes
    not seen       acquired                               Acquired, count 1, locked for a time
    Available      acquired                               Acquired, count + 1, locked for a time
    Acquired       accepted                               Acknowledged *
    Acquired       rejected, or it is a gap               Archived *
    Acquired       released, its member's session ended   Available *, at the limit Archived *
    Acquired       renewed                                Acquired, locked anew
    Acquired       its time is over                       Available, at the limit Archived
    Available      found not to exist                     Archived
    any            of an aborted transaction, acquired    Archived
    any            the log starts above it                forgotten
    Acknowledged or Archived, and nothing below           forgotten

    *  in two steps

A record that has failed often is given alone, that others do not fail with it: from half of the
count's limit on, half of the batch, a quarter, ...; the last time, it alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from itertools import groupby, pairwise
from typing import Final, NamedTuple

from tierlog.broker.group_coordinator.share_group import ShareLimits
from tierlog.broker.share_coordinator.share_runs import NEVER, NOBODY, Lock, Run, Runs
from tierlog.record_format.errors import GroupRefused
from tierlog.record_format.share_state import (
    UNKNOWN_START,
    DeliveryState,
    ShareState,
    StateBatch,
)


class Ack(IntEnum):
    GAP = 0
    ACCEPT = 1
    RELEASE = 2
    REJECT = 3
    RENEW = 4


_BECOMES: Final = {
    Ack.GAP: DeliveryState.ARCHIVED,
    Ack.ACCEPT: DeliveryState.ACKNOWLEDGED,
    Ack.RELEASE: DeliveryState.AVAILABLE,
    Ack.REJECT: DeliveryState.ARCHIVED,
}


class Span(NamedTuple):
    """A record batch that was read. `is_aborted`: its transaction was."""

    first: int
    last: int
    is_aborted: bool = False


class Wanted(NamedTuple):
    """`batch_size`: what is new is given in parts of about so many. `is_strict`: never more than
    `max_records`, though a batch is cut by it.
    """

    member: str
    max_records: int
    batch_size: int
    is_strict: bool = False


class Acquired(NamedTuple):
    """Both offsets inclusive."""

    first: int
    last: int
    deliveries: int


class AckBatch(NamedTuple):
    """One type for all of the offsets, or one for each."""

    first: int
    last: int
    types: Sequence[int]

    def parts(self, start: int) -> Iterator[tuple[int, int, Ack]]:
        """Offsets that are acknowledged alike, from `start` on."""
        if len(self.types) == 1:
            yield max(self.first, start), self.last, Ack(self.types[0])
            return
        begin = max(self.first, start)
        for offset in range(begin, self.last + 1):
            ends = offset == self.last or self._type(offset + 1) != self._type(offset)
            if ends:
                yield begin, offset, Ack(self._type(offset))
                begin = offset + 1

    def count_by_type(self) -> Counter[Ack]:
        if len(self.types) == 1:
            return Counter({Ack(self.types[0]): self.last - self.first + 1})
        return Counter(map(Ack, self.types))

    def _type(self, offset: int) -> int:
        return self.types[offset - self.first]


class Change(NamedTuple):
    """`runs` wait for `settle`, once `batches` are written or could not be."""

    runs: list[Run]
    batches: list[StateBatch]


class SharePartition:
    """Not thread-safe."""

    def __init__(self, state: ShareState) -> None:
        """`state`: of a start that is known."""
        assert state.start_offset != UNKNOWN_START, "it is looked up first"
        self.start_offset = self.end_offset = state.start_offset
        self._runs = Runs()
        for batch in state.batches:
            self._fill_until(batch.first, DeliveryState.AVAILABLE)  # it may have been acquired
            kind, extent = DeliveryState(batch.state), (batch.first, batch.last)
            self._runs.append(Run(*extent, kind, batch.deliveries, extent))
            self.end_offset = batch.last + 1
        self._advance()

    # --- what it shows ----------------------------------------------------------------------------

    @property
    def next_fetch_offset(self) -> int:
        """From where on there may be records for somebody."""
        return next((run.first for run in self._runs if run.is_available), self.end_offset)

    def may_acquire(self, limits: ShareLimits) -> bool:
        has_room = self.end_offset - self.start_offset < limits.locks_max
        return has_room or self.next_fetch_offset < self.end_offset

    @property
    def due_ms(self) -> float:
        """When the next lock is over."""
        locked = (run.until_ms for run in self._runs if run.before is None)
        return min(locked, default=NEVER)

    @property
    def in_flight_count(self) -> int:
        """Records that somebody was given, from the first that is not done with on."""
        return self.end_offset - self.start_offset

    @property
    def complete_count(self) -> int:
        return sum(len(run) for run in self._runs if run.state.is_final)

    def batches(self) -> list[StateBatch]:
        """What a snapshot has: acquired records as they were before."""
        found = []
        for run in self._runs:
            if run.state is not DeliveryState.ACQUIRED:
                found.append(run.written)
            elif run.count > 1:
                available = DeliveryState.AVAILABLE
                found.append(StateBatch(run.first, run.last, available, run.count - 1))
        return found

    # --- acquiring --------------------------------------------------------------------------------

    def acquire(
        self,
        wanted: Wanted,
        spans: Sequence[Span],
        *,
        fetch_offset: int,
        limits: ShareLimits,
        now_ms: int,
    ) -> list[Acquired]:
        """Of the batches that were read from `fetch_offset` on, which was `next_fetch_offset`."""
        if not spans or spans[-1].last < self.start_offset:
            return []
        self._archive_missing(fetch_offset, spans[0].first)
        last = spans[-1].last
        most = min(wanted.max_records, limits.locks_max - (self.end_offset - self.start_offset))
        if most <= 0:  # no room for others: what nobody has any more
            last = min(last, self.end_offset - 1)
            most = min(wanted.max_records, last - fetch_offset + 1)
        wanted = wanted._replace(max_records=most)
        lock = Lock(wanted.member, now_ms + limits.lock_ms)
        taken, is_over = self._take_available(wanted, (spans[0].first, last), lock, limits)
        left = most - sum(map(len, taken))
        if left > 0 and not is_over and last >= self.end_offset:
            taken += self._take_new(wanted._replace(max_records=left), spans, last, lock)
        aborted = [span for span in spans if span.is_aborted]
        return _shown(self._without_aborted(taken, aborted) if aborted else taken)

    def skip(self, fetch_offset: int, next_offset: int) -> None:
        """There are no records in [fetch_offset, next_offset)."""
        self._archive_missing(fetch_offset, next_offset)
        self._fill_until(next_offset, DeliveryState.ARCHIVED)
        self._advance()

    def _archive_missing(self, fetch_offset: int, first: int) -> None:
        """Compaction or a restore left nothing in [fetch_offset, first)."""
        for run in self._runs.between(fetch_offset, first - 1):
            if run.is_available:
                self._runs.cut(run, fetch_offset, first - 1).archive()
        self._advance()

    def _take_available(
        self,
        wanted: Wanted,
        extent: tuple[int, int],
        lock: Lock,
        limits: ShareLimits,
    ) -> tuple[list[Run], bool]:
        """What was given before; and whether nothing more is to be given with it."""
        taken: list[Run] = []
        free = (run for run in self._runs.between(*extent) if run.is_available)
        for _, batch in groupby(list(free), key=lambda run: run.batch):
            left = wanted.max_records - sum(map(len, taken))
            if left <= 0:
                break
            runs = list(batch)
            is_throttled = any(run.count >= limits.throttled_from for run in runs)
            if is_throttled and taken:
                return taken, True
            most = left if wanted.is_strict else NEVER
            for first, last in _throttled(runs, extent, most, limits):
                (run,) = self._runs.between(first, last)
                mine = self._runs.cut(run, first, last)
                mine.lock(lock)
                taken.append(mine)
            if is_throttled and taken:
                return taken, True
        return taken, False

    def _take_new(self, wanted: Wanted, spans: Sequence[Span], last: int, lock: Lock) -> list[Run]:
        begin = next(span.first for span in spans if span.last >= self.end_offset)
        if not self._runs and begin > self.end_offset:
            self.start_offset = self.end_offset = begin
        self._fill_until(begin, DeliveryState.ARCHIVED)
        first = self.end_offset
        if wanted.max_records < last - first + 1:
            last = first + wanted.max_records - 1
            end = max(span.last for span in spans if span.first <= last)  # of a batch
            last = min(last, end) if wanted.is_strict else end
        bounds = [first, *_parts(first, last, spans, wanted), last + 1]
        taken = []
        for begin, end in pairwise(bounds):
            run = Run(begin, end - 1, DeliveryState.AVAILABLE, 0, (begin, end - 1))
            run.lock(lock)
            taken.append(run)
        self._runs += taken
        self.end_offset = last + 1
        return taken

    def _without_aborted(self, taken: list[Run], aborted: Sequence[Span]) -> list[Run]:
        for span in aborted:
            taken = [part for run in taken for part in self._spared(run, span)]
        self._advance()
        return taken

    def _spared(self, run: Run, aborted: Span) -> list[Run]:
        """The parts of a run outside of an aborted batch; what is in it is archived."""
        if run.last < aborted.first or run.first > aborted.last:
            return [run]
        parts = []
        if run.last > aborted.last:
            self._runs.put(tail := run.tail_from(aborted.last + 1))
            parts.append(tail)
        if run.first < aborted.first:
            parts.insert(0, run)
            self._runs.put(run := run.tail_from(aborted.first))
        run.archive()
        return parts

    def _fill_until(self, offset: int, state: DeliveryState) -> None:
        """Nothing was said of what lies between the end and `offset`."""
        if offset > self.end_offset:
            extent = (self.end_offset, offset - 1)
            self._runs.append(Run(*extent, state, 0, extent))
            self.end_offset = offset

    # --- what members say -------------------------------------------------------------------------

    def acknowledge(
        self, member: str, acks: Iterable[AckBatch], limits: ShareLimits, now_ms: int
    ) -> Change:
        """All or nothing. Raises GroupRefused."""
        changed: list[Run] = []
        try:
            for ack in acks:
                if ack.last >= self.start_offset:
                    self._acknowledge(member, ack, limits, now_ms, changed)
        except GroupRefused:
            self.settle(changed, is_written=False, limits=limits, now_ms=now_ms)
            raise
        return Change(changed, [run.written for run in changed])

    def _acknowledge(
        self, member: str, ack: AckBatch, limits: ShareLimits, now_ms: int, changed: list[Run]
    ) -> None:
        self._check_known(ack)
        for first, last, kind in ack.parts(self.start_offset):
            for run in self._runs.between(first, last):
                if run.state is not DeliveryState.ACQUIRED or run.before is not None:
                    raise _invalid_state(f"records {run.first} to {run.last} are not acquired")
                if run.member != member:
                    raise _invalid_state(f"{run.first} to {run.last} are another member's")
                if kind is Ack.RENEW:
                    if not limits.may_renew:
                        raise _invalid_state("share.renew.acknowledge.enable is false")
                    self._runs.cut(run, first, last).until_ms = now_ms + limits.lock_ms
                    continue
                part = self._runs.cut(run, first, last)
                _leave(part, _BECOMES[kind], limits)
                changed.append(part)

    def _check_known(self, ack: AckBatch) -> None:
        if not self._runs or (
            ack.first < self._runs[0].first and not ack.first < self.start_offset <= ack.last
        ):
            raise _invalid_state("no records of these offsets are acquired")
        if ack.last >= self.end_offset:
            raise GroupRefused("INVALID_REQUEST", f"offset {ack.last} is past the acquired records")

    def release(self, member: str, limits: ShareLimits) -> Change:
        """The member's session is over."""
        changed = [
            run
            for run in self._runs
            if run.state is DeliveryState.ACQUIRED and run.before is None and run.member == member
        ]
        for run in changed:
            _leave(run, DeliveryState.AVAILABLE, limits)
        return Change(changed, [run.written for run in changed])

    def settle(
        self, runs: Iterable[Run], *, is_written: bool, limits: ShareLimits, now_ms: int
    ) -> None:
        for run in runs:
            member, run.before = run.before, None
            if is_written or member is None:
                run.until_ms = NEVER
            elif run.until_ms <= now_ms:
                run.free(limits.count_limit)
            else:
                run.state, run.member = DeliveryState.ACQUIRED, member
        self._runs.join()
        self._advance()

    # --- time, and the log ------------------------------------------------------------------------

    def expire(self, limits: ShareLimits, now_ms: int) -> list[StateBatch]:
        """Free what was locked for too long."""
        late = [
            run
            for run in self._runs
            if run.state is DeliveryState.ACQUIRED and run.before is None and run.until_ms <= now_ms
        ]
        for run in late:
            run.free(limits.count_limit)
        batches = [run.written for run in late]
        if late:
            self._runs.join()
            self._advance()
        return batches

    def move_start(self, log_start_offset: int) -> None:
        """Records below were deleted from the log."""
        if log_start_offset <= self.start_offset:
            return
        self._runs = Runs(run for run in self._runs if run.last >= log_start_offset)
        for run in self._runs[:1]:
            run.first = max(run.first, log_start_offset)
        self.start_offset = log_start_offset
        self.end_offset = max(self.end_offset, log_start_offset)
        self._advance()

    def _advance(self) -> None:
        if self._runs.drop_done():
            self.start_offset = self._runs[0].first if self._runs else self.end_offset


def _leave(run: Run, state: DeliveryState, limits: ShareLimits) -> None:
    run.before = run.member
    run.member, run.state = NOBODY, state
    if state is DeliveryState.AVAILABLE and run.count >= limits.count_limit:
        run.state = DeliveryState.ARCHIVED


def _throttled(
    runs: Iterable[Run], extent: tuple[int, int], most: float, limits: ShareLimits
) -> Iterator[tuple[int, int]]:
    """What may be given of one batch's available runs, at most `most` records: first and last
    offsets.
    """
    count = 0
    for run in runs:
        if run.count >= limits.throttled_from:
            is_last_time = limits.gives_last_alone and run.count >= limits.count_limit - 1
            if is_last_time and count:
                return
            part = run.size >> (run.count - limits.throttled_from + 1)
            most = min(most, 1 if is_last_time else max(1, part))
        first = max(run.first, extent[0])
        last = int(min(run.last, extent[1], first + most - count - 1))
        if last < first:
            return
        yield first, last
        count += last - first + 1


def _parts(first: int, last: int, spans: Sequence[Span], wanted: Wanted) -> Iterator[int]:
    """Where what is new is parted, at beginnings of batches."""
    if wanted.is_strict or last - first + 1 <= wanted.batch_size:
        return
    for span in spans:
        if span.first > last:
            return
        if span.first - first >= wanted.batch_size:
            yield span.first
            first = span.first


def _shown(runs: Iterable[Run]) -> list[Acquired]:
    """Parts of one batch that follow each other are shown as one."""
    found: list[Acquired] = []
    before: Run | None = None
    for run in runs:
        is_next = before is not None and before.last + 1 == run.first
        if (
            before is not None
            and is_next
            and (before.batch, before.count) == (run.batch, run.count)
        ):
            found[-1] = found[-1]._replace(last=run.last)
        else:
            found.append(Acquired(run.first, run.last, run.count))
        before = run
    return found


def _invalid_state(detail: str) -> GroupRefused:
    return GroupRefused("INVALID_RECORD_STATE", detail)
