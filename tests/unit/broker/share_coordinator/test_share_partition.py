"""The state machine of a share partition (KIP-932): each state and event. What a real Kafka answers
is compared in `test_share_groups_match_kafka`.
"""

from __future__ import annotations

import pytest

from tierlog.broker.group_coordinator.share_group import ShareLimits
from tierlog.broker.share_coordinator.share_partition import (
    AckBatch,
    Acquired,
    SharePartition,
    Span,
    Wanted,
)
from tierlog.record_format.errors import GroupRefused
from tierlog.record_format.share_state import (
    DeliveryState,
    ShareState,
    StateBatch,
    merge_batches,
)

LIMITS = ShareLimits(lock_ms=1_000, count_limit=5, locks_max=100)
AVAILABLE, ACKNOWLEDGED, ARCHIVED = 0, 2, 4


class Share:
    """A share partition over batches of ten records."""

    def __init__(self, *batches: StateBatch, start: int = 0, limits: ShareLimits = LIMITS) -> None:
        self.partition = SharePartition(ShareState(start, batches=batches))
        self.limits, self.now_ms = limits, 0
        self.spans = [Span(first, first + 9) for first in range(0, 200, 10)]

    def acquire(self, member: str = "m", count: int = 500, **fields: int) -> list[Acquired]:
        offset = self.partition.next_fetch_offset
        given = {"batch_size": 500, **fields}
        return self.partition.acquire(
            Wanted(member, count, given["batch_size"], is_strict=bool(given.get("strict"))),
            [one for one in self.spans if one.last >= offset],
            fetch_offset=offset,
            limits=self.limits,
            now_ms=self.now_ms,
        )

    def begin(self, *acks: tuple[int, int, list[int]], member: str = "m") -> list[StateBatch]:
        rows = [AckBatch(*one) for one in acks]
        self.change = self.partition.acknowledge(member, rows, self.limits, self.now_ms)
        return self.change.batches

    def settle(self, *, is_written: bool = True) -> None:
        self.partition.settle(
            self.change.runs, is_written=is_written, limits=self.limits, now_ms=self.now_ms
        )

    def acknowledge(self, *acks: tuple[int, int, list[int]], member: str = "m") -> None:
        self.begin(*acks, member=member)
        self.settle()

    @property
    def bounds(self) -> tuple[int, int]:
        return self.partition.start_offset, self.partition.end_offset


def test_what_is_new_is_given_to_the_end_of_a_batch() -> None:
    assert Share().acquire(count=15) == [Acquired(0, 19, 1)]


def test_no_more_is_given_than_asked_for_if_that_is_wanted() -> None:
    share = Share()
    assert share.acquire(count=15, strict=1) == [Acquired(0, 14, 1)]
    assert share.acquire(count=3, strict=1) == [Acquired(15, 17, 1)]


def test_what_is_new_is_given_in_parts_of_whole_batches() -> None:
    found = Share().acquire(count=50, batch_size=15)
    assert found == [Acquired(0, 19, 1), Acquired(20, 39, 1), Acquired(40, 49, 1)]


def test_no_more_records_are_locked_than_the_limit() -> None:
    share = Share()
    assert share.acquire() == [Acquired(0, 99, 1)]
    assert not share.partition.may_acquire(LIMITS)
    share.acknowledge((50, 59, [2]))
    assert share.partition.may_acquire(LIMITS)
    assert share.acquire() == [Acquired(50, 59, 2)]


def test_what_is_done_with_from_the_start_on_is_forgotten() -> None:
    share = Share()
    share.acquire(count=30)
    share.acknowledge((10, 19, [1]))
    assert share.bounds == (0, 30)
    assert share.partition.complete_count == 10
    share.acknowledge((0, 9, [1] * 9 + [3]))
    assert share.bounds == (20, 30)
    share.acknowledge((20, 29, [0]))
    assert share.bounds == (30, 30)


