"""The leader epochs that this folder allocated, a new one each time it opens a log: `epochs.json`.

* An epoch is durable before the first append under it: one file and one fsync for all logs that
  are opened together.
* It is above every epoch of the log, of the bucket when last seen, and of this folder.

Thread-safe: a repair may open a log at any time.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Final

from tierlog.broker.cold_log import ColdLog
from tierlog.broker.data_folder import DataFolder, Document, parse_topic_id_partition
from tierlog.broker.log_spec import OpenedLog
from tierlog.manifest.state import MAX_EPOCHS, EpochStart

EPOCHS: Final = Document("epochs.json", "epochs", dict[str, tuple[EpochStart, ...]])


class AllocatedEpochs:
    """By topic id and partition."""

    def __init__(self, folder: DataFolder) -> None:
        self._folder = folder
        self._epochs = EPOCHS.read(folder.path) or {}
        self._lock = threading.Lock()  # for changes

    def of(self, name: str) -> tuple[EpochStart, ...]:
        """The epochs that the bucket may not know yet, oldest first."""
        return self._epochs.get(name, ())

    def prepare(self, cold: ColdLog, name: str) -> None:
        """Prepare the claim of a log that is open already, under the epoch that it has."""
        cold.ownership.prepare(self._folder.owner, self.of(name), take_over=False)

    def allocate(self, opened: Sequence[OpenedLog]) -> None:
        """Start the next epoch of each log and prepare its claim; durable when this returns. May be
        repeated after an error. Raises OSError.
        """
        owner = self._folder.owner
        with self._lock:
            epochs = dict(self._epochs)
            for one in opened:
                history = epochs.get(one.name, ())
                own = (entry.epoch for entry in history)
                last = max([one.log.leader_epoch, one.epoch_in_force, *own])
                start = EpochStart(last + 1, one.next_offset, owner)
                # Includes epochs under which nothing was written: one may be in force in the bucket
                # through a claim whose process died before it was recorded here.
                epochs[one.name] = (*one.kept_epochs(history), start)[-MAX_EPOCHS:]
                one.log.bump_epoch(start.epoch)
            self._save(epochs)
            for one in opened:
                if one.cold is not None:
                    is_take_over = one.take_over is not None
                    one.cold.ownership.prepare(owner, epochs[one.name], take_over=is_take_over)

    def forget_all_but(self, topic_ids: Collection[str]) -> None:
        """Forget topics that no longer exist, here or in the bucket."""
        with self._lock:
            kept = {
                name: history
                for name, history in self._epochs.items()
                if parse_topic_id_partition(name)[0] in topic_ids
            }
            if len(kept) != len(self._epochs):
                self._save(kept)

    def _save(self, epochs: dict[str, tuple[EpochStart, ...]]) -> None:
        EPOCHS.write(self._folder.path, epochs, write=self._folder.write)
        self._epochs = epochs
