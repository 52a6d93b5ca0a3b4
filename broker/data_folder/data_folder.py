"""The data folder of one broker: its lock, its identity, and the files that survive a crash.

    <data>/.lock                                flock: one broker per folder
    <data>/.kafka_cleanshutdown                 only between a clean stop and the next start
    <data>/meta.properties                      cluster.id, node.id, directory.id (Kafka's file)
    <data>/recovery-point-offset-checkpoint     everything below these offsets was flushed
    <data>/replication-offset-checkpoint        high watermarks (for Kafka; we recompute them)
    <data>/log-start-offset-checkpoint          log starts, in either tier
    <data>/cleaner-offset-checkpoint            everything below these offsets was compacted
    <data>/tierlog/owner                        the owner of its partitions: a random id, the inode
    <data>/tierlog/epochs.json                  leader epochs: `opened_log`
    <data>/tierlog/format.json                  the format level, if it was raised
    <data>/tierlog/topics.json                  see `topic_registry`
    <data>/tierlog/compaction-reached           how far compaction rounds may have reached
    <data>/tierlog/take-over.json               partitions that are being taken over
    <data>/tierlog/cuts.json                    truncated logs: `checkpoints`
    <data>/tierlog/store.json                   the result of probing the store: `store_status`
    <data>/tierlog/node.json                    its place in the cluster, if it joined: `node`
    <data>/tierlog/replicas/<id>-<p>.json       what a replica promised: `replicas.kept_file`
    <data>/tierlog/restoring                    exists while a restore into the folder is incomplete
    <data>/tierlog/manifests/<id>-<p>.json      the last manifest seen in force, as in the bucket
    <data>/tierlog/manifests/<id>-<p>.claims    the epochs that were claimed: `bucket_state`
    <data>/tierlog/manifests/<id>-<p>.trim      how far clients have trimmed: `bucket_state`
    <data>/tierlog/uploads/                     uploads that can be resumed after a crash
    <data>/tierlog/scratch/                     emptied at each start
    <data>/tierlog/cache/                       chunks of cold segments
    <data>/tierlog/damaged/                     files that repairs set aside
    <data>/tierlog/diverged/                    records that take-overs set aside

* Files that Kafka has too are byte for byte Kafka's; our own are below `tierlog/`.
* Whatever a later step relies on is fsynced before that step, and so is its directory entry.
* The format level is read before anything is changed, and once the folder is locked: `finalize`
  may have raised it until then. A newer version's folder is left as it is.
* The clean-shutdown marker is removed, durably, before the first log is opened. A start that is
  refused before that puts it back; a crash in between only costs a recovery that was not needed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Generic, TypeVar

from tierlog.host.durable_file import REAL_DISK, write_durably
from tierlog.host.medium import make_folders
from tierlog.hot_tier.log_folder import has_segments
from tierlog.record_format import checkpoint_files, sealed_json
from tierlog.record_format.errors import ConfigurationError, CorruptSnapshot, ShuttingDown
from tierlog.record_format.format_level import (
    FIRST_LEVEL,
    NEW_FOLDER_LEVEL,
    decode_level,
    encode_level,
)

T = TypeVar("T")

CLEAN_SHUTDOWN = ".kafka_cleanshutdown"
RECOVERY_POINTS = "recovery-point-offset-checkpoint"
HIGH_WATERMARKS = "replication-offset-checkpoint"
LOG_STARTS = "log-start-offset-checkpoint"
CLEANER_CHECKPOINT = "cleaner-offset-checkpoint"
COMPACTION_REACHED = "tierlog/compaction-reached"
FORMAT_LEVEL = "tierlog/format.json"
RESTORING = "tierlog/restoring"

NAME_BYTES_MAX: Final = 255  # of a file, on the usual file systems

TopicPartition = tuple[str, int]
TopicIdPartition = tuple[str, int]
"""Topic id and partition. A topic that is re-created under the same name has another id."""


class FolderInUse(ConfigurationError):
    """Another process has the folder open."""


def unusable(path: Path, error: OSError) -> ConfigurationError:
    """The error for a folder that cannot be used: read-only, no permission, full disk."""
    place = f"{error.filename}: " if error.filename else ""
    return ConfigurationError(f"data folder {path}: {place}{error.strerror}")


def new_id() -> str:
    """A random UUID in Kafka's text form, never starting with a dash (Kafka's Uuid.randomUuid)."""
    while True:
        text = checkpoint_files.format_topic_id(uuid.uuid4())
        if not text.startswith("-"):
            return text


def format_topic_id_partition(topic_id: str, partition: int) -> str:
    """As used in the names and contents of files below `tierlog/`."""
    return f"{topic_id}-{partition}"


def parse_topic_id_partition(name: str) -> TopicIdPartition:
    topic_id, _, partition = name.rpartition("-")
    return topic_id, int(partition)


def with_suffix(folder: Path, suffix: str) -> Path:
    """The folder's path with the suffix. A name that would be too long loses its start."""
    return folder.with_name((folder.name + suffix)[-NAME_BYTES_MAX:])


