"""Compaction's key table in plain Python, and the choice between it and the compiled one.

Rules that keep it honest:

* Memory is bounded: a table holds as many keys as fit its size, and then reports that it is full.
  The caller continues in another round.
* Keys are identified by their hash alone, as in Kafka's offset map: reading a key back from the log
  for each lookup would cost a disk seek per record. For the probability of a collision see
  docs/decisions/0014-compaction.md.
* Both tables return the same results.
"""

from __future__ import annotations

import hashlib
import os
from typing import Final

from tierlog.record_format.batch import LOG_APPEND_TIME_BIT, BatchHeader
from tierlog.record_format.batch_compaction import Choice, KeyTable
from tierlog.record_format.decode import walk_batch
from tierlog.record_format.native import can_compile
from tierlog.record_format.record_walk import Fields
from tierlog.record_format.varint import encoded, read_varint, read_varlong, zigzag

PLAIN_ENTRY_BYTES: Final = 160  # a dict entry, a bytes object of 16, an int
MAX_SPAN: Final = 0xFFFFFFFF  # offsets per round: the compiled table has 32 bits for them


class PlainKeyTable:
    """A dict of 128-bit hashes."""

    def __init__(self, memory_bytes: int) -> None:
        self._max_keys = max(1, memory_bytes // PLAIN_ENTRY_BYTES)
        self._seed = os.urandom(16)
        self._offsets: dict[bytes, int] = {}
        self.latest_offset = self.start_offset = -1

    def clear(self, *, start_offset: int) -> None:
        self._offsets.clear()
        self.start_offset, self.latest_offset = start_offset, -1

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, data: bytes, header: BatchHeader) -> bool:
        fields = walk_batch(data, header, with_columns=True).fields
        rows = zip(fields.offset_deltas, fields.key_starts, fields.key_ends, strict=True)
        for delta, start, end in rows:
            offset = header.base_offset + delta
            if start < 0 or offset < self.start_offset:
                continue
            if len(self._offsets) >= self._max_keys or offset - self.start_offset >= MAX_SPAN:
                return False
            self._offsets[self._hash(data[start:end])] = offset
        return True

    def choose(self, data: bytes, header: BatchHeader, *, drop_tombstones: bool) -> Choice:
        fields = walk_batch(data, header, with_columns=True).fields
        keep = bytearray(header.record_count)
        times, tombstones = [], 0
        for number, delta in enumerate(fields.offset_deltas):
            if not self._is_kept(data, header.base_offset + delta, fields, number, drop_tombstones):
                continue
            keep[number] = 1
            times.append(fields.timestamps[number])
            tombstones += fields.value_starts[number] < 0
        first, greatest = (times[0], max(times)) if times else (0, 0)
        return Choice(len(times), tombstones, first, greatest, keep)

    def _is_kept(
        self, data: bytes, offset: int, fields: Fields, number: int, drop_tombstones: bool
    ) -> bool:
        if offset > self.latest_offset:
            return True
        start, end = fields.key_starts[number], fields.key_ends[number]
        if start < 0 or (drop_tombstones and fields.value_starts[number] < 0):
            return False
        return offset >= self._offsets.get(self._hash(data[start:end]), -1)

    def copy(
        self, data: bytes, header: BatchHeader, choice: Choice, *, base_timestamp: int
    ) -> bytes:
        keep = choice.keep
        assert keep is None or isinstance(keep, bytearray)
        stamped = bool(header.attributes & LOG_APPEND_TIME_BIT)
        parts: list[bytes] = []
        position = 0
        for number in range(header.record_count):
            size, position = read_varint(data, position)
            end = position + size
            if keep is None or keep[number]:
                delta, behind = read_varlong(data, position + 1)
                timestamp = header.max_timestamp if stamped else header.base_timestamp + delta
                moved = zigzag(timestamp - base_timestamp)
                rest = data[behind:end]
                parts += (encoded(1 + len(moved) + len(rest)), b"\0", moved, rest)
            position = end
        return b"".join(parts)

    def _hash(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=16, key=self._seed).digest()


def make_key_table(memory_bytes: int) -> KeyTable:
    """A table of at most `memory_bytes`: the compiled one if it is available."""
    if not can_compile():
        return PlainKeyTable(memory_bytes)
    from tierlog.record_format.native_keys import NativeKeyTable

    return NativeKeyTable(memory_bytes)
