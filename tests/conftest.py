"""Who runs which tests, where there are workers (`make test`): what shares something that takes
long to start stays together, and so do the tests of one file. And where brokers' log lines go.
"""

from __future__ import annotations

import sys

import pytest
import structlog

SHARED = ("spark", "kafka", "chromium")
"""Fixtures of a whole session."""


class ShownWithItsTest:
    """stdout while pytest keeps it, to show it where a test fails.

    A broker of several tests also logs between them: that would stand among the dots.
    """

    def write(self, text: str) -> None:
        if sys.stdout is not sys.__stdout__:
            sys.stdout.write(text)

    def flush(self) -> None:
        sys.stdout.flush()


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("capture") != "no":
        factory = structlog.PrintLoggerFactory(ShownWithItsTest())  # type: ignore[arg-type]
        structlog.configure(logger_factory=factory)


@pytest.hookimpl(tryfirst=True)  # before the groups are read
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        wanted = getattr(item, "fixturenames", ())
        group = next((name for name in SHARED if name in wanted), str(item.path))
        item.add_marker(pytest.mark.xdist_group(group))
