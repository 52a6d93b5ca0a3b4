"""A partition folder: Kafka's names for its files, and the clean-up of what a crash left in it.

| name | content | found at an open |
|---|---|---|
| `<20 digits>.log` | record batches from that base offset on | |
| `<20 digits>.index`, `.timeindex`, `.txnindex` | the segment's indexes | unlinked without `.log` |
| `<20 digits>.snapshot` | the producers' state before that offset | |
| `….deleted` | to be unlinked after `file.delete.delay.ms` | unlinked: nobody has it open |
| `….cleaned` | a compacted segment, not published yet | unlinked; published if its `.log.swap` |
| | | exists: it was complete before |
| `….swap` | one past the point of no return | renamed into place, what it replaces unlinked |
| `<20 digits>.log.cut`, `.cut.2` | not Kafka's: what recovery cut from there | kept |
| `….tmp` | a file that was being written | unlinked |
| `partition.metadata` | the topic's id | refused if it is another's |
| anything else | | left alone |
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tierlog.host.disk import Disk
from tierlog.host.durable_file import write_durably
from tierlog.hot_tier.batch_walk import end_offset_of
from tierlog.record_format.checkpoint_files import (
    format_partition_metadata,
    format_topic_id,
    parse_partition_metadata,
    parse_topic_id,
)
from tierlog.record_format.errors import CorruptSnapshot

LOG = ".log"
OFFSET_INDEX = ".index"
TIME_INDEX = ".timeindex"
TRANSACTION_INDEX = ".txnindex"
SNAPSHOT = ".snapshot"
DELETED = ".deleted"
CLEANED = ".cleaned"
SWAP = ".swap"
CUT = f"{LOG}.cut"
LEADER_EPOCHS = "leader-epoch-checkpoint"
PARTITION_METADATA = "partition.metadata"
# Not Kafka's. The log's disk failed, so the page cache above the recovery point is not trusted. It
# needs no sync: a crash that loses the marker loses that page cache too.
OFFLINE_MARKER = "tierlog-offline"
# Not Kafka's. Segments were replaced, and the bucket may still hold the old ones.
UNMIRRORED = "tierlog-unmirrored"
SEGMENT_SUFFIXES = (LOG, OFFSET_INDEX, TIME_INDEX, TRANSACTION_INDEX)
LARGEST_OFFSET = 2**63 - 1


class FileName(NamedTuple):
    """`stage` is `.deleted`, `.cleaned`, `.swap` or empty."""

    offset: int
    suffix: str
    stage: str


def file_name(offset: int, suffix: str) -> str:
    return f"{offset:020d}{suffix}"


def parse_file_name(name: str) -> FileName | None:
    """The parts of a segment file's name; None for any other file."""
    stage = ""
    for ending in (DELETED, CLEANED, SWAP):
        if name.endswith(ending):
            name, stage = name[: -len(ending)], ending
            break
    digits, dot, kind = name.partition(".")
    suffix = dot + kind
    known = suffix in SEGMENT_SUFFIXES or suffix == SNAPSHOT
    if not known or not (digits.isascii() and digits.isdigit()) or int(digits) > LARGEST_OFFSET:
        return None
    return FileName(int(digits), suffix, stage)


def segment_files(folder: Path) -> list[tuple[FileName, Path]]:
    """The segment files in a folder, by offset and suffix. Raises OSError."""
    found = ((parse_file_name(path.name), path) for path in folder.iterdir())
    return sorted((name, path) for name, path in found if name is not None)


def path_of(folder: Path, offset: int, suffix: str) -> Path:
    return folder / file_name(offset, suffix)


def staged(path: Path, stage: str) -> Path:
    """The path with `.deleted`, `.cleaned` or `.swap` added."""
    return path.with_name(path.name + stage)


def first_base_offset(path: Path) -> int | None:
    """The lowest base offset in the folder of a closed log, even of a segment whose swap is
    unfinished; None without a segment, or a folder. Raises OSError.
    """
    found = segment_files(path) if path.is_dir() else ()
    logs = (name for name, _ in found if name.suffix == LOG and name.stage in ("", SWAP))
    return min((name.offset for name in logs), default=None)


def has_segments(path: Path) -> bool:
    """Whether the folder of a closed log holds a segment. Raises OSError."""
    return first_base_offset(path) is not None


