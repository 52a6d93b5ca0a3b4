"""Makes one segment of neighbouring ones in the bucket, from their objects alone.

* Batches stay as they are. Offset and time index, chunk table and key filters are made anew; the
  producer snapshot is the last segment's, the aborted transactions are those of all.
* Each object is read in full and has to have the manifest's CRC-32C, and so has what was uploaded.
* It commits nothing: whatever is interrupted leaves at most an orphan.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from msgspec.structs import replace

from tierlog.cold_tier.ranged_reader import piece_ranges, read_range
from tierlog.cold_tier.segment_check import scan_segment
from tierlog.cold_tier.segment_lookup import load_bundle
from tierlog.cold_tier.segment_uploader import SegmentUploader, UploadLimits
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.batch import Buffer, iter_headers
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import CorruptDataError
from tierlog.record_format.index_builder import IndexBuilder
from tierlog.record_format.segment_entry import MergePlan, SegmentEntry

T = TypeVar("T")
R = TypeVar("R")


class InOrder(Protocol):
    """As `map`, perhaps with some calls ahead of what was taken."""

    def __call__(self, call: Callable[[T], R], items: Iterable[T], /) -> Iterator[R]: ...


class Piece(NamedTuple):
    """Of the bytes of a segment."""

    entry: SegmentEntry
    start: int
    end: int


def _pieces_of(run: Iterable[SegmentEntry]) -> Iterator[Piece]:
    for entry in run:
        for start, end in piece_ranges(entry.size_bytes):
            yield Piece(entry, start, end)


def _read_piece(store: ObjectStore, piece: Piece) -> tuple[Piece, bytes]:
    return piece, read_range(store, piece.entry.log_key, piece.start, piece.end)


class _JoinedBytes:
    """The bytes of whole segments. `crc32c` is that of all, once they were iterated."""

    def __init__(self, reads: Iterable[tuple[Piece, bytes]]) -> None:
        self._reads, self.crc32c = reads, 0

    def __iter__(self) -> Iterator[bytes]:
        """Raises CorruptDataError for a segment that has not the manifest's CRC-32C."""
        crc = 0
        for piece, body in self._reads:
            crc = crc32c_of(body, crc if piece.start else 0)
            if piece.end == piece.entry.size_bytes:
                check_log_crc(piece.entry, crc)
            self.crc32c = crc32c_of(body, self.crc32c)
            yield body


def check_log_crc(entry: SegmentEntry, crc: int) -> None:
    """Raises CorruptDataError unless the `.log` object that was read has the manifest's CRC-32C."""
    if crc != entry.log_crc32c:
        raise CorruptDataError(
            f"has CRC-32C {crc:08x}, not {entry.log_crc32c:08x}: "
            "`tierlog storage verify --deep` shows where",
            file=entry.log_key,
        )


@dataclass(frozen=True)
class MergedFiles:
    """A segment that was merged, on disk. `log_crc32c`: of the bytes that were read."""

    base_offset: int
    last_offset: int
    log: Path
    index: Path
    timeindex: Path
    txnindex: Path
    snapshot: Path
    log_crc32c: int = field(default=0, kw_only=True)


@contextmanager
def merged_files(
    store: ObjectStore,
    run: Sequence[SegmentEntry],
    *,
    scratch: Path,
    index_interval_bytes: int,
    in_order: InOrder = map,
) -> Iterator[MergedFiles]:
    """The files of what `run` is merged to. `scratch`, an exclusive folder, is removed. `in_order`
    makes the requests. Raises CorruptDataError, StoreUnavailable, OSError.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        yield _merge(store, run, scratch, index_interval_bytes, in_order)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def merge_objects(
    store: ObjectStore, run: Sequence[SegmentEntry], plan: MergePlan, *, scratch: Path
) -> SegmentEntry:
    """Upload what `run`, of the plan, is merged to; the entry to commit. `scratch` as of
    `merged_files`. Raises what it does, and ConfigurationError.
    """
    limits = UploadLimits(chunk_bytes=plan.chunk_bytes)
    uploader = SegmentUploader(store, limits=limits, reads_back=lambda: plan.reads_back)
    interval = plan.index_interval_bytes
    with merged_files(store, run, scratch=scratch, index_interval_bytes=interval) as files:
        merged = uploader.upload_segment(
            files,
            folder=plan.segments_folder,
            leader_epoch=plan.leader_epoch,
            filters_keys=plan.filters_keys,
        )
    if merged.log_crc32c != files.log_crc32c:
        raise CorruptDataError("merged wrongly: has other bytes", file=merged.log_key)
    return as_entry_of(run, merged)


def as_entry_of(run: Sequence[SegmentEntry], merged: SegmentEntry) -> SegmentEntry:
    """The entry of what was uploaded, as it takes the place of the run."""
    modified_ms = max(one.modified_ms for one in run)
    return replace(merged, last_offset=run[-1].last_offset, modified_ms=modified_ms)


def _merge(
    store: ObjectStore,
    run: Sequence[SegmentEntry],
    scratch: Path,
    interval_bytes: int,
    ask: InOrder,
) -> MergedFiles:
    names = ("log", "index", "timeindex", "txnindex", "snapshot")
    paths = (scratch / name for name in names)
    files = MergedFiles(run[0].base_offset, run[-1].last_offset, *paths)
    body = _JoinedBytes(ask(partial(_read_piece, store), _pieces_of(run)))
    with files.log.open("wb") as log:
        log.writelines(body)
    _write_indexes(files, interval_bytes=interval_bytes)
    snapshot = b""
    with files.txnindex.open("wb") as aborted:
        for bundle in ask(partial(load_bundle, store), run):
            aborted.write(bundle.txn_index)
            snapshot = bundle.producer_snapshot
    files.snapshot.write_bytes(snapshot)
    return dataclasses.replace(files, log_crc32c=body.crc32c)


def _write_indexes(files: MergedFiles, *, interval_bytes: int) -> None:
    """Raises CorruptBatch."""
    builder, position = IndexBuilder(files.base_offset, interval_bytes=interval_bytes), 0

    def add(chunk: Buffer) -> None:
        nonlocal position
        for header in iter_headers(chunk):
            builder.index_batch(header, position=position + header.position)
        position += len(chunk)

    size_bytes = files.log.stat().st_size
    scan_segment(files.log, base_offset=files.base_offset, size_bytes=size_bytes, on_chunk=add)
    builder.add_time_entry()
    offsets, times = builder.images()
    files.index.write_bytes(offsets)
    files.timeindex.write_bytes(times)
