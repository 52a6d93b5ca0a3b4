import threading

import pytest

from tierlog.cli.bench import _threads


def test_an_interrupt_does_not_wait_for_queued_work():
    started, release = [], threading.Event()

    def work(number):
        started.append(number)
        release.wait(5)

    def interrupted():
        with _threads(2) as pool:
            for number in range(1000):
                pool.submit(work, number)
            threading.Timer(0.05, release.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(started) <= 4
