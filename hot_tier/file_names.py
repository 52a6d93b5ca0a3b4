"""Kafka's names for the files of a partition folder.

| name | content |
|---|---|
| `<20 digits>.log` | record batches from that base offset on |
| `<20 digits>.index`, `.timeindex`, `.txnindex` | the segment's indexes |
| `<20 digits>.snapshot` | the producers' state before that offset |
| `….deleted` | a deleted file, unlinked after `file.delete.delay.ms` |
| `….cleaned`, `….swap` | a compacted segment before and after the point of no return |
| `<20 digits>.log.cut`, `.cut.2` | not Kafka's, nor a segment's: what recovery cut from there |
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
CUT = f"{LOG}.cut"
LEADER_EPOCHS = "leader-epoch-checkpoint"
PARTITION_METADATA = "partition.metadata"
# Not Kafka's. The log's disk failed, so the page cache above the recovery point is not trusted. It
# needs no sync: a crash that loses the marker loses that page cache too.
OFFLINE_MARKER = "tierlog-offline"
# Not Kafka's. Segments were replaced, and the bucket may still hold the old ones.
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
    """The parts of a segment file's name; None for any other file."""
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


def segment_files(folder: Path) -> list[tuple[FileName, Path]]:
    """The segment files in a folder, by offset and suffix. Raises OSError."""
    found = ((parse_file_name(path.name), path) for path in folder.iterdir())
    return sorted((name, path) for name, path in found if name is not None)


def path_of(folder: Path, offset: int, suffix: str) -> Path:
    return folder / file_name(offset, suffix)


def staged(path: Path, stage: str) -> Path:
    """The path with `.deleted`, `.cleaned` or `.swap` added."""
    return path.with_name(path.name + stage)
