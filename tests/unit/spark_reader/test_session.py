import signal

import pytest

from tierlog.spark_reader.jobs.session import _interrupt_deferred


@pytest.mark.parametrize(("times", "started"), [(1, True), (2, False)])
def test_the_first_interrupt_is_deferred_until_spark_has_started(times, started):
    before, starts = signal.getsignal(signal.SIGINT), []

    def start():
        with _interrupt_deferred():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
            starts.append(True)

    with pytest.raises(KeyboardInterrupt):
        start()
    assert bool(starts) == started
    assert signal.getsignal(signal.SIGINT) is before


def test_a_handler_set_by_spark_is_kept():
    before = signal.getsignal(signal.SIGINT)
    try:
        with _interrupt_deferred():
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
