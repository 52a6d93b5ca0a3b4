"""A segment's objects in the bucket, as the files that a dump reads.

* An object is downloaded whole into a folder of the caller, who removes it; nothing is sent to the
  bucket.
* An `.indexes` bundle is split into the files from which it was made, each named like the bundle.
  Its producers are those at the END of the segment, while Kafka's `.snapshot` of that name has
  those at its start.
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


def bring(
    url: str,
    folder: Path,
    *,
    endpoint: str | None = None,
    region: str | None = None,
    with_log: bool = False,
) -> list[Path]:
    """The object's files in `folder`. `with_log`: for a bundle also its segment, to compare with.

    Raises FileNotFoundError, StoreUnavailable, CorruptObject, ConfigurationError.
    """
    where, _, name = url.rpartition("/")
    store = open_store(
        where, endpoint=endpoint, region=region, must_exist=True, policy=OUTAGE_POLICY
    )
    try:
        file = _download(store, name, folder, url=url)
        if not name.endswith(BUNDLE):
            return [file]
        if with_log:
            log = name.removesuffix(BUNDLE) + ".log"
            _download(store, log, folder, url=f"{where}/{log}")
    finally:
        store.close()
    return take_apart(file, folder)


def _download(store: ObjectStore, key: str, folder: Path, *, url: str) -> Path:
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


def take_apart(bundle: Path, folder: Path) -> list[Path]:
    """The files from which an `.indexes` bundle was made. Raises CorruptObject."""
    parts = parse_bundle(bundle.read_bytes(), file=bundle.name)
    stem = bundle.name.removesuffix(BUNDLE)
    made = [
        (folder / f"{stem}.index", parts.offset_index),
        (folder / f"{stem}.timeindex", parts.time_index),
        (folder / f"{stem}.txnindex", parts.txn_index),
        (folder / f"{stem}.snapshot", parts.producer_snapshot),
    ]
    # The other two files do not exist if they would be empty.
    kept = [(path, data) for path, data in made if data or path.suffix in {".index", ".timeindex"}]
    for path, data in kept:
        path.write_bytes(data)
    return [path for path, _ in kept]
