"""Control records: the markers that end a transaction, written by a coordinator.

Rule: a key whose version is newer is read by its first four bytes, as Kafka does; a type that is
not known is kept as a number and is neither a commit nor an abort.

    key    version i16 (0), type i16 (0 abort, 1 commit, 2.. KRaft's own)
    value  of an end marker: version i16 (0), coordinator epoch i32, and in version 1 tagged fields
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from record_format.batch import BatchHeader, Buffer
from record_format.decode import Record, decode_batch
from record_format.errors import CorruptBatch

ABORT: Final = 0
COMMIT: Final = 1
_KEY: Final = struct.Struct(">hh")
_VALUE: Final = struct.Struct(">hi")


class EndMarker(NamedTuple):
    """The end of a producer's transaction."""

    committed: bool
    coordinator_epoch: int


def control_type(key: bytes | None) -> int:
    """The type of a control record. Raises CorruptBatch for a key that is truncated or has a
    version < 0.
    """
    if key is None or len(key) < _KEY.size:
        raise CorruptBatch("a control record's key takes four bytes")
    version, kind = _KEY.unpack_from(key)
    if version < 0:
        raise CorruptBatch(f"a control record's key has version {version}")
    return int(kind)


def end_marker(record: Record) -> EndMarker | None:
    """The marker in `record`; None for another control type. Raises CorruptBatch."""
    kind = control_type(record.key)
    if kind not in (ABORT, COMMIT):
        return None
    if record.value is None or len(record.value) < _VALUE.size:
        raise CorruptBatch("an end marker's value takes six bytes", offset=record.offset)
    version, epoch = _VALUE.unpack_from(record.value)
    if version < 0:
        raise CorruptBatch(f"an end marker has version {version}", offset=record.offset)
    return EndMarker(kind == COMMIT, epoch)


def end_marker_of(buf: Buffer, header: BatchHeader) -> EndMarker | None:
    """The marker of a control batch; None where compaction took it or it is of another type."""
    assert header.is_control, "only control batches hold markers"
    records = decode_batch(buf, header)
    return end_marker(records[0]) if records else None
