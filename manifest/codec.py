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

from typing import TypeVar

import msgspec
from msgspec.structs import replace

from manifest.invariants import violation
from manifest.keys import PartitionKeys, version_key
from manifest.state import Manifest, PageRef, RemovedObject, RemovedPage, SegmentEntry
from record_format import sealed_json
from record_format.errors import CorruptManifest

KIND_MANIFEST = "manifest"
KIND_PAGE = "manifest-page"
KIND_REMOVED = "removed-page"
MAX_MANIFEST_BYTES = 4 * 1024 * 1024
MAX_PAGE_BYTES = 32 * 1024 * 1024


_Keyed = TypeVar("_Keyed", PageRef, RemovedObject, RemovedPage)


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
    folder = keys_of(manifest).folder
    written = [page for page in manifest.pages if isinstance(page, PageRef)]
    assert len(written) == len(manifest.pages), "pages are written before the manifest"
    pages = [_with_key(page, folder, shorten=True) for page in written]
    stored = replace(
        manifest,
        pages=tuple(pages),
        segments=tuple(_with_keys(entry, folder, shorten=True) for entry in manifest.segments),
        removed=tuple(_with_key(entry, folder, shorten=True) for entry in manifest.removed),
        removed_pages=tuple(_with_key(p, folder, shorten=True) for p in manifest.removed_pages),
    )
    return sealed_json.encode(stored, kind=KIND_MANIFEST)


def decode_manifest(data: bytes, *, keys: PartitionKeys, version: int) -> Manifest:
    """Decode the object of this version. Raises CorruptManifest, UnknownFormatVersion."""
    file = version_key(keys.versions, version)
    stored = sealed_json.decode(data, kind=KIND_MANIFEST, file=file, document=_StoredManifest)
    folder = keys.folder
    manifest = Manifest(
        **{
            **{name: getattr(stored, name) for name in stored.__struct_fields__},
            "pages": tuple(_with_key(page, folder) for page in stored.pages),
            "segments": tuple(_with_keys(entry, folder) for entry in stored.segments),
            "removed": tuple(_with_key(entry, folder) for entry in stored.removed),
            "removed_pages": tuple(_with_key(page, folder) for page in stored.removed_pages),
        }
    )
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
    short = tuple(_with_keys(entry, keys.folder, shorten=True) for entry in entries)
    page = _Page(topic_id=keys.topic_id, partition=keys.partition, entries=short)
    return sealed_json.encode(page, kind=KIND_PAGE)


def decode_page(data: bytes, *, keys: PartitionKeys, file: str) -> tuple[SegmentEntry, ...]:
    """The entries of a page object. Raises CorruptManifest, UnknownFormatVersion."""
    page = sealed_json.decode(data, kind=KIND_PAGE, file=file, document=_Page)
    _check_partition(page.topic_id, page.partition, keys=keys, file=file)
    return tuple(_with_keys(entry, keys.folder) for entry in page.entries)


def encode_removed_page(keys: PartitionKeys, removed: tuple[RemovedObject, ...]) -> bytes:
    short = tuple(_with_key(entry, keys.folder, shorten=True) for entry in removed)
    page = _RemovedPage(topic_id=keys.topic_id, partition=keys.partition, removed=short)
    return sealed_json.encode(page, kind=KIND_REMOVED)


def decode_removed_page(
    data: bytes, *, keys: PartitionKeys, file: str
) -> tuple[RemovedObject, ...]:
    page = sealed_json.decode(data, kind=KIND_REMOVED, file=file, document=_RemovedPage)
    _check_partition(page.topic_id, page.partition, keys=keys, file=file)
    return tuple(_with_key(entry, keys.folder) for entry in page.removed)


def keys_of(manifest: Manifest) -> PartitionKeys:
    return PartitionKeys(manifest.topic, manifest.topic_id, manifest.partition)


def _check_partition(topic_id: str, partition: int, *, keys: PartitionKeys, file: str) -> None:
    if (topic_id, partition) != (keys.topic_id, keys.partition):
        raise CorruptManifest(
            f"the content is of topic id {topic_id}, partition {partition}", file=file
        )


def _rekeyed(key: str, folder: str, *, shorten: bool) -> str:
    if not shorten:
        return folder + key
    assert key.startswith(folder), f"{key} is not in {folder}"
    return key[len(folder) :]


def _with_keys(entry: SegmentEntry, folder: str, *, shorten: bool = False) -> SegmentEntry:
    return replace(
        entry,
        log_key=_rekeyed(entry.log_key, folder, shorten=shorten),
        indexes_key=_rekeyed(entry.indexes_key, folder, shorten=shorten),
    )


def _with_key(entry: _Keyed, folder: str, *, shorten: bool = False) -> _Keyed:
    return replace(entry, key=_rekeyed(entry.key, folder, shorten=shorten))
