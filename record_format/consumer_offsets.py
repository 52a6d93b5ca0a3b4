"""Records of `__consumer_offsets`: who has read how far, byte for byte as Kafka keeps it.

* Written are the versions that Kafka 4 writes (key 1, value 3); read are all that Kafka ever wrote.
* A key of another type (group metadata, members, assignments) is none of ours: None, not an error.
* Bytes behind the last field are passed over, as Kafka's readers do.
* A group's records are all in one partition, Kafka's choice by the hash of its name: only so does
  the order of commits mean anything.

Big-endian; a string is its length (i16) and UTF-8.

    key    version i16 (0 or 1), group string, topic string, partition i32
    value  version i16, then
           0      offset i64, metadata string, commit timestamp i64
           1      offset i64, metadata string, commit timestamp i64, expire timestamp i64
           2      as 0
           3      offset i64, leader epoch i32, metadata string, commit timestamp i64
           4      as 3, metadata as a compact string (varint of length + 1), then tagged fields
    null   a tombstone: the commit under this key is gone

From Kafka's OffsetCommitKey.json and OffsetCommitValue.json (group-coordinator).
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from record_format.errors import CorruptDataError

TOPIC: Final = "__consumer_offsets"
NO_EPOCH: Final = -1

_KEY_VERSION: Final = 1
_LAST_KEY_VERSION: Final = 1  # from 2 on a key is of another type
_VALUE_VERSION: Final = 3
_FLEXIBLE_VERSION: Final = 4
_SHORT: Final = struct.Struct(">h")
_INT: Final = struct.Struct(">i")
_LONG: Final = struct.Struct(">q")


class CommitKey(NamedTuple):
    group: str
    topic: str
    partition: int


class Commit(NamedTuple):
    """The next offset to be read. `metadata` is the client's own; empty where it gave none."""

    offset: int
    metadata: str = ""
    commit_timestamp: int = -1
    leader_epoch: int = NO_EPOCH


def encode_key(key: CommitKey) -> bytes:
    head = _SHORT.pack(_KEY_VERSION)
    return head + _string(key.group) + _string(key.topic) + _INT.pack(key.partition)


def encode_value(commit: Commit) -> bytes:
    head = struct.pack(">hqi", _VALUE_VERSION, commit.offset, commit.leader_epoch)
    return head + _string(commit.metadata) + _LONG.pack(commit.commit_timestamp)


def decode_key(data: bytes) -> CommitKey | None:
    """None where the key is not of an offset commit. Raises CorruptDataError."""
    fields = _Fields(data)
    version = fields.number(_SHORT)
    if version > _LAST_KEY_VERSION:
        return None
    if version < 0:
        raise CorruptDataError(f"a key of {TOPIC} has version {version}")
    return CommitKey(fields.string(), fields.string(), fields.number(_INT))


def decode_value(data: bytes) -> Commit:
    """Raises CorruptDataError, for a version that is not known too."""
    fields = _Fields(data)
    version = fields.number(_SHORT)
    if not 0 <= version <= _FLEXIBLE_VERSION:
        raise CorruptDataError(f"an offset commit has version {version}; 0 to 4 are known")
    offset = fields.number(_LONG)
    epoch = fields.number(_INT) if version >= _VALUE_VERSION else NO_EPOCH
    metadata = fields.compact_string() if version >= _FLEXIBLE_VERSION else fields.string()
    return Commit(offset, metadata, fields.number(_LONG), epoch)


def partition_for_group(group: str, partitions: int) -> int:
    """Kafka's choice: the absolute value of Java's hash of the name, which is over UTF-16."""
    data = group.encode("utf-16-be")
    hashed = 0
    for high, low in zip(data[::2], data[1::2], strict=True):
        hashed = (31 * hashed + (high << 8 | low)) & 0xFFFFFFFF
    if hashed >= 1 << 31:
        hashed -= 1 << 32
    return 0 if hashed == -(1 << 31) else abs(hashed) % partitions


def _string(text: str) -> bytes:
    data = text.encode()
    return _SHORT.pack(len(data)) + data


class _Fields:
    """Takes one field after the other, each checked against the bytes that are left."""

    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    def number(self, layout: struct.Struct) -> int:
        return int(layout.unpack(self._take(layout.size))[0])

    def string(self) -> str:
        return self._text(self.number(_SHORT))

    def compact_string(self) -> str:
        size = shift = 0
        while True:
            byte = self._take(1)[0]
            size |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return self._text(size - 1)
            if shift > 28:
                raise CorruptDataError("a length takes more than five bytes")

    def _text(self, size: int) -> str:
        if size < 0:
            raise CorruptDataError("a text that may not be null is null")
        try:
            return self._take(size).decode()
        except UnicodeDecodeError as error:
            raise CorruptDataError(f"a text is not UTF-8: {error.reason}") from error

    def _take(self, size: int) -> bytes:
        taken = self._data[self._position : self._position + size]
        if len(taken) < size:
            raise CorruptDataError(f"a field of {size} bytes is cut at {len(taken)}")
        self._position += size
        return taken