def diverged_folder(data_dir: Path) -> Path:
    """No topic's folder can be here; in the data folder any name with a number may be one."""
    return data_dir / "tierlog" / "diverged"


class DataFolder:
    """Open in one process at a time; `mark_clean_shutdown` lets the next start skip its checks.
    `level`: the format level, of which the broker writes.
    """

    def __init__(self, path: Path) -> None:
        try:
            if not (path / "meta.properties").exists():
                _check_not_nested(path)
            make_folders(path / "tierlog" / "manifests")
            self._lock_fd = _take_lock(path / ".lock")
        except OSError as error:
            raise unusable(path, error) from error
        self.path = path
        self._writes, self._being_written = threading.Condition(), set[Path]()
        self._closed = False
        try:
            self.level = read_level(path)
            self._sync_folders()
            self.is_new = not (path / "meta.properties").exists()
            if self.is_new and (path / RESTORING).exists():
                raise ConfigurationError(
                    f"data folder {path}: a restore into it is incomplete: run `tierlog storage "
                    "restore` on it again, or choose another folder"
                )
            self._identity = self._read_or_make_identity()
            self.owner = self._read_or_make_owner()
            self.was_clean = self._consume_clean_marker()
            shutil.rmtree(self.scratch(), ignore_errors=True)
        except BaseException as error:
            os.close(self._lock_fd)
            if isinstance(error, OSError):
                raise unusable(path, error) from error
            raise

    @property
    def cluster_id(self) -> str:
        return self._identity["cluster.id"]

    @property
    def node_id(self) -> int | None:
        """As in `meta.properties`."""
        text = self._identity.get("node.id", "")
        return int(text) if text.isdecimal() else None

    @property
    def has_topics(self) -> bool:
        """Also if another broker, or Kafka, left them."""
        topics = self.path / "tierlog" / "topics.json"
        folders = (path for path in self.path.glob("*-*") if path.is_dir())
        return topics.exists() or any(map(has_segments, folders))

    @property
    def cache(self) -> Path:
        return self.path / "tierlog" / "cache"

    @property
    def uploads(self) -> Path:
        return self.path / "tierlog" / "uploads"

    def scratch(self, name: str = "") -> Path:
        return self.path / "tierlog" / "scratch" / name

    @property
    def damaged(self) -> Path:
        """Files that repairs set aside, in a folder for each repair."""
        return self.path / "tierlog" / "damaged"

    @property
    def ignores_letter_case(self) -> bool:
        """Whether the file system takes `A` and `a` for the same name, as macOS's does."""
        return (self.path / "META.PROPERTIES").exists()

    def partition_folder(self, topic: str, partition: int) -> Path:
        return self.path / f"{topic}-{partition}"

    def diverged(self) -> list[Path]:
        """Folders of diverged records that take-overs set aside; never served or deleted."""
        return sorted(path for path in diverged_folder(self.path).glob("*") if path.is_dir())

    def mark_clean_shutdown(self) -> None:
        """Record that every log is closed and the checkpoints are current. Raises OSError."""
        # Kafka 4 reads JSON here; -1 means that no broker epoch is known.
        write_durably(self.path / CLEAN_SHUTDOWN, b'{"version":0,"brokerEpoch":-1}')

    def put_back_clean_marker(self) -> None:
        """The start ended before it opened a log: the next one may rely on the last clean stop."""
        if self.was_clean:
            with suppress(OSError):  # then the next start checks everything
                self.mark_clean_shutdown()

    def close(self) -> None:
        """Release the folder to another broker. Threads that still wait for the store can no longer
        write here.
        """
        with self._writes:
            self._writes.wait_for(lambda: not self._being_written)
            self._closed = True
        os.close(self._lock_fd)

    def write(self, path: Path, content: bytes) -> None:
        """Replace a file of the folder, durably; one writer at a time for each. Raises OSError, and
        ShuttingDown after `close`.
        """
        with self._writes:
            self._writes.wait_for(lambda: path not in self._being_written)
            if self._closed:
                raise ShuttingDown(f"data folder {self.path} was closed")
            self._being_written.add(path)
        try:
            write_durably(path, content)
        finally:
            with self._writes:
                self._being_written.discard(path)
                self._writes.notify_all()

    # --- checkpoints ------------------------------------------------------------------------------

    def read_checkpoint(self, name: str) -> dict[TopicPartition, int]:
        """Offsets by topic and partition; empty if there is no file.

        Raises CorruptSnapshot if the file is not in Kafka's format: guessing a log start could
        bring back deleted records.
        """
        return read_checkpoint(self.path / name)

    def write_checkpoint(self, name: str, offsets: Mapping[TopicPartition, int]) -> None:
        write_checkpoint(self.path / name, offsets, write=self.write)

    def _sync_folders(self) -> None:
        """Sync renames that a process which died may not have synced: startup relies on them."""
        for folder in (self.path, self.path / "tierlog", self.path / "tierlog" / "manifests"):
            REAL_DISK.sync_folder(folder)

    # --- identity ---------------------------------------------------------------------------------

    def join_cluster(self, cluster_id: str) -> None:
        """Belong to this cluster; the folder is new, or never had a topic. Raises OSError."""
        assert not self.has_topics, "topics stay in their cluster"
        self._change_identity("cluster.id", cluster_id)

    def take_node_id(self, node_id: int) -> None:
        """Raises OSError, ShuttingDown."""
        if node_id != self.node_id:
            self._change_identity("node.id", str(node_id))

    def _change_identity(self, name: str, value: str) -> None:
        changed = {**self._identity, name: value}
        self.write(self.path / "meta.properties", checkpoint_files.format_properties(changed))
        self._identity = changed

    def take_new_owner_id(self) -> None:
        """As for a copy: the newer folder of that id, if there still is one, is another.

        Raises OSError, ShuttingDown.
        """
        self.owner = _write_owner(self.path, write=self.write)

    def _read_or_make_identity(self) -> dict[str, str]:
        path = self.path / "meta.properties"
        if self.is_new:
            self.level = NEW_FOLDER_LEVEL
            write_level(self.path, self.level)
            properties = {
                "version": "1",
                "cluster.id": new_id(),
                "node.id": "1",
                "directory.id": new_id(),
            }
            write_durably(path, checkpoint_files.format_properties(properties))
            return properties
        properties = checkpoint_files.parse_properties(path.read_bytes(), file=str(path))
        if "cluster.id" not in properties:
            raise CorruptSnapshot("has no cluster.id", file=str(path))
        return properties

    def _read_or_make_owner(self) -> str:
        """The id of this folder. A copy has another inode, and gets a new id.

        Otherwise two copies would both believe themselves the owner and write. A folder that was
        moved gets a new id too, and continues: it still has the epochs recorded under the old id.
        """
        path = self.path / "tierlog" / "owner"
        text = path.read_text(errors="ignore") if path.exists() else ""
        owner, _, place = text.partition(" ")
        return owner if place == _place(self.path) else _write_owner(self.path)

    def _consume_clean_marker(self) -> bool:
        marker = self.path / CLEAN_SHUTDOWN
        if not marker.exists():
            return False
        marker.unlink()
        REAL_DISK.sync_folder(self.path)
        return True


