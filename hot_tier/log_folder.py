"""Lists a partition folder and cleans up what a crash left in it.

| found | action |
|---|---|
| `….deleted` | unlink: nobody can have it open |
| `….cleaned`, `….tmp` | unlink: not published yet |
| `….cleaned` of an index whose `.log.swap` exists | publish with it: it was complete before |
| `….swap` | rename into place and unlink the segments it replaces: past the point of no return |
| an index or transaction index without its `.log` | unlink |
| `partition.metadata` with another topic id | refuse |
| anything else | leave alone |
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from tierlog.host.disk import Disk
from tierlog.host.durable_file import write_durably
from tierlog.hot_tier.batch_walk import end_offset_of
from tierlog.hot_tier.file_names import (
    CLEANED,
    CUT,
    LOG,
    OFFLINE_MARKER,
    PARTITION_METADATA,
    SEGMENT_SUFFIXES,
    SNAPSHOT,
    SWAP,
    TRANSACTION_INDEX,
    UNMIRRORED,
    FileName,
    file_name,
    parse_file_name,
    path_of,
    segment_files,
    staged,
)
from tierlog.record_format.checkpoint_files import (
    format_partition_metadata,
    format_topic_id,
    parse_partition_metadata,
    parse_topic_id,
)
from tierlog.record_format.errors import CorruptSnapshot


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
