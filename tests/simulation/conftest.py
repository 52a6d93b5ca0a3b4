from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.partition_logs import *  # noqa: F403
from tests.simulation.failing_disk import close_files_below, failing_disk  # noqa: F401


@pytest.fixture(autouse=True)
def close_leaked_descriptors(tmp_path: Path) -> Iterator[None]:
    yield
    close_files_below(tmp_path)
