from concurrent.futures import ThreadPoolExecutor

import pytest

from tierlog.cold_tier.segment_uploader import UploadThrottle
from tierlog.record_format.errors import ShuttingDown


class Clock:
    def __init__(self):
        self.now = 100.0
        self.slept = []

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


def test_the_rate_is_kept_over_many_parts():
    clock = Clock()
    throttle = UploadThrottle(1000, monotonic=lambda: clock.now, sleep=clock.sleep)
    for _ in range(50):
        throttle(100)
    assert abs(clock.now - 100.0 - 4.9) < 0.2, "5,000 bytes, the last part starts after 4.9 s"


def test_at_most_one_idle_second_is_saved():
    clock = Clock()
    throttle = UploadThrottle(1000, monotonic=lambda: clock.now, sleep=clock.sleep)
    clock.now += 3600
    throttle(1000)
    throttle(1000)
    assert clock.slept == []
    throttle(1000)
    assert clock.slept == [1.0]


@pytest.mark.parametrize("rate", [None, 1])
def test_a_stop_interrupts_waiting_uploads(rate):
    throttle = UploadThrottle(rate)
    throttle(10**6)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(throttle, 1) if rate else None
        throttle.stop()
        if waiting is not None:
            with pytest.raises(ShuttingDown):
                waiting.result(10)
    with pytest.raises(ShuttingDown):
        throttle(1)
