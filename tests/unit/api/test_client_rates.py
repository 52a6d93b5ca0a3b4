import pytest

from tierlog.api.serving import client_rates
from tierlog.api.serving.client_rates import ClientRates
from tierlog.record_format.errors import Throttled


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def allowed(rates, client, times):
    count = 0
    for _ in range(times):
        try:
            rates.take(client)
        except Throttled:
            continue
        count += 1
    return count


def test_a_burst_is_allowed_and_then_the_rate(clock):
    rates = ClientRates(10, clock=clock)
    assert allowed(rates, "a", 100) == 20
    clock.now = 0.5
    assert allowed(rates, "a", 100) == 5
    clock.now = 1000
    assert allowed(rates, "a", 100) == 20


def test_clients_are_limited_independently(clock):
    rates = ClientRates(1, clock=clock)
    assert allowed(rates, "a", 10) == 2
    assert allowed(rates, "b", 10) == 2


def test_throttled_says_when_to_retry(clock):
    rates = ClientRates(2, clock=clock)
    allowed(rates, "a", 10)
    with pytest.raises(Throttled) as refused:
        rates.take("a")
    clock.now += refused.value.retry_after_s
    rates.take("a")


def test_the_number_of_tracked_clients_is_limited(clock, monkeypatch):
    monkeypatch.setattr(client_rates, "CLIENTS_MAX", 3)
    rates = ClientRates(1, clock=clock)
    for client in "abcd":
        allowed(rates, client, 5)
    assert allowed(rates, "d", 5) == 0
    assert allowed(rates, "a", 5) == 2  # forgotten
