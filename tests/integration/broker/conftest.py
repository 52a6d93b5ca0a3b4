from collections.abc import Iterator
from pathlib import Path

import pytest

from broker import store_status
from tests.fakes.house import House


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a store answers again is looked at after seconds: here at once. The copier keeps its
    second, in which tests stop it.
    """
    monkeypatch.setattr(store_status, "RETRY_S", 0.05)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.broker.close()
