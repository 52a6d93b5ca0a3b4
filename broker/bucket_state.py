"""What a data folder has noted of one partition's bucket.

* `manifests/<id>-<p>.json`: the manifest that it last saw in force, fsynced before anything local
  is deleted because of it: so `earliest`, and the border between 410 and 503, are right from the
  start, even with the store down.
* `manifests/<id>-<p>.claims`: the (owner, epoch) pairs under which it asked to be the owner,
  fsynced before the claim is sent: a claim whose answer never came, or that a crash kept from being
  noted, is recognised when it is found in force.
* An epoch that the folder took but never claimed proves nothing: if this folder is an older copy of
  another, that one takes the same numbers, under the same owner if the whole disk was copied.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from broker.data_folder import format_topic_id_partition
from hot_tier.durable_file import read_whole, write_durably
from manifest.codec import decode_copy, encode_manifest
from manifest.keys import PartitionKeys
from manifest.state import Manifest
from record_format import sealed_json
from record_format.errors import CorruptDataError, CorruptManifest

log = structlog.get_logger(__name__)

KIND = "sent-claims"

OwnerEpochs = frozenset[tuple[str, int]]


def has_bucket(data_dir: Path) -> bool:
    """Whether a data folder has a bucket."""
    return any((data_dir / "tierlog" / "manifests").glob("*.json"))


class _Sent(msgspec.Struct, frozen=True):
    claims: tuple[tuple[str, int], ...]


class BucketState:
    """`manifest` is one immutable value, replaced whole: readers take it once. One writer at a
    time.
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
        self._sent_path = self._path.with_suffix(".claims")
        self.manifest = _read_copy(self._path, keys)
        self._sent = _read_sent(self._sent_path)

    @property
    def version(self) -> int:
        """Of the manifest; 0 if none is known."""
        return self.manifest.version if self.manifest else 0

    @property
    def was_ever_used(self) -> bool:
        """Whether the folder ever asked to be the owner, or saw who is: the bucket may then have
        segments, even if what was noted of it is old or cannot be read.
        """
        return self._sent_path.exists() or self._path.exists()

    @property
    def recorded(self) -> OwnerEpochs:
        """The (owner, epoch) pairs in force under which the bucket is known to be this folder's:
        those that it asked for itself, and the one that it last saw in force.
        """
        copy = self.manifest
        return self._sent | {(copy.owner, copy.leader_epoch)} if copy else self._sent

    def knows(self, manifest: Manifest) -> bool:
        """Whether the folder asked for the epoch in force, or saw it in force and continued from
        there.
        """
        return (manifest.owner, manifest.leader_epoch) in self.recorded

    def note(self, manifest: Manifest) -> None:
        """Note the manifest in force: durably, then for readers."""
        self._write(self._path, encode_manifest(manifest))
        self.manifest = manifest

    def note_sent(self, owner: str, epoch: int) -> None:
        """From here on that claim may be in force, whatever becomes of its answer."""
        if (owner, epoch) in self._sent:
            return
        noted = self.manifest.leader_epoch if self.manifest else -1
        sent = frozenset({(owner, epoch), *(one for one in self._sent if one[1] >= noted)})
        document = _Sent(tuple(sorted(sent)))
        self._write(self._sent_path, sealed_json.encode(document, kind=KIND))
        self._sent = sent

    def forget(self) -> None:
        """The topic was deleted."""
        self._path.unlink(missing_ok=True)
        self._sent_path.unlink(missing_ok=True)


def _read_copy(path: Path, keys: PartitionKeys) -> Manifest | None:
    """None if there is none to be read."""
    if not path.exists():
        return None
    try:
        return decode_copy(read_whole(path, CorruptManifest), keys=keys, file=str(path))
    except CorruptDataError as error:
        # Only the bucket's own word is lost with it: reads below answer 503 until it is back.
        log.warning("manifest copy unreadable", partition=str(keys), error=str(error))
        return None


def _read_sent(path: Path) -> OwnerEpochs:
    if not path.exists():
        return frozenset()
    try:
        data = read_whole(path, CorruptManifest)
        sent = sealed_json.decode(data, kind=KIND, file=str(path), document=_Sent)
        return frozenset(sent.claims)
    except CorruptDataError as error:  # the manifest noted last still speaks for the folder
        log.warning("noted claims unreadable", file=str(path), error=str(error))
        return frozenset()
