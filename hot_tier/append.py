"""The input and the result of an append."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from tierlog.record_format.produced import ProducedBatches


class Acks(IntEnum):
    """When a write is acknowledged, with Kafka's numbers."""

    ALL = -1
    NONE = 0
    LEADER = 1


class Append(NamedTuple):
    """Batches that are appended together or not at all.

    `expected_offset`: append only if the log ends exactly there.
    """

    batches: ProducedBatches
    expected_offset: int | None = None


class AppendResult(NamedTuple):
    """Where the batches are. `duplicate`: an earlier request appended them."""

    base_offset: int
    last_offset: int
    log_append_time: int | None
    duplicate: bool
    log_start_offset: int
