"""What a salvage finds in damaged bytes; tests/integration/broker repairs whole partitions."""

import pytest

from tests.fakes.partition_logs import batch
from tierlog.hot_tier.batch_walk import CHECK_CHUNK_BYTES, CheckedBatch, checked_batches
from tierlog.hot_tier.salvage import LostRange, SalvageScan
from tierlog.record_format.batch import LOG_OVERHEAD
from tierlog.record_format.errors import CorruptBatch


class CountingBytes:
    """A `.log` in memory."""

    name = "0.log"

    def __init__(self, data: bytes) -> None:
        self.data, self.reads = data, list[int]()  # their sizes

    def read(self, size_bytes: int, position: int) -> bytes:
        self.reads.append(size_bytes)
        return self.data[position : position + size_bytes]


def test_the_missing_part_of_a_cut_file_is_not_searched_byte_by_byte():
    first, second = (batch([b"v" * 100], base_offset=offset) for offset in range(2))
    log = CountingBytes(bytes(first + second)[:-30])
    scan = SalvageScan(log, size_bytes=10_000, start_offset=0, end_offset=9, reaches_end=True)
    found, lost = scan
    assert found.header.base_offset == 0
    assert lost == LostRange(1, 9, len(first), 10_000 - len(first))
    assert len(log.reads) < 20


def test_preallocated_space_is_not_searched_byte_by_byte():
    class Window(bytes):
        searches = 0

        def find(self, *arguments):
            Window.searches += 1
            return super().find(*arguments)

    first = batch([b"v" * 100])
    log = CountingBytes(bytes(first).ljust(100_000, b"\0"))
    log.read = lambda size_bytes, position: Window(log.data[position : position + size_bytes])
    scan = SalvageScan(log, size_bytes=100_000, start_offset=0, end_offset=9, reaches_end=True)
    assert [type(piece) for piece in scan] == [CheckedBatch, LostRange]
    assert Window.searches < 20


def test_a_corrupt_length_does_not_bring_the_rest_of_the_file_into_memory():
    first, second = (batch([b"v" * 100], base_offset=offset) for offset in range(2))
    size_bytes = 4 * CHECK_CHUNK_BYTES
    claims_all = first[:8] + (size_bytes - LOG_OVERHEAD).to_bytes(4, "big") + first[12:]
    log = CountingBytes(bytes(claims_all + second).ljust(size_bytes, b"\0"))
    with pytest.raises(CorruptBatch, match="checksum"):
        next(checked_batches(log, end=size_bytes))
    assert max(log.reads) <= CHECK_CHUNK_BYTES
