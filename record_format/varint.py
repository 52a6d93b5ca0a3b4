"""Zig-zag varints as Kafka's records use them (Protocol Buffers' sint32 and sint64).

A varint that is truncated, longer than 5 (10) bytes, or does not fit 32 (64) bits raises
CorruptBatch. Nothing here reads past the end of its buffer.
"""

from __future__ import annotations

from typing import Final

from tierlog.record_format.errors import CorruptBatch

_TABLE_SIZE: Final = 8192


def zigzag(value: int) -> bytes:
    """Encode any signed 64-bit integer."""
    bits = (value << 1) ^ (value >> 63)
    encoded = bytearray()
    while bits > 0x7F:
        encoded.append(bits & 0x7F | 0x80)
        bits >>= 7
    encoded.append(bits)
    return bytes(encoded)


# Precomputed encodings of all one- and two-byte values: most lengths and offset deltas.
SMALL: Final[list[bytes]] = [zigzag(value) for value in range(_TABLE_SIZE)]
NULL: Final = zigzag(-1)


def encoded(value: int) -> bytes:
    """`zigzag`, from the table if the value is in it."""
    return SMALL[value] if 0 <= value < _TABLE_SIZE else zigzag(value)


def size_of(value: int) -> int:
    """The encoded size of `value` in bytes."""
    if 0 <= value < _TABLE_SIZE:
        return len(SMALL[value])
    return max(1, (((value << 1) ^ (value >> 63)).bit_length() + 6) // 7)


def read_varint(buf: bytes, position: int) -> tuple[int, int]:
    """(32-bit value, position after it)."""
    return _read(buf, position, bits=32)


def read_varlong(buf: bytes, position: int) -> tuple[int, int]:
    """(64-bit value, position after it)."""
    return _read(buf, position, bits=64)


def _read(buf: bytes, position: int, *, bits: int) -> tuple[int, int]:
    raw = shift = 0
    try:
        while True:
            byte = buf[position]
            position += 1
            raw |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift >= bits:
                raise CorruptBatch(f"a varint is longer than {bits} bits")
    except IndexError:
        raise CorruptBatch("a varint is truncated") from None
    if raw >> bits:
        raise CorruptBatch(f"a varint is longer than {bits} bits")
    return (raw >> 1) ^ -(raw & 1), position
