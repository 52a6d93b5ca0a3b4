"""Large responses take turns."""

import asyncio
from collections import Counter

from tierlog.api.serving.slice_sender import TURN_BYTES, SendScheduler

WINDOW = TURN_BYTES // 2


def drain(scheduler: SendScheduler, sent: Counter[int], number: int, left: int) -> None:
    """A sender whose socket accepts everything, rescheduled until nothing is left."""
    loop = asyncio.get_running_loop()

    def send() -> int:
        nonlocal left
        left -= 1
        sent[number] += 1
        if left:
            scheduler.schedule(send, loop)
        return WINDOW

    scheduler.schedule(send, loop)


def test_all_senders_get_a_turn_and_the_loop_runs_in_between():
    async def case() -> None:
        scheduler, sent = SendScheduler(), Counter[int]()
        for number in range(8):
            drain(scheduler, sent, number, left=20)
        passes = 0
        while sum(sent.values()) < 8 * 20:
            await asyncio.sleep(0)  # other tasks get an iteration of the loop
            passes += 1
            assert sum(sent.values()) <= passes * TURN_BYTES // WINDOW
            assert max(sent.values()) - min(sent[number] for number in range(8)) <= 1
        assert passes >= 8 * 20 * WINDOW // TURN_BYTES
        assert not scheduler.busy

    asyncio.run(case())


def test_a_sender_without_bytes_does_not_stop_the_others():
    async def case() -> None:
        scheduler, sent = SendScheduler(), Counter[int]()
        for _ in range(5):
            scheduler.schedule(lambda: 0, asyncio.get_running_loop())
        drain(scheduler, sent, 1, left=3)
        for _ in range(10):
            await asyncio.sleep(0)
        assert sent[1] == 3

    asyncio.run(case())
