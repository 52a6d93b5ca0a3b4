"""When no later segment can name an aborted transaction that has records in a range of offsets.

* A transaction's marker, and with it the entry of a `.txnindex`, may come many segments after its
  records. The producer snapshot at a segment's end says which transactions are open there: once all
  that began in the range are over, no later segment can name one.
* A transaction is over if the snapshot has its producer, either in no transaction or in a later
  one. A producer that is missing may have been forgotten. A snapshot may have been made from less
  than there was: then it begins a transaction too late, or lacks the producer.
* Without a snapshot nothing is known, and all following segments are looked at.
* The last stable offset that an entry was written with says the same.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from record_format.index_layouts import AbortedTxn
from record_format.producer_snapshot import parse_snapshot


class Producers(NamedTuple):
    """At the end of a segment. `ids`: of all, sorted; `begun`: where an open transaction begins."""

    ids: array[int]
    begun: Mapping[int, int]

    def has_ended(self, producer_id: int, first_offset: int) -> bool:
        begun = self.begun.get(producer_id)
        if begun is not None and begun <= first_offset:
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
    """`aborted`: whose markers lie in the segment; `producers`: at its end, None: not known."""

    base_offset: int
    last_offset: int
    aborted: Sequence[AbortedTxn]
    producers: Producers | None


def aborted_transactions(
    segments: Iterable[SegmentTransactions], *, start_offset: int, end_offset: int
) -> list[AbortedTxn]:
    """Those with records in [start_offset, end_offset), by `segments`, the first of which holds
    `start_offset`; as many as can name one are looked at.
    """
    found: list[AbortedTxn] = []
    left = _OpenTransactions(end_offset=end_offset)
    for segment in segments:
        found += [
            one
            for one in segment.aborted
            if one.last_offset >= start_offset and one.first_offset < end_offset
        ]
        is_settled = any(one.last_stable_offset >= end_offset for one in segment.aborted)
        if is_settled or left.none_after(segment):
            break
    return found


class _OpenTransactions:
    """Those with records below `end_offset`, while one goes from segment to segment."""

    def __init__(self, *, end_offset: int) -> None:
        self._end_offset, self._is_known = end_offset, True
        self._open: set[tuple[int, int]] = set()

    def none_after(self, segment: SegmentTransactions) -> bool:
        """Whether all are over at the end of this segment."""
        producers = segment.producers
        if producers is not None:
            self._open = {one for one in self._open if not producers.has_ended(*one)}
        if segment.base_offset < self._end_offset:
            begun = producers.begun.items() if producers is not None else ()
            self._open.update(one for one in begun if one[1] < self._end_offset)
            self._is_known &= producers is not None
        return self._is_known and not self._open and segment.last_offset + 1 >= self._end_offset
