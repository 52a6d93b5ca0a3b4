"""Starts fetching what a reader will want: chunks ahead of it, also in the segments that follow.

* The chunk that is wanted now goes first, so that no guess delays it.
* What this read itself will wait for (more than one chunk) is started together, whoever reads;
  beyond that, `read_ahead` says how far.
* A failure here is not reported: the reader will meet it.

Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from itertools import islice
from typing import Final

from cold_tier.chunk_fills import ChunkFills
from cold_tier.read_ahead import Ahead, ReadAhead
from cold_tier.segment_indexes import ColdSegment, SegmentIndex, SegmentIndexes
from record_format.errors import TierlogError

SEGMENTS_AHEAD: Final = 2
TASKS_AHEAD: Final = 32


class Prefetcher:
    def __init__(self, fills: ChunkFills, indexes: SegmentIndexes, read_ahead: ReadAhead) -> None:
        self._fills, self._indexes, self._read_ahead = fills, indexes, read_ahead
        self._pool = ThreadPoolExecutor(SEGMENTS_AHEAD, thread_name_prefix="cold-ahead")
        self._slots = threading.BoundedSemaphore(TASKS_AHEAD)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def begin(
        self,
        segment: ColdSegment,
        index: SegmentIndex,
        offset: int,
        *,
        max_bytes: int,
        following: Iterable[ColdSegment],
    ) -> Ahead:
        """Begin with what a read of `max_bytes` from `offset` on will want; what was done."""
        number = index.table.index_of(offset)
        here = (segment.log_key, number)
        ahead = self._read_ahead.before(_folder_of(segment.log_key), offset, chunk=here)
        window, surely = ahead.window, _surely_wanted(index, number, max_bytes=max_bytes)
        if surely <= window and (not window or ahead.settled):
            return ahead
        reach = max(window, surely)
        end = min(number + 1 + reach, len(index.chunks))
        begun = [self._fills.prefetch(chunk) for chunk in index.chunks[number:end]]
        beyond = number + 1 + window - end
        if beyond > 0:
            begun.append(self._begin_beyond(following, beyond))
        return Ahead(window, here, settled=all(begun))

    def ended(self, segment: ColdSegment, next_offset: int, *, done: Ahead) -> None:
        """A read that was begun like this ended at `next_offset`."""
        self._read_ahead.note(_folder_of(segment.log_key), next_offset, done=done)

    def _begin_beyond(self, following: Iterable[ColdSegment], chunks: int) -> bool:
        if not self._slots.acquire(blocking=False):
            return False
        try:
            self._pool.submit(self._fetch_beyond, iter(following), chunks)
        except RuntimeError:  # the pool's only word for: shut down
            self._slots.release()
            return False
        return True

    def _fetch_beyond(self, following: Iterator[ColdSegment], chunks: int) -> None:
        try:
            with suppress(TierlogError, BlockingIOError):
                for segment in islice(following, SEGMENTS_AHEAD):
                    index = self._indexes.get(segment)
                    for chunk in index.chunks[:chunks]:
                        self._fills.prefetch(chunk)
                    chunks -= len(index.chunks)
                    if chunks <= 0:
                        return
        finally:
            self._slots.release()


@lru_cache(maxsize=4096)
def _folder_of(log_key: str) -> str:
    """Of the partition: what the reads of one sequence have in common."""
    return log_key.rpartition("/")[0]


def _surely_wanted(index: SegmentIndex, number: int, *, max_bytes: int) -> int:
    """How many chunks after this one a read goes on to: while half of what it wants is missing."""
    chunks = index.chunks
    got = count = 0
    while number + count < len(chunks) - 1:
        got += chunks[number + count].size_bytes
        if got * 2 > max_bytes:
            break
        count += 1
    return count
