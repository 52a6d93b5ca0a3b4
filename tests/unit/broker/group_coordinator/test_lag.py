from types import SimpleNamespace

import pytest

from tierlog.broker.group_coordinator.groups import lag_of
from tierlog.manifest.state import OffsetGap


def partition(*gaps):
    return SimpleNamespace(gaps=tuple(OffsetGap(*gap) for gap in gaps))


@pytest.mark.parametrize(
    ("gaps", "offset", "end", "lag"),
    [
        ((), 5, 20, 15),
        ((), 20, 20, 0),
        ((), 25, 20, 0),  # a commit past the end has no lag
        (((100, 1100),), 50, 1150, 100),
        (((100, 1100),), 100, 1150, 50),
        (((100, 1100),), 600, 1150, 50),  # a commit inside the gap
        (((100, 1100),), 1100, 1150, 50),
        (((100, 1100),), 50, 1100, 50),  # nothing written after it yet
        (((100, 1100), (1200, 2200)), 50, 2300, 250),
    ],
)
def test_lag_excludes_the_gaps_of_a_restore(gaps, offset, end, lag):
    assert lag_of(partition(*gaps), offset, end) == lag
