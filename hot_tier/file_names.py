"""How Kafka names the files of a partition folder.

| name | holds |
|---|---|
| `<20 digits>.log` | record batches from that base offset on |
| `<20 digits>.index`, `.timeindex`, `.txnindex` | the segment's indexes |
| `<20 digits>.snapshot` | the producers as they were before that offset |
| `….deleted` | a file that nobody may open any more, unlinked a little later |
| `….cleaned`, `….swap` | compaction, before and after its point of no return |
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

LOG = ".log"
OFFSET_INDEX = ".index"
TIME_INDEX = ".timeindex"
TRANSACTION_INDEX = ".txnindex"
SNAPSHOT = ".snapshot"
DELETED = ".deleted"
CLEANED = ".cleaned"
SWAP = ".swap"
LEADER_EPOCHS = "leader-epoch-checkpoint"
PARTITION_METADATA = "partition.metadata"
# Ours: the log's disk failed, so what lies above the recovery point is not to be trusted to the
# page cache. It needs no sync: it lives and dies with the very page cache that it warns of.
OFFLINE_MARKER = "tierlog-offline"
# Ours too: compaction replaced segments, and the bucket may still have what they were made of.
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
    """The parts of a segment's file name; None for any other file."""
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


def path_of(folder: Path, offset: int, suffix: str) -> Path:
    return folder / file_name(offset, suffix)


def staged(path: Path, stage: str) -> Path:
    """The file under its name with `.deleted`, `.cleaned` or `.swap`."""
    return path.with_name(path.name + stage)
