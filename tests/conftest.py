"""Who runs which tests, where there are workers (`make test`): what shares something that takes long
to start stays together, and so do the tests of one file.
"""

from __future__ import annotations

import pytest

SHARED = ("spark", "kafka", "chromium")
"""Fixtures of a whole session."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        wanted = getattr(item, "fixturenames", ())
        group = next((name for name in SHARED if name in wanted), str(item.path))
        item.add_marker(pytest.mark.xdist_group(group))
