"""What is known of who leads what, from what the brokers say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tierlog.broker.membership.leaders import Leader, Leaders

PLACE = ("flights", 0)


def led(epoch: int, *, adding: tuple[int, ...] = ()) -> Leader:
    replicas = (0, 1, *adding)
    return Leader(epoch, 10, 0, epoch - 1, replicas=replicas, in_sync=(0, 1), adding=adding)


def is_changing(leaders: Leaders) -> bool:
    return PLACE in leaders.changing()


@pytest.mark.parametrize(
    "leave",
    [
        lambda leaders: leaders.put_report(0, {}),
        lambda leaders: leaders.put_led(0, PLACE, None),
        lambda leaders: leaders.keep_only([1]),
    ],
    ids=["reported", "told", "gone"],
)
def test_what_is_being_changed_is_remembered_until_the_next_leader_says_what_it_is(
    leave: Callable[[Leaders], None],
) -> None:
    leaders = Leaders()
    leaders.put_report(0, {PLACE: led(1, adding=(2,))})
    leave(leaders)
    assert leaders.changing()[PLACE].adding == (2,)
    assert not leaders.sets()
    leaders.put_report(1, {PLACE: led(2, adding=(2,))})
    assert is_changing(leaders)
    leaders.put_report(1, {PLACE: led(2)})
    assert not is_changing(leaders)
    leaders.put_report(1, {})
    assert not is_changing(leaders)


def test_a_late_word_of_the_old_leader_does_not_bring_back_what_is_done() -> None:
    leaders = Leaders()
    leaders.put_report(0, {PLACE: led(1, adding=(2,))})
    leaders.put_report(1, {PLACE: led(2)})
    assert not is_changing(leaders)
    leaders.put_report(0, {})
    leaders.put_report(1, {})
    assert not is_changing(leaders)


def test_what_a_leader_answers_counts_before_its_next_report() -> None:
    leaders = Leaders()
    leaders.put_report(0, {PLACE: led(1)})
    leaders.put_replicas(0, PLACE, replicas=[0, 1, 2], adding=[2], removing=[])
    leaders.put_report(0, {})
    assert is_changing(leaders)
