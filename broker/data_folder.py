"""The data folder of one broker: who holds it, which cluster it belongs to, and what outlives a
crash.

    <data>/.lock                                flock: one broker a folder
    <data>/.kafka_cleanshutdown                 only between a clean stop and the next start
    <data>/meta.properties                      cluster.id, node.id, directory.id (Kafka's file)
    <data>/recovery-point-offset-checkpoint     below it everything was flushed
    <data>/replication-offset-checkpoint        high watermarks (Kafka reads it; we recompute)
    <data>/log-start-offset-checkpoint          log starts, in either tier
    <data>/tierlog/owner                        who owns its partitions: a random id, this inode
    <data>/tierlog/epochs.json                  the epochs it took: `allocated_epochs`
    <data>/tierlog/topics.json                  see `topic_registry`
    <data>/tierlog/compaction-reached           how far rounds of compaction may have come
    <data>/tierlog/take-over.json               partitions that are being taken over
    <data>/tierlog/cuts.json                    logs that were cut, until groups have followed
    <data>/tierlog/store.json                   what a probe found of the store: `store_status`
    <data>/tierlog/restoring                    a restore into it has not ended: it is no broker's
    <data>/tierlog/manifests/<id>-<p>.json      the last manifest seen in force, as in the bucket
    <data>/tierlog/manifests/<id>-<p>.claims    under which epochs it was asked for: `bucket_state`
    <data>/tierlog/uploads/                     uploads that may go on after a crash
    <data>/tierlog/scratch/                     what nothing of outlives the process
    <data>/tierlog/cache/                       chunks of cold segments
    <data>/tierlog/damaged/                     what repairs set aside

* Files that Kafka has too are byte for byte Kafka's; our own are below `tierlog/`.
* Whatever a later step relies on is fsynced, and its folder entry too, before that step.
* The clean-shutdown marker is removed, durably, before the first log is opened: a crash in between
  only costs a recovery that was not needed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hot_tier.durable_file import sync_folder, write_durably
from hot_tier.log_folder import has_segments
from record_format import checkpoint_files
from record_format.checkpoint_files import TopicPartitionOffset
from record_format.errors import ConfigurationError, CorruptSnapshot, ShuttingDown

CLEAN_SHUTDOWN = ".kafka_cleanshutdown"
RECOVERY_POINTS = "recovery-point-offset-checkpoint"
HIGH_WATERMARKS = "replication-offset-checkpoint"
LOG_STARTS = "log-start-offset-checkpoint"
CLEANER_CHECKPOINT = "cleaner-offset-checkpoint"
COMPACTION_REACHED = "tierlog/compaction-reached"
RESTORING = "tierlog/restoring"

# What a take-over set apart: `<topic>-<partition>.diverged-<epoch>`, Kafka's files in it.
DIVERGED: Final = re.compile(r"-\d{1,9}\.diverged-\d+\Z")

TopicPartition = tuple[str, int]
TopicIdPartition = tuple[str, int]
"""Topic id and partition: of a topic that was made anew under the name, it is another."""


class FolderInUse(ConfigurationError):
    """Another broker has the folder open."""


def refused(path: Path, error: OSError) -> ConfigurationError:
    """The error for a folder that a broker may not, or cannot, use: read-only, not ours, full."""
    place = f"{error.filename}: " if error.filename else ""
    return ConfigurationError(f"data folder {path}: {place}{error.strerror}")


def new_id() -> str:
    """A random UUID as Kafka writes them; never beginning with a dash (Kafka's Uuid.randomUuid)."""
    while True:
        text = checkpoint_files.format_topic_id(uuid.uuid4())
        if not text.startswith("-"):
            return text


def format_topic_id_partition(topic_id: str, partition: int) -> str:
    """What files below `tierlog/` call a place."""
    return f"{topic_id}-{partition}"


def parse_topic_id_partition(name: str) -> TopicIdPartition:
    topic_id, _, partition = name.rpartition("-")
    return topic_id, int(partition)


class DataFolder:
    """Opened by one process at a time; `note_clean_stop` lets the next start skip its checks."""

    def __init__(self, path: Path) -> None:
        try:
            if not (path / "meta.properties").exists():
                _check_is_no_neighbour(path)
            path.mkdir(parents=True, exist_ok=True)
            (path / "tierlog" / "manifests").mkdir(parents=True, exist_ok=True)
            self._lock_fd = _take_lock(path / ".lock")
        except OSError as error:
            raise refused(path, error) from error
        self.path = path
        self._write_lock = threading.Lock()
        self._closed = False
        try:
            self._sync_names()
            self.is_new = not (path / "meta.properties").exists()
            if self.is_new and (path / RESTORING).exists():
                raise ConfigurationError(
                    f"data folder {path}: a restore into it has not ended: run `tierlog storage "
                    "restore` on it again, or choose another"
                )
            self.cluster_id = self._read_or_make_identity()
            self.owner = self._read_or_make_owner()
            self.was_clean = self._consume_clean_marker()
            shutil.rmtree(self.scratch(), ignore_errors=True)
        except BaseException as error:
            os.close(self._lock_fd)
            if isinstance(error, OSError):
                raise refused(path, error) from error
            raise

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
        """What repairs set aside, a folder for each."""
        return self.path / "tierlog" / "damaged"

    def partition_folder(self, topic: str, partition: int) -> Path:
        return self.path / f"{topic}-{partition}"

    def diverged(self) -> list[Path]:
        """Folders of records that take-overs set apart: nobody serves or deletes them."""
        return sorted(path for path in self.path.iterdir() if DIVERGED.search(path.name))

    def note_clean_stop(self) -> None:
        """Every log is closed, and what the checkpoints say holds. Raises OSError."""
        # Kafka 4 reads JSON here; -1 says that no broker epoch is known.
        write_durably(self.path / CLEAN_SHUTDOWN, b'{"version":0,"brokerEpoch":-1}')

    def close(self) -> None:
        """Let another broker have the folder: whoever still waits for the store writes nothing here
        any more.
        """
        with self._write_lock:
            self._closed = True
        os.close(self._lock_fd)

    def write(self, path: Path, content: bytes) -> None:
        """Replace a file of the folder, durably; one at a time. Raises OSError, and ShuttingDown
        once another broker may have the folder.
        """
        with self._write_lock:
            if self._closed:
                raise ShuttingDown(f"data folder {self.path} was closed")
            write_durably(path, content)

    # --- checkpoints ------------------------------------------------------------------------------

    def read_checkpoint(self, name: str) -> dict[TopicPartition, int]:
        """Offsets by topic and partition; empty where there is no file.

        Raises CorruptSnapshot if the file is not of Kafka's format: a log start that is guessed
        could bring back what was deleted.
        """
        return read_checkpoint(self.path / name)

    def write_checkpoint(self, name: str, offsets: Mapping[TopicPartition, int]) -> None:
        write_checkpoint(self.path / name, offsets, write=self.write)

    def _sync_names(self) -> None:
        """What a process that died had renamed, and not synced yet, is about to be relied on."""
        for folder in (self.path, self.path / "tierlog", self.path / "tierlog" / "manifests"):
            sync_folder(folder)

    # --- identity ---------------------------------------------------------------------------------

    def _read_or_make_identity(self) -> str:
        path = self.path / "meta.properties"
        if self.is_new:
            properties = {
                "version": "1",
                "cluster.id": new_id(),
                "node.id": "1",
                "directory.id": new_id(),
            }
            write_durably(path, checkpoint_files.format_properties(properties))
            return properties["cluster.id"]
        properties = checkpoint_files.parse_properties(path.read_bytes(), file=str(path))
        if "cluster.id" not in properties:
            raise CorruptSnapshot("has no cluster.id", file=str(path))
        return properties["cluster.id"]

    def _read_or_make_owner(self) -> str:
        """The id of this folder, and a new one for a copy of it, which has another inode.

        Two copies that both took themselves for the owner would both write. A folder that was moved
        gets a new id too and goes on: it still has the epochs that it recorded under the old one.
        """
        path = self.path / "tierlog" / "owner"
        stat = self.path.stat()
        here = f"{stat.st_dev}:{stat.st_ino}"
        text = path.read_text(errors="ignore") if path.exists() else ""  # any id will do
        owner, _, place = text.partition(" ")
        if place != here:
            owner = secrets.token_hex(16)
            write_durably(path, f"{owner} {here}".encode())
        return owner

    def _consume_clean_marker(self) -> bool:
        marker = self.path / CLEAN_SHUTDOWN
        if not marker.exists():
            return False
        marker.unlink()
        sync_folder(self.path)
        return True


def _check_is_no_neighbour(path: Path) -> None:
    """A new folder is begun there: not where a data folder is a step away."""
    if has_segments(path):
        raise ConfigurationError(
            f"data folder {path}: is the folder of a partition; give the one that it is in"
        )
    for below in path.glob("*/meta.properties"):
        raise ConfigurationError(
            f"data folder {path}: has the data folder {below.parent}; give that, or a folder "
            "without one"
        )


def read_checkpoint(path: Path) -> dict[TopicPartition, int]:
    """Offsets by topic and partition; empty where there is no file. Raises CorruptSnapshot."""
    if not path.exists():
        return {}
    entries = checkpoint_files.parse_offset_checkpoint(path.read_bytes(), file=str(path))
    return {(entry.topic, entry.partition): entry.offset for entry in entries}


def write_checkpoint(
    path: Path,
    offsets: Mapping[TopicPartition, int],
    *,
    write: Callable[[Path, bytes], None] = write_durably,
) -> None:
    entries = [TopicPartitionOffset(*place, offset) for place, offset in offsets.items()]
    write(path, checkpoint_files.format_offset_checkpoint(entries))


@contextmanager
def folder_lock(data_dir: Path) -> Iterator[None]:
    """Hold a folder that no broker may have open. Raises ConfigurationError if one has."""
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
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # a lost broker's disk, mounted to be read
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise FolderInUse(
            f"data folder {path.parent} is in use by another broker: stop it, or choose another"
        ) from None
    return fd


def topic_id_of(folders: Iterable[Path]) -> str | None:
    """The topic id in the first of these partition folders that has one; None if none does."""
    for folder in folders:
        path = folder / "partition.metadata"
        if path.exists():
            topic_id = checkpoint_files.parse_partition_metadata(path.read_bytes(), file=str(path))
            return checkpoint_files.format_topic_id(topic_id)
    return None
