"""What a data folder has recorded about one partition's state in the bucket.

* `manifests/<id>-<p>.json`: the manifest last seen in force, fsynced before anything local is
  deleted because of it. So `earliest`, and whether a cold offset is 410 or 503, are right from the
  start, even with the store down.
* `manifests/<id>-<p>.claims`: the (owner, epoch) pairs that the folder claimed, fsynced before the
  claim is sent. A claim whose response was lost, or that a crash kept from being recorded, is
  recognised when it is found in force.
* `manifests/<id>-<p>.trim`: how far clients have trimmed the log, fsynced before the log start
  moves. Only a trim overrides pins, and the store may be down until after a restart.
* An epoch that was allocated but never claimed proves nothing: if this folder is an older copy of
  another, that one allocates the same numbers, under the same owner if the whole disk was copied.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from tierlog.broker.data_folder.data_folder import format_topic_id_partition
from tierlog.host.durable_file import read_whole, write_durably
from tierlog.manifest.codec import decode_copy, encode_manifest
from tierlog.manifest.keys import PartitionKeys
from tierlog.manifest.state import Manifest
from tierlog.record_format import sealed_json
from tierlog.record_format.errors import CorruptDataError, CorruptManifest

log = structlog.get_logger(__name__)

CLAIMS_KIND = "sent-claims"
TRIM_KIND = "trim"

OwnerEpochs = frozenset[tuple[str, int]]
T = TypeVar("T")


def has_bucket(data_dir: Path) -> bool:
    """Whether the data folder has recorded a manifest of any partition."""
    return any((data_dir / "tierlog" / "manifests").glob("*.json"))


class _Claims(msgspec.Struct, frozen=True):
    claims: tuple[tuple[str, int], ...]


class _Trim(msgspec.Struct, frozen=True):
    before_offset: int


class BucketState:
    """`manifest` is immutable, and replaced as a whole: readers take it once. `trimmed_to`: clients
    have trimmed the log up to this offset, or were about to; 0 if none has. A single writer, except
    for `record_trim`, which is thread-safe.
    """

    def __init__(
        self,
        data_dir: Path,
        keys: PartitionKeys,
        *,
        write: Callable[[Path, bytes], None] = write_durably,
    ) -> None:
        self._write = write
        folder = data_dir / "tierlog" / "manifests"
        self._path = folder / f"{format_topic_id_partition(keys.topic_id, keys.partition)}.json"
        self._claims_path = self._path.with_suffix(".claims")
        self._trim_path = self._path.with_suffix(".trim")
        self.manifest = _read_manifest(self._path, keys)
        claims = _read(self._claims_path, CLAIMS_KIND, _Claims)
        self._claims = frozenset(claims.claims if claims else ())
        trim = _read(self._trim_path, TRIM_KIND, _Trim)
        self.trimmed_to = trim.before_offset if trim else 0
        self._trimming = threading.Lock()

    @property
    def version(self) -> int:
        """The manifest's version; 0 if none is known."""
        return self.manifest.version if self.manifest else 0

    @property
    def was_ever_used(self) -> bool:
        """Whether the folder ever sent a claim or saw a manifest. The bucket may then have
        segments, even if the files here are out of date or cannot be read.
        """
        return self._claims_path.exists() or self._path.exists()

    @property
    def recorded(self) -> OwnerEpochs:
        """The (owner, epoch) pairs under which the bucket is known to be this folder's: those that
        it claimed, and the one that it last saw in force.
        """
        seen = self.manifest
        return self._claims | {(seen.owner, seen.leader_epoch)} if seen else self._claims

    def knows(self, manifest: Manifest) -> bool:
        """Whether the folder claimed the manifest's epoch, or saw it in force and continued."""
        return (manifest.owner, manifest.leader_epoch) in self.recorded

    def record_manifest(self, manifest: Manifest) -> None:
        """Record the manifest in force: durably, then for readers."""
        self._write(self._path, encode_manifest(manifest))
        self.manifest = manifest

    def record_claim(self, owner: str, epoch: int) -> None:
        """Record, durably, a claim that is about to be sent: from then on it may be in force."""
        if (owner, epoch) in self._claims:
            return
        seen = self.manifest.leader_epoch if self.manifest else -1
        claims = frozenset({(owner, epoch), *(one for one in self._claims if one[1] >= seen)})
        document = _Claims(tuple(sorted(claims)))
        self._write(self._claims_path, sealed_json.encode(document, kind=CLAIMS_KIND))
        self._claims = claims

    def record_trim(self, before_offset: int) -> None:
        """Record, durably, a trim that is about to move the log start."""
        with self._trimming:
            if before_offset > self.trimmed_to:
                trim = _Trim(before_offset)
                self._write(self._trim_path, sealed_json.encode(trim, kind=TRIM_KIND))
                self.trimmed_to = before_offset

    def forget(self) -> None:
        """Remove the files of a deleted topic."""
        for path in (self._path, self._claims_path, self._trim_path):
            path.unlink(missing_ok=True)


def _read_manifest(path: Path, keys: PartitionKeys) -> Manifest | None:
    """None if there is none, or it cannot be read."""
    if not path.exists():
        return None
    try:
        return decode_copy(read_whole(path, CorruptManifest), keys=keys, file=str(path))
    except CorruptDataError as error:
        # The bucket still has it: cold reads respond 503 until it was read from there.
        log.warning("manifest copy unreadable", partition=str(keys), error=str(error))
        return None


def _read(path: Path, kind: str, document: type[T]) -> T | None:
    """None if there is none, or it cannot be read: the recorded manifest still proves the
    ownership, and what a trim would delete in spite of a pin goes with the pin.
    """
    if not path.exists():
        return None
    try:
        data = read_whole(path, CorruptManifest)
        return sealed_json.decode(data, kind=kind, file=str(path), document=document)
    except CorruptDataError as error:
        log.warning(f"recorded {path.suffix[1:]} unreadable", file=str(path), error=str(error))
        return None
