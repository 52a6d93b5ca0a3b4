"""Encodes and decodes manifest objects: sealed JSON (`record_format.sealed_json`).

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
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from tierlog.manifest.invariants import violation
from tierlog.manifest.keys import PartitionKeys, version_key
from tierlog.manifest.state import Manifest, PageRef, RemovedObject, RemovedPage
from tierlog.record_format import sealed_json
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
