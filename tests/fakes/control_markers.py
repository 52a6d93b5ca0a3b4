"""The key and the value of a transaction's end marker, as Kafka's coordinator writes them."""

from __future__ import annotations

import struct

from tierlog.record_format.decode import ABORT, COMMIT


def marker_key(*, committed: bool) -> bytes:
    return struct.pack(">hh", 0, COMMIT if committed else ABORT)


def marker_value(*, coordinator_epoch: int) -> bytes:
    return struct.pack(">hi", 0, coordinator_epoch)
