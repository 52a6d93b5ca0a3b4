"""Logs of the hot tier in a folder, without a broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.records import START_MS, TOPIC_ID
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.log_config import LogConfig
from tierlog.hot_tier.recovery_scan import OpenRequest
from tierlog.record_format.produced import ProducedBatches, ProduceLimits, check_produced


def open_log(
    folder: Path, *, clean: bool = True, recovery_point: int = 0, **config: Any
) -> PartitionLog:
    named = {key.replace("_", "."): value for key, value in config.items()}
    return PartitionLog.open(
        folder,
        topic="t",
        partition=0,
        topic_id=TOPIC_ID,
        config=LogConfig.parse(named),
        clock=lambda: START_MS,
        request=OpenRequest(clean=clean, recovery_point=recovery_point),
    )


@contextmanager
def opened(folder: Path, **config: Any) -> Iterator[PartitionLog]:
    log = open_log(folder, **config)
    try:
        yield log
    finally:
        log.close()


def produced(body: bytes | bytearray) -> ProducedBatches:
    """Check batches like a producer's. A bytearray is used without a copy, and stamped in place."""
    writable = body if isinstance(body, bytearray) else bytearray(body)
    return check_produced(writable, ProduceLimits(max_message_bytes=1 << 30, now_ms=START_MS))
