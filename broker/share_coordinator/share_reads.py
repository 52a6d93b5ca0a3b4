"""What a share group is given of the batches that were read: only headers are looked at, and slices
of files are narrowed to it.

* Batches are whole: the first may begin below what was acquired, the last end above it.
* An aborted transaction's batches are known by the list that comes with a committed read, up to the
  abort's marker.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from tierlog.broker.partition.tiered_reads import Fetched
from tierlog.broker.share_coordinator.share_partition import Acquired, Span
from tierlog.host.file_slice import FileSlice, pread_exactly
from tierlog.record_format.batch import HEADER_SIZE, BatchHeader, parse_header
from tierlog.record_format.decode import end_marker_of
from tierlog.record_format.index_layouts import AbortedTxn


class ReadBatch(NamedTuple):
    """`position`: in all the slices, one after the other."""

    position: int
    size_bytes: int
    span: Span


def read_batches(fetched: Fetched, *, until: int) -> list[ReadBatch]:
    """The batches up to the one that holds `until`. Raises CorruptBatch, EOFError, OSError."""
    aborted = _Aborted(fetched.aborted)
    found, begin = list[ReadBatch](), 0
    for piece in fetched.slices:
        for header in _headers(piece):
            span = Span(header.base_offset, header.last_offset, aborted.has(piece, header))
            found.append(ReadBatch(begin + header.position, header.size_bytes, span))
            if span.last >= until:
                return found
        begin += piece.size_bytes
    return found


def _headers(piece: FileSlice) -> Iterator[BatchHeader]:
    """Positions are those in the slice."""
    position = 0
    while position < piece.size_bytes:
        data = pread_exactly(piece.file, HEADER_SIZE, piece.position + position)
        header = parse_header(data, at=position)
        yield header
        position += header.size_bytes


class _Aborted:
    def __init__(self, transactions: Iterable[AbortedTxn]) -> None:
        self._left = sorted(transactions, key=lambda one: one.first_offset, reverse=True)
        self._open: set[int] = set()

    def has(self, piece: FileSlice, header: BatchHeader) -> bool:
        """Whether a batch is of an aborted transaction; in the log's order."""
        while self._left and self._left[-1].first_offset <= header.last_offset:
            self._open.add(self._left.pop().producer_id)
        if header.producer_id not in self._open:
            return False
        if not header.is_control:
            return header.is_transactional
        data = pread_exactly(piece.file, header.size_bytes, piece.position + header.position)
        marker = end_marker_of(data, header.at(0))
        if marker is not None and not marker.committed:
            self._open.discard(header.producer_id)
        return False


def narrowed(
    slices: Sequence[FileSlice], batches: Iterable[ReadBatch], acquired: Sequence[Acquired]
) -> tuple[FileSlice, ...]:
    """Of slices, the batches from the first to the last that hold something acquired. Slices that
    are left out are closed.
    """
    first, last = acquired[0].first, acquired[-1].last
    wanted = [one for one in batches if one.span.last >= first and one.span.first <= last]
    begin, end = wanted[0].position, wanted[-1].position + wanted[-1].size_bytes
    kept, position = list[FileSlice](), 0
    for piece in slices:
        low, high = max(begin - position, 0), min(end - position, piece.size_bytes)
        position += piece.size_bytes
        if low < high:
            kept.append(piece._replace(position=piece.position + low, size_bytes=high - low))
        else:
            piece.close()
    return tuple(kept)