def test_until_it_is_written_it_is_nobodys() -> None:
    share = Share()
    share.acquire(count=10)
    assert share.begin((0, 9, [2])) == [StateBatch(0, 9, AVAILABLE, 1)]
    assert share.partition.next_fetch_offset == 10
    with pytest.raises(GroupRefused):
        share.partition.acknowledge("m", [AckBatch(0, 9, [1])], LIMITS, 0)
    share.settle(is_written=False)
    share.acknowledge((0, 9, [1]))  # it is the member's again
    assert share.bounds == (10, 10)


def test_what_is_not_written_yet_does_not_move_the_start() -> None:
    share = Share()
    share.acquire(count=10)
    share.begin((0, 9, [1]))
    share.acquire("n", count=10)
    assert share.bounds == (0, 20)
    share.settle(is_written=False)
    share.acknowledge((0, 9, [1]))
    assert share.bounds == (10, 20)


def test_what_could_not_be_written_is_free_if_its_time_is_over_meanwhile() -> None:
    share = Share()
    share.acquire(count=10)
    share.begin((0, 9, [1]))
    share.now_ms = 1_000
    assert share.partition.expire(LIMITS, 1_000) == []
    share.settle(is_written=False)
    assert share.acquire("n", count=10) == [Acquired(0, 9, 2)]


def test_an_acknowledgement_is_done_as_a_whole_or_not_at_all() -> None:
    share = Share()
    share.acquire(count=10)
    share.acquire("n", count=10)
    with pytest.raises(GroupRefused) as refused:
        share.begin((0, 9, [1]), (10, 19, [1]))
    assert refused.value.reason == "INVALID_RECORD_STATE"
    share.acknowledge((0, 9, [1]))


@pytest.mark.parametrize(
    ("ack", "reason"),
    [
        ((0, 12, [1]), "INVALID_REQUEST"),
        ((50, 60, [1]), "INVALID_REQUEST"),
    ],
)
def test_what_was_never_given_is_not_acknowledged(
    ack: tuple[int, int, list[int]], reason: str
) -> None:
    share = Share()
    share.acquire(count=10)
    with pytest.raises(GroupRefused) as refused:
        share.begin(ack)
    assert refused.value.reason == reason


def test_a_lock_that_is_over_frees_records_and_one_that_was_renewed_does_not() -> None:
    share = Share()
    share.acquire(count=20)
    share.now_ms = 500
    assert share.begin((0, 9, [4])) == []
    assert share.partition.due_ms == 1_000
    assert share.partition.expire(LIMITS, 1_000) == [StateBatch(10, 19, AVAILABLE, 1)]
    assert share.partition.due_ms == 1_500
    assert share.acquire("n", count=10) == [Acquired(10, 19, 2)]


def test_nothing_is_renewed_where_that_is_off() -> None:
    share = Share(limits=LIMITS._replace(may_renew=False))
    share.acquire(count=10)
    with pytest.raises(GroupRefused):
        share.begin((0, 9, [4]))


def test_a_record_is_given_up_after_as_many_deliveries_as_the_limit() -> None:
    share = Share()
    counts = []
    for _ in range(20):
        found = share.acquire(count=1, strict=1)
        counts += [one.deliveries for one in found if one.first == 0]
        share.partition.settle(
            share.partition.release("m", LIMITS).runs, is_written=True, limits=LIMITS, now_ms=0
        )
        if share.partition.start_offset:
            break
    assert counts == [1, 2, 3, 4, 5]
    assert share.bounds[0] == 1


def test_records_that_fail_are_given_in_ever_smaller_parts_and_the_last_time_alone() -> None:
    share = Share(limits=LIMITS._replace(count_limit=6))
    given: list[list[Acquired]] = []
    for _ in range(6):
        given.append(share.acquire(count=10))
        share.acknowledge(*((one.first, one.last, [2]) for one in given[-1]))
    assert given == [
        [Acquired(0, 9, 1)],
        [Acquired(0, 9, 2)],
        [Acquired(0, 9, 3)],
        [Acquired(0, 4, 4)],  # from half of the limit on: half of the batch, ...
        [Acquired(0, 1, 5)],
        [Acquired(0, 0, 6)],
    ]


