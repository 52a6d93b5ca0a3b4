"""Kafka's small files: offset and epoch checkpoints, partition.metadata, properties, and snapshots.

    <x>-offset-checkpoint     "0", the count, then lines of "topic partition offset"
    leader-epoch-checkpoint   "0", the count, then lines of "epoch start-offset"
    partition.metadata        "version: 0", "topic_id: <22 characters>"
    meta.properties           Java properties: node.id, directory.id, version, cluster.id
    <offset>.snapshot         the state of a partition's idempotent producers at an offset

A snapshot, big-endian (docs/formats/snapshots-and-checkpoints.md):

    version i16 (1), crc u32 (CRC-32C over the rest), count i32, then for each producer 46 bytes:
    producer id i64, epoch i16, last sequence i32, last offset i64, offset delta i32, timestamp i64,
    coordinator epoch i32, first offset of the open transaction i64 (-1: none)

No file I/O: callers write these files by temp file, fsync, rename, and fsync of the folder.

Rules that keep it honest:

* Parsing is strict: a wrong version or line count, an invalid number, entries out of order, and
  anything after the last line are corrupt. A partial file is never used in part.
* Every line ends with a line feed except the last of partition.metadata, as Kafka writes them.
* Formatting a snapshot that was parsed gives the same bytes: the order of producers is preserved.
  Its count is checked against the file size before any entry is read. It stores only a producer's
  newest batch: the earlier ones, whose duplicates have to be recognized too, come from the log.
"""

from __future__ import annotations

import base64
import re
import struct
import uuid
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from tierlog.record_format.batch import MAX_SEQUENCE, Buffer
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import CorruptSnapshot, UnknownFormatVersion

_VERSION: Final = 0
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]{0,18})\Z", re.ASCII)
_TOPIC_ID: Final = re.compile(r"[0-9A-Za-z_-]{22}", re.ASCII)
_I64_MAX: Final = 2**63 - 1
_I32_MAX: Final = 2**31 - 1


class TopicPartitionOffset(NamedTuple):
    topic: str
    partition: int
    offset: int


class EpochEntry(NamedTuple):
    """A leader epoch and the first offset written under it."""

    epoch: int
    start_offset: int


def format_offset_checkpoint(entries: Iterable[tuple[str, int, int]]) -> bytes:
    """The file with these topics, partitions and offsets."""
    return _format_lines(f"{topic} {partition} {offset}" for topic, partition, offset in entries)


def parse_offset_checkpoint(data: bytes, *, file: str = "") -> list[TopicPartitionOffset]:
    """The entries in the file's order. Raises CorruptSnapshot, UnknownFormatVersion."""
    entries: list[TopicPartitionOffset] = []
    seen: set[tuple[str, int]] = set()
    for line in _parse_lines(data, fields=3, file=file):
        entry = TopicPartitionOffset(
            line[0], _number(line[1], _I32_MAX, file), _number(line[2], _I64_MAX, file)
        )
        if entry[:2] in seen or not entry.topic:
            raise CorruptSnapshot(f"{entry.topic!r} {entry.partition} occurs twice", file=file)
        seen.add(entry[:2])
        entries.append(entry)
    return entries


def format_epoch_checkpoint(entries: Iterable[EpochEntry]) -> bytes:
    return _format_lines(f"{epoch} {start}" for epoch, start in entries)


def parse_epoch_checkpoint(data: bytes, *, file: str = "") -> list[EpochEntry]:
    """The entries: epochs strictly increase, start offsets do not decrease.

    Raises CorruptSnapshot, UnknownFormatVersion.
    """
    entries: list[EpochEntry] = []
    for line in _parse_lines(data, fields=2, file=file):
        entry = EpochEntry(_number(line[0], _I32_MAX, file), _number(line[1], _I64_MAX, file))
        last = entries[-1] if entries else EpochEntry(-1, 0)
        if entry.epoch <= last.epoch or entry.start_offset < last.start_offset:
            raise CorruptSnapshot(f"epoch {entry.epoch} is out of order", file=file)
        entries.append(entry)
    return entries


