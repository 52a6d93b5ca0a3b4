"""Which page of records comes before which."""

import pytest

from tierlog.api.console.record_browser import page_before
from tierlog.manifest.state import OffsetGap

RESTORED = (OffsetGap(10, 20), OffsetGap(100, 1_000_000_100))


@pytest.mark.parametrize(
    ("offset", "before"),
    [
        (1_000_000_200, 1_000_000_150),
        (1_000_000_101, 1_000_000_051),  # shown from the gap's end on
        (1_000_000_100, 50),
        (1_000_000_051, 50),
        (101, 50),
        (100, 50),
        (20, -40),
    ],
)
def test_pages_skip_the_offsets_that_a_restore_skipped(offset, before):
    assert page_before(offset, RESTORED, limit=50) == before


def test_a_log_without_gaps_is_paged_by_offsets():
    assert page_before(70, (), limit=50) == 20
