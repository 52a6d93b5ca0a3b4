"""The history of leader epochs: who wrote from which offset on.

* An epoch under which nothing was written leaves no trace: a later one that starts at or below its
  start replaces it, as in Kafka's leader-epoch cache.
* What lies wholly below the log start is dropped, except for the epoch that the log start is in.
* Only the newest MAX_EPOCHS are kept: a history serves to find where two logs diverge, and they
  diverge near their ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from manifest.state import EpochStart

MAX_EPOCHS = 512


def assign(history: Sequence[EpochStart], new: EpochStart) -> tuple[EpochStart, ...]:
    """The history with `new` at its end. `new.epoch` is above all in it."""
    assert not history or new.epoch > history[-1].epoch
    kept = takewhile(lambda old: old.start_offset < new.start_offset, history)
    return (*kept, new)[-MAX_EPOCHS:]


def prune(history: tuple[EpochStart, ...], log_start_offset: int) -> tuple[EpochStart, ...]:
    """Without the epochs that end at or below the log start. The last one always stays."""
    first = 0
    while first + 1 < len(history) and history[first + 1].start_offset <= log_start_offset:
        first += 1
    return history[first:]


def divergence_offset(
    local: Sequence[EpochStart], remote: Sequence[EpochStart], *, local_end: int, remote_end: int
) -> int:
    """Where two histories of one partition diverge: below it both logs hold the same records.

    Ends are the logs' next offsets. If one history continues the other, it is the smaller end.
    Equal epochs of different owners are different epochs.
    """
    shared = set(local) & set(remote)
    last_shared = max((start.epoch for start in shared), default=-1)
    # No epoch in common: pruned apart, or never one log. Then nothing from the first start on is
    # proven.
    ends = [start.start_offset for start in (*local, *remote) if start.epoch > last_shared]
    return min(local_end, remote_end, *ends)
