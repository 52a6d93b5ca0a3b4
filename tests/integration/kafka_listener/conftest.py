from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.served_broker import Served, served_broker
from tierlog.api.kafka.settings import KafkaSettings


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with served_broker(tmp_path / "data", kafka=KafkaSettings()) as served:
        yield served