def _place(data_dir: Path) -> str:
    stat = data_dir.stat()
    return f"{stat.st_dev}:{stat.st_ino}"


def _write_owner(data_dir: Path, *, write: Callable[[Path, bytes], None] = write_durably) -> str:
    owner = secrets.token_hex(16)
    write(data_dir / "tierlog" / "owner", f"{owner} {_place(data_dir)}".encode())
    return owner


def _check_not_nested(path: Path) -> None:
    """Refuse to create a data folder inside, or directly around, another."""
    if has_segments(path):
        raise ConfigurationError(
            f"data folder {path}: is the folder of a partition; give the folder that contains it"
        )
    for below in path.glob("*/meta.properties"):
        raise ConfigurationError(
            f"data folder {path}: contains the data folder {below.parent}; give that, or another "
            "folder"
        )


def read_level(data_dir: Path) -> int:
    """The format level of a folder. Raises ConfigurationError if this version does not read it,
    CorruptManifest, OSError.
    """
    path = data_dir / FORMAT_LEVEL
    if not path.exists():
        return FIRST_LEVEL
    return decode_level(path.read_bytes(), file=str(path))


def write_level(data_dir: Path, level: int) -> None:
    """Durable when this returns. Raises OSError."""
    path = data_dir / FORMAT_LEVEL
    if level > FIRST_LEVEL:
        write_durably(path, encode_level(level))
    elif path.exists():
        path.unlink()  # of a restore that was interrupted
        REAL_DISK.sync_folder(path.parent)


