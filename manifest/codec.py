"""A manifest and its objects: how they are encoded (`record_format.sealed_json`), and which entries
are in pages of their own, so that a partition of a million segments commits in one small PUT.

| kind            | document                                          | object                    |
|-----------------|---------------------------------------------------|---------------------------|
| `manifest`      | all fields of `state.Manifest`                    | `manifest/<version>.json` |
| `manifest-page` | `topic_id`, `partition`, `entries`: [entry]       | `pages/<offset>-*.json`   |
| `removed-page`  | `topic_id`, `partition`, `removed`: [object]      | `pages/*.removed.json`    |

* Stored keys are relative to the partition's folder, so that an entry is small however long the
  topic's name is; in memory they are relative to the store's prefix.
* Decoding raises CorruptManifest unless the content matches the object's key (topic id, partition,
  version) and satisfies the invariants. Unknown members are refused: a new member requires a new
  format version.
* Epochs, gaps and removed objects are arrays, in the order of the fields in `state`.
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

import msgspec
from msgspec.structs import replace

from tierlog.manifest.invariants import violation
from tierlog.manifest.keys import PartitionKeys, version_key
from tierlog.manifest.state import (
    Manifest,
    PageRef,
    Reason,
    RemovedObject,
    RemovedPage,
    RemovedPageKind,
    UnwrittenPage,
)
from tierlog.record_format import sealed_json
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import CorruptManifest
from tierlog.record_format.segment_entry import SegmentEntry

KIND_MANIFEST = "manifest"
KIND_PAGE = "manifest-page"
KIND_REMOVED = "removed-page"
MAX_MANIFEST_BYTES = 4 * 1024 * 1024
MAX_PAGE_BYTES = 32 * 1024 * 1024


_Keyed = TypeVar("_Keyed", PageRef, RemovedObject, RemovedPage)
_Rekey = Callable[[str], str]


class _StoredManifest(Manifest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pages: tuple[PageRef, ...] = ()


class _Version(msgspec.Struct, frozen=True):
    version: int


class _Page(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    topic_id: str
    partition: int
    entries: tuple[SegmentEntry, ...]


class _RemovedPage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    topic_id: str
    partition: int
    removed: tuple[RemovedObject, ...]


def encode_manifest(manifest: Manifest) -> bytes:
    """The sealed object. All pages must have been written."""
    return sealed_json.encode(_rekeyed(manifest, _short(keys_of(manifest))), kind=KIND_MANIFEST)


def decode_manifest(data: bytes, *, keys: PartitionKeys, version: int) -> Manifest:
    """Decode the object of this version. Raises CorruptManifest, UnknownFormatVersion."""
    file = version_key(keys.versions, version)
    stored = sealed_json.decode(data, kind=KIND_MANIFEST, file=file, document=_StoredManifest)
    fields = {name: getattr(stored, name) for name in stored.__struct_fields__}
    manifest = _rekeyed(Manifest(**fields), _full(keys))
    if keys_of(manifest) != keys or manifest.version != version:
        raise CorruptManifest(
            f"the content is of {keys_of(manifest).folder} version {manifest.version}", file=file
        )
    if (broken := violation(manifest)) is not None:
        raise CorruptManifest(broken, file=file)
    return manifest


def decode_copy(data: bytes, *, keys: PartitionKeys, file: str) -> Manifest:
    """Decode the owner's local copy, whose file name does not have the version."""
    version = sealed_json.decode(data, kind=KIND_MANIFEST, file=file, document=_Version).version
    return decode_manifest(data, keys=keys, version=version)


def encode_page(keys: PartitionKeys, entries: tuple[SegmentEntry, ...]) -> bytes:
    rekey = _short(keys)
    short = tuple(_with_keys(entry, rekey) for entry in entries)
    page = _Page(topic_id=keys.topic_id, partition=keys.partition, entries=short)
    return sealed_json.encode(page, kind=KIND_PAGE)


