"""The content of a manifest: the objects that make up one partition.

* Everything here is immutable. New states are derived only by `transitions`.
* Entries are in offset order, pages (older) before segments (newer). They cover the cold tier's
  [log_start_offset, end_offset), except for recorded gaps and for what compaction removed.
* `end_offset` is stored, not derived: although a trim may drop the last entry, and compaction the
  last record, no offset below it is ever assigned again.
* Keys in memory are relative to the store's prefix; the codec makes them relative to the partition.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from tierlog.record_format.segment_entry import SegmentEntry


class PageRef(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reference to a page: an immutable object with a run of older entries.

    Only its entries from `base_offset` on are live: retention advances that instead of rewriting
    the page. `age_timestamp` is the maximum of its entries'; None if one of them is unknown.
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
    """A page without an object yet: exists only between a transition and its commit."""

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
    """[start_offset, end_offset) has no records: a restore skipped it, or they were lost."""

    start_offset: int
    end_offset: int


class Reason(StrEnum):
    """Why an object was removed from the manifest. Only a trim overrides pins."""

    RETENTION = "retention"
    TRIM = "trim"
    REPLACED = "replaced"


class RemovedObject(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    key: str
    removed_ms: int
    reason: Reason


class RemovedPageKind(StrEnum):
    """What a removed page lists: entries, all of whose objects are removed, or removed objects."""

    SEGMENTS = "segments"
    REMOVED = "removed"


class RemovedPage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A page that was removed together with all objects it lists.

    `removed_ms` is the latest of theirs. `reason` applies to entries; removed objects have their
    own.
    """

    key: str
    removed_ms: int
    reason: Reason
    kind: RemovedPageKind
    crc32c: int

    @property
    def own_object(self) -> RemovedObject:
        """The object that the page itself is stored in."""
        return RemovedObject(self.key, self.removed_ms, self.reason)


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version. `version`, `nonce` and `created_ms` are set by the commit."""

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
        """The entry that contains `offset`, or else the next one; or the page of that entry.

        None at or past the end, and if nothing is in the cold tier. The caller rejects offsets
        below the log start.
        """
        if self.pages and offset <= self.pages[-1].last_offset:
            return self.pages[bisect_left(self.pages, offset, key=lambda page: page.last_offset)]
        return first_at(self.segments, offset)


def first_at(entries: Sequence[SegmentEntry], offset: int) -> SegmentEntry | None:
    """The first entry whose last offset is at or above `offset`."""
    index = bisect_left(entries, offset, key=lambda entry: entry.last_offset)
    return entries[index] if index < len(entries) else None
