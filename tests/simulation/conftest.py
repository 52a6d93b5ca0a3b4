import gc
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.fakes.partition_logs import *  # noqa: F403
from tests.simulation.worn_disk import wear  # noqa: F401


@pytest.fixture(autouse=True)
def what_was_killed_is_closed(tmp_path: Path) -> Iterator[None]:
    """As the system does for a process: otherwise a whole run leaves over a thousand files open."""
    yield
    gc.collect()  # not later, when the descriptor may belong to something else
    for held in list(Path("/proc/self/fd").iterdir()):
        with suppress(FileNotFoundError):
            if held.readlink().is_relative_to(tmp_path):
                os.close(int(held.name))
