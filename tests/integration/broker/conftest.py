from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.broker_harness import BrokerHarness
from tierlog.broker.background import background_tasks
from tierlog.broker.bucket import store_status


@pytest.fixture(autouse=True)
def fast_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Re-check an unavailable store, and finish deletions, almost immediately. The copier keeps its
    interval of a second, within which tests stop it.
    """
    monkeypatch.setattr(store_status, "RETRY_S", 0.05)
    monkeypatch.setattr(background_tasks, "DELETION_INTERVAL_S", 0.05)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[BrokerHarness]:
    harness = BrokerHarness(tmp_path)
    yield harness
    harness.broker.close()
