"""Pages of older entries, with which a partition of a million segments commits in one small PUT.

* The newest entries are inline (at most INLINE_MAX). When there are more, a commit moves the oldest
  into pages of SMALL_PAGE entries, so that every commit is small.
* A run of RUN_MAX pages that are less than half full is merged into a full one (`mergeable_pages`),
  in a separate step that delays no upload. So each entry is written three times in all.
* The list of removed objects spills into pages of its own in the same way.
* A page is immutable and has a unique name. It is written before the commit that references it; if
  that commit fails, the page is an orphan, which is deleted by age.
* `spill_overflow` is pure: it returns the objects to write, and never adds or drops an entry.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import accumulate, groupby
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from tierlog.manifest.codec import encode_page, encode_removed_page, keys_of
from tierlog.manifest.keys import PartitionKeys
from tierlog.manifest.state import (
    Manifest,
    PageRef,
    Reason,
    RemovedPage,
    RemovedPageKind,
    UnwrittenPage,
    first_at,
)
from tierlog.manifest.transitions import PageSource, live_entries
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.segment_entry import SegmentEntry

INLINE_MAX = 256
SMALL_PAGE = 128
PAGE_ENTRIES = 4096
RUN_MAX = PAGE_ENTRIES // SMALL_PAGE
REMOVED_MAX = 512
REMOVED_KEPT = 128

_Item = TypeVar("_Item")


class SpillResult(NamedTuple):
    """A manifest without unwritten pages, and the objects (key, body) to write before it."""

    manifest: Manifest
    objects: tuple[tuple[str, bytes], ...]


def spill_overflow(manifest: Manifest, *, unique: Callable[[], str]) -> SpillResult:
    """Move overflow into pages, and assign keys to unwritten pages. `unique` generates names."""
    loose = _overflow_paged(manifest)
    keys = keys_of(manifest)
    written: list[PageRef] = []
    objects: list[tuple[str, bytes]] = []
    for page in loose.pages:
        if isinstance(page, PageRef):
            written.append(page)
            continue
        for entries in in_chunks(page.entries, PAGE_ENTRIES):
            ref, body = build_page(keys, entries, unique=unique())
            written.append(ref)
            objects.append((ref.key, body))
    spilled, removed_objects = _removed_paged(replace(loose, pages=tuple(written)), unique=unique)
    assert spilled.segment_count == manifest.segment_count, "spilling keeps every entry"
    return SpillResult(spilled, (*objects, *removed_objects))


def _overflow_paged(manifest: Manifest) -> Manifest:
    surplus = len(manifest.segments) - INLINE_MAX
    if surplus <= 0:
        return manifest
    count = min(len(manifest.segments), -(-surplus // SMALL_PAGE) * SMALL_PAGE)
    overflow, inline = manifest.segments[:count], manifest.segments[count:]
    loose = [UnwrittenPage(entries=chunk) for chunk in in_chunks(overflow, PAGE_ENTRIES)]
    return replace(manifest, segments=inline, pages=(*manifest.pages, *loose))


def mergeable_pages(manifest: Manifest) -> tuple[PageRef, ...]:
    """The oldest run of small pages that fills a large one; empty if there is none."""
    runs = groupby(manifest.pages, key=lambda page: page.entry_count * 2 < PAGE_ENTRIES)
    for small, group in runs:
        run = [page for page in group if isinstance(page, PageRef)]
        if small and len(run) >= RUN_MAX:
            counts = accumulate(page.entry_count for page in run)
            return tuple(run[: sum(count <= PAGE_ENTRIES for count in counts)])
    return ()


def _removed_paged(
    manifest: Manifest, *, unique: Callable[[], str]
) -> tuple[Manifest, list[tuple[str, bytes]]]:
    if len(manifest.removed) <= REMOVED_MAX:
        return manifest, []
    keys = keys_of(manifest)
    cut = len(manifest.removed) - REMOVED_KEPT
    refs, objects = [], []
    for chunk in in_chunks(manifest.removed[:cut], PAGE_ENTRIES):
        key = keys.removed_page(manifest.version + 1, unique())
        body = encode_removed_page(keys, chunk)
        newest_ms = max(entry.removed_ms for entry in chunk)
        kind = RemovedPageKind.REMOVED
        refs.append(RemovedPage(key, newest_ms, Reason.REPLACED, kind, crc32c_of(body)))
        objects.append((key, body))
    kept = manifest.removed[cut:]
    return replace(manifest, removed=kept, removed_pages=(*manifest.removed_pages, *refs)), objects


def build_page(
    keys: PartitionKeys, entries: tuple[SegmentEntry, ...], *, unique: str
) -> tuple[PageRef, bytes]:
    """A page of these entries: the reference to it, and the body of its object."""
    body = encode_page(keys, entries)
    ages = [entry.age_timestamp for entry in entries]
    ref = PageRef(
        key=keys.page(entries[0].base_offset, unique),
        base_offset=entries[0].base_offset,
        last_offset=entries[-1].last_offset,
        entry_count=len(entries),
        size_bytes=sum(entry.size_bytes for entry in entries),
        age_timestamp=max(ages) if min(ages) >= 0 else None,
        crc32c=crc32c_of(body),
    )
    return ref, body


def in_chunks(items: tuple[_Item, ...], size: int) -> Iterator[tuple[_Item, ...]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


class PageCache:
    """An LRU cache of pages, shared by all partitions and bounded by entries. Thread-safe."""

    def __init__(self, *, max_entries: int = 8 * PAGE_ENTRIES) -> None:
        self._max_entries = max_entries
        self._lock = threading.Lock()
        self._pages: OrderedDict[str, tuple[SegmentEntry, ...]] = OrderedDict()
        self._entries = 0

    def get(self, key: str) -> tuple[SegmentEntry, ...] | None:
        with self._lock:
            if (entries := self._pages.get(key)) is not None:
                self._pages.move_to_end(key)
            return entries

    def entries(self, page: PageRef, /) -> tuple[SegmentEntry, ...]:
        """Makes the cache a `PageSource` without I/O: a page that is not cached has no entries."""
        return self.get(page.key) or ()

    def put(self, key: str, entries: tuple[SegmentEntry, ...]) -> None:
        with self._lock:
            if key in self._pages:
                return
            self._pages[key] = entries
            self._entries += len(entries)
            while self._entries > self._max_entries and len(self._pages) > 1:
                _, dropped = self._pages.popitem(last=False)
                self._entries -= len(dropped)


def find_entry(manifest: Manifest, offset: int, *, pages: PageSource) -> SegmentEntry | None:
    """The entry that contains `offset`, or else the next one; None at the cold tier's end."""
    found = manifest.find(offset)
    if found is None or isinstance(found, SegmentEntry):
        return found
    entries = found.entries if isinstance(found, UnwrittenPage) else pages.entries(found)
    # Entries below the page's live start were dropped by retention, and must not be found.
    return first_at(entries, max(offset, found.base_offset))


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
