"""A partition whose log could not be opened: it is left untouched while the others are served. And
what to do about a file of the data folder that cannot be read, or a disk that is full.

* Its files are evidence. Retention, offload and compaction only see open partitions.
* Its rows in the checkpoints are preserved: with a recovery point of 0 the next start would take
  flushed bytes for an unflushed tail, and truncate them.
* A data folder with a damaged partition is not marked as cleanly shut down, so that the next start
  checks the log again.
* A remedy goes by the file's name: some files are rebuilt if they are missing, others must be
  restored. Nothing is repaired here: an operator should first find out why one became unreadable.
* If a newer tierlog wrote the file, the error says so, and no remedy is added: removing the file
  would lose what it holds.
"""

from __future__ import annotations

import copy
import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from tierlog.broker.data_folder.data_folder import (
    CLEANER_CHECKPOINT,
    COMPACTION_REACHED,
    HIGH_WATERMARKS,
    LOG_STARTS,
    RECOVERY_POINTS,
)
from tierlog.hot_tier.log_folder import LEADER_EPOCHS, PARTITION_METADATA
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptDataError,
    DiskFull,
    LogOfflineError,
    TierlogError,
    TooManyOpenFiles,
    UnknownFormatVersion,
)


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


REMEDIES: Final = {
    RECOVERY_POINTS: (
        f"`cp {HIGH_WATERMARKS} {RECOVERY_POINTS}` restores it: both say how far was flushed"
    ),
    LOG_STARTS: (
        "without the file, logs start where the bucket says, and logs without a bucket at their "
        "first segment: `rm` it only if trimmed records may reappear"
    ),
    CLEANER_CHECKPOINT: "`rm` the file: compaction then starts over",
    Path(COMPACTION_REACHED).name: "`rm` the file if every compacted topic is still compacted",
    PARTITION_METADATA: "`rm` the file if the folder is this topic's: it is written again",
    LEADER_EPOCHS: "`rm` the file: it is rebuilt from the batches",
    "meta.properties": "write `cluster.id=ID` into it, with the id in the bucket's cluster.json",
    "topics.json": (
        "`tierlog storage restore --store URL --data-dir NEW --tail OLD` makes a new folder from "
        "the bucket and from the records that only this folder has"
    ),
    "format.json": (
        "`rm` the file, and run `tierlog storage finalize` before the next start, with the version "
        "that ran last"
    ),
    "epochs.json": "`rm` the file, and start with `--take-over` if a partition requires it",
    "cuts.json": "`rm` the file; groups may be past the end of a log that was repaired",
    "take-over.json": "`rm` the file, and start with `--take-over` again",
    "store.json": "`rm` the file: the store is probed again",
}


def with_remedy(error: CorruptDataError) -> CorruptDataError:
    """The error, with the remedy if one is known."""
    name = Path(error.file).name
    is_newer = isinstance(error, UnknownFormatVersion) and name.endswith(".json")
    if is_newer or name not in REMEDIES:
        return error
    return type(error)(
        f"{error.detail}; {REMEDIES[name]}",
        file=error.file,
        position=error.position,
        offset=error.offset,
    )


@contextmanager
def adding_remedies() -> Iterator[None]:
    try:
        yield
    except CorruptDataError as error:
        raise with_remedy(error) from error
    except DiskFull as error:
        raise ConfigurationError(f"{error}: {_remedy_for_full(error)}, then start again") from error


def _remedy_for_full(error: DiskFull) -> str:
    if not isinstance(error, TooManyOpenFiles):
        return "free space on its disk"
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"raise the process's limit of {allowed} (`ulimit -n`, systemd's LimitNOFILE)"