def read_checkpoint(path: Path) -> dict[TopicPartition, int]:
    """Offsets by topic and partition; empty if there is no file. Raises CorruptSnapshot."""
    if not path.exists():
        return {}
    entries = checkpoint_files.parse_offset_checkpoint(path.read_bytes(), file=str(path))
    return {(entry.topic, entry.partition): entry.offset for entry in entries}


@dataclass(frozen=True)
class Document(Generic[T]):
    """One of the sealed documents below `tierlog/`."""

    name: str
    kind: str
    content: type[T]

    def path(self, data_dir: Path) -> Path:
        return data_dir / "tierlog" / self.name

    def read_document(self, data_dir: Path) -> T | None:
        """None if there is no file. Raises CorruptDataError."""
        path = self.path(data_dir)
        if not path.exists():
            return None
        data = path.read_bytes()
        return sealed_json.decode(data, kind=self.kind, file=str(path), document=self.content)

    def write_document(
        self, data_dir: Path, content: T, *, write: Callable[[Path, bytes], None] = write_durably
    ) -> None:
        """Durable when this returns. Raises what `write` raises."""
        write(self.path(data_dir), sealed_json.encode(content, kind=self.kind))


def write_checkpoint(
    path: Path,
    offsets: Mapping[TopicPartition, int],
    *,
    write: Callable[[Path, bytes], None] = write_durably,
) -> None:
    entries = ((*place, offset) for place, offset in offsets.items())
    write(path, checkpoint_files.format_offset_checkpoint(entries))


@contextmanager
def folder_lock(data_dir: Path) -> Iterator[None]:
    """Hold the lock of a folder. Raises ConfigurationError if a broker has it open."""
    try:
        fd = _take_lock(data_dir / ".lock")
    except OSError as error:
        raise ConfigurationError(f"data folder {data_dir}: {error.strerror}") from error
    try:
        yield
    finally:
        os.close(fd)


def _take_lock(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a lost broker's disk, mounted read-only
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise FolderInUse(
            f"data folder {path.parent} is in use by another broker: stop that broker, or choose "
            "another folder"
        ) from None
    return fd


def topic_id_of(folders: Iterable[Path]) -> str | None:
    """The topic id of the first of these partition folders that has one; None if none does."""
    for folder in folders:
        path = folder / "partition.metadata"
        if path.exists():
            topic_id = checkpoint_files.parse_partition_metadata(path.read_bytes(), file=str(path))
            return checkpoint_files.format_topic_id(topic_id)
    return None
