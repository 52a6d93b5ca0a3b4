"""One sealed segment in the bucket, as a manifest names it: what an upload returns, a commit stores
and a read starts from. And the keys of its two objects, relative to the store's prefix:

    <partition's segments folder>/<20-digit base offset>-<epoch>-<unique>.log
    <partition's segments folder>/<same>.indexes

* The members are the format of a manifest's entry (docs/formats/manifest.md): a new one needs a new
  format version of the manifest. Both objects were confirmed before an entry of them exists.
* Offsets have 20 digits, so that keys sort by offset. `<unique>` is random, so no two uploads ever
  share a key, whichever broker uploads.
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

import msgspec


class SegmentEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sealed segment in the bucket: a `.log` object and its `.indexes` object.

    If `min_timestamp` is None it is unknown, and the segment is never skipped by time. If
    `max_timestamp` is -1 no record has a timestamp, as far as is known, and the segment's age is
    that of its file (`modified_ms`), as in Kafka. The chunk table is part of the `.indexes` object.
    """

    base_offset: int
    last_offset: int
    size_bytes: int
    record_count: int
    min_timestamp: int | None
    max_timestamp: int
    leader_epoch: int
    log_key: str
    log_crc32c: int
    indexes_key: str
    indexes_crc32c: int
    indexes_size_bytes: int
    chunk_table_position: int
    chunk_table_size: int
    modified_ms: int = -1

    @property
    def next_offset(self) -> int:
        return self.last_offset + 1

    @property
    def keys(self) -> tuple[str, str]:
        return self.log_key, self.indexes_key

    @property
    def max_timestamp_or_none(self) -> int | None:
        """For those who show it: None if no record has a timestamp, as far as is known."""
        return self.max_timestamp if self.max_timestamp >= 0 else None

    @property
    def known_max_timestamp(self) -> int | None:
        """-1 if no record has a timestamp; None if it is unknown, as the minimum is then too."""
        is_known = self.max_timestamp >= 0 or self.min_timestamp is not None
        return self.max_timestamp if is_known else None

    @property
    def age_timestamp(self) -> int:
        """The timestamp for time-based retention; -1 if unknown."""
        return self.max_timestamp if self.max_timestamp >= 0 else self.modified_ms

    def same_bytes(self, other: SegmentEntry) -> bool:
        """Whether both have the same log bytes: one segment can be uploaded under several names."""
        return (self.base_offset, self.last_offset, self.size_bytes, self.log_crc32c) == (
            other.base_offset,
            other.last_offset,
            other.size_bytes,
            other.log_crc32c,
        )


_LOG = re.compile(r"([0-9]{20}-[0-9]{1,10}-[0-9a-z]{1,64})\.log")


class MergePlan(msgspec.Struct, frozen=True, kw_only=True):
    """`runs`: which segments of a partition may become one each, oldest first. The rest is what
    merged segments are made with; `reads_back`: the store's own checksums are not to be trusted.
    """

    runs: list[list[SegmentEntry]]
    segments_folder: str
    leader_epoch: int
    index_interval_bytes: int
    filters_keys: bool
    chunk_bytes: int
    reads_back: bool


class SegmentKeys(NamedTuple):
    """The two objects of one upload of one segment."""

    log: str
    indexes: str


def segment_keys(folder: str, *, base_offset: int, leader_epoch: int, unique: str) -> SegmentKeys:
    """`folder` is the partition's `…/segments/`, with its slash."""
    assert folder.endswith("/")
    stem = f"{folder}{base_offset:020d}-{leader_epoch}-{unique}"
    return SegmentKeys(log=f"{stem}.log", indexes=f"{stem}.indexes")


def segment_keys_of(log_key: str) -> SegmentKeys:
    """Both keys of the upload that `log_key` belongs to."""
    return SegmentKeys(log=log_key, indexes=log_key.removesuffix(".log") + ".indexes")


def name_of(log_key: str) -> str | None:
    """The name in the key of a segment's log object, without its suffix; None for any other key."""
    match = _LOG.fullmatch(log_key.rpartition("/")[2])
    return match[1] if match else None


def new_unique() -> str:
    """80 random bits in 20 hex digits."""
    return secrets.token_hex(10)
