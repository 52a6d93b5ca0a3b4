import signal

import pytest

from spark_reader.jobs.session import _interrupt_deferred


@pytest.mark.parametrize(("times", "started"), [(1, True), (2, False)])
def test_an_interrupt_waits_until_spark_is_there_and_a_second_does_not(times, started):
    before, there = signal.getsignal(signal.SIGINT), []

    def start():
        with _interrupt_deferred():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            there.append(True)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert bool(there) == started
    assert signal.getsignal(signal.SIGINT) is before


def test_sparks_own_handler_stays():
    before = signal.getsignal(signal.SIGINT)
    try:
        with _interrupt_deferred():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
