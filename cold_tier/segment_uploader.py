"""A sealed segment into the bucket: two objects under a name that was never used before.

* The `.log` goes up as it is, the `.indexes` bundle beside it. Nothing counts before a manifest
  names them; that is the caller's to commit. What was uploaded and not committed is an orphan.
* Both are confirmed before `upload` returns: the store's own word on size and CRC-32C where it is
  known to check checksums, else the whole object is read back.
* A name is used for one upload. One that was broken off goes on with what the store has of it,
  where a note tells of it and all agrees; else the next try begins under a new name.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from crc32c import crc32c as crc32c_of

from cold_tier.index_bundle import IndexBundle, pack_bundle
from cold_tier.object_keys import SegmentKeys, keys_beside, new_unique, segment_keys
from cold_tier.object_store import ObjectStat, ObjectStore, Resumable, UploadLost, crc32c_checksum
from cold_tier.segment_scan import CHUNK_BYTES, scan_segment
from cold_tier.upload_notes import LogContent, UploadNotes
from record_format.errors import CorruptBatch, StoreUnavailable

PART_BYTES = 16 * 1024 * 1024
READ_BACK_BYTES = 16 * 1024 * 1024


class SegmentFiles(Protocol):
    """A sealed segment on local disk, as the hot tier describes it."""

    @property
    def base_offset(self) -> int: ...
    @property
    def last_offset(self) -> int: ...
    @property
    def log(self) -> Path: ...
    @property
    def index(self) -> Path: ...
    @property
    def timeindex(self) -> Path: ...
    @property
    def txnindex(self) -> Path | None: ...
    @property
    def snapshot(self) -> Path | None:
        """The producer state at the END of the segment."""
        ...


class UploadedSegment(NamedTuple):
    """What a manifest entry is made of. Both objects were confirmed."""

    base_offset: int
    last_offset: int
    size_bytes: int
    record_count: int
    min_timestamp: int | None
    max_timestamp: int
    leader_epoch: int
    log_key: str
    log_crc32c: int
    indexes_key: str
    indexes_crc32c: int
    indexes_size_bytes: int
    chunk_table_position: int
    chunk_table_size: int


class UploadLimits(NamedTuple):
    """`parts` of a large segment are in flight at once, of `part_bytes` each."""

    part_bytes: int = PART_BYTES
    parts: int = 4
    chunk_bytes: int = CHUNK_BYTES


class _Log(NamedTuple):
    folder: str
    path: Path
    content: LogContent


class SegmentUploader:
    """`read_back_whole`: the store was found not to check checksums, or to give none back.

    `pace(n)` is called before `n` bytes are sent, and may block. `notes`: where uploads are noted
    that may go on after they were broken off.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        limits: UploadLimits = UploadLimits(),  # noqa: B008  immutable
        read_back_whole: bool = False,
        pace: Callable[[int], None] | None = None,
        notes: UploadNotes | None = None,
    ) -> None:
        self._store, self._limits, self._notes = store, limits, notes
        self._read_back_whole, self._pace = read_back_whole, pace

    def upload(self, files: SegmentFiles, *, folder: str, leader_epoch: int) -> UploadedSegment:
        """Scan, upload, confirm. `folder` is the partition's `…/segments/` in the store.

        Raises CorruptBatch, StoreUnavailable, ConfigurationError.
        """
        size_bytes = files.log.stat().st_size
        table = scan_segment(
            files.log,
            base_offset=files.base_offset,
            size_bytes=size_bytes,
            chunk_bytes=self._limits.chunk_bytes,
        )
        if table.chunks and table.chunks[-1].last_offset > files.last_offset:
            raise CorruptBatch(
                f"reaches above its last offset {files.last_offset}",
                file=str(files.log),
                offset=table.chunks[-1].last_offset,
            )
        bundle = pack_bundle(
            table,
            offset_index=files.index.read_bytes(),
            time_index=files.timeindex.read_bytes(),
            txn_index=_read_optional(files.txnindex),
            producer_snapshot=_read_optional(files.snapshot),
        )
        keys = segment_keys(
            folder,
            base_offset=files.base_offset,
            leader_epoch=leader_epoch,
            unique=new_unique(),
        )
        content = LogContent(
            size_bytes=size_bytes, crc32c=table.log_crc32c, part_bytes=self._limits.part_bytes
        )
        keys = self._upload_log(_Log(folder, files.log, content), keys)
        self._upload_indexes(keys, bundle)
        max_timestamp = table.max_timestamp
        return UploadedSegment(
            base_offset=files.base_offset,
            last_offset=files.last_offset,
            size_bytes=size_bytes,
            record_count=table.record_count,
            min_timestamp=table.min_timestamp,
            max_timestamp=-1 if max_timestamp is None else max_timestamp,
            leader_epoch=leader_epoch,
            log_key=keys.log,
            log_crc32c=table.log_crc32c,
            indexes_key=keys.indexes,
            indexes_crc32c=bundle.crc32c,
            indexes_size_bytes=len(bundle.body),
            chunk_table_position=bundle.chunk_table_position,
            chunk_table_size=bundle.chunk_table_size,
        )

    def _upload_log(self, log: _Log, keys: SegmentKeys) -> SegmentKeys:
        """The keys that it went up under: `keys`, or those of an upload that was broken off."""
        note = self._notes.find(log.folder, log.content) if self._notes is not None else None
        if note is not None:
            with suppress(UploadLost):
                self._put_log(log, note.log_key, upload_id=note.upload_id)
                return keys_beside(note.log_key)
        self._put_log(log, keys.log, upload_id="")
        return keys

    def _put_log(self, log: _Log, log_key: str, *, upload_id: str) -> None:
        size_bytes, crc32c = log.content.size_bytes, log.content.crc32c
        stat = self._store.put_file(
            log_key,
            log.path,
            size_bytes=size_bytes,
            crc32c=crc32c,
            part_bytes=self._limits.part_bytes,
            concurrency=self._limits.parts,
            pace=self._pace,
            resumable=self._resumable(log, log_key, upload_id),
        )
        if self._notes is not None:
            self._notes.forget(log.folder)  # a name that a manifest may hold is not taken up again
        self._confirm(stat, size_bytes=size_bytes, crc32c=crc32c)

    def _resumable(self, log: _Log, log_key: str, upload_id: str) -> Resumable | None:
        notes = self._notes
        if notes is None:
            return None
        return Resumable(
            upload_id,
            lambda begun: notes.write(log.folder, log_key, log.content, upload_id=begun),
        )

    def _upload_indexes(self, keys: SegmentKeys, bundle: IndexBundle) -> None:
        if self._pace is not None:
            self._pace(len(bundle.body))
        self._store.put(keys.indexes, bundle.body, crc32c=bundle.crc32c)
        stat = self._store.head(keys.indexes)
        if stat is None:
            raise StoreUnavailable(f"{keys.indexes}: the store accepted it but does not have it")
        self._confirm(stat, size_bytes=len(bundle.body), crc32c=bundle.crc32c)

    def _confirm(self, stat: ObjectStat, *, size_bytes: int, crc32c: int) -> None:
        confirm_object(
            self._store,
            stat,
            size_bytes=size_bytes,
            crc32c=crc32c,
            read_back_whole=self._read_back_whole,
        )


