"""Reads two tiers as one log: which tier serves a read.

* A read never waits for a write: it takes a snapshot of the offsets, reads the hot tier from the
  local log start on and the cold tier below it, and retries if a segment left the disk meanwhile.
* The cold tier serves only offsets below the local log start; if both tiers have one, the hot one
  serves it.
* A result counts only if the log start has not passed it meanwhile: the manifest would then skip to
  the next segment.
* An offset in the cold range yields records or StoreUnavailable, never OffsetTrimmed or an empty
  result; one that neither tier has, because files were lost, raises CorruptDataError.
* Everything here may block except what is given Wait.NEVER.
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, Protocol

from tierlog.broker.bucket.cold_log import EmptyColdTier
from tierlog.broker.bucket.cold_reads import ColdReads
from tierlog.cold_tier.cold_reader import MAX_OFFSET
from tierlog.cold_tier.key_search import KeySearch
from tierlog.host.file_slice import FileSlice, TierRead, close_all
from tierlog.host.waiting import Wait, WouldBlock
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.log_state import Offsets
from tierlog.record_format.errors import (
    CorruptDataError,
    LogOfflineError,
    OffsetTrimmed,
    UnknownSegment,
)
from tierlog.record_format.index_layouts import AbortedTxn

Tier = Literal["hot", "cold", "mixed"]

READ_ATTEMPTS = 4  # segments leave the disk rarely: a few retries suffice
_MAY_FOLLOW: Final = (CorruptDataError, LogOfflineError, OSError, OffsetTrimmed, UnknownSegment)


class Fetched(NamedTuple):
    """Whole batches; the first may begin below the requested offset, the last ends at
    `next_offset`. `hot_offset`: where the hot part of a `mixed` result begins.
    """

    slices: tuple[FileSlice, ...]
    next_offset: int
    end_offset: int
    log_start_offset: int
    high_watermark: int
    tier: Tier
    aborted: tuple[AbortedTxn, ...] = ()
    hot_offset: int = 0

    def close(self) -> None:
        close_all(self.slices)

    def tier_below(self, next_offset: int) -> Tier:
        """The tier of a response that is cut off at `next_offset`."""
        return "cold" if self.tier == "mixed" and next_offset <= self.hot_offset else self.tier

    @property
    def at_end(self) -> bool:
        """Whether no more records follow."""
        return self.next_offset >= self.end_offset

    @property
    def size_bytes(self) -> int:
        return sum([piece.size_bytes for piece in self.slices])

    def span_from(self, offset: int) -> int:
        """How many offsets the batches span from `offset` on; 0 if only a gap was skipped."""
        return max(0, self.next_offset - offset) if self.slices else 0


class Read(Protocol):
    """As `TieredReads.read`."""

    def __call__(
        self, offset: int, *, max_bytes: int, committed: bool = False, wait: Wait = Wait.WAIT
    ) -> Fetched: ...


class Served(Protocol):
    """Whether the partition is still served, as `Partition` says."""

    def check_exists(self) -> None: ...
    def check_leadership(self) -> None: ...
    def confirm_end(self, wait: Wait) -> None:
        """Raises what says that the log may end above its high watermark, or WouldBlock."""
        ...


class ReportingDefunct:
    """Report an error that follows from a deletion or take-over as that. A success is refused too:
    files found by name may belong to the next topic of that name.
    """

    __slots__ = ("_served",)

    def __init__(self, served: Served) -> None:
        self._served = served

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if error is None:
            self._served.check_exists()
        elif isinstance(error, _MAY_FOLLOW):
            self._served.check_leadership()


class EmptyHotTier:
    """As much of `PartitionLog` as `TieredReads` uses, of a partition of which nothing is on this
    disk: for it the log ends where the cold tier does.
    """

    swap_sequence: Final = 0

    def __init__(self, offsets: Offsets) -> None:
        assert offsets.local_log_start_offset == offsets.high_watermark
        self.offsets, self.log_start_offset = offsets, offsets.log_start_offset
        self.local_log_start_offset = self.first_local_offset = offsets.local_log_start_offset

    @property
    def sealed(self) -> EmptyHotTier:
        return self

    def read_hot(self, offset: int, **_: object) -> TierRead:
        return TierRead((), offset)

    def aborted_transactions(self, *_: object) -> list[AbortedTxn]:
        return []

    def offset_for_timestamp(self, _timestamp: int, **_: int) -> None:
        return None

    def max_timestamp(self) -> None:
        return None


class TieredReads:
    """Of one partition. Thread-safe. `cold` is replaced when remote storage is turned on."""

    def __init__(
        self,
        log: PartitionLog | EmptyHotTier,
        cold: ColdReads | EmptyColdTier,
        *,
        served: Served,
    ) -> None:
        self._log, self.cold, self._served = log, cold, served

    def read(
        self,
        offset: int,
        *,
        max_bytes: int,
        committed: bool = False,
        below: int = MAX_OFFSET,
        wait: Wait = Wait.WAIT,
    ) -> Fetched:
        """Slices of local files, from the batch that holds `offset` on; at least one batch, unless
        none ends at or below `below`, as `find_key` returns it.

        `committed` reads up to the last stable offset and lists the aborted transactions. Raises
        OffsetTrimmed, OffsetPastEnd, StoreUnavailable, CorruptDataError, FencedError, and
        WouldBlock if it needs the disk or the bucket.
        """
        for _ in range(READ_ATTEMPTS):
            try:
                return self._read(
                    offset,
                    self._log.offsets,
                    max_bytes=max_bytes,
                    committed=committed,
                    below=below,
                    wait=wait,
                )
            except WouldBlock:
                raise
            except OffsetTrimmed:
                self._served.check_leadership()
                if offset < self._log.log_start_offset:
                    raise
                wait.before("a segment that has left the disk is read from the bucket")
            except (CorruptDataError, LogOfflineError, OSError, UnknownSegment):
                self._served.check_leadership()  # it may follow from a deletion or take-over
                raise
        raise CorruptDataError(f"{self._log}: the file of offset {offset} is gone", offset=offset)

    def _read(
        self,
        offset: int,
        now: Offsets,
        *,
        max_bytes: int,
        committed: bool,
        below: int,
        wait: Wait,
    ) -> Fetched:
        self._served.check_leadership()
        if offset > now.high_watermark:
            self._served.confirm_end(wait)
            now = self._log.offsets
        generation = self._local_generation() if committed else None
        end_offset = now.last_stable_offset if committed else now.high_watermark
        _check_range(offset, now)
        slices, next_offset, tier, hot_offset = self._read_tiers(
            now,
            offset=offset,
            end_offset=min(end_offset, below),
            max_bytes=max_bytes,
            wait=wait,
        )
        try:
            aborted = self._aborted(offset, next_offset, now, wait) if committed and slices else ()
            self._check_read(offset, now, generation)
        except BaseException:
            close_all(slices)
            raise
        return Fetched(
            slices=slices,
            next_offset=next_offset,
            end_offset=end_offset,
            log_start_offset=now.log_start_offset,
            high_watermark=now.high_watermark,
            tier=tier,
            aborted=aborted,
            hot_offset=hot_offset,
        )

    def _check_read(self, offset: int, now: Offsets, generation: tuple[int, int] | None) -> None:
        """What was found is still that of the offset. `generation`: the local one before a
        committed read.
        """
        if offset < self._log.log_start_offset:
            _check_range(offset, self._log.offsets)
        self._served.check_exists()  # files found by name may belong to the next topic of that name
        if generation is not None and self._local_generation() != generation:
            # Compaction and deletion drop an aborted transaction together with its records, which
            # these slices may still hold.
            raise now.trimmed(f"{self._log}: segments were deleted or replaced meanwhile")

    def _read_tiers(
        self,
        now: Offsets,
        *,
        offset: int,
        end_offset: int,
        max_bytes: int,
        wait: Wait,
    ) -> tuple[tuple[FileSlice, ...], int, Tier, int]:
        """The slices, next offset, tier and hot offset of what is in [offset, end_offset)."""
        slices: tuple[FileSlice, ...] = ()
        next_offset, hot_offset = offset, 0
        tier: Tier = "hot" if offset >= now.local_log_start_offset else "cold"
        cold_end = min(now.local_log_start_offset, end_offset)
        if offset < cold_end:
            cold = self._read_cold(offset, max_bytes=max_bytes, end_offset=cold_end, wait=wait)
            slices, next_offset = cold.slices, cold.next_offset
        hot_has_more = now.local_log_start_offset <= next_offset < end_offset
        if hot_has_more:
            max_bytes -= sum([piece.size_bytes for piece in slices])
        if hot_has_more and (max_bytes > 0 or not slices):
            try:
                hot = self._log.read_hot(
                    next_offset, max_bytes=max_bytes, end_offset=end_offset, wait=wait
                )
            except BaseException:
                close_all(slices)
                raise
            # The hot tier returns at least one batch, whatever its size: not on top of others.
            if not slices or sum(piece.size_bytes for piece in hot.slices) <= max_bytes:
                tier, hot_offset = ("mixed", next_offset) if slices else ("hot", 0)
                slices, next_offset = slices + hot.slices, hot.next_offset
            else:
                hot.close()
        return slices, next_offset, tier, hot_offset

    def _read_cold(self, offset: int, *, max_bytes: int, end_offset: int, wait: Wait) -> TierRead:
        cold = self.cold.read_cold(offset, max_bytes=max_bytes, end_offset=end_offset, wait=wait)
        if cold.slices or cold.next_offset > offset:
            return cold
        wait.before("both tiers are looked at again")
        _check_range(offset, self._log.offsets)
        raise CorruptDataError(
            f"{self._log}: offsets {offset} to {end_offset - 1} are in neither tier: files were "
            "lost; `tierlog storage repair` records a gap in their place",
            offset=offset,
        )

    def find_key(
        self, offset: int, search: KeySearch, *, end_offset: int = MAX_OFFSET
    ) -> tuple[int, int]:
        """Where the next batches begin, from `offset` on and below `end_offset`, that may have the
        key, and where they end: those of one chunk in the bucket, or all on local disk. If the
        segment at `offset` has none, both are where to go on.

        Waits for one segment's key filters at most. Raises as `read` does.
        """
        self._served.check_leadership()
        now = self._log.offsets
        _check_range(offset, now)
        if offset >= now.local_log_start_offset:
            return offset, MAX_OFFSET
        with ReportingDefunct(self._served):
            cold_end = min(now.local_log_start_offset, end_offset)
            return self.cold.find_key(offset, search, end_offset=cold_end)

    def _local_generation(self) -> tuple[int, int]:
        """Changes whenever local segments are deleted or replaced."""
        return self._log.sealed.swap_sequence, self._log.first_local_offset

    def _aborted(
        self, offset: int, next_offset: int, now: Offsets, wait: Wait
    ) -> tuple[AbortedTxn, ...]:
        """Aborted transactions with records in [offset, next_offset), in either tier."""
        found: list[AbortedTxn] = []
        if offset < now.local_log_start_offset:
            wait.before("the bucket's indexes are read")
            found += self.cold.aborted_transactions(offset, next_offset)
        # Even if the read ended in the cold tier: the marker may have been written much later.
        found += self._log.aborted_transactions(offset, next_offset, wait)
        return tuple(dict.fromkeys(found))

    def offset_for_timestamp(self, timestamp: int) -> tuple[int, int] | None:
        """(offset, timestamp) of the first record at or after `timestamp`; None past the last one.

        "First" is by offset, as in Kafka's ListOffsets: timestamps need not be ordered.
        """
        for attempt in range(1, READ_ATTEMPTS + 1):
            self._served.check_leadership()
            now = self._log.offsets
            try:
                with ReportingDefunct(self._served):
                    found = self._offset_for_timestamp(timestamp, now)
            except OffsetTrimmed:  # a segment has left the disk: the cold tier may have it
                if attempt == READ_ATTEMPTS:
                    raise
                continue
            if self._log.local_log_start_offset == now.local_log_start_offset:
                break
        return found

    def _offset_for_timestamp(self, timestamp: int, now: Offsets) -> tuple[int, int] | None:
        found = None
        if now.log_start_offset < now.local_log_start_offset:
            found = self.cold.offset_for_timestamp(
                timestamp,
                start_offset=now.log_start_offset,
                end_offset=now.local_log_start_offset,
            )
        if found is None:
            found = self._log.offset_for_timestamp(timestamp, end_offset=now.high_watermark)
        return found

    def max_timestamp(self) -> int | None:
        """The greatest timestamp of all records, also of those that are not flushed yet; None if
        none has one.
        """
        self._served.check_leadership()
        cold_end = self._log.local_log_start_offset
        with ReportingDefunct(self._served):
            found: list[int | None] = [self._log.max_timestamp()]
            for entry in self.cold.cold_entries(self._log.log_start_offset):
                if entry.base_offset >= cold_end:
                    break
                found.append(entry.known_max_timestamp)
        known = [timestamp for timestamp in found if timestamp is not None and timestamp >= 0]
        return max(known, default=None)


def _check_range(offset: int, now: Offsets) -> None:
    if offset < now.log_start_offset:
        raise now.trimmed(f"offset {offset} is below the log start {now.log_start_offset}")
    if offset > now.high_watermark:
        raise now.past_end(f"offset {offset} is above the high watermark {now.high_watermark}")
