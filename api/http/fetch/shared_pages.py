"""The end of a log as text, written once for all its readers.

* Only pages that end where the log ended are kept: many clients read there, and each record is
  written as text once for all of them. Readers of old records share nothing.
* An empty page is not kept: a growing log has one at each of its ends.
* A key holds everything that the page depends on, as values that never mean something else later
  (the topic's id, not its name; the very bytes it was made from, since compaction replaces files).
  The kept pages are limited in bytes; the least recently used goes first.
* If several ask for the same page at the same time, one makes it and the others wait for it; they
  get it even if it is too large to be kept.
"""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

from prometheus_client import Counter

from broker.partition import Fetched, Partition

LIMIT_BYTES: Final = 16 << 20
PAGE_MAX_BYTES: Final = 1 << 20
KEY_BYTES: Final = 1 << 10  # roughly what a kept page takes besides its text

Key = tuple[object, ...]


class RenderedPage(NamedTuple):
    """Records as text, in the form that the key names, and the offset after them."""

    content: Any
    next_offset: int
    size_bytes: int
    records: int


class PendingPage:
    """A page that is being made. `page` stays None if that failed."""

    def __init__(self) -> None:
        self.over = asyncio.Event()
        self.page: RenderedPage | None = None


Make = Callable[[], Awaitable[RenderedPage]]


def page_key(partition: Partition, fetched: Fetched, offset: int, *form: object) -> Key:
    """`form`: how the records are chosen and written."""
    source = tuple(
        (piece.file.name, os.fstat(piece.file.fd).st_ino, piece.position, piece.size_bytes)
        for piece in fetched.slices
    )
    return (partition.log.topic_id, partition.number, offset, fetched.next_offset, source, *form)


class SharedPages:
    """Used only on the event loop."""

    def __init__(self, counter: Counter, limit_bytes: int = LIMIT_BYTES) -> None:
        """`counter` has one label: `hit` or `miss`."""
        self._limit_bytes, self.size_bytes = limit_bytes, 0
        self._hits, self._misses = counter.labels("hit"), counter.labels("miss")
        self._pages: OrderedDict[Key, RenderedPage] = OrderedDict()
        self._under_way: dict[Key, PendingPage] = {}

    async def get(self, key: Key, fetched: Fetched, make: Make) -> RenderedPage:
        """The page, made if it is not there; kept if `fetched` reached the end of the log."""
        if not _is_shared(fetched):
            return await make()
        while True:
            page = self._kept(key)
            if page is not None:
                return page
            making = self._under_way.get(key)
            if making is None:
                return await self._made(key, make)
            await making.over.wait()
            if making.page is not None:
                self._hits.inc()
                return making.page
            # The other attempt failed, for reasons of its own: try again here.

    def get_now(self, key: Key, fetched: Fetched, make: Callable[[], RenderedPage]) -> RenderedPage:
        """As `get`, for a page that is made so quickly that nobody waits for another's."""
        if not _is_shared(fetched):
            return make()
        page = self._kept(key)
        if page is None:
            self._misses.inc()
            page = make()
            self._keep(key, page)
        return page

    def _kept(self, key: Key) -> RenderedPage | None:
        page = self._pages.get(key)
        if page is not None:
            self._hits.inc()
            self._pages.move_to_end(key)
        return page

    async def _made(self, key: Key, make: Make) -> RenderedPage:
        self._misses.inc()
        making = self._under_way[key] = PendingPage()
        try:
            making.page = page = await make()
        finally:
            del self._under_way[key]
            making.over.set()
        self._keep(key, page)
        return page

    def _keep(self, key: Key, page: RenderedPage) -> None:
        if page.size_bytes > PAGE_MAX_BYTES or key in self._pages:
            return
        self._pages[key] = page
        self.size_bytes += page.size_bytes + KEY_BYTES
        while self.size_bytes > self._limit_bytes:
            self.size_bytes -= self._pages.popitem(last=False)[1].size_bytes + KEY_BYTES


def _is_shared(fetched: Fetched) -> bool:
    return fetched.at_end and 0 < fetched.size_bytes <= PAGE_MAX_BYTES
