"""Which transactions of cold segments were aborted: a search that ends as early as it may. Pure.

* A transaction's marker, and with it its `.txnindex` entry, may be many segments after its records.
  The producer snapshot at a segment's end tells which transactions are open there: once all that
  began in a range of offsets have ended, no later segment can have an entry for one. Without a
  snapshot nothing is known, and all following segments are read.
* A transaction has ended if the snapshot has its producer either in no transaction or in a later
  one. A producer that is missing may have expired. A snapshot may have been built from an
  incomplete log: then it has a transaction's start too late, or lacks the producer.
* An entry's last stable offset at or past the end of the range ends the search too.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tierlog.record_format.checkpoint_files import parse_snapshot
from tierlog.record_format.index_layouts import AbortedTxn


class Producers(NamedTuple):
    """The producers at the end of a segment: all ids, sorted, and the first offset of each open
    transaction by producer id.
    """

    ids: array[int]
    open_transactions: Mapping[int, int]

    def has_ended(self, producer_id: int, first_offset: int) -> bool:
        open_since = self.open_transactions.get(producer_id)
        if open_since is not None and open_since <= first_offset:
            return False
        number = bisect_left(self.ids, producer_id)
        return number < len(self.ids) and self.ids[number] == producer_id


def parse_producers(snapshot: bytes, *, file: str) -> Producers:
    """Raises CorruptSnapshot, UnknownFormatVersion."""
    found = parse_snapshot(snapshot, file=file)
    return Producers(
        array("q", sorted(one.producer_id for one in found)),
        {
            one.producer_id: one.current_txn_first_offset
            for one in found
            if one.current_txn_first_offset >= 0
        },
    )


class SegmentTransactions(NamedTuple):
    """`aborted` have their markers in the segment; `producers` is None if they are unknown."""

    base_offset: int
    last_offset: int
    aborted: Sequence[AbortedTxn]
    producers: Producers | None


def aborted_transactions(
    segments: Iterable[SegmentTransactions], *, start_offset: int, end_offset: int
) -> list[AbortedTxn]:
    """The transactions with records in [start_offset, end_offset). `segments` starts with the one
    that holds `start_offset`; it is read as far as an entry may lie.
    """
    found: list[AbortedTxn] = []
    pending = _OpenTransactions(end_offset=end_offset)
    for segment in segments:
        found += [
            txn
            for txn in segment.aborted
            if txn.last_offset >= start_offset and txn.first_offset < end_offset
        ]
        is_stable = any(txn.last_stable_offset >= end_offset for txn in segment.aborted)
        if is_stable or pending.have_ended_after(segment):
            break
    return found


class _OpenTransactions:
    """Tracks, segment by segment, the open transactions with records below `end_offset`."""

    def __init__(self, *, end_offset: int) -> None:
        self._end_offset, self._is_known = end_offset, True
        self._open: set[tuple[int, int]] = set()

    def have_ended_after(self, segment: SegmentTransactions) -> bool:
        """Whether all of them have ended at the end of this segment."""
        producers = segment.producers
        if producers is not None:
            self._open = {txn for txn in self._open if not producers.has_ended(*txn)}
        if segment.base_offset < self._end_offset:
            still_open = producers.open_transactions.items() if producers is not None else ()
            self._open.update(txn for txn in still_open if txn[1] < self._end_offset)
            self._is_known &= producers is not None
        return self._is_known and not self._open and segment.last_offset + 1 >= self._end_offset
