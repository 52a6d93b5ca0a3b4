"""Salvages the sound batches of a corrupt `.log` object.

Follows the rules of `hot_tier.salvage`, as for a segment on disk. Each pass downloads the object
again, so that a plan needs no local disk space.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

from tierlog.broker.rebuilt_segment import PIECE_BYTES
from tierlog.cold_tier.ranged_reader import read_range
from tierlog.hot_tier.batch_walk import CheckedBatch
from tierlog.hot_tier.open_files import SECTOR_BYTES
from tierlog.hot_tier.salvage import LostRange, SalvageScan, fill_lost_ranges
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.errors import CorruptDataError, CorruptObject
from tierlog.record_format.segment_entry import SegmentEntry


class ObjectSalvage:
    """The object of `entry`, of which the store has `size_bytes`. Reads all of it. Raises
    StoreUnavailable, MissingObject, CorruptObject.
    """

    def __init__(self, store: ObjectStore, entry: SegmentEntry, *, size_bytes: int) -> None:
        self._store, self._entry = store, entry
        self._size_bytes = min(size_bytes, entry.size_bytes)
        self.lost: list[LostRange] = []
        self._epochs: list[tuple[int, int]] = []  # (first offset, epoch) of the good batches
        for piece in self._pieces():
            if isinstance(piece, LostRange):
                self.lost.append(piece)
            elif not self._epochs or piece.header.leader_epoch != self._epochs[-1][1]:
                self._epochs.append((piece.header.base_offset, piece.header.leader_epoch))

    @property
    def has_good_batches(self) -> bool:
        return bool(self._epochs)

    def batches(self) -> Iterator[bytes]:
        """The log's batches; empty batches replace the lost ones. Raises CorruptDataError at the
        end if other bytes were corrupt this time.
        """
        for batch in fill_lost_ranges(self._as_before(), epoch_of=self._epoch_of):
            yield bytes(batch.body)

    def _as_before(self) -> Iterator[CheckedBatch | LostRange]:
        lost = []
        for piece in self._pieces():
            if isinstance(piece, LostRange):
                lost.append(piece)
            yield piece
        if lost != self.lost:
            raise CorruptDataError("reads differently each time", file=self._entry.log_key)

    def _epoch_of(self, offset: int) -> int:
        """The epoch of the sound batch before the offset, or else of the first."""
        number = bisect_right(self._epochs, offset, key=lambda epoch: epoch[0])
        return self._epochs[max(0, number - 1)][1]

    def _pieces(self) -> SalvageScan:
        return SalvageScan(
            _ObjectBytes(self._store, self._entry.log_key, self._size_bytes),
            size_bytes=self._size_bytes,
            start_offset=self._entry.base_offset,
            end_offset=self._entry.next_offset,
            reaches_end=self._size_bytes < self._entry.size_bytes,
        )


class _ObjectBytes:
    """Reads the object; caches the last piece. What a folder's disk cannot read is zeros."""

    def __init__(self, store: ObjectStore, key: str, size_bytes: int) -> None:
        self._store, self.name, self._size_bytes = store, key, size_bytes
        self._piece, self._start = b"", 0

    def read(self, size_bytes: int, position: int) -> bytes:
        end = min(position + size_bytes, self._size_bytes)
        if not self._start <= position <= end <= self._start + len(self._piece):
            until = min(max(end, position + PIECE_BYTES), self._size_bytes)
            self._piece, self._start = self._read(position, until), position
        return self._piece[position - self._start : end - self._start]

    def _read(self, start: int, end: int) -> bytes:
        try:
            return read_range(self._store, self.name, start, end)
        except CorruptObject:
            if end - start <= SECTOR_BYTES:
                return bytes(end - start)
            middle = (start + end) // 2
            return self._read(start, middle) + self._read(middle, end)
