"""Which sessions are kept, by Kafka's rule, and how little an idle one costs."""

import pytest

from tests.fakes.kafka_requests import fetch_request
from tierlog.api.kafka import fetch_sessions
from tierlog.api.kafka.error_codes import Refused
from tierlog.api.kafka.fetch_sessions import EVICTION_MS, FetchSession, FetchSessions
from tierlog.api.serving.grants import EVERYTHING, Grant, Scope


class Clock:
    now_ms = 0

    def __call__(self) -> int:
        return self.now_ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sessions(clock: Clock) -> FetchSessions:
    return FetchSessions(2, clock=clock)


def begin(
    sessions: FetchSessions, *, partitions: int = 1, session: tuple[int, int] = (0, 0)
) -> FetchSession:
    request = fetch_request(*(("a", number, 0) for number in range(partitions)), session=session)
    return sessions.begin(request, by_id=False, grant=EVERYTHING)


def poll(sessions: FetchSessions, session: FetchSession) -> FetchSession:
    request = fetch_request(session=(session.id, session.epoch))
    return sessions.begin(request, by_id=False, grant=EVERYTHING)


def test_a_client_that_wants_no_session_has_none(sessions: FetchSessions) -> None:
    assert begin(sessions, session=(0, -1)).id == 0
    assert len(sessions) == 0


def test_epochs_follow_each_other_and_wrap_to_1(sessions: FetchSessions) -> None:
    session = begin(sessions)
    for expected in 2, 3, 4:
        assert poll(sessions, session) is session
        assert session.epoch == expected
    session.epoch = 2**31 - 1
    poll(sessions, session)
    assert session.epoch == 1


def test_without_room_a_young_session_replaces_none(sessions: FetchSessions, clock: Clock) -> None:
    kept = [begin(sessions), begin(sessions)]
    clock.now_ms += EVICTION_MS - 1
    assert begin(sessions, partitions=9).id == 0
    assert [poll(sessions, one) for one in kept] == kept


def test_the_one_that_was_idle_for_long_goes_first(sessions: FetchSessions, clock: Clock) -> None:
    idle, used = begin(sessions, partitions=9), begin(sessions)
    clock.now_ms += EVICTION_MS + 1
    poll(sessions, used)
    assert begin(sessions).id != 0
    assert poll(sessions, used) is used
    with pytest.raises(Refused, match="FETCH_SESSION_ID_NOT_FOUND"):
        poll(sessions, idle)


def test_otherwise_the_smallest_old_one_goes_if_it_is_not_larger(
    sessions: FetchSessions, clock: Clock
) -> None:
    large, small = begin(sessions, partitions=9), begin(sessions, partitions=3)
    clock.now_ms += EVICTION_MS + 1
    for one in large, small:
        poll(sessions, one)
    assert begin(sessions, partitions=2).id == 0
    assert begin(sessions, partitions=3).id != 0
    assert small.id == 0
    assert poll(sessions, large) is large


def test_all_together_hold_so_many_partitions(
    sessions: FetchSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch_sessions, "PARTITIONS_MAX", 10)
    first = begin(sessions, partitions=8)
    assert begin(sessions, partitions=3).id == 0
    grown = fetch_request(*(("b", n, 0) for n in range(5)), session=(first.id, first.epoch))
    assert sessions.begin(grown, by_id=False, grant=EVERYTHING) is first
    assert (first.id, len(sessions)) == (0, 0), "it is answered, and not kept"
    assert begin(sessions, partitions=10).id != 0


def test_a_session_is_its_clients_alone(sessions: FetchSessions) -> None:
    session = begin(sessions)
    other = Grant("other", frozenset({Scope.READ}))
    request = fetch_request(session=(session.id, session.epoch))
    with pytest.raises(Refused, match="FETCH_SESSION_ID_NOT_FOUND"):
        sessions.begin(request, by_id=False, grant=other)
    assert poll(sessions, session) is session
