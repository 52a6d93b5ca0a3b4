from collections.abc import Iterator
from pathlib import Path

import pytest

from broker import store_status
from tests.fakes.house import House


@pytest.fixture(autouse=True)
def fast_store_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Re-check an unavailable store almost immediately. The copier keeps its interval of a second,
    within which tests stop it.
    """
    monkeypatch.setattr(store_status, "RETRY_S", 0.05)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path)
    yield house
    house.broker.close()
