"""What a salvage finds in damaged bytes; tests/integration/broker repairs whole partitions."""

from hot_tier.salvage import LostRange, SalvageScan
from tests.fakes.partition_logs import batch


class CountingBytes:
    """A `.log` in memory."""

    name = "0.log"

    def __init__(self, data: bytes) -> None:
        self.data, self.reads = data, 0

    def read(self, size_bytes: int, position: int) -> bytes:
        self.reads += 1
        return self.data[position : position + size_bytes]


def test_the_missing_part_of_a_cut_file_is_not_searched_byte_by_byte():
    first, second = (batch([b"v" * 100], base_offset=offset) for offset in range(2))
    log = CountingBytes(bytes(first + second)[:-30])
    scan = SalvageScan(log, size_bytes=10_000, start_offset=0, end_offset=9, reaches_end=True)
    found, lost = scan
    assert found.header.base_offset == 0
    assert lost == LostRange(1, 9, len(first), 10_000 - len(first))
    assert log.reads < 20