def decode_page(data: bytes, *, keys: PartitionKeys, file: str) -> tuple[SegmentEntry, ...]:
    """The entries of a page object. Raises CorruptManifest, UnknownFormatVersion."""
    page = sealed_json.decode(data, kind=KIND_PAGE, file=file, document=_Page)
    _check_partition(page.topic_id, page.partition, keys=keys, file=file)
    rekey = _full(keys)
    return tuple(_with_keys(entry, rekey) for entry in page.entries)


def encode_removed_page(keys: PartitionKeys, removed: tuple[RemovedObject, ...]) -> bytes:
    rekey = _short(keys)
    short = tuple(_with_key(entry, rekey) for entry in removed)
    page = _RemovedPage(topic_id=keys.topic_id, partition=keys.partition, removed=short)
    return sealed_json.encode(page, kind=KIND_REMOVED)


def decode_removed_page(
    data: bytes, *, keys: PartitionKeys, file: str
) -> tuple[RemovedObject, ...]:
    page = sealed_json.decode(data, kind=KIND_REMOVED, file=file, document=_RemovedPage)
    _check_partition(page.topic_id, page.partition, keys=keys, file=file)
    rekey = _full(keys)
    return tuple(_with_key(entry, rekey) for entry in page.removed)


def keys_of(manifest: Manifest) -> PartitionKeys:
    return PartitionKeys(manifest.topic, manifest.topic_id, manifest.partition)


def _check_partition(topic_id: str, partition: int, *, keys: PartitionKeys, file: str) -> None:
    if (topic_id, partition) != (keys.topic_id, keys.partition):
        raise CorruptManifest(
            f"the content is of topic id {topic_id}, partition {partition}", file=file
        )


# --- keys in memory and in an object --------------------------------------------------------------


def _full(keys: PartitionKeys) -> _Rekey:
    """Keys as they are in memory, from those in an object."""
    return keys.folder.__add__


def _short(keys: PartitionKeys) -> _Rekey:
    """Keys as they are in an object, from those in memory."""
    folder = keys.folder

    def shorten(key: str) -> str:
        assert key.startswith(folder), f"{key} is not in {folder}"
        return key[len(folder) :]

    return shorten


def _rekeyed(manifest: Manifest, rekey: _Rekey) -> Manifest:
    written = [page for page in manifest.pages if isinstance(page, PageRef)]
    assert len(written) == len(manifest.pages), "pages are written before the manifest"
    return replace(
        manifest,
        pages=tuple(_with_key(page, rekey) for page in written),
        segments=tuple(_with_keys(entry, rekey) for entry in manifest.segments),
        removed=tuple(_with_key(entry, rekey) for entry in manifest.removed),
        removed_pages=tuple(_with_key(page, rekey) for page in manifest.removed_pages),
    )


def _with_keys(entry: SegmentEntry, rekey: _Rekey) -> SegmentEntry:
    return replace(entry, log_key=rekey(entry.log_key), indexes_key=rekey(entry.indexes_key))


def _with_key(entry: _Keyed, rekey: _Rekey) -> _Keyed:
    return replace(entry, key=rekey(entry.key))


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

    def cached_page(self, key: str) -> tuple[SegmentEntry, ...] | None:
        with self._lock:
            if (entries := self._pages.get(key)) is not None:
                self._pages.move_to_end(key)
            return entries

    def page_entries(self, page: PageRef, /) -> tuple[SegmentEntry, ...]:
        """Makes the cache a `PageSource` without I/O: a page that is not cached has no entries."""
        return self.cached_page(page.key) or ()

    def keep_page(self, key: str, entries: tuple[SegmentEntry, ...]) -> None:
        with self._lock:
            if key in self._pages:
                return
            self._pages[key] = entries
            self._entries += len(entries)
            while self._entries > self._max_entries and len(self._pages) > 1:
                _, dropped = self._pages.popitem(last=False)
                self._entries -= len(dropped)
