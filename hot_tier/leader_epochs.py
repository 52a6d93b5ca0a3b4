"""Which leader epoch began at which offset: Kafka's `leader-epoch-checkpoint`.

* Every change replaces the file: an epoch's line is on the medium before its first record.
* Both columns increase. Replaying the log may append entries, never insert them.
* Guarded by the log's lock; `entries` is a value that is replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tierlog.host.disk import Disk
from tierlog.host.durable_file import read_whole, write_durably
from tierlog.hot_tier.log_folder import LEADER_EPOCHS
from tierlog.record_format.checkpoint_files import (
    EpochEntry,
    format_epoch_checkpoint,
    parse_epoch_checkpoint,
)
from tierlog.record_format.errors import CorruptSnapshot


class LeaderEpochs:
    def __init__(self, folder: Path, *, disk: Disk, entries: tuple[EpochEntry, ...] = ()) -> None:
        self._folder, self._disk = folder, disk
        self.entries = entries

    @classmethod
    def load(cls, folder: Path, *, disk: Disk) -> LeaderEpochs:
        """Raises FileNotFoundError, CorruptSnapshot."""
        path = folder / LEADER_EPOCHS
        entries = parse_epoch_checkpoint(read_whole(path, CorruptSnapshot), file=str(path))
        return cls(folder, disk=disk, entries=tuple(entries))

    @property
    def latest(self) -> int | None:
        return self.entries[-1].epoch if self.entries else None

    def epoch_of(self, offset: int) -> int | None:
        """The epoch that the record at `offset` was appended in."""
        found = [entry.epoch for entry in self.entries if entry.start_offset <= offset]
        return found[-1] if found else None

    def assign(self, epoch: int, start_offset: int) -> None:
        """The next record is the first of `epoch`; no effect if the epoch has begun."""
        latest = self.entries[-1].epoch if self.entries else -1
        if epoch > latest:
            self._replace((*self.entries, EpochEntry(epoch, start_offset)))

    def assign_in_memory(self, epoch: int, start_offset: int) -> None:
        """As `assign`, for replay: not written until `save`."""
        if epoch >= 0 and (not self.entries or epoch > self.entries[-1].epoch):
            self.entries = (*self.entries, EpochEntry(epoch, start_offset))

    def truncate_from_end(self, end_offset: int) -> None:
        """Drop epochs that begin at or above the log's end; in memory only."""
        self.entries = tuple(entry for entry in self.entries if entry.start_offset < end_offset)

    def drop_from(self, end_offset: int) -> None:
        """As `truncate_from_end`, durably."""
        entries = tuple(entry for entry in self.entries if entry.start_offset < end_offset)
        if entries != self.entries:
            self._replace(entries)

    def truncate_from_start(self, start_offset: int) -> None:
        """Drop epochs that end at or below the log's start; the one that contains it now begins
        there.
        """
        before = [entry for entry in self.entries if entry.start_offset <= start_offset]
        after = [entry for entry in self.entries if entry.start_offset > start_offset]
        kept = [before[-1]._replace(start_offset=start_offset)] if before else []
        entries = (*kept, *after)
        if entries != self.entries:
            self._replace(entries)

    def prepend(self, older: Sequence[EpochEntry]) -> None:
        """Records of `older` epochs were prepended. An epoch in both began in the prepended
        records.
        """
        if older:
            later = [entry for entry in self.entries if entry.epoch > older[-1].epoch]
            self._replace((*older, *later))

    def clear(self) -> None:
        if self.entries:
            self._replace(())

    def save(self) -> None:
        self._replace(self.entries)

    def _replace(self, entries: tuple[EpochEntry, ...]) -> None:
        data = format_epoch_checkpoint(entries)
        write_durably(self._folder / LEADER_EPOCHS, data, disk=self._disk)
        self.entries = entries
