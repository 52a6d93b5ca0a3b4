import threading

import pytest

from tierlog.cli.bench import _threads


def test_what_is_not_begun_is_not_waited_for():
    begun, go_on = [], threading.Event()

    def work(number):
        begun.append(number)
        go_on.wait(5)

    def interrupted():
        with _threads(2) as pool:
            for number in range(1000):
                pool.submit(work, number)
            threading.Timer(0.05, go_on.set).start()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert len(begun) <= 4
