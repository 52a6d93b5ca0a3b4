"""The leader epoch history: which owner wrote from which offset on.

* An epoch without records is not kept: a later one that starts at or below its start offset
  replaces it, as in Kafka's LeaderEpochFileCache.
* Epochs wholly below the log start are dropped; the one that contains it is kept.
* Only the newest MAX_EPOCHS are kept: the history serves to find where two logs diverge, which is
  near their ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from tierlog.manifest.state import EpochStart

MAX_EPOCHS = 512


def assign(history: Sequence[EpochStart], new: EpochStart) -> tuple[EpochStart, ...]:
    """The history with `new` appended, whose epoch must be the highest."""
    assert not history or new.epoch > history[-1].epoch
    kept = takewhile(lambda old: old.start_offset < new.start_offset, history)
    return (*kept, new)[-MAX_EPOCHS:]


def prune(history: tuple[EpochStart, ...], log_start_offset: int) -> tuple[EpochStart, ...]:
    """The history without epochs that end at or below the log start. The last one is kept."""
    first = 0
    while first + 1 < len(history) and history[first + 1].start_offset <= log_start_offset:
        first += 1
    return history[first:]


def divergence_offset(
    local: Sequence[EpochStart], remote: Sequence[EpochStart], *, local_end: int, remote_end: int
) -> int:
    """The offset where two histories of a partition diverge: below it, both logs have the same
    records.

    `local_end` and `remote_end` are log end offsets; if one history continues the other, the result
    is the smaller of them. The same epoch number of two owners is two different epochs.
    """
    shared = set(local) & set(remote)
    last_shared = max((start.epoch for start in shared), default=-1)
    # Without a common epoch (pruned, or unrelated logs), everything from the first start offset on
    # may differ.
    ends = [start.start_offset for start in (*local, *remote) if start.epoch > last_shared]
    return min(local_end, remote_end, *ends)
