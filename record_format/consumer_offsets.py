"""Records of `__consumer_offsets`, which hold the committed offsets of groups, in Kafka's format.

* Writes the versions that Kafka 4.3 writes (key 1, value 4), and reads all that Kafka ever wrote.
* The topic id, if the writer included it, distinguishes a topic from an earlier one of that name.
* Keys of other types (group metadata, members, assignments) are ignored.
* Bytes after the last field, and unknown tags, are skipped, as by Kafka's readers.
* All records of a group are in one partition, chosen by the hash of the group's name as in Kafka:
  this is what orders its commits.

Big-endian; a string is its length (i16) and UTF-8.

    key    version i16 (0 or 1), group string, topic string, partition i32
    value  version i16, then
           0      offset i64, metadata string, commit timestamp i64
           1      offset i64, metadata string, commit timestamp i64, expire timestamp i64
           2      as 0
           3      offset i64, leader epoch i32, metadata string, commit timestamp i64
           4      as 3, metadata as a compact string (varint of length + 1), then tagged fields:
                  count (varint), then for each: tag, size (varints) and data;
                  tag 0 is the topic id (16 bytes, zero if unknown)
    null   a tombstone: the commit with this key is deleted

From Kafka's OffsetCommitKey.json and OffsetCommitValue.json (group-coordinator).
"""

from __future__ import annotations

import struct
import uuid
from typing import Final, NamedTuple

from tierlog.record_format.errors import CorruptDataError

TOPIC: Final = "__consumer_offsets"
NO_EPOCH: Final = -1

_KEY_VERSION: Final = 1
_LAST_KEY_VERSION: Final = 1  # from 2 on a key is of another type
_EPOCH_VERSION: Final = 3  # the first with a leader epoch
_FLEXIBLE_VERSION: Final = 4  # the one that is written
_TOPIC_ID_TAG: Final = 0
_MAX_TAGS: Final = 100
_NO_ID: Final = uuid.UUID(int=0)
_SHORT: Final = struct.Struct(">h")
_INT: Final = struct.Struct(">i")
_LONG: Final = struct.Struct(">q")


class CommitKey(NamedTuple):
    group: str
    topic: str
    partition: int


class Commit(NamedTuple):
    """A committed offset: the next one to read. `metadata` is the client's, "" if it gave none.

    `topic_id` is None if the writer did not include it.
    """

    offset: int
    metadata: str = ""
    commit_timestamp: int = -1
    leader_epoch: int = NO_EPOCH
    topic_id: uuid.UUID | None = None


def encode_key(key: CommitKey) -> bytes:
    head = _SHORT.pack(_KEY_VERSION)
    return head + _string(key.group) + _string(key.topic) + _INT.pack(key.partition)


def encode_value(commit: Commit) -> bytes:
    metadata = commit.metadata.encode()
    parts = [
        struct.pack(">hqi", _FLEXIBLE_VERSION, commit.offset, commit.leader_epoch),
        _unsigned_varint(len(metadata) + 1),
        metadata,
        _LONG.pack(commit.commit_timestamp),
    ]
    if commit.topic_id is None:
        parts.append(b"\0")
    else:
        parts += (bytes((1, _TOPIC_ID_TAG, 16)), commit.topic_id.bytes)
    return b"".join(parts)


def decode_key(data: bytes) -> CommitKey | None:
    """Decode a key; None if it is not an offset commit's. Raises CorruptDataError."""
    fields = _Fields(data)
    version = fields.number(_SHORT)
    if version > _LAST_KEY_VERSION:
        return None
    if version < 0:
        raise CorruptDataError(f"a key of {TOPIC} has version {version}")
    return CommitKey(fields.string(), fields.string(), fields.number(_INT))


def decode_value(data: bytes) -> Commit:
    """Decode a value. Raises CorruptDataError, also for an unknown version."""
    fields = _Fields(data)
    version = fields.number(_SHORT)
    if not 0 <= version <= _FLEXIBLE_VERSION:
        raise CorruptDataError(f"unknown offset commit version {version}; 0 to 4 are supported")
    offset = fields.number(_LONG)
    epoch = fields.number(_INT) if version >= _EPOCH_VERSION else NO_EPOCH
    flexible = version >= _FLEXIBLE_VERSION
    metadata = fields.compact_string() if flexible else fields.string()
    timestamp = fields.number(_LONG)
    tag = fields.tags().get(_TOPIC_ID_TAG) if flexible else None
    return Commit(offset, metadata, timestamp, epoch, _topic_id(tag))


def _topic_id(tag: bytes | None) -> uuid.UUID | None:
    if tag is None:
        return None
    if len(tag) != 16:
        raise CorruptDataError(f"a topic id has {len(tag)} bytes, expected 16")
    found = uuid.UUID(bytes=tag)
    return None if found == _NO_ID else found


def partition_for_group(group: str, partitions: int) -> int:
    """Kafka's choice: the absolute value of Java's String.hashCode, which is over UTF-16 units."""
    data = group.encode("utf-16-be")
    hashed = 0
    for high, low in zip(data[::2], data[1::2], strict=True):
        hashed = (31 * hashed + (high << 8 | low)) & 0xFFFFFFFF
    if hashed >= 1 << 31:
        hashed -= 1 << 32
    return 0 if hashed == -(1 << 31) else abs(hashed) % partitions


def _unsigned_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _string(text: str) -> bytes:
    data = text.encode()
    return _SHORT.pack(len(data)) + data


class _Fields:
    """Reads fields in order, checking each against the remaining bytes."""

    def __init__(self, data: bytes) -> None:
        self._data, self._position = data, 0

    def number(self, layout: struct.Struct) -> int:
        return int(layout.unpack(self._take(layout.size))[0])

    def string(self) -> str:
        return self._text(self.number(_SHORT))

    def compact_string(self) -> str:
        return self._text(self._unsigned_varint() - 1)

    def tags(self) -> dict[int, bytes]:
        """Tagged fields by tag."""
        count = self._unsigned_varint()
        if count > _MAX_TAGS:
            raise CorruptDataError(f"{count} tagged fields, more than the limit of {_MAX_TAGS}")
        found = {}
        for _ in range(count):
            tag = self._unsigned_varint()
            found[tag] = self._take(self._unsigned_varint())
        return found

    def _unsigned_varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._take(1)[0]
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value
            if shift > 28:
                raise CorruptDataError("a varint is longer than five bytes")

    def _text(self, size: int) -> str:
        if size < 0:
            raise CorruptDataError("a string that may not be null is null")
        try:
            return self._take(size).decode()
        except UnicodeDecodeError as error:
            raise CorruptDataError(f"a string is not UTF-8: {error.reason}") from error

    def _take(self, size: int) -> bytes:
        taken = self._data[self._position : self._position + size]
        if len(taken) < size:
            raise CorruptDataError(f"a field of {size} bytes is truncated after {len(taken)}")
        self._position += size
        return taken
