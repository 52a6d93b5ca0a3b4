"""Downloads a segment's objects from the bucket as files for a dump.

* An object is downloaded whole into a folder of the caller, who removes it; nothing is written to
  the bucket.
* An `.indexes` bundle is unpacked into the files from which it was made, named after the bundle.
  Its producer snapshot is of the END of the segment; Kafka's `.snapshot` of that name is of its
  start.
"""

from __future__ import annotations

import errno
from pathlib import Path

from tierlog.cold_tier.index_bundle import parse_bundle
from tierlog.cold_tier.ranged_reader import read_range
from tierlog.object_store.store import ObjectStore

BUNDLE = ".indexes"
PART_BYTES = 8 * 1024 * 1024


def download(store: ObjectStore, name: str, folder: Path, *, with_log: bool) -> list[Path]:
    """Download an object into `folder`; return its files. `with_log`: a bundle's segment too.

    Raises FileNotFoundError, StoreUnavailable, CorruptObject.
    """
    file = _download_object(store, name, folder)
    if not name.endswith(BUNDLE):
        return [file]
    if with_log:
        _download_object(store, name.removesuffix(BUNDLE) + ".log", folder)
    return unpack(file, folder)


def _download_object(store: ObjectStore, key: str, folder: Path) -> Path:
    stat = store.head(key)
    if stat is None:
        raise FileNotFoundError(errno.ENOENT, "no such object", f"{store.url}/{key}")
    file = folder / key
    with file.open("wb") as out:
        if stat.size_bytes:
            for start in range(0, stat.size_bytes, PART_BYTES):
                end = min(start + PART_BYTES, stat.size_bytes)
                out.write(read_range(store, key, start, end))
    return file


def unpack(bundle: Path, folder: Path) -> list[Path]:
    """Write the files from which an `.indexes` bundle was made. Raises CorruptObject."""
    parts = parse_bundle(bundle.read_bytes(), file=bundle.name)
    stem = bundle.name.removesuffix(BUNDLE)
    files = [
        (folder / f"{stem}.index", parts.offset_index),
        (folder / f"{stem}.timeindex", parts.time_index),
        (folder / f"{stem}.txnindex", parts.txn_index),
        (folder / f"{stem}.snapshot", parts.producer_snapshot),
    ]
    # Kafka omits the other two files if they are empty.
    kept = [(path, data) for path, data in files if data or path.suffix in {".index", ".timeindex"}]
    for path, data in kept:
        path.write_bytes(data)
    return [path for path, _ in kept]
