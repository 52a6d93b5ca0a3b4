import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from tierlog.broker.data_folder.disk_reserve import DiskReserve
from tierlog.broker.settings import BrokerSettings
from tierlog.record_format.errors import DiskFull


class Disk:
    """Free bytes, and how many two reliefs can still free."""

    def __init__(self, free, cache=0, segments=0):
        self.free, self.releasable, self.released = free, {"cache": cache, "segments": segments}, []

    def relief(self, name):
        def free(missing):
            freed = min(missing, self.releasable[name])
            self.releasable[name] -= freed
            self.free += freed
            self.released.append((name, freed))
            return freed > 0

        return free

    def reserve(self, reserve_bytes):
        return DiskReserve(
            Path("/x"),
            reserve_bytes=reserve_bytes,
            free=lambda path: self.free,
        )

    @property
    def reliefs(self):
        return self.relief("cache"), self.relief("segments")


def test_with_enough_space_nothing_is_released():
    disk = Disk(free=100)
    reserve = disk.reserve(100)
    reserve.check(disk.reliefs)
    reserve.check_not_breached()
    assert disk.released == []


def test_the_cache_is_released_before_segments_and_writes_continue():
    disk = Disk(free=50, cache=30, segments=100)
    reserve = disk.reserve(100)
    reserve.check(disk.reliefs)
    reserve.check_not_breached()
    assert disk.releasable == {"cache": 0, "segments": 80}


def test_with_nothing_to_release_writes_are_refused_until_there_is_space():
    disk = Disk(free=50, cache=10)
    reserve = disk.reserve(100)
    reserve.check(disk.reliefs)
    with pytest.raises(DiskFull, match=r"disk\.reserve\.bytes"):
        reserve.check_not_breached()
    disk.free = 100
    reserve.check(disk.reliefs)
    reserve.check_not_breached()


@pytest.mark.parametrize(
    ("disk_bytes", "expected"), [(10 << 30, (10 << 30) // 20), (250 << 30, 1 << 30)]
)
def test_by_default_a_twentieth_of_the_disk_is_kept_and_a_gib_at_most(
    disk_bytes, expected, monkeypatch
):
    disk = SimpleNamespace(f_frsize=4096, f_blocks=disk_bytes // 4096)
    monkeypatch.setattr(os, "statvfs", lambda path: disk)
    assert BrokerSettings(data_dir=Path("/x")).resolve().disk_reserve_bytes == expected