def confirm_object(
    store: ObjectStore,
    stat: ObjectStat,
    *,
    size_bytes: int,
    crc32c: int,
    read_back_whole: bool,
) -> None:
    """Raise StoreUnavailable unless the store holds exactly these bytes.

    Its own CRC-32C decides where it is trusted to have computed it; what else it may say (an ETag
    that may be an MD5) decides nothing, and the object is read.
    """
    if stat.size_bytes != size_bytes:
        raise StoreUnavailable(f"{stat.key}: stored with {stat.size_bytes} of {size_bytes} bytes")
    given = stat.checksum
    if given is not None and given.algorithm == "crc32c" and not read_back_whole:
        if given != crc32c_checksum(crc32c):
            raise StoreUnavailable(
                f"{stat.key}: stored with CRC-32C {given.value}, not {crc32c:08x}"
            )
        return
    found = 0
    for start in range(0, size_bytes, READ_BACK_BYTES):
        end = min(start + READ_BACK_BYTES, size_bytes)
        found = store.read_policy.run(partial(_crc_on, store, stat.key, start, end, found))
    if found != crc32c:
        raise StoreUnavailable(f"{stat.key}: read back with CRC-32C {found:08x}, not {crc32c:08x}")


def _crc_on(store: ObjectStore, key: str, start: int, end: int, crc: int) -> int:
    """The CRC-32C up to `end` of an object whose CRC-32C up to `start` is `crc`."""
    for piece in store.get_range(key, start, end):
        crc = crc32c_of(piece, crc)
    return crc


def _read_optional(path: Path | None) -> bytes:
    return path.read_bytes() if path is not None else b""
