"""A fixture for both record walks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tierlog.record_format import native, record_walk
from tierlog.record_format.record_walk import Walker, walk_plain


@pytest.fixture(params=["plain", "native"])
def walk(request: pytest.FixtureRequest) -> Iterator[Walker]:
    """Run the test with each of the two record walks."""
    if request.param == "native":
        assert native.load(), "numba is a test dependency"
        from tierlog.record_format.record_kernel import walk_native as chosen
    else:
        chosen = walk_plain
    record_walk.use(chosen)
    yield chosen
    record_walk.use(walk_plain)
