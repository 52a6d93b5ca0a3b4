"""CRC-32C (Castagnoli): the checksum of record batches, of the bucket's objects and of S3.

The one door to the library that computes it, in C and without the GIL for large buffers.
"""

from __future__ import annotations

from typing import Final, Protocol

import crc32c


class _Checksum(Protocol):
    def __call__(self, data: bytes | bytearray | memoryview, value: int = 0, /) -> int: ...


crc32c_of: Final[_Checksum] = crc32c.crc32c
"""The checksum of `data`, continued from that of the bytes before it. No wrapper: it is called for
every batch.
"""
