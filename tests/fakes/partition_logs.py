"""Fixtures: logs in `tmp_path`, and batches to put into them. A conftest imports them all."""

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.clock import NOW_MS, Clock
from tests.fakes.faulty_disk import FaultyDisk
from tierlog.host.file_slice import TierRead
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.log_config import LogConfig
from tierlog.hot_tier.log_writer import Append, AppendResult
from tierlog.hot_tier.recovery_scan import OpenRequest
from tierlog.record_format.batch import BatchHeader, iter_headers, parse_header
from tierlog.record_format.decode import Record, decode_batch, min_timestamp_of
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.produced import ProducedBatches, ProduceLimits, check_produced

TOPIC_ID = "MjD0UKSJT2qa6zQLS6M5HA"
REQUEST = fields(OpenRequest)


Batches = list[tuple[BatchHeader, list[Record]]]


def produced(*batches: bytes) -> ProducedBatches:
    limits = ProduceLimits(max_message_bytes=1 << 30, now_ms=NOW_MS)
    return check_produced(bytearray(b"".join(batches)), limits)


def unchecked(batch: bytearray) -> ProducedBatches:
    """A transactional batch, which only a coordinator may append."""
    header = parse_header(batch)
    return ProducedBatches(batch, [header], [min_timestamp_of(batch, header)])


def batch(
    values: list[bytes | None], *, timestamps: list[int] | None = None, **fields: Any
) -> bytearray:
    times = timestamps or [NOW_MS] * len(values)
    return encode_batch(values, timestamps=times, **fields)


def append_values(log: PartitionLog, *values: bytes, **fields: Any) -> AppendResult:
    (outcome,) = log.writer.append([Append(produced(batch(list(values), **fields)))])
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def append_a_record_per_ms(log: PartitionLog, count: int) -> None:
    """One to a batch, from NOW_MS on."""
    for number in range(count):
        append_values(log, b"v" * 40, timestamps=[NOW_MS + number])


def batches_of(log: PartitionLog, offset: int | None = None, **limits: Any) -> Batches:
    """All batches from `offset` (the local start) to the end, through as many reads as it takes."""
    position = log.local_log_start_offset if offset is None else offset
    start, found = position, []
    end = limits.get("end_offset", log.high_watermark)
    while position < end:
        read = log.read_hot(position, max_bytes=limits.get("max_bytes", 1 << 20), end_offset=end)
        assert read.next_offset > position
        for piece in read.slices:
            data = piece.read()
            headers = list(iter_headers(data))
            assert sum(header.size_bytes for header in headers) == len(data)
            for header in headers:
                records = [] if header.is_control else decode_batch(data, header)
                found.append((header, [record for record in records if record.offset >= start]))
        position = read.next_offset
    return found


def first_offset(read: TierRead) -> int:
    """The base offset of a read's first batch."""
    return parse_header(read.slices[0].read()).base_offset


def records_of(log: PartitionLog, offset: int | None = None, **limits: Any) -> list[Record]:
    return [record for _, records in batches_of(log, offset, **limits) for record in records]


@pytest.fixture(name="append_values")
def append_values_fixture():
    return append_values


@pytest.fixture(name="append_a_record_per_ms")
def append_a_record_per_ms_fixture():
    return append_a_record_per_ms


@pytest.fixture(name="records_of")
def records_of_fixture():
    return records_of


@pytest.fixture(name="batches_of")
def batches_of_fixture():
    return batches_of


@pytest.fixture(name="make_batch")
def make_batch_fixture():
    return batch


@pytest.fixture(name="produced")
def produced_fixture():
    return produced


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_log(tmp_path: Path, clock: Clock) -> Callable[..., PartitionLog]:
    """Opens `tmp_path/t-0` (or another folder); logs still open are closed after the test."""
    opened: list[PartitionLog] = []

    def _open(
        folder: Path | None = None, *, config: dict[str, Any] | None = None, **arguments: Any
    ):
        given = {"topic_id": TOPIC_ID, "partition": 0, "monotonic_clock": clock}
        known = {one.name: arguments.pop(one.name) for one in REQUEST if one.name in arguments}
        log = PartitionLog.open(
            folder or tmp_path / "t-0",
            topic="t",
            config=LogConfig.parse(config or {}),
            clock=clock,
            request=OpenRequest(**{"clean": True, **known}),
            **{**given, **arguments},
        )
        opened.append(log)
        return log

    yield _open
    for log in opened:
        if not log.offline:
            log.close()
