"""The threads in which blocking calls of both doors are made.

The event loop never waits for a disk or a bucket: `readers` are for reads that may wait for the
disk, `cold_readers` for those that may wait for the bucket, `writers` for writes to disk (topics,
groups), `cold_writers` for what waits for the bucket (trims, uploads, verifications), `parsers` for
decoding and encoding large bodies; `searchers` are for the console's searches, which read at
length; `tables` is for Iceberg's catalog, which may hang. Each has its own threads, so that a
bucket that does not respond blocks neither local reads nor `/metrics`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import Context
from typing import Any

from tierlog.broker.partition.partition import Readable
from tierlog.host.file_slice import HoldsFiles
from tierlog.host.threads import Threads


class Workers:
    def __init__(
        self, *, read_threads: int, write_threads: int, parse_threads: int, search_threads: int
    ) -> None:
        """Raises TooManyThreads."""
        self._pools: list[Threads] = []
        self.readers = self._pool("api-read", read_threads)
        self.cold_readers = self._pool("api-cold", read_threads)
        self.writers = self._pool("api-write", write_threads)
        self.cold_writers = self._pool("api-cold-write", write_threads)
        self.parsers = self._pool("api-parse", parse_threads)
        self.searchers = self._pool("api-search", search_threads)
        self.tables = self._pool("api-table", 1)

    def _pool(self, name: str, threads: int) -> Threads:
        self._pools.append(Threads(threads, name=name))
        return self._pools[-1]

    def threads_for(self, partition: Readable, offset: int) -> Executor:
        """Those of the tier that holds this offset."""
        is_cold = offset < partition.offsets().local_log_start_offset
        return self.cold_readers if is_cold else self.readers

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)


def call_on_loop(
    loop: asyncio.AbstractEventLoop,
    call: Callable[..., object],
    *args: object,
    context: Context | None = None,
) -> None:
    """Have the event loop make the call, from any thread; never, once the server has stopped."""
    try:
        loop.call_soon_threadsafe(call, *args, context=context)
    except RuntimeError:
        assert loop.is_closed()


def close_late(future: Future[Any]) -> None:
    """Nobody waits for this call any more: cancel it, and close the files that it brings."""
    future.cancel()
    future.add_done_callback(_close_result)


def _close_result(future: Future[Any]) -> None:
    if not future.cancelled() and future.exception() is None:
        found = future.result()
        if isinstance(found, HoldsFiles):
            found.close()
