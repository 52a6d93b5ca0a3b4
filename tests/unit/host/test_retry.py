"""How often and for how long a call is repeated."""

import pytest

from tierlog.host.retry import RetryPolicy
from tierlog.record_format.errors import StoreUnavailable


def test_retry_delays_grow_with_jitter_up_to_a_limit():
    delays = []
    policy = RetryPolicy(
        attempts=6, first_delay_s=1, max_delay_s=4, sleep=delays.append, jitter=lambda: 1.0
    )
    with pytest.raises(StoreUnavailable):
        policy.call_with_retries(_down)
    assert delays == [1, 2, 4, 4, 4]
    assert RetryPolicy(first_delay_s=1, jitter=lambda: 0.0).delay_s(1) == pytest.approx(0.5)


@pytest.mark.parametrize(("silence_s", "attempts"), [(20, 2), (29, 2), (30, 1), (61, 1)])
def test_a_silent_call_is_not_retried_past_its_deadline(silence_s, attempts):
    now, begun = [0.0], []

    def silent():
        begun.append(now[0])
        now[0] += silence_s
        _down()

    policy = RetryPolicy(
        deadline_s=60,
        monotonic=lambda: now[0],
        sleep=lambda s: now.__setitem__(0, now[0] + s),
    )
    with pytest.raises(StoreUnavailable):
        policy.call_with_retries(silent)
    assert len(begun) == attempts
    assert now[0] < 60 or attempts == 1


def _down():
    raise StoreUnavailable("down")
