"""A partition whose log could not be opened: kept as it is, while the others are served.

* Its files are evidence. Retention, offload and compaction see open partitions only.
* Its rows in the checkpoints stay as they were: with a recovery point of 0 the next start would
  take flushed bytes for a tail that a crash left, and cut them off.
* A data folder with one is not closed as clean, so that the next start checks the log again.
"""

from __future__ import annotations

import copy
import errno
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from broker.remedies import with_remedy
from record_format.errors import CorruptDataError, LogOfflineError, TierlogError

Places = Mapping[tuple[str, int], int]


class DamagedPartition(NamedTuple):
    """What its last checkpoints say, and why it is not served."""

    topic: str
    number: int
    reason: TierlogError
    recovery_point: int | None
    log_start_offset: int | None

    def __str__(self) -> str:
        return f"{self.topic}-{self.number}"

    def error(self) -> TierlogError:
        """The error to raise: a new one each time, because each carries its caller's traceback."""
        return copy.copy(self.reason)


def reason_of(error: Exception, partition: str) -> TierlogError | None:
    """What the partition's calls answer; None if the fault is not of this partition alone."""
    if isinstance(error, CorruptDataError):
        return with_remedy(error)
    if isinstance(error, LogOfflineError):
        return error
    if isinstance(error, OSError) and error.errno == errno.EIO:
        return LogOfflineError(f"{partition}: its log could not be read: {error.strerror}")
    return None


def with_recovery_points(open_ones: Places, damaged: Iterable[DamagedPartition]) -> Places:
    kept = {(d.topic, d.number): d.recovery_point for d in damaged if d.recovery_point is not None}
    return {**open_ones, **kept}


def with_log_starts(open_ones: Places, damaged: Iterable[DamagedPartition]) -> Places:
    starts = {(d.topic, d.number): d.log_start_offset for d in damaged if d.log_start_offset}
    return {**open_ones, **starts}
