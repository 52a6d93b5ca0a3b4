import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fakes.partition_logs import *  # noqa: F403
from tests.simulation.failing_disk import failing_disk  # noqa: F401


@pytest.fixture(autouse=True)
def close_leaked_descriptors(tmp_path: Path) -> Iterator[None]:
    """As the system does for a killed process: a run would leave over a thousand files open."""
    yield
    gc.collect()  # not later, when the descriptor may belong to something else
    for link in list(Path("/proc/self/fd").iterdir()):
        with suppress(FileNotFoundError):
            if link.readlink().is_relative_to(tmp_path):
                os.close(int(link.name))
