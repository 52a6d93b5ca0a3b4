"""Compaction's key table with compiled loops: 12 bytes per slot.

Only `key_table.make_key_table` imports this module. It returns the same results as `PlainKeyTable`.
"""

from __future__ import annotations

import secrets
from typing import Any, Final

import numpy as np

from tierlog.record_format.batch import LOG_APPEND_TIME_BIT, BatchHeader
from tierlog.record_format.batch_compaction import Choice
from tierlog.record_format.decode import corrupt_batch
from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.key_kernel import CORRUPT, OK, add_keys, choose_records, copy_records

SLOT_BYTES: Final = 12
LOAD_FACTOR: Final = 0.9  # Kafka's log.cleaner.io.buffer.load.factor
_VARINT_GROWTH: Final = 16  # at most this much longer is a record with another timestamp delta


class NativeKeyTable:
    """64 bits of hash and 32 bits of relative offset per slot."""

    def __init__(self, memory_bytes: int) -> None:
        self._slots = max(2, memory_bytes // SLOT_BYTES)
        self._max_keys = max(1, int(self._slots * LOAD_FACTOR))
        self._seed = np.uint64(secrets.randbits(64))
        self._prints = np.zeros(self._slots, np.uint64)
        self._offsets = np.zeros(self._slots, np.uint32)
        self._used = 0
        self.latest_offset = self.start_offset = -1

    def clear(self, *, start_offset: int) -> None:
        self._offsets[:] = 0
        self._used = 0
        self.start_offset, self.latest_offset = start_offset, -1

    def __len__(self) -> int:
        return self._used

    def add(self, data: bytes, header: BatchHeader) -> bool:
        status, self._used = add_keys(
            np.frombuffer(data, np.uint8),
            _facts(header),
            self.start_offset,
            self._used,
            self._max_keys,
            self._seed,
            self._prints,
            self._offsets,
        )
        if status == CORRUPT:
            raise _corrupt(header)
        return bool(status == OK)

    def choose(self, data: bytes, header: BatchHeader, *, drop_tombstones: bool) -> Choice:
        keep = np.empty(header.record_count, np.uint8)
        status, count, tombstones, first, greatest = choose_records(
            np.frombuffer(data, np.uint8),
            _facts(header),
            self.start_offset,
            self.latest_offset,
            drop_tombstones,
            self._seed,
            self._prints,
            self._offsets,
            keep,
        )
        if status == CORRUPT:
            raise _corrupt(header)
        return Choice(count, tombstones, first, greatest, keep)

    def copy(
        self, data: bytes, header: BatchHeader, choice: Choice, *, base_timestamp: int
    ) -> bytes:
        keep: Any = choice.keep
        if keep is None:
            keep = np.ones(header.record_count, np.uint8)
        stamped = bool(header.attributes & LOG_APPEND_TIME_BIT)
        old_base = header.max_timestamp if stamped else header.base_timestamp
        out = np.empty(len(data) + _VARINT_GROWTH * header.record_count, np.uint8)
        records = np.frombuffer(data, np.uint8)
        size = copy_records(
            records, header.record_count, keep, stamped, old_base, base_timestamp, out
        )
        return out[:size].tobytes()


def _facts(header: BatchHeader) -> tuple[int, int, int, int]:
    return (
        header.record_count,
        header.base_offset,
        header.last_offset_delta,
        header.base_timestamp,
    )


def _corrupt(header: BatchHeader) -> CorruptBatch:
    return corrupt_batch("invalid records", header)