def test_records_of_an_aborted_transaction_are_nobodys() -> None:
    share = Share()
    share.spans[1] = Span(10, 19, is_aborted=True)
    assert share.acquire(count=30) == [Acquired(0, 9, 1), Acquired(20, 29, 1)]
    share.acknowledge((0, 9, [1]))
    assert share.bounds == (20, 30)


def test_what_compaction_has_removed_is_done_with() -> None:
    share = Share()
    share.acquire(count=30)
    share.acknowledge((0, 29, [2]))
    del share.spans[0]
    assert share.acquire(count=10) == [Acquired(10, 29, 2)]
    assert share.bounds == (10, 30)


def test_a_gap_of_a_restore_takes_no_time_and_no_room() -> None:
    share = Share()
    share.spans = [Span(0, 9), Span(10**9, 10**9 + 9), Span(10**9 + 10, 10**9 + 19)]
    assert share.acquire(count=15) == [Acquired(0, 9, 1)]
    share.acknowledge((0, 9, [1]))
    assert share.acquire(count=15) == [Acquired(10**9, 10**9 + 19, 1)]
    assert share.partition.start_offset == 10**9
    share.partition.skip(10**9 + 20, 2 * 10**9)
    share.acknowledge((10**9, 10**9 + 19, [1]))
    assert share.bounds == (2 * 10**9, 2 * 10**9)


def test_records_that_the_log_has_deleted_are_forgotten() -> None:
    share = Share()
    share.acquire(count=30)
    share.partition.move_start(15)
    assert share.bounds == (15, 30)
    share.acknowledge((10, 19, [1]))  # of which a part is there
    assert share.bounds == (20, 30)
    share.acknowledge((0, 9, [1]))  # nothing of it is
    share.partition.move_start(100)
    assert share.bounds == (100, 100)


def test_after_a_restart_what_nobody_was_done_with_is_available() -> None:
    share = Share(StateBatch(10, 19, ACKNOWLEDGED, 1), StateBatch(20, 24, AVAILABLE, 2))
    assert share.bounds == (0, 25)
    found = [Acquired(0, 9, 1), Acquired(20, 24, 3), Acquired(25, 29, 1)]
    assert share.acquire(count=20) == found


def test_a_snapshot_has_acquired_records_as_they_were_before() -> None:
    share = Share()
    share.acquire(count=30)
    share.acknowledge((0, 4, [2]), (5, 9, [1]), (20, 29, [3]))
    share.acquire(count=5)
    assert share.partition.batches() == [
        StateBatch(0, 4, AVAILABLE, 1),
        StateBatch(5, 9, ACKNOWLEDGED, 1),
        StateBatch(20, 29, ARCHIVED, 1),
    ]


@pytest.mark.parametrize(
    ("old", "new", "start", "merged"),
    [
        ([], [(5, 9, 2, 1), (0, 4, 2, 1)], -1, [(0, 9, 2, 1)]),
        ([(0, 9, 0, 1)], [(3, 4, 2, 2)], 0, [(0, 2, 0, 1), (3, 4, 2, 2), (5, 9, 0, 1)]),
        ([(0, 9, 0, 1)], [(0, 9, 2, 1)], 0, [(0, 9, 2, 1)]),
        (
            [(0, 3, 2, 1), (6, 9, 0, 1)],
            [(2, 7, 4, 3)],
            1,
            [(1, 1, 2, 1), (2, 7, 4, 3), (8, 9, 0, 1)],
        ),
        ([(0, 3, 2, 1)], [], 4, []),
    ],
)
def test_what_was_written_later_counts(
    old: list[tuple[int, int, int, int]],
    new: list[tuple[int, int, int, int]],
    start: int,
    merged: list[tuple[int, int, int, int]],
) -> None:
    rows = [[StateBatch(*one) for one in given] for given in (old, new, merged)]
    assert merge_batches(rows[0], rows[1], start=start) == tuple(rows[2])


def test_states_have_kafkas_numbers() -> None:
    assert [one.value for one in DeliveryState] == [0, 1, 2, 4]