def format_topic_id(topic_id: uuid.UUID) -> str:
    """Kafka's text form of a UUID: URL-safe base64 without padding, 22 characters."""
    return base64.urlsafe_b64encode(topic_id.bytes).rstrip(b"=").decode()


@lru_cache(maxsize=1024)  # of each offset that a group committed
def parse_topic_id(text: str) -> uuid.UUID:
    """The inverse of `format_topic_id`. Raises ValueError for any other text."""
    if _TOPIC_ID.fullmatch(text):
        topic_id = uuid.UUID(bytes=base64.urlsafe_b64decode(text + "=="))
        if format_topic_id(topic_id) == text:  # the last character has four unused bits
            return topic_id
    raise ValueError(f"{text!r} is not a topic id")


def format_partition_metadata(topic_id: uuid.UUID) -> bytes:
    return f"version: 0\ntopic_id: {format_topic_id(topic_id)}".encode()


def parse_partition_metadata(data: bytes, *, file: str = "") -> uuid.UUID:
    """The topic id; a line feed after it is allowed.

    Raises CorruptSnapshot, UnknownFormatVersion.
    """
    match = re.fullmatch(
        rb"version: (-?[0-9]{1,9})\n(topic_id: ([0-9A-Za-z_-]{22}))?.*", data, re.S
    )
    if match and int(match[1]) != _VERSION:
        raise UnknownFormatVersion(f"unknown version {int(match[1])}", file=file)
    try:
        if not match or not match[3] or data[match.end(2) :] not in (b"", b"\n"):
            raise ValueError("not a partition.metadata file")
        return parse_topic_id(match[3].decode())
    except ValueError as error:
        raise CorruptSnapshot(str(error), file=file) from error


def format_properties(properties: Mapping[str, str]) -> bytes:
    """A Java properties file, in the mapping's order. No name or value may need escapes."""
    lines = ["#"]  # Java's begin with a comment
    for name, value in properties.items():
        assert not set("=:#!\\ \n\r") & set(name), f"{name!r} would need escapes"
        assert not set("\\\n\r") & set(value), f"{value!r} would need escapes"
        assert value == value.lstrip(), f"{value!r} would need escapes"
        lines.append(f"{name}={value}")
    return ("\n".join(lines) + "\n").encode("ascii")


def parse_properties(data: bytes, *, file: str = "") -> dict[str, str]:
    """Parse a Java properties file as Kafka writes them: `name=value` lines, comments, escapes.

    The text is latin-1; line continuations are not supported. Raises CorruptSnapshot for a line
    that is not a property, a bad escape, or a duplicate name.
    """
    properties: dict[str, str] = {}
    for line in re.split("\r\n|\r|\n", data.decode("latin-1")):
        line = line.lstrip(" \t\f")
        if not line or line[0] in "#!":
            continue
        match = re.fullmatch(
            r"((?:\\.|[^\\=: \t\f])+)[ \t\f]*[=: \t\f][ \t\f]*((?:\\.|[^\\])*)", line
        )
        if not match:
            raise CorruptSnapshot(f"{line!r} is not a property", file=file)
        name, value = (_unescape(text, file) for text in match.groups())
        if name in properties:
            raise CorruptSnapshot(f"property {name!r} occurs twice", file=file)
        properties[name] = value
    return properties


_ESCAPES: Final = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def _unescape(text: str, file: str) -> str:
    if re.search(r"\\u(?![0-9A-Fa-f]{4})", text):
        raise CorruptSnapshot(f"{text!r} has a bad escape", file=file)
    return re.sub(
        r"\\(?:u([0-9A-Fa-f]{4})|(.))",
        lambda match: chr(int(match[1], 16)) if match[1] else _ESCAPES.get(match[2], match[2]),
        text,
    )


