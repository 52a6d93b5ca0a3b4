"""A partition whose log could not be opened: it is left untouched while the others are served.

* Its files are evidence. Retention, offload and compaction only see open partitions.
* Its rows in the checkpoints are preserved: with a recovery point of 0 the next start would take
  flushed bytes for an unflushed tail, and truncate them.
* A data folder with a damaged partition is not marked as cleanly shut down, so that the next start
  checks the log again.
"""

from __future__ import annotations

import copy
import errno
from typing import NamedTuple

from tierlog.broker.remedies import with_remedy
from tierlog.record_format.errors import CorruptDataError, LogOfflineError, TierlogError


class DamagedPartition(NamedTuple):
    """The reason, and the partition's rows in the last checkpoints."""

    topic: str
    number: int
    reason: TierlogError
    recovery_point: int | None
    log_start_offset: int | None

    def __str__(self) -> str:
        return f"{self.topic}-{self.number}"

    def error(self) -> TierlogError:
        """A copy of the reason to raise: each raise attaches the caller's traceback."""
        return copy.copy(self.reason)


def reason_of(error: Exception, partition: str) -> TierlogError | None:
    """The error that the partition's calls raise; None if the fault affects more than it."""
    if isinstance(error, CorruptDataError):
        return with_remedy(error)
    if isinstance(error, LogOfflineError):
        return error
    if isinstance(error, OSError) and error.errno == errno.EIO:
        return LogOfflineError(f"{partition}: its log could not be read: {error.strerror}")
    return None
