"""An LRU cache of records encoded as text at the end of a log, shared by all its readers.

* Only pages that reach the end of the log are cached: many clients read there, and each record is
  encoded once for all of them. Reads of older records are not shared.
* Empty pages are not cached: a growing log would leave one at every end offset.
* A key holds everything that a page depends on, as values that are never reused for something else
  (the topic's id, not its name; the file ranges it was read from, since compaction replaces files).
* Concurrent requests for the same page render it once; the others wait for it, and get it even if
  it is too large to be cached.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from prometheus_client import Counter

from tierlog.broker.partition.partition import Readable
from tierlog.broker.partition.tiered_reads import Fetched

LIMIT_BYTES: Final = 16 << 20
PAGE_MAX_BYTES: Final = 1 << 20
KEY_BYTES: Final = 1 << 10  # roughly what a cached page takes besides its text

Key = tuple[object, ...]


class RenderedPage(NamedTuple):
    """Records encoded as the key says, and the offset after them. `needs_files`: of a large record,
    whose text is read while it is sent, from the files of this request: it is not shared.
    """

    content: Any
    next_offset: int
    size_bytes: int
    records: int
    needs_files: bool = False


class PendingPage:
    """A page that is being rendered. `page` stays None if that fails."""

    def __init__(self) -> None:
        self.done = asyncio.Event()
        self.page: RenderedPage | None = None


Render = Callable[[], Awaitable[RenderedPage]]


def page_key(partition: Readable, fetched: Fetched, offset: int, *form: object) -> Key:
    """`form`: how the records are selected and encoded."""
    source = tuple(
        (piece.file.name, os.fstat(piece.file.fd).st_ino, piece.position, piece.size_bytes)
        for piece in fetched.slices
    )
    return (partition.topic_id, partition.number, offset, fetched.next_offset, source, *form)


class SharedPages:
    """Used only on the event loop."""

    def __init__(self, counter: Counter, limit_bytes: int = LIMIT_BYTES) -> None:
        """`counter` has one label: `hit` or `miss`."""
        self._limit_bytes, self.size_bytes = limit_bytes, 0
        self._hits, self._misses = counter.labels("hit"), counter.labels("miss")
        self._pages: OrderedDict[Key, RenderedPage] = OrderedDict()
        self._pending: dict[Key, PendingPage] = {}

    async def get(self, key: Key, fetched: Fetched, render: Render) -> RenderedPage:
        """The cached page, or a new one, cached if `fetched` reached the end of the log."""
        if not _is_shared(fetched):
            return await render()
        while True:
            page = self._cached(key)
            if page is not None:
                return page
            pending = self._pending.get(key)
            if pending is None:
                return await self._rendered(key, render)
            await pending.done.wait()
            if pending.page is not None and not pending.page.needs_files:
                self._hits.inc()
                return pending.page
            # The other request failed, perhaps for reasons of its own, or its page is its own.

    def _cached(self, key: Key) -> RenderedPage | None:
        page = self._pages.get(key)
        if page is not None:
            self._hits.inc()
            self._pages.move_to_end(key)
        return page

    async def _rendered(self, key: Key, render: Render) -> RenderedPage:
        self._misses.inc()
        pending = self._pending[key] = PendingPage()
        try:
            pending.page = page = await render()
        finally:
            del self._pending[key]
            pending.done.set()
        self._add(key, page)
        return page

    def _add(self, key: Key, page: RenderedPage) -> None:
        if page.needs_files or page.size_bytes > PAGE_MAX_BYTES or key in self._pages:
            return
        self._pages[key] = page
        self.size_bytes += page.size_bytes + KEY_BYTES
        while self.size_bytes > self._limit_bytes:
            self.size_bytes -= self._pages.popitem(last=False)[1].size_bytes + KEY_BYTES


def _is_shared(fetched: Fetched) -> bool:
    return fetched.at_end and 0 < fetched.size_bytes <= PAGE_MAX_BYTES
