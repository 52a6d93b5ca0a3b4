"""Large responses between their rendering and their clients' reading."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from tierlog.api.http.exchange import Exchange
from tierlog.api.http.request.bodies import InflightBytes
from tierlog.api.http.responses import SMALL_BYTES, AnyResponse, FileResponse, Response
from tierlog.api.http.unsent_responses import UnsentLimits, UnsentResponses
from tierlog.host.file_slice import OpenFile
from tierlog.record_format.errors import Throttled

SIZE = SMALL_BYTES + 1


def test_responses_that_wait_for_a_slow_disk_are_bounded(tmp_path: Path) -> None:
    async def case() -> None:
        disk_responds = asyncio.Event()

        async def in_thread(call: Callable[[], OpenFile]) -> OpenFile:
            await disk_responds.wait()
            return call()

        inflight = InflightBytes(2 * SIZE)
        unsent = UnsentResponses(tmp_path, in_thread, inflight)
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

    asyncio.run(case())
