from pathlib import Path

import pytest

from broker.disk_reserve import DiskReserve
from record_format.errors import DiskFull


class Disk:
    """Free bytes, and what two reliefs can still give."""

    def __init__(self, free, cache=0, segments=0):
        self.free, self.left, self.order = free, {"cache": cache, "segments": segments}, []

    def relief(self, name):
        def give(missing):
            given = min(missing, self.left[name])
            self.left[name] -= given
            self.free += given
            self.order.append((name, given))
            return given > 0

        return give

    def reserve(self, reserve_bytes):
        return DiskReserve(
            Path("/x"),
            reserve_bytes=reserve_bytes,
            reliefs=(self.relief("cache"), self.relief("segments")),
            free=lambda path: self.free,
        )


def test_enough_room_asks_nobody():
    disk = Disk(free=100)
    reserve = disk.reserve(100)
    reserve.check()
    reserve.check_not_breached()
    assert disk.order == []


def test_the_cache_goes_before_segments_and_writes_go_on():
    disk = Disk(free=50, cache=30, segments=100)
    reserve = disk.reserve(100)
    reserve.check()
    reserve.check_not_breached()
    assert disk.left == {"cache": 0, "segments": 80}


def test_when_nothing_is_left_to_give_writes_are_refused_until_room_is_back():
    disk = Disk(free=50, cache=10)
    reserve = disk.reserve(100)
    reserve.check()
    with pytest.raises(DiskFull, match=r"disk\.reserve\.bytes"):
        reserve.check_not_breached()
    disk.free = 100
    reserve.check()
    reserve.check_not_breached()
