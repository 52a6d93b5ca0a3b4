"""The content of a manifest: the objects that make up one partition, and how to find one.

* Everything here is immutable. New states are derived only by `transitions`.
* Entries are in offset order, pages (older) before segments (newer). They cover the cold tier's
  [log_start_offset, end_offset), except for recorded gaps and for what compaction removed.
* `end_offset` is stored, not derived: although a trim may drop the last entry, and compaction the
  last record, no offset below it is ever assigned again.
* The epoch history says which owner wrote from which offset on. An epoch without records is not
  kept: a later one that starts at or below its start offset replaces it, as in Kafka's
  LeaderEpochFileCache. Epochs wholly below the log start are dropped, and only the newest
  MAX_EPOCHS are kept: it serves to find where two logs diverge, which is near their ends.
* Keys in memory are relative to the store's prefix; the codec makes them relative to the partition.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import takewhile
from typing import Protocol

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
    """One version. `version`, `nonce` and `created_ms` are set by the commit.

    `assigned_to`: in a cluster, the folder that is to claim the partition next, and the only one
    that may: its owner has stopped, and everything is in the bucket.
    """

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
    assigned_to: str | msgspec.UnsetType = msgspec.UNSET

    @property
    def segment_count(self) -> int:
        return len(self.segments) + sum(page.entry_count for page in self.pages)

    def find_run(self, offset: int) -> SegmentEntry | PageRef | UnwrittenPage | None:
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


class PageSource(Protocol):
    """Returns all entries of a page, including those that retention has since dropped."""

    def page_entries(self, page: PageRef, /) -> tuple[SegmentEntry, ...]: ...


def live_entries(page: PageRef | UnwrittenPage, pages: PageSource) -> tuple[SegmentEntry, ...]:
    """The entries of a page that are not below its live start."""
    if isinstance(page, UnwrittenPage):
        return page.entries
    return tuple(e for e in pages.page_entries(page) if e.base_offset >= page.base_offset)


def find_entry(manifest: Manifest, offset: int, *, pages: PageSource) -> SegmentEntry | None:
    """The entry that contains `offset`, or else the next one; None at the cold tier's end."""
    found = manifest.find_run(offset)
    if found is None or isinstance(found, SegmentEntry):
        return found
    entries = found.entries if isinstance(found, UnwrittenPage) else pages.page_entries(found)
    # Entries below the page's live start were dropped by retention, and must not be found.
    return first_at(entries, max(offset, found.base_offset))


def find_entry_before(manifest: Manifest, offset: int, *, pages: PageSource) -> SegmentEntry | None:
    """The last entry that begins below `offset`; None if none does."""
    entries: Sequence[SegmentEntry] = manifest.segments
    if manifest.pages and (not entries or entries[0].base_offset >= offset):
        number = bisect_left(manifest.pages, offset, key=lambda page: page.base_offset)
        entries = live_entries(manifest.pages[number - 1], pages) if number else ()
    number = bisect_left(entries, offset, key=lambda entry: entry.base_offset)
    return entries[number - 1] if number else None


def iter_entries(
    manifest: Manifest, *, pages: PageSource, from_offset: int = 0, since_ms: int = -1
) -> Iterator[SegmentEntry]:
    """Live entries that end at or above `from_offset`, oldest first. Pages are read lazily.

    Pages whose records are all older than `since_ms` are skipped.
    """
    for page in manifest.pages:
        age = page.age_timestamp if isinstance(page, PageRef) else None
        if page.last_offset >= from_offset and (age is None or age >= since_ms):
            yield from (e for e in live_entries(page, pages) if e.last_offset >= from_offset)
    yield from (e for e in manifest.segments if e.last_offset >= from_offset)


def references_object(manifest: Manifest, key: str, *, base_offset: int, pages: PageSource) -> bool:
    """Whether the manifest references `key`, whose name begins with `base_offset`."""
    if any(isinstance(page, PageRef) and page.key == key for page in manifest.pages):
        return True
    entry = find_entry(manifest, base_offset, pages=pages)
    return entry is not None and key in entry.keys


def live_size_bytes(manifest: Manifest) -> int:
    """The size of all live segments."""
    return sum(item.size_bytes for item in (*manifest.pages, *manifest.segments))


MAX_EPOCHS = 512


def append_epoch(history: Sequence[EpochStart], new: EpochStart) -> tuple[EpochStart, ...]:
    """The history with `new` appended, whose epoch must be the highest."""
    assert not history or new.epoch > history[-1].epoch
    kept = takewhile(lambda old: old.start_offset < new.start_offset, history)
    return (*kept, new)[-MAX_EPOCHS:]


def prune_epochs(history: tuple[EpochStart, ...], log_start_offset: int) -> tuple[EpochStart, ...]:
    """The history without epochs that end at or below the log start. The last one is kept."""
    first = 0
    while first + 1 < len(history) and history[first + 1].start_offset <= log_start_offset:
        first += 1
    return history[first:]


def divergence_offset(
    local: Sequence[EpochStart], remote: Sequence[EpochStart], *, local_end: int, remote_end: int
) -> int:
    """The offset where two histories of a partition diverge: below it, both logs have the same
    records.

    `local_end` and `remote_end` are log end offsets; if one history continues the other, the result
    is the smaller of them. The same epoch number of two owners is two different epochs.
    """
    shared = set(local) & set(remote)
    last_shared = max((start.epoch for start in shared), default=-1)
    # Without a common epoch (pruned, or unrelated logs), everything from the first start offset on
    # may differ.
    ends = [start.start_offset for start in (*local, *remote) if start.epoch > last_shared]
    return min(local_end, remote_end, *ends)
