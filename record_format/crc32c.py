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

_ZEROS: Final = memoryview(bytes(64 * 1024))


def crc32c_joined(first: int, second: int, *, second_bytes: int) -> int:
    """The checksum of two runs of bytes end to end, by the checksum of each and the second's size.

    It is linear: what `first` changes is what it would change before as many zeros.
    """
    over_first, over_none = first, 0
    for start in range(0, second_bytes, len(_ZEROS)):
        zeros = _ZEROS[: second_bytes - start]
        over_first, over_none = crc32c_of(zeros, over_first), crc32c_of(zeros, over_none)
    return over_first ^ over_none ^ second
