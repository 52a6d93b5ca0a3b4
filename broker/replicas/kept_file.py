"""What a replica keeps about its partition (`election.Kept`), in `tierlog/replicas/<id>-<p>.json`.

* It is not in the log's folder: a log that is gone must not take with it what it promised.
* It is on the medium before the fetch or the version that rests on it is sent.
* `was_opened`: the replica had a log here. One that is gone then is another replica's (`renew`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from tierlog.broker.data_folder.data_folder import (
    TopicIdPartition,
    format_topic_id_partition,
    parse_topic_id_partition,
)
from tierlog.broker.replication.election import FIRST_GENERATION, Kept
from tierlog.host.durable_file import read_whole, write_durably
from tierlog.host.medium import make_folders
from tierlog.record_format import sealed_json
from tierlog.record_format.errors import CorruptSnapshot

KIND_REPLICA: Final = "replica"
SUFFIX: Final = ".json"


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    replica_id: str
    seen: int
    version: int
    members: tuple[str, ...]
    was_opened: bool


class KeptFiles:
    """Of one data folder. Every change raises OSError."""

    def __init__(
        self,
        data_dir: Path,
        *,
        folder_id: str,
        write: Callable[[Path, bytes], None] = write_durably,
    ) -> None:
        self._folder, self._folder_id, self._write = data_dir / "tierlog/replicas", folder_id, write

    def places(self) -> Iterator[TopicIdPartition]:
        """The partitions that something is kept about."""
        if self._folder.is_dir():
            for path in sorted(self._folder.glob(f"*{SUFFIX}")):
                yield parse_topic_id_partition(path.name.removesuffix(SUFFIX))

    def has(self, place: TopicIdPartition) -> bool:
        """Whether something is kept about it."""
        return self._path(place).exists()

    def read_kept(self, place: TopicIdPartition) -> tuple[Kept, bool]:
        """What is kept, and whether the replica has had a log. A folder that was copied has another
        id, and so has its replica: it answers for nothing that the original promised. Raises
        CorruptDataError.
        """
        path = self._path(place)
        if not path.exists():
            return Kept(f"{self._folder_id}.{FIRST_GENERATION}"), False
        data = read_whole(path, CorruptSnapshot)
        record = sealed_json.decode(data, kind=KIND_REPLICA, file=str(path), document=_Record)
        if not record.replica_id.startswith(f"{self._folder_id}."):
            fresh = Kept(f"{self._folder_id}.{FIRST_GENERATION}", record.seen, record.version)
            return fresh, False
        kept = Kept(record.replica_id, record.seen, record.version, frozenset(record.members))
        return kept, record.was_opened

    def write_kept(self, place: TopicIdPartition, kept: Kept, *, was_opened: bool) -> None:
        """Durable when this returns."""
        if not self._folder.is_dir():
            make_folders(self._folder)
        record = _Record(
            replica_id=kept.replica_id,
            seen=kept.seen,
            version=kept.version,
            members=tuple(sorted(kept.members)),
            was_opened=was_opened,
        )
        self._write(self._path(place), sealed_json.encode(record, kind=KIND_REPLICA))

    def forget(self, place: TopicIdPartition) -> None:
        """The topic was deleted, or the partition is this folder's alone."""
        self._path(place).unlink(missing_ok=True)

    def _path(self, place: TopicIdPartition) -> Path:
        return self._folder / f"{format_topic_id_partition(*place)}{SUFFIX}"
