"""How binary objects of the bucket begin: a header that ends with a count, as many entries, and the
CRC-32C of all that. Big-endian:

    0   magic, 4 bytes            6   entry size u16
    4   format version u16 (1)    8   fields of the object's own, then the count u32
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from tierlog.record_format.batch import Buffer
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import CorruptObject, UnknownFormatVersion

FORMAT_VERSION: Final = 1
_CRC: Final = struct.Struct(">I")


class TableLayout(NamedTuple):
    what: str
    magic: bytes
    header: struct.Struct
    entry: struct.Struct

    def size_bytes(self, count: int) -> int:
        return self.header.size + count * self.entry.size + _CRC.size

    def pack(self, *fields: int, entries: Sequence[tuple[Any, ...]]) -> bytes:
        body = self.header.pack(
            self.magic, FORMAT_VERSION, self.entry.size, *fields, len(entries)
        ) + b"".join(self.entry.pack(*entry) for entry in entries)
        return body + _CRC.pack(crc32c_of(body))

    def unpack(self, data: Buffer, *, file: str) -> tuple[list[int], list[tuple[Any, ...]]]:
        """The header's fields and the entries that `data` begins with. Raises CorruptObject,
        UnknownFormatVersion.
        """
        if len(data) < self.size_bytes(0) or bytes(data[:4]) != self.magic:
            raise CorruptObject(f"is not a {self.what}", file=file)
        _, version, entry_size, *fields, count = self.header.unpack_from(data)
        if version != FORMAT_VERSION:
            raise UnknownFormatVersion(
                f"{self.what} has format version {version}; this tierlog supports {FORMAT_VERSION}",
                file=file,
            )
        end = self.size_bytes(count) - _CRC.size
        if entry_size != self.entry.size or len(data) < end + _CRC.size:
            raise CorruptObject(f"the {self.what} is truncated", file=file)
        if crc32c_of(bytes(data[:end])) != _CRC.unpack_from(data, end)[0]:
            raise CorruptObject(f"the {self.what} fails its CRC-32C", file=file)
        return fields, list(self.entry.iter_unpack(bytes(data[self.header.size : end])))
