"""Who runs which tests, where there are workers (`make test`): what shares something that takes
long to start stays together, and so do the tests of one file. And where brokers' log lines go.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import structlog
from botocore.loaders import JSONFileLoader
from xdist.scheduler import LoadScopeScheduling

from broker import store_status

LONGEST = "tests/integration/spark/"
SHARED = (LONGEST, "tests/integration/kafka/", "tests/integration/console/")
"""One Spark session, one Kafka from Maven, one browser."""


class ShownWithItsTest:
    """stdout while pytest keeps it, to show it where a test fails.

    A broker of several tests also logs between them: that would stand among the dots.
    """

    def write(self, text: str) -> None:
        if sys.stdout is not sys.__stdout__:
            sys.stdout.write(text)

    def flush(self) -> None:
        sys.stdout.flush()


@pytest.fixture(autouse=True, scope="session")
def short_race() -> Iterator[None]:
    """Each broker that a test opens on a new folder would write 140 MB to ask whether the folder
    lets two writers win: fewer and smaller bodies ask the same.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_status, "FOLDER_RACE_S", 0.0)
        yield


@pytest.fixture(autouse=True, scope="session")
def s3_described_once() -> Iterator[None]:
    """botocore parses its description of S3 for each store that is opened, a sixth of a second."""
    parsed = cache(JSONFileLoader().load_file)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JSONFileLoader, "load_file", lambda _, path: parsed(path))
        yield


def pytest_configure(config: pytest.Config) -> None:
    # Of a proxy, boto3, curl and other clients of the tests would ask what is on this machine.
    os.environ["no_proxy"] = "127.0.0.1,localhost"
    if config.getoption("capture") != "no":
        factory = structlog.PrintLoggerFactory(ShownWithItsTest())  # type: ignore[arg-type]
        structlog.configure(logger_factory=factory)


class RoomsAndFiles(LoadScopeScheduling):  # type: ignore[misc]
    def _split_scope(self, nodeid: str) -> str:
        file: str = nodeid.partition("::")[0]
        return next((room for room in SHARED if file.startswith(room)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> RoomsAndFiles:
    return RoomsAndFiles(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whoever has the longest room begins with it."""
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))
