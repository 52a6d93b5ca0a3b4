from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fakes.kafka_caller import KafkaCaller
from tests.fakes.served_broker import Served, served_broker
from tierlog.api.kafka.settings import KafkaSettings


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with served_broker(tmp_path / "data", kafka=KafkaSettings()) as served:
        yield served


@pytest.fixture
def caller(served: Served) -> Iterator[KafkaCaller]:
    with KafkaCaller(served.kafka_port) as caller:
        yield caller


@pytest.fixture
def callers(served: Served) -> Iterator[Callable[[], KafkaCaller]]:
    """Makes more of them."""
    made: list[KafkaCaller] = []

    def make() -> KafkaCaller:
        made.append(KafkaCaller(served.kafka_port))
        return made[-1]

    yield make
    for one in made:
        one.close()
