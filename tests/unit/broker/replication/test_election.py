import pytest

from tierlog.broker.replication.election import cut_offset


@pytest.mark.parametrize(
    ("epochs", "at", "cut"),
    [
        ([(1, 0), (2, 5)], (1, 5), 5),
        ([(1, 0), (2, 7)], (1, 5), 5),  # the leader has less of the epoch that both have
        ([(1, 0), (2, 4)], (1, 5), 4),  # the follower has less of it
        ([(2, 5)], (1, 5), 5),  # what was below is gone from its disk: committed, and never cut
        ([(2, 5)], (1, 3), 3),
        ([(2, 5)], (-1, 0), 0),
        ([], (-1, 0), 0),
    ],
)
def test_a_follower_cuts_where_its_epochs_and_the_leaders_part(epochs, at, cut):
    assert cut_offset(epochs, at, log_end_offset=19) == cut