class LogFolder:
    """The files of a partition folder by kind, after the clean-up."""

    def __init__(self, path: Path, *, disk: Disk) -> None:
        self.path, self._disk = path, disk
        self.log_sizes: dict[int, int] = {}
        self.snapshots: set[int] = set()
        self.transaction_indexes: set[int] = set()
        self.cuts: list[str] = []  # see `torn_tail`
        self.went_offline = False
        self.unmirrored = False  # see `segment_swap`

    @classmethod
    def open(cls, path: Path, *, disk: Disk) -> LogFolder:
        """Create the folder if it does not exist, clean it up, and list it. Raises OSError."""
        folder = cls(path, disk=disk)
        if not path.is_dir():
            path.mkdir(parents=True)
            disk.sync_folder(path.parent)
        if not os.access(path, os.W_OK | os.X_OK):  # opening may not write; the first roll does
            raise PermissionError(errno.EACCES, "may not be written", str(path))
        swapped = folder._scan()
        if swapped:
            for base_offset in sorted(swapped):
                folder._finish_swap(base_offset, swapped[base_offset])
            folder._scan()
        return folder

    def _scan(self) -> dict[int, list[str]]:
        """List the folder and unlink leftovers; returns the suffixes of `.swap` files by base
        offset.
        """
        self.log_sizes, self.snapshots, self.transaction_indexes = {}, set(), set()
        self.cuts = []
        indexes: list[FileName] = []
        cleaned: list[FileName] = []
        swapped: dict[int, list[str]] = {}
        with os.scandir(self.path) as entries:
            for entry in entries:
                name = parse_file_name(entry.name)
                if name is None:
                    self._note_other_file(entry.name)
                elif name.stage == SWAP:
                    swapped.setdefault(name.offset, []).append(name.suffix)
                elif name.stage == CLEANED:
                    cleaned.append(name)
                elif name.stage:
                    self._drop(entry.name)
                elif name.suffix == LOG:
                    self.log_sizes[name.offset] = entry.stat().st_size
                elif name.suffix == SNAPSHOT:
                    self.snapshots.add(name.offset)
                else:
                    indexes.append(name)
        for name in cleaned:
            self._promote_cleaned(name, swapped.get(name.offset, []))
        for name in indexes:
            if name.offset not in self.log_sizes and name.offset not in swapped:
                self._drop(file_name(name.offset, name.suffix))
            elif name.suffix == TRANSACTION_INDEX:
                self.transaction_indexes.add(name.offset)
        return swapped

    def _promote_cleaned(self, name: FileName, swapped: list[str]) -> None:
        """The `.log` is renamed to `.swap` first: if that happened, the other files follow."""
        path = path_of(self.path, name.offset, name.suffix)
        if LOG not in swapped:
            self._drop(staged(path, CLEANED).name)
            return
        self._disk.rename(staged(path, CLEANED), staged(path, SWAP))
        if name.suffix not in swapped:  # a crash during a rename may leave both names
            swapped.append(name.suffix)

    def _note_other_file(self, name: str) -> None:
        if name == OFFLINE_MARKER:
            self.went_offline = True
        elif name == UNMIRRORED:
            self.unmirrored = True
        elif name.endswith(".tmp"):
            self._drop(name)
        elif CUT in name:
            self.cuts.append(name)

    def _drop(self, name: str) -> None:
        self._disk.unlink(self.path / name)

    def _finish_swap(self, base_offset: int, suffixes: list[str]) -> None:
        """The last step of a compaction: the new segment replaces those it was made from."""
        if LOG in suffixes:
            swap_log = staged(path_of(self.path, base_offset, LOG), SWAP)
            end_offset = end_offset_of(swap_log, base_offset)
            for old in [old for old in self.log_sizes if base_offset <= old < end_offset]:
                self.remove_segment(old, keep_snapshot=old == base_offset)
        for suffix in sorted(suffixes, key=lambda suffix: suffix == LOG):  # the .log last
            target = path_of(self.path, base_offset, suffix)
            self._disk.rename(staged(target, SWAP), target)
        self._disk.sync_folder(self.path)

    def remove_segment(
        self,
        base_offset: int,
        *,
        keep_snapshot: bool = False,
        keep_log: Callable[[Path, int], None] | None = None,
    ) -> None:
        """Unlink all files of a segment, the `.log` last: the open after a crash repeats it.
        `keep_log` may rename the `.log` first.
        """
        suffixes = SEGMENT_SUFFIXES if keep_snapshot else (*SEGMENT_SUFFIXES, SNAPSHOT)
        for suffix in reversed(suffixes):
            path = path_of(self.path, base_offset, suffix)
            if suffix == LOG and keep_log is not None:
                keep_log(path, base_offset)
            self._disk.unlink(path)
        self.log_sizes.pop(base_offset, None)
        if not keep_snapshot:
            self.snapshots.discard(base_offset)
        self.transaction_indexes.discard(base_offset)

    def remove_stray_snapshots(self, *, end_offset: int) -> None:
        """Keep those at base offsets and the newest, which a clean shutdown leaves at the log's
        end.
        """
        newest = max((s for s in self.snapshots if s <= end_offset), default=None)
        for offset in sorted(self.snapshots):
            if offset > end_offset or (offset not in self.log_sizes and offset != newest):
                self._drop(file_name(offset, SNAPSHOT))
                self.snapshots.discard(offset)

    def check_topic_id(self, topic_id: str) -> None:
        """Check that the folder belongs to that topic; write the id if there is none. Raises
        CorruptSnapshot.
        """
        path = self.path / PARTITION_METADATA
        try:
            found = parse_partition_metadata(path.read_bytes(), file=str(path))
        except FileNotFoundError:
            data = format_partition_metadata(parse_topic_id(topic_id))
            write_durably(path, data, disk=self._disk)
            return
        if format_topic_id(found) != topic_id:
            raise CorruptSnapshot(
                f"has topic id {format_topic_id(found)}, not {topic_id}; a folder of another "
                "topic belongs elsewhere",
                file=str(path),
            )
