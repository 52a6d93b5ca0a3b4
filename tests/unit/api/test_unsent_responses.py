"""Large responses between their rendering and their clients' reading."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tierlog.api.http.bodies import InflightBytes
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.memory_limits import UnsentLimits, UnsentResponses
from tierlog.api.http.responses import SMALL_BYTES, AnyResponse, FileResponse, Response
from tierlog.record_format.errors import Throttled

SIZE = SMALL_BYTES + 1


def test_responses_that_wait_for_a_slow_disk_are_bounded(tmp_path: Path) -> None:
    async def case() -> None:
        disk_responds = threading.Event()
        disk.submit(disk_responds.wait)
        inflight = InflightBytes(2 * SIZE)
        unsent = UnsentResponses(tmp_path, disk, inflight)
        unsent.limits = UnsentLimits(memory_bytes=0)

        async def admit() -> AnyResponse:
            exchange = Exchange({"method": "GET", "headers": []})
            return await unsent.admit(exchange, Response(200, [], bytes(SIZE)))

        admitted = [asyncio.create_task(admit()) for _ in range(3)]
        await asyncio.wait(admitted, timeout=0)  # each runs until it has to wait
        disk_responds.set()
        outcomes = await asyncio.gather(*admitted, return_exceptions=True)
        assert [type(one) for one in outcomes] == [FileResponse, FileResponse, Throttled]
        assert (inflight.held, unsent.held.disk_bytes) == (0, 2 * SIZE)

    with ThreadPoolExecutor(1) as disk:
        asyncio.run(case())
