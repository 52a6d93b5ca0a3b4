from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.house import House


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.broker.close()
