"""Searches for the records of one key: which chunks may have them, by the key filters of segments,
and the filters of the segments that come next, loaded meanwhile.

* A search costs one GET a segment, and each is needed only if the search comes so far. So as many
  are loaded ahead as lacked the key before: in vain never more than were looked at in vain.
* At most AHEAD_MAX are loaded ahead at once, by all searches together: with a round trip of 20 ms
  they are 800 a second, about what one process can parse. As many wait; more is dropped.
* What was loaded waits in the cache of indexes: of one search at most AHEAD_BYTES.
* Errors of what is loaded ahead are not reported: the search meets them when it comes there.
* A search ends by not going on: nothing more is loaded then than what was requested.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from tierlog.cold_tier.segment_lookup import SegmentIndexes
from tierlog.host.threads import Threads
from tierlog.record_format.errors import ShuttingDown, TierlogError
from tierlog.record_format.key_filter import hash_key
from tierlog.record_format.segment_entry import SegmentEntry

AHEAD_MAX: Final = 16
AHEAD_BYTES: Final = 4 << 20  # of `.indexes` objects: a quarter of what is kept of all

Beyond = Callable[[SegmentEntry], SegmentEntry | None]
"""The segment that a search comes to after this one."""


class KeySearch:
    """One search in one partition, for one thread at a time. `backward_to`: it goes from the newest
    segment to the one that has this offset.
    """

    __slots__ = (
        "_ahead",
        "_found_in",
        "_lacking",
        "_last_lacking",
        "backward_to",
        "key",
        "key_hash",
    )

    def __init__(self, key: bytes, *, backward_to: int | None = None) -> None:
        self.key, self.key_hash, self.backward_to = key, hash_key(key), backward_to
        self._ahead: deque[SegmentEntry] = deque()  # in the order in which the search meets them
        self._lacking, self._last_lacking, self._found_in = 0, "", ""

    def note_found(self, segment: SegmentEntry) -> None:
        self._found_in = segment.log_key

    def note_lacking(self, segment: SegmentEntry) -> None:
        """What is left of the segment has not the key."""
        if segment.log_key not in (self._found_in, self._last_lacking):
            self._lacking += 1
            self._last_lacking = segment.log_key

    def load_ahead(
        self, segment: SegmentEntry, beyond: Beyond, load: Callable[[SegmentEntry], bool]
    ) -> None:
        """`load` segments that come after this one, where the search is; False: not now."""
        ahead = self._ahead
        while ahead and not self._is_before(segment, ahead[0]):
            ahead.popleft()
        size_bytes = sum(one.indexes_size_bytes for one in ahead)
        while len(ahead) < min(AHEAD_MAX, self._lacking):
            following = beyond(ahead[-1] if ahead else segment)
            if following is None or not self._comes_to(following):
                return
            size_bytes += following.indexes_size_bytes
            if (ahead and size_bytes > AHEAD_BYTES) or not load(following):
                return
            ahead.append(following)

    def _is_before(self, segment: SegmentEntry, other: SegmentEntry) -> bool:
        if self.backward_to is None:
            return segment.base_offset < other.base_offset
        return segment.base_offset > other.base_offset

    def _comes_to(self, segment: SegmentEntry) -> bool:
        return self.backward_to is None or segment.last_offset >= self.backward_to


class FiltersAhead:
    """Loads key filters in threads. Thread-safe."""

    def __init__(self, indexes: SegmentIndexes) -> None:
        self._indexes = indexes
        self._pool = Threads(AHEAD_MAX, name="cold-keys")
        # A search may go on before its loads have given their slots back, and then begins others.
        self._slots = threading.BoundedSemaphore(2 * AHEAD_MAX)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def begin_load(self, segment: SegmentEntry) -> bool:
        """False if too many are being loaded."""
        if self._indexes.has_key_filters(segment):
            return True
        if not self._slots.acquire(blocking=False):
            return False
        try:
            self._pool.submit(self._load, segment)
        except ShuttingDown:
            self._slots.release()
            return False
        return True

    def _load(self, segment: SegmentEntry) -> None:
        try:
            with suppress(TierlogError):
                self._indexes.load_key_filters(segment)
        finally:
            self._slots.release()
