"""What a manifest says: which objects make up one partition.

* Everything here is immutable; `transitions` makes new states out of old ones, nothing else does.
* Offsets of the cold tier: entries lie in offset order, pages (older) before segments (newer), and
  cover [log_start_offset, end_offset) except for recorded gaps and for what compaction removed.
* `end_offset` is kept, not derived: trim may drop the last entry and compaction the last record,
  and yet no offset below it is ever assigned again.
* Keys in memory are relative to the store's prefix. The codec shortens them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from enum import StrEnum

import msgspec


class SegmentEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sealed segment in the bucket: a `.log` object and its `.indexes` object.

    `min_timestamp` None: not known, so never skipped by time. `max_timestamp` -1: no record has
    one; `modified_ms` (when the file was last written) then determines its age, as in Kafka. The
    chunk table is inside the `.indexes` object.
    """

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
    modified_ms: int = -1

    @property
    def next_offset(self) -> int:
        return self.last_offset + 1

    @property
    def keys(self) -> tuple[str, str]:
        return self.log_key, self.indexes_key

    @property
    def known_max_timestamp(self) -> int | None:
        return self.max_timestamp if self.max_timestamp >= 0 else None

    @property
    def age_timestamp(self) -> int:
        """The time that retention uses; -1 if nothing is known."""
        return self.max_timestamp if self.max_timestamp >= 0 else self.modified_ms

    def same_bytes(self, other: SegmentEntry) -> bool:
        """The same segment, maybe uploaded twice under two names."""
        return (self.base_offset, self.last_offset, self.size_bytes, self.log_crc32c) == (
            other.base_offset,
            other.last_offset,
            other.size_bytes,
            other.log_crc32c,
        )


class PageRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A run of older entries in an immutable object of their own.

    Only the entries from `base_offset` on are live: retention moves that and leaves the page alone.
    `age_timestamp` is the greatest of the entries; None if one of them has none.
    """

    key: str
    base_offset: int
    last_offset: int
    entry_count: int
    size_bytes: int
    age_timestamp: int | None
    crc32c: int

    @property
    def next_offset(self) -> int:
        return self.last_offset + 1


class UnwrittenPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page not yet written: only between a transition and its commit, never in the bucket."""

    entries: tuple[SegmentEntry, ...]

    @property
    def base_offset(self) -> int:
        return self.entries[0].base_offset

    @property
    def last_offset(self) -> int:
        return self.entries[-1].last_offset

    @property
    def next_offset(self) -> int:
        return self.last_offset + 1

    @property
    def entry_count(self) -> int:
        return len(self.entries)

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)


class EpochStart(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """From `start_offset` on, records were written by `owner` under `epoch`."""

    epoch: int
    start_offset: int
    owner: str


class OffsetGap(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """[start_offset, end_offset) was never written: a restore skipped it."""

    start_offset: int
    end_offset: int


class Reason(StrEnum):
    """Why an object was dropped. A trim overrides pins; the others do not."""

    RETENTION = "retention"
    TRIM = "trim"
    REPLACED = "replaced"


class RemovedObject(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: str
    removed_ms: int
    reason: Reason


class RemovedPageKind(StrEnum):
    """What the page lists: entries whose objects all go, or removed objects by key."""

    SEGMENTS = "segments"
    REMOVED = "removed"


class RemovedPage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A page whose objects go, and the page with them.

    `removed_ms` is the newest in it. `reason` counts for entries; removed objects carry their own.
    """

    key: str
    removed_ms: int
    reason: Reason
    kind: RemovedPageKind
    crc32c: int

    @property
    def own_object(self) -> RemovedObject:
        """The page's own object."""
        return RemovedObject(self.key, self.removed_ms, self.reason)


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version. The commit stamps `version`, `nonce` and its time, `created_ms`."""

    topic: str
    topic_id: str
    partition: int
    version: int
    nonce: str
    created_ms: int
    owner: str
    leader_epoch: int
    epochs: tuple[EpochStart, ...]
    log_start_offset: int
    end_offset: int
    compacted_before: int = 0
    segments: tuple[SegmentEntry, ...] = ()
    pages: tuple[PageRef | UnwrittenPage, ...] = ()
    gaps: tuple[OffsetGap, ...] = ()
    removed: tuple[RemovedObject, ...] = ()
    removed_pages: tuple[RemovedPage, ...] = ()

    @property
    def segment_count(self) -> int:
        return len(self.segments) + sum(page.entry_count for page in self.pages)

    def find(self, offset: int) -> SegmentEntry | PageRef | UnwrittenPage | None:
        """The entry with `offset` or the next above it (gap, compaction); the page of it; or None.

        None: at or past the end, or nothing is cold. Below the log start is the caller's to refuse.
        """
        if self.pages and offset <= self.pages[-1].last_offset:
            return self.pages[bisect_left(self.pages, offset, key=lambda page: page.last_offset)]
        return first_at(self.segments, offset)


def first_at(entries: Sequence[SegmentEntry], offset: int) -> SegmentEntry | None:
    """The first entry that ends at or above `offset`."""
    index = bisect_left(entries, offset, key=lambda entry: entry.last_offset)
    return entries[index] if index < len(entries) else None
