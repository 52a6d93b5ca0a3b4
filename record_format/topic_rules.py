"""Kafka's rules for topics: their names (Topic.validate), how many partitions they have, the type
of their configuration's values, and the partition of a key.

* Names become folder names, object keys and fields of Kafka's checkpoint files, so they are checked
  wherever they come from: a request, or the bucket.
* A key maps to the same partition as with the default partitioner of any Kafka client: by murmur2.
  Tests compare it with hashes from Kafka's own Utils.murmur2.
"""

from __future__ import annotations

import re
import struct
from typing import Final

ConfigValue = int | float | bool | str

MAX_NAME_LENGTH: Final = 249  # the partition's number and a suffix must fit a 255-byte file name
MAX_PARTITIONS: Final = 10_000  # of one topic; each is a folder and open files
_LEGAL_NAME: Final = re.compile(r"[a-zA-Z0-9._-]+\Z")


def name_problem(name: str) -> str:
    """Why no topic can have this name; empty if one can."""
    if not name:
        return "a topic name may not be empty"
    if name in (".", ".."):
        return f"a topic may not be named {name!r}"
    if len(name) > MAX_NAME_LENGTH:
        return f"a topic name has at most {MAX_NAME_LENGTH} characters, this one {len(name)}"
    if not _LEGAL_NAME.match(name):
        return f"topic name {name!r}: only letters, digits, '.', '_' and '-'"
    return ""


_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_MASK: Final = 0xFFFFFFFF
_WORDS: Final = {n: struct.Struct(f"<{n}I") for n in range(65)}


def murmur2(data: bytes) -> int:
    """Utils.murmur2: the 32-bit hash, signed as in Java."""
    length = len(data)
    words = length >> 2
    h = _SEED ^ length
    layout = _WORDS.get(words) or struct.Struct(f"<{words}I")
    for k in layout.unpack_from(data):
        k = k * _M & _MASK
        h = (h * _M & _MASK) ^ ((k ^ k >> 24) * _M & _MASK)
    tail = data[words << 2 :]
    if tail:
        h = (h ^ int.from_bytes(tail, "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    h ^= h >> 15
    return h - (1 << 32) if h >> 31 else h


def partition_for_key(key: bytes, partitions: int) -> int:
    """BuiltInPartitioner.partitionForKey: 0 <= result < partitions."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions
