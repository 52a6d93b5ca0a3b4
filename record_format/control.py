"""Control records: the markers with which a coordinator ends a transaction.

Keys of a newer version are read by their first four bytes, as Kafka does. An unknown type is
returned as a number, and is neither a commit nor an abort.

    key    version i16 (0), type i16 (0 abort, 1 commit, from 2 on KRaft's)
    value  of an end marker: version i16 (0), coordinator epoch i32, and in version 1 tagged fields
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

from tierlog.record_format.batch import BatchHeader, Buffer
from tierlog.record_format.decode import Record, decode_batch
from tierlog.record_format.errors import CorruptBatch

ABORT: Final = 0
COMMIT: Final = 1
_KEY: Final = struct.Struct(">hh")
_VALUE: Final = struct.Struct(">hi")


class EndMarker(NamedTuple):
    """The end of a producer's transaction."""

    committed: bool
    coordinator_epoch: int


def control_type(key: bytes | None) -> int:
    """The type of a control record. Raises CorruptBatch if the key is truncated or its version is
    negative.
    """
    if key is None or len(key) < _KEY.size:
        raise CorruptBatch("the key of a control record is shorter than four bytes")
    version, kind = _KEY.unpack_from(key)
    if version < 0:
        raise CorruptBatch(f"the key of a control record has version {version}")
    return int(kind)


def end_marker(record: Record) -> EndMarker | None:
    """The marker in `record`; None if it is of another control type. Raises CorruptBatch."""
    kind = control_type(record.key)
    if kind not in (ABORT, COMMIT):
        return None
    if record.value is None or len(record.value) < _VALUE.size:
        raise CorruptBatch(
            "the value of an end marker is shorter than six bytes", offset=record.offset
        )
    version, epoch = _VALUE.unpack_from(record.value)
    if version < 0:
        raise CorruptBatch(f"an end marker has version {version}", offset=record.offset)
    return EndMarker(kind == COMMIT, epoch)


def end_marker_of(buf: Buffer, header: BatchHeader) -> EndMarker | None:
    """The marker of a control batch; None if compaction removed it, or it is of another type."""
    assert header.is_control, "only control batches hold markers"
    records = decode_batch(buf, header)
    return end_marker(records[0]) if records else None
