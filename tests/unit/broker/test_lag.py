from types import SimpleNamespace

import pytest

from broker.groups.groups import lag_of
from manifest.state import OffsetGap


def partition(*gaps, cold=True, manifest=True):
    found = SimpleNamespace(gaps=tuple(OffsetGap(*gap) for gap in gaps)) if manifest else None
    return SimpleNamespace(cold=SimpleNamespace(manifest=found) if cold else None)


@pytest.mark.parametrize(
    ("gaps", "offset", "end", "lag"),
    [
        ((), 5, 20, 15),
        ((), 20, 20, 0),
        ((), 25, 20, 0),  # a commit past the end owes nothing
        (((100, 1100),), 50, 1150, 100),
        (((100, 1100),), 100, 1150, 50),
        (((100, 1100),), 600, 1150, 50),  # a commit inside of the gap
        (((100, 1100),), 1100, 1150, 50),
        (((100, 1100),), 50, 1100, 50),  # nothing was written behind it yet
        (((100, 1100), (1200, 2200)), 50, 2300, 250),
    ],
)
def test_lag_leaves_out_what_a_restore_stepped_over(gaps, offset, end, lag):
    assert lag_of(partition(*gaps), offset, end) == lag


def test_without_a_bucket_or_a_manifest_there_are_no_gaps():
    assert lag_of(partition(cold=False), 1, 3) == 2
    assert lag_of(partition(manifest=False), 1, 3) == 2
