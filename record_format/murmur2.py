"""The default partitioner for keys: murmur2, as Kafka's clients compute it.

A key maps to the same partition here as with the default partitioner of any Kafka client; tests
compare it with hashes from Kafka's own Utils.murmur2.
"""

from __future__ import annotations

import struct
from typing import Final

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
