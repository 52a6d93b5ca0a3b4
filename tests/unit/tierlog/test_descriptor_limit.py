import resource

import pytest

from tierlog.cli import broker_process


class MacLimits:
    """A Mac reports no hard limit, and refuses more than `kern.maxfilesperproc`."""

    def __init__(self, per_process: int) -> None:
        self.soft, self.per_process = 256, per_process

    def getrlimit(self, which: int) -> tuple[int, int]:
        assert which == resource.RLIMIT_NOFILE
        return self.soft, resource.RLIM_INFINITY

    def setrlimit(self, which: int, limits: tuple[int, int]) -> None:
        if limits[0] > self.per_process:
            raise ValueError("current limit exceeds maximum limit")
        self.soft = limits[0]


@pytest.mark.parametrize(
    ("per_process", "raised"), [(1 << 20, 262_144), (61_440, 32_768), (10_240, 8_192), (256, 256)]
)
def test_on_macos_a_broker_may_open_as_many_files_as_it_can_find_out(
    monkeypatch, per_process, raised
):
    limits = MacLimits(per_process)
    monkeypatch.setattr(resource, "getrlimit", limits.getrlimit)
    monkeypatch.setattr(resource, "setrlimit", limits.setrlimit)
    broker_process._raise_descriptor_limit()
    assert limits.soft == raised
