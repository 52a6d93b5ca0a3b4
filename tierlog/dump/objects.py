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

from cold_tier.index_bundle import parse_bundle
from cold_tier.object_store import ObjectStore
from cold_tier.open import open_store
from cold_tier.ranged_reader import read_range
from cold_tier.retry import OUTAGE_POLICY

BUNDLE = ".indexes"
PART_BYTES = 8 * 1024 * 1024


def download(
    url: str,
    folder: Path,
    *,
    endpoint: str | None = None,
    region: str | None = None,
    with_log: bool = False,
) -> list[Path]:
    """Download an object into `folder`; return its files. `with_log`: a bundle's segment too.

    Raises FileNotFoundError, StoreUnavailable, CorruptObject, ConfigurationError.
    """
    base_url, _, name = url.rpartition("/")
    store = open_store(
        base_url, endpoint=endpoint, region=region, must_exist=True, policy=OUTAGE_POLICY
    )
    try:
        file = _download_object(store, name, folder, url=url)
        if not name.endswith(BUNDLE):
            return [file]
        if with_log:
            log = name.removesuffix(BUNDLE) + ".log"
            _download_object(store, log, folder, url=f"{base_url}/{log}")
    finally:
        store.close()
    return unpack(file, folder)


def _download_object(store: ObjectStore, key: str, folder: Path, *, url: str) -> Path:
    stat = store.head(key)
    if stat is None:
        raise FileNotFoundError(errno.ENOENT, "no such object", url)
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
