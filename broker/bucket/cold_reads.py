"""Reads one partition's cold tier through the manifest in force.

* Everything here may block on the store, except what is given Wait.NEVER.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import NamedTuple

import structlog

from tierlog.broker.bucket.store_status import StoreStatus
from tierlog.broker.data_folder.bucket_state import BucketState
from tierlog.cold_tier.cold_reader import ColdReader
from tierlog.cold_tier.key_search import KeySearch
from tierlog.cold_tier.segment_lookup import load_bundle
from tierlog.host.file_slice import FileSlice, TierRead
from tierlog.host.waiting import Wait
from tierlog.hot_tier.log_config import LogConfig
from tierlog.manifest.state import Manifest, PageRef, UnwrittenPage, first_at
from tierlog.manifest.store import ManifestStore
from tierlog.manifest.versions import VersionStat
from tierlog.record_format.errors import (
    CorruptDataError,
    MissingObject,
    StoreUnavailable,
    UnknownManifestVersion,
)
from tierlog.record_format.index_layouts import AbortedTxn
from tierlog.record_format.segment_entry import SegmentEntry

log = structlog.get_logger(__name__)


class InForce(NamedTuple):
    """A manifest that was in force when it was read."""

    manifest: Manifest


class ColdReads:
    def __init__(
        self,
        manifests: ManifestStore,
        reader: ColdReader,
        *,
        bucket_state: BucketState | InForce,
        store_status: StoreStatus,
    ) -> None:
        self._manifests, self._reader, self._state = manifests, reader, bucket_state
        self._store_status = store_status
        self._oldest: tuple[PageRef | UnwrittenPage, SegmentEntry] | None = None

    def __str__(self) -> str:
        return str(self._manifests.keys)

    @property
    def manifest(self) -> Manifest | None:
        """The one in force, as far as is known."""
        return self._state.manifest

    # --- records ----------------------------------------------------------------------------------

    def read_cold(
        self,
        offset: int,
        *,
        max_bytes: int,
        end_offset: int,
        wait: Wait = Wait.WAIT,
    ) -> TierRead:
        """Read from `offset` on, across segments; a recorded gap is skipped.

        Returns no slices, and `next_offset`, if a gap extends to the end of the cold tier. Raises
        WouldBlock if not everything is in memory.
        """
        manifest = self._manifest_for_reading()
        with self._noting_store():
            entry = self._manifests.find_segment(manifest, offset, wait)
            if entry is None:
                return TierRead((), max(offset, manifest.end_offset))

            def find(offset: int) -> SegmentEntry | None:
                return self._manifests.find_segment(manifest, offset, wait)

            return self._reader.read_segments(
                entry,
                max(offset, entry.base_offset),
                max_bytes=max_bytes,
                end_offset=end_offset,
                following=_Following(find, entry.next_offset),
                wait=wait,
            )

    def find_key(self, offset: int, search: KeySearch, *, end_offset: int) -> tuple[int, int]:
        """As `TieredReads.find_key`, of the segment that holds `offset`, or the next one."""
        manifest = self._manifest_for_reading()

        def beyond(entry: SegmentEntry) -> SegmentEntry | None:
            if search.backward_to is not None:
                return self._manifests.find_segment_before(manifest, entry.base_offset)
            return self._manifests.find_segment(manifest, entry.next_offset)

        with self._noting_store():
            entry = self._manifests.find_segment(manifest, offset)
            if entry is None:
                return offset, end_offset
            return self._reader.find_chunk_with_key(
                entry, offset, search, end_offset=end_offset, beyond=beyond
            )

    @contextmanager
    def _noting_store(self) -> Iterator[None]:
        try:
            yield
        except StoreUnavailable as error:
            self._store_status.mark_unavailable(error)
            raise
        except MissingObject as error:
            if self._store_status.is_verified:
                raise
            # Not verified yet: an empty mount point lacks every object, and has lost none.
            raise StoreUnavailable(f"{self}: its bucket has not been verified yet") from error

    def offset_for_timestamp(
        self, timestamp: int, *, start_offset: int, end_offset: int
    ) -> tuple[int, int] | None:
        """As TieredReads.offset_for_timestamp, within [start_offset, end_offset)."""
        for entry in self.cold_entries(start_offset, since_ms=timestamp):
            if entry.base_offset >= end_offset:
                return None
            newest = entry.known_max_timestamp
            if newest is not None and newest < timestamp:
                continue
            found = self._reader.offset_for_timestamp(
                entry, timestamp, start_offset=start_offset, end_offset=end_offset
            )
            if found is not None:
                return found
        return None

    def aborted_transactions(self, offset: int, end_offset: int) -> list[AbortedTxn]:
        """The aborted transactions in [offset, end_offset), from the cold tier's indexes."""
        return self._reader.aborted_transactions(
            self.cold_entries(offset), start_offset=offset, end_offset=end_offset
        )

    def stable_end(self, wait: Wait = Wait.WAIT) -> int | None:
        """Below it no transaction is open, and all that were have their ends in the cold tier too;
        None if that is not known. Raises WouldBlock, StoreUnavailable, CorruptDataError.
        """
        manifest = self._manifest_for_reading()
        if not manifest.segments:
            return None
        return self._reader.first_open_offset(manifest.segments[-1], wait)

    def byte_range(
        self, entry: SegmentEntry, *, start: int, end: int, wait: Wait = Wait.WAIT
    ) -> Iterator[FileSlice]:
        """Bytes [start, end) of a segment's log; each chunk is fetched when it is requested."""
        return self._reader.byte_range(entry, start=start, end=end, wait=wait)

    def find_entry(self, offset: int, wait: Wait = Wait.WAIT) -> SegmentEntry | None:
        """The entry that holds `offset`, or the next one. Raises WouldBlock."""
        manifest = self._state.manifest
        return None if manifest is None else self._manifests.find_segment(manifest, offset, wait)

    def cold_entries(self, from_offset: int, *, since_ms: int = -1) -> Iterator[SegmentEntry]:
        """Entries of the manifest in force that end at or above `from_offset`, oldest first. Pages
        that are older than `since_ms` are not read.
        """
        if self._state.manifest is None:
            return iter(())
        return self._manifests.iter_entries(
            self._state.manifest, from_offset=from_offset, since_ms=since_ms
        )

    def oldest_cold_entries(self, from_offset: int) -> Iterator[SegmentEntry]:
        """As `cold_entries`, for callers that repeatedly need only the first one: it is cached, so
        that its page is not read again.
        """
        manifest = self._state.manifest
        if manifest is None or not manifest.pages:
            yield from self.cold_entries(from_offset)
            return
        page, oldest = manifest.pages[0], self._oldest
        if oldest is None or oldest[0] != page:
            first = next(self.manifest_entries(manifest, from_offset=page.base_offset))
            oldest = self._oldest = (page, first)
        _, first = oldest
        if first.last_offset >= from_offset:
            yield first
            from_offset = first.next_offset
        yield from self.manifest_entries(manifest, from_offset=from_offset)

    def manifest_entries(self, manifest: Manifest, *, from_offset: int) -> Iterator[SegmentEntry]:
        """As `cold_entries`, for any version of the manifest."""
        return self._manifests.iter_entries(manifest, from_offset=from_offset)

    def uploaded_crc32c(self, base_offset: int, size_bytes: int) -> int | None:
        """The checksum of the object of such a segment; None without one in the manifest itself."""
        entry = (
            first_at(self._state.manifest.segments, base_offset) if self._state.manifest else None
        )
        if entry is None or (entry.base_offset, entry.size_bytes) != (base_offset, size_bytes):
            return None
        return entry.log_crc32c

    def producers_at_end(self, manifest: Manifest | None) -> bytes | None:
        return producers_below(self._manifests, manifest, manifest.end_offset) if manifest else None

    def producers_at(self, offset: int, manifest: Manifest | None = None) -> bytes | None:
        """The producer snapshot for a log that is to begin there, by the newest manifest that was
        recorded, or by this one; None if the bucket has none. Raises StoreUnavailable.
        """
        manifest = manifest or self._state.manifest
        if manifest is None or not manifest.log_start_offset < offset <= manifest.end_offset:
            return None
        if not self._store_status.is_reachable:
            raise StoreUnavailable(f"{self}: {self._store_status.unavailable}")
        return producers_below(self._manifests, manifest, offset)

    def producers_before(self, offset: int) -> bytes | None:
        """The producer snapshot for the start of a local log that lost its own. A start does not
        wait for it while the store is unreachable.
        """
        try:
            found = self.producers_at(offset)
        except StoreUnavailable as error:
            log.error("producer state is unknown", partition=str(self), error=str(error))
            return None
        if found:
            log.warning("producer state read from the bucket", partition=str(self), offset=offset)
        return found

    def manifest_version(self, version: int | None) -> Manifest:
        """The manifest in force, or that version. Raises UnknownManifestVersion."""
        if version is not None:
            return self._manifests.load_version(version)
        if self._state.manifest is None:
            raise UnknownManifestVersion(f"{self} has no manifest yet")
        return self._state.manifest

    def manifest_history(self, *, after: int, limit: int) -> list[VersionStat]:
        """Versions above `after` that still exist, oldest first. One LIST."""
        return self._manifests.versions.stats(after=after, limit=limit)

    def object_key(self, key: str) -> str:
        return self._store_status.store.full_key(key)

    def _manifest_for_reading(self) -> Manifest:
        if self._state.manifest is None:
            # The local copy was unreadable, and only a claim may accept what the bucket has.
            raise StoreUnavailable(f"{self}: its manifest has not been read from the bucket yet")
        return self._state.manifest


