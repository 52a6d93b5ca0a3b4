"""Uploads a sealed segment as two objects, under a name that was never used before.

    <folder>/<hash of the partition's folder in the store>.json      a checkpoint, at most one each

* The `.log` file is uploaded unchanged, with an `.indexes` bundle beside it. Neither counts until
  the caller commits a manifest that names them; objects that are never committed are orphans.
* Both are verified before `upload_segment` returns: by the size and CRC-32C that the store reports
  if it is known to check checksums, otherwise by reading the whole object back.
* A name is used for one upload. An interrupted upload resumes from the parts that the store has if
  a checkpoint of exactly this content exists (size, CRC-32C, part size); otherwise the next attempt
  starts under a new name, as it does if a checkpoint cannot be read or written.
* A checkpoint expires well before the grace period after which unreferenced objects are collected,
  since a store may date an object by when its upload was initiated. It is deleted before a manifest
  can name the object, so that no name is ever used for a second one.
* Uploads of one partition run one at a time; different partitions may use different threads.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from tierlog.cold_tier.index_bundle import Chunk, IndexBundle, pack_bundle
from tierlog.cold_tier.key_filters import pack_key_filters
from tierlog.cold_tier.segment_check import CHUNK_BYTES, scan_segment
from tierlog.object_store.store import (
    ObjectStat,
    ObjectStore,
    Resumable,
    UploadNotFound,
)
from tierlog.record_format.batch import Buffer
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import CorruptBatch, ShuttingDown, StoreUnavailable
from tierlog.record_format.key_filter import make_filter
from tierlog.record_format.segment_entry import (
    SegmentEntry,
    SegmentKeys,
    new_unique,
    segment_keys,
    segment_keys_of,
)
from tierlog.record_format.workarounds import decode_json

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
        """The producer state at the end of the segment."""
        ...


class UploadLimits(NamedTuple):
    """A large segment is sent in parts of `part_bytes`, `parts` of them in flight at once."""

    part_bytes: int = PART_BYTES
    parts: int = 4
    chunk_bytes: int = CHUNK_BYTES


class _Log(NamedTuple):
    folder: str
    path: Path
    content: LogContent


class SegmentUploader:
    """`reads_back` tells, at each upload, whether whole objects are read back, because the store
    does not check checksums or does not return them.

    `pace(n)` is called before `n` bytes are sent and may block. With `checkpoints`, interrupted
    uploads can be resumed.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        limits: UploadLimits,
        reads_back: Callable[[], bool] = lambda: False,
        pace: Callable[[int], None] | None = None,
        checkpoints: UploadCheckpoints | None = None,
    ) -> None:
        self._store, self._limits, self._checkpoints = store, limits, checkpoints
        self._reads_back, self._pace = reads_back, pace

    @property
    def reads_back(self) -> bool:
        return self._reads_back()

    @property
    def chunk_bytes(self) -> int:
        return self._limits.chunk_bytes

    def upload_segment(
        self, files: SegmentFiles, *, folder: str, leader_epoch: int, filters_keys: bool = True
    ) -> SegmentEntry:
        """Scan, upload and verify; the entry to commit. `folder`: the partition's `…/segments/` in
        the store. `filters_keys`: with filters of the keys of its chunks.

        Raises CorruptBatch, StoreUnavailable, ConfigurationError.
        """
        file = files.log.stat()
        size_bytes = file.st_size
        filters: list[bytes | None] = []

        def add_filter(chunk: Buffer) -> None:
            filters.append(make_filter(chunk))

        spans: list[Chunk] = []
        table = scan_segment(
            files.log,
            base_offset=files.base_offset,
            size_bytes=size_bytes,
            chunk_bytes=self._limits.chunk_bytes,
            on_chunk=add_filter if filters_keys else None,
            on_span=spans.append,
        )
        if table.chunks and table.chunks[-1].last_offset > files.last_offset:
            raise CorruptBatch(
                f"extends past its last offset {files.last_offset}",
                file=str(files.log),
                offset=table.chunks[-1].last_offset,
            )
        bundle = pack_bundle(
            table,
            offset_index=files.index.read_bytes(),
            time_index=files.timeindex.read_bytes(),
            txn_index=_read_optional(files.txnindex),
            producer_snapshot=_read_optional(files.snapshot),
            spans=spans if len(spans) > len(table.chunks) else (),
            key_filters=pack_key_filters(table, filters) if filters else b"",
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
        return SegmentEntry(
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
            modified_ms=file.st_mtime_ns // 1_000_000,
        )

    def _upload_log(self, log: _Log, keys: SegmentKeys) -> SegmentKeys:
        """The keys that were used: `keys`, or those of the interrupted upload that was resumed."""
        if self._checkpoints is not None:
            resumed = self._checkpoints.find_checkpoint(log.folder, log.content)
            if resumed is not None:
                with suppress(UploadNotFound):
                    self._put_log(log, resumed.log_key, upload_id=resumed.upload_id)
                    return segment_keys_of(resumed.log_key)
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
        if self._checkpoints is not None:
            self._checkpoints.delete_checkpoint(
                log.folder
            )  # never resume an object that a manifest may name
        self._verify(stat, size_bytes=size_bytes, crc32c=crc32c)

    def _resumable(self, log: _Log, log_key: str, upload_id: str) -> Resumable | None:
        checkpoints = self._checkpoints
        if checkpoints is None:
            return None
        return Resumable(
            upload_id,
            lambda new_id: checkpoints.save_checkpoint(
                log.folder, log_key, log.content, upload_id=new_id
            ),
        )

    def _upload_indexes(self, keys: SegmentKeys, bundle: IndexBundle) -> None:
        if self._pace is not None:
            self._pace(len(bundle.body))
        self._store.put(keys.indexes, bundle.body, crc32c=bundle.crc32c)
        stat = self._store.head(keys.indexes)
        if stat is None:
            raise StoreUnavailable(f"{keys.indexes}: the store accepted it but does not have it")
        self._verify(stat, size_bytes=len(bundle.body), crc32c=bundle.crc32c)

    def _verify(self, stat: ObjectStat, *, size_bytes: int, crc32c: int) -> None:
        """Raise StoreUnavailable unless the store holds exactly these bytes.

        The store's own CRC-32C is accepted if the store is trusted to compute it. Otherwise the
        object is read back.
        """
        if stat.size_bytes != size_bytes:
            raise StoreUnavailable(
                f"{stat.key}: stored with {stat.size_bytes} of {size_bytes} bytes"
            )
        if stat.crc32c is not None and not self._reads_back():
            if stat.crc32c != crc32c:
                raise StoreUnavailable(
                    f"{stat.key}: stored with CRC-32C {stat.crc32c:08x}, not {crc32c:08x}"
                )
            return
        actual = 0
        for start in range(0, size_bytes, READ_BACK_BYTES):
            end = min(start + READ_BACK_BYTES, size_bytes)
            extend = partial(_extend_crc, self._store, stat.key, start, end, actual)
            actual = self._store.read_policy.call_with_retries(extend)
        if actual != crc32c:
            raise StoreUnavailable(
                f"{stat.key}: read back with CRC-32C {actual:08x}, not {crc32c:08x}"
            )


def _extend_crc(store: ObjectStore, key: str, start: int, end: int, crc: int) -> int:
    """The CRC-32C of the object's bytes up to `end`, given `crc` over those up to `start`."""
    for piece in store.get_range(key, start, end):
        crc = crc32c_of(piece, crc)
    return crc


def _read_optional(path: Path | None) -> bytes:
    return path.read_bytes() if path is not None else b""


class LogContent(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes to upload, and the size of the parts that they are split into."""

    size_bytes: int
    crc32c: int
    part_bytes: int


class UploadCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    log_key: str
    upload_id: str
    content: LogContent
    began_ms: int


class UploadCheckpoints:
    def __init__(self, folder: Path, *, max_age_ms: int, clock: Callable[[], int]) -> None:
        self._folder, self._max_age_ms, self._clock = folder, max_age_ms, clock

    def find_checkpoint(self, segments_folder: str, content: LogContent) -> UploadCheckpoint | None:
        """The upload of this content to this folder that can be resumed, if there is one."""
        try:
            body = self._path(segments_folder).read_bytes()
            found = decode_json(body, UploadCheckpoint)
        except (OSError, msgspec.DecodeError):
            return None
        is_fresh = 0 <= self._clock() - found.began_ms < self._max_age_ms
        matches = found.log_key.startswith(segments_folder) and found.content == content
        return found if is_fresh and matches else None

    def save_checkpoint(
        self, segments_folder: str, log_key: str, content: LogContent, *, upload_id: str
    ) -> None:
        """Record an upload that was just initiated."""
        checkpoint = UploadCheckpoint(
            log_key=log_key, upload_id=upload_id, content=content, began_ms=self._clock()
        )
        path = self._path(segments_folder)
        temp = path.with_suffix(".new")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temp.write_bytes(msgspec.json.encode(checkpoint))
            temp.replace(path)
        except OSError:  # a full disk, say: without a checkpoint a crash restarts the upload
            with suppress(OSError):
                temp.unlink(missing_ok=True)

    def delete_checkpoint(self, segments_folder: str) -> None:
        with suppress(OSError):
            self._path(segments_folder).unlink(missing_ok=True)

    def _path(self, segments_folder: str) -> Path:
        name = hashlib.blake2b(segments_folder.encode(), digest_size=16).hexdigest()
        return self._folder / f"{name}.json"


class UploadThrottle:
    """Call it with the number of bytes about to be sent; it may block. Thread-safe."""

    def __init__(
        self,
        bytes_per_second: int | None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        assert bytes_per_second is None or bytes_per_second > 0
        self._rate, self._monotonic = bytes_per_second, monotonic
        self._stopped = threading.Event()
        self._sleep = sleep or self._stopped.wait
        self._lock = threading.Lock()
        self._free_at = monotonic()

    def stop(self) -> None:
        """Interrupt all uploads, including those that wait."""
        self._stopped.set()

    def __call__(self, size_bytes: int) -> None:
        """Raises ShuttingDown after `stop`."""
        wait_s = self._wait_s(size_bytes, self._rate) if self._rate is not None else 0.0
        if wait_s > 0:
            self._sleep(wait_s)
        if self._stopped.is_set():
            raise ShuttingDown("the broker is shutting down")

    def _wait_s(self, size_bytes: int, rate: int) -> float:
        with self._lock:
            now = self._monotonic()
            begin = max(self._free_at, now - 1.0)
            self._free_at = begin + size_bytes / rate
            return begin - now
