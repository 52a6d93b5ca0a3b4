"""What helps if a file of a data folder cannot be read, or its disk is full: said together with the
refusal.

* The file's name decides: what is rebuilt without it, and what has to come from elsewhere.
* Nothing is mended here. Some of these files could safely be recreated, but somebody should first
  find out why one became unreadable.
* If a newer tierlog wrote the file, the refusal says so; removing it would lose what it holds.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from broker.data_folder import (
    CLEANER_CHECKPOINT,
    COMPACTION_REACHED,
    HIGH_WATERMARKS,
    LOG_STARTS,
    RECOVERY_POINTS,
)
from hot_tier.file_names import LEADER_EPOCHS, PARTITION_METADATA
from record_format.errors import (
    ConfigurationError,
    CorruptDataError,
    DiskFull,
    TooManyOpenFiles,
    UnknownFormatVersion,
)

REMEDIES: Final = {
    RECOVERY_POINTS: (
        f"`cp {HIGH_WATERMARKS} {RECOVERY_POINTS}` puts it back: both say how far was flushed"
    ),
    LOG_STARTS: (
        "without the file logs begin where the bucket says, and those that are nowhere else at "
        "their first segment: `rm` it only if trimmed records may reappear"
    ),
    CLEANER_CHECKPOINT: "without the file compaction starts over: `rm` it",
    Path(COMPACTION_REACHED).name: "`rm` the file if every topic that was compacted still is",
    PARTITION_METADATA: "`rm` the file: it is written again",
    LEADER_EPOCHS: "`rm` the file: it is rebuilt from the batches",
    "meta.properties": "write `cluster.id=ID` into it: the bucket's cluster.json has the id",
    "topics.json": (
        "`tierlog storage restore --store URL --data-dir NEW --tail OLD` makes a folder out of the "
        "bucket and of what only this one has"
    ),
    "epochs.json": "`rm` the file, and start with `--take-over` if a partition asks for it",
    "cuts.json": "`rm` the file; groups may have read further than a log that was repaired reaches",
    "take-over.json": "`rm` the file, and start with `--take-over` again",
    "store.json": "`rm` the file: the store is probed again",
}


def with_remedy(error: CorruptDataError) -> CorruptDataError:
    """The error, and what helps if that is known."""
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
        raise ConfigurationError(f"{error}: {_room_for(error)}, then start again") from error


def _room_for(error: DiskFull) -> str:
    if not isinstance(error, TooManyOpenFiles):
        return "make room on its disk"
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"allow the process more than {allowed} (`ulimit -n`, systemd's LimitNOFILE)"