def _format_lines(lines: Iterable[str]) -> bytes:
    body = list(lines)
    return "".join(f"{line}\n" for line in (str(_VERSION), str(len(body)), *body)).encode()


def _parse_lines(data: bytes, *, fields: int, file: str) -> list[list[str]]:
    """The fields of each line after version and count; [] for an empty file.

    Kafka creates a checkpoint file empty and replaces it with the first checkpoint.
    """
    if not data:
        return []
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise CorruptSnapshot("not UTF-8 text", file=file) from error
    if not text.endswith("\n"):
        raise CorruptSnapshot("the last line is truncated", file=file)
    lines = text[:-1].split("\n")
    version = _number(lines[0], _I32_MAX, file)
    if version != _VERSION:
        raise UnknownFormatVersion(f"unknown version {version}", file=file)
    if len(lines) < 2 or _number(lines[1], _I32_MAX, file) != len(lines) - 2:
        raise CorruptSnapshot(f"the count does not match {len(lines) - 2} lines", file=file)
    split = [line.split(" ") for line in lines[2:]]
    for line in split:
        if len(line) != fields:
            raise CorruptSnapshot(f"{' '.join(line)!r} does not have {fields} fields", file=file)
    return split


def _number(text: str, limit: int, file: str) -> int:
    """A decimal number from 0 to `limit`, in Java's notation."""
    if not _NUMBER.match(text) or not 0 <= int(text) <= limit:
        raise CorruptSnapshot(f"{text[:40]!r} is not a number from 0 to {limit}", file=file)
    return int(text)


_SNAPSHOT_VERSION: Final = 1
ENTRY_SIZE: Final = 46
_HEAD: Final = struct.Struct(">hIi")
_COUNT_AT: Final = 6
_COUNT: Final = struct.Struct(">i")
_ENTRY: Final = struct.Struct(">qhiqiqiq")

assert _ENTRY.size == ENTRY_SIZE


class ProducerEntry(NamedTuple):
    """A producer's state. -1 means none for sequence, offset, timestamp and transaction."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_offset: int
    offset_delta: int
    timestamp: int
    coordinator_epoch: int
    current_txn_first_offset: int

    @property
    def first_sequence(self) -> int:
        """The last batch's first sequence; -1 if none. Sequences wrap from 2**31 - 1 to 0."""
        if self.last_sequence < 0:
            return -1
        return (self.last_sequence - self.offset_delta) & MAX_SEQUENCE


def format_snapshot(entries: Iterable[ProducerEntry]) -> bytes:
    packed = [_ENTRY.pack(*entry) for entry in entries]
    checked = _COUNT.pack(len(packed)) + b"".join(packed)
    return _HEAD.pack(_SNAPSHOT_VERSION, crc32c_of(checked), len(packed)) + checked[_COUNT.size :]


def parse_snapshot(data: Buffer, *, file: str = "") -> list[ProducerEntry]:
    """The producers in the file's order. Raises CorruptSnapshot, UnknownFormatVersion."""
    if len(data) < _HEAD.size:
        raise CorruptSnapshot(f"a producer snapshot is longer than {len(data)} bytes", file=file)
    version, crc, count = _HEAD.unpack_from(data)
    if version != _SNAPSHOT_VERSION:
        raise UnknownFormatVersion(f"unknown producer snapshot version {version}", file=file)
    found = crc32c_of(bytes(data[_COUNT_AT:]))
    if found != crc:
        raise CorruptSnapshot(f"checksum is {found:08x}, expected {crc:08x}", file=file)
    if count * ENTRY_SIZE != len(data) - _HEAD.size:
        raise CorruptSnapshot(f"{count} producers do not fit {len(data)} bytes", file=file)
    return [ProducerEntry(*fields) for fields in _ENTRY.iter_unpack(bytes(data[_HEAD.size :]))]
