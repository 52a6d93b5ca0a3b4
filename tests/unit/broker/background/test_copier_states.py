"""What the copier does next, in every state and after every outcome."""

from itertools import product

import pytest

from tierlog.broker.background import copier
from tierlog.broker.background.copier import (
    MAX_SCAN_WAIT_S,
    MAX_WAIT_S,
    Outcome,
    State,
    Work,
    next_state,
    outcome_of,
)
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptBatch,
    CorruptDataError,
    FencedError,
    LogOfflineError,
    OffsetTrimmed,
    ShuttingDown,
    StoreUnavailable,
)

LOOKS = {Outcome.DUE, Outcome.NOTHING}
FAILURES = (
    Outcome.STOPPED,
    Outcome.STORE_DOWN,
    Outcome.FAILED,
    Outcome.DAMAGED,
    Outcome.UNREADABLE,
)
TURNS = {*FAILURES, Outcome.MORE, Outcome.DONE}

NEXT = {
    **{(State.IDLE, outcome): state for outcome, state in {
        Outcome.DUE: State.QUEUED, Outcome.NOTHING: State.IDLE, Outcome.ASKED: State.IDLE,
    }.items()},
    **{(State.WAITING, outcome): state for outcome, state in {
        Outcome.DUE: State.QUEUED, Outcome.NOTHING: State.IDLE, Outcome.ASKED: State.IDLE,
    }.items()},
    **{(State.QUEUED, outcome): State.WAITING for outcome in FAILURES},
    (State.QUEUED, Outcome.MORE): State.QUEUED,
    (State.QUEUED, Outcome.DONE): State.IDLE,
    (State.QUEUED, Outcome.ASKED): State.QUEUED,
}  # fmt: skip

FAILED_TWICE = {"failures": 2, "blocked": "a.log is corrupt", "unreadable": 7, "not_before_s": 9.0}


@pytest.mark.parametrize(("state", "outcome"), list(product(State, Outcome)))
def test_every_state_and_outcome_has_one_successor_or_cannot_be(state, outcome):
    if (state, outcome) not in NEXT:
        assert outcome in (TURNS if state is not State.QUEUED else LOOKS)
        with pytest.raises(KeyError):
            next_state(Work(state), outcome)
        return
    after = next_state(Work(state, **FAILED_TWICE), outcome, now_s=100.0, reason="b.log is gone")
    assert after.state is NEXT[state, outcome]
    assert (after.not_before_s > 100.0) == (after.state is State.WAITING)


@pytest.mark.parametrize(("state", "outcome"), list(NEXT))
def test_only_failures_count_and_only_what_succeeds_or_is_over_resets(state, outcome):
    after = next_state(Work(state, **FAILED_TWICE), outcome)
    is_over = outcome in {Outcome.MORE, Outcome.DONE, Outcome.NOTHING}
    assert after.failures == (3 if outcome in FAILURES else 0 if is_over else 2)


@pytest.mark.parametrize(("state", "outcome"), list(NEXT))
def test_a_partition_is_blocked_by_a_bad_file_until_a_turn_finds_it_whole(state, outcome):
    after = next_state(Work(state, **FAILED_TWICE), outcome, reason="b.log is gone")
    if outcome in {Outcome.DAMAGED, Outcome.UNREADABLE}:
        assert after.blocked == "b.log is gone"
    elif outcome in {Outcome.MORE, Outcome.DONE, Outcome.NOTHING}:
        assert after.blocked is None
    else:
        assert after.blocked == FAILED_TWICE["blocked"], "the file was not looked at"


def test_only_a_corrupt_batch_is_waited_for_by_its_segment():
    for outcome in FAILURES:
        after = next_state(Work(State.QUEUED), outcome, oldest=40)
        assert after.unreadable == (40 if outcome is Outcome.UNREADABLE else None)


@pytest.mark.parametrize("outcome", FAILURES)
def test_waits_double_to_their_limit_which_is_longer_where_a_segment_is_read_each_time(outcome):
    work, waits = Work(State.QUEUED), []
    for _ in range(15):
        work = next_state(work, outcome)._replace(state=State.QUEUED)
        waits.append(work.not_before_s)
    assert waits[:4] == [0.5, 1.0, 2.0, 4.0]
    assert waits[-1] == (MAX_SCAN_WAIT_S if outcome is Outcome.UNREADABLE else MAX_WAIT_S)
    assert next_state(Work(State.QUEUED), outcome, jitter=0.0).not_before_s == 0.25


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (ShuttingDown("stops"), Outcome.STOPPED),
        (CorruptBatch("bad CRC"), Outcome.UNREADABLE),
        (CorruptDataError("is missing"), Outcome.DAMAGED),
        (OffsetTrimmed("trimmed", log_start_offset=9, high_watermark=9), Outcome.DAMAGED),
        (StoreUnavailable("503"), Outcome.FAILED),  # STORE_DOWN is known only by asking the store
        (ConfigurationError("no permission"), Outcome.FAILED),
        (FencedError("another owner"), Outcome.FAILED),
        (LogOfflineError("the disk failed"), Outcome.FAILED),
        (OSError("EIO"), Outcome.FAILED),
    ],
)
def test_the_outcome_of_a_failed_turn_follows_from_its_error(failure, outcome):
    assert outcome_of(failure) is outcome


def test_an_outage_and_a_shutdown_are_not_logged_for_each_partition():
    logged = {outcome for (_, outcome), row in copier._ROWS.items() if row.is_logged}
    assert logged == {Outcome.FAILED, Outcome.DAMAGED, Outcome.UNREADABLE}