def uses_bucket(config: LogConfig, manifest: Manifest | None) -> bool:
    """Whether a partition uses the bucket: true also if remote storage was turned off after
    segments were uploaded. Even if all of those were deleted since, after the loss of a disk only
    the manifest knows which offsets were assigned.
    """
    return config.remote_storage_enable or (manifest is not None and manifest.end_offset > 0)


def producers_below(manifests: ManifestStore, manifest: Manifest, offset: int) -> bytes | None:
    """Kafka's producer snapshot at the end of the last segment that begins below `offset`, from its
    `.indexes` object. None if there is none, or it is lost with its object: a retried request may
    then be appended twice, which does not keep a partition from being restored. Raises
    StoreUnavailable.
    """
    runs = (*manifest.pages, *manifest.segments)
    start = max((run.base_offset for run in runs if run.base_offset < offset), default=None)
    if start is None:
        return None
    following = manifests.iter_entries(manifest, from_offset=start)
    try:
        newest = deque(takewhile(lambda one: one.base_offset < offset, following), maxlen=1)[-1]
        return load_bundle(manifests.objects, newest).producer_snapshot or None
    except CorruptDataError as bad:
        log.error("producer state not restored", partition=str(manifests.keys), error=str(bad))
        return None


class _Following:
    """The entries from the one that holds `offset` on; may be iterated repeatedly.

    `find` returns the entry that holds an offset, or the next above it; None past the last.
    """

    def __init__(self, find: Callable[[int], SegmentEntry | None], offset: int) -> None:
        self._find, self._offset = find, offset

    def __iter__(self) -> Iterator[SegmentEntry]:
        offset = self._offset
        while (entry := self._find(offset)) is not None:
            yield entry
            offset = entry.next_offset
