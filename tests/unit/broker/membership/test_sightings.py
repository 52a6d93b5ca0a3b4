from __future__ import annotations

import pytest

from tierlog.broker.membership.sightings import Look, Sighting, observe
from tierlog.manifest.registrations import Alive


def beat(number: int) -> Alive:
    return Alive(node_id=1, folder_id="f", incarnation=1, beat=number)


def seen(*looks: tuple[int, Alive | None], steady_since_ms: int = 0) -> Sighting:
    sighting = None
    for at_ms, alive in looks:
        look = Look(at_ms, at_ms + 10, steady_since_ms)
        sighting = observe(sighting, alive, look, session_timeout_ms=6000)
    assert sighting is not None
    return sighting


@pytest.mark.parametrize(
    ("looks", "is_alive", "is_doubtful"),
    [
        ([(0, beat(1))], True, True),
        ([(0, beat(1)), (20_000, beat(7))], True, False),
        ([(0, beat(1)), (3_000, beat(1))], True, True),
        ([(0, beat(1)), (6_009, beat(1))], True, True),  # it may have come at 10 ms
        ([(0, beat(1)), (6_010, beat(1))], False, False),
        ([(0, beat(1)), (20_000, beat(7)), (26_009, beat(7))], True, True),
        ([(0, beat(1)), (20_000, beat(7)), (26_010, beat(7))], False, False),
        ([(0, beat(1)), (9_000, beat(1)), (9_001, beat(2))], True, False),
        ([(0, None)], True, True),
        ([(0, None), (6_010, None)], False, False),
        ([(0, None), (6_010, beat(1))], True, False),
    ],
)
def test_it_lives_unless_two_looks_a_session_time_out_apart_saw_the_same_beat(
    looks: list[tuple[int, Alive | None]], is_alive: bool, is_doubtful: bool
) -> None:
    found = seen(*looks)
    assert (found.is_alive, found.is_doubtful) == (is_alive, is_doubtful)


def test_looks_before_the_observer_beat_steadily_itself_prove_nothing() -> None:
    looks = [(0, beat(1)), (60_000, beat(1))]
    assert seen(*looks, steady_since_ms=54_001).is_alive
    assert not seen(*looks, steady_since_ms=54_000).is_alive


def test_a_beat_was_written_after_the_last_look_that_saw_another() -> None:
    assert seen((5, beat(1))).beat_after_ms < 0
    assert seen((5, beat(1)), (900, beat(2))).beat_after_ms == 5
    found = seen((5, beat(1)), (900, beat(1)), (2_000, beat(2)), (3_000, beat(2)))
    assert found.beat_after_ms == 900


def test_who_was_dead_stays_so_while_nothing_can_be_proved() -> None:
    found = seen((0, beat(1)), (9_000, beat(1)))
    later = observe(found, beat(1), Look(10_000, 10_010, 10_010), session_timeout_ms=6000)
    assert not later.is_alive
