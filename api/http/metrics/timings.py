"""Where the time of a request went: `Server-Timing`, in milliseconds.

`broker`: the log and the local disk, including the wait for a flush. `store`: reads that went to
the cold tier. `encode`: records into text and text into records. `total`: from the head of the
request to the head of the response; the wait of a long poll is in it, and in none of the others.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Literal

Part = Literal["broker", "store", "encode"]


class Timings:
    """Those of one request; used on the event loop."""

    __slots__ = ("_began_s", "broker", "encode", "store")

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self.broker = self.store = self.encode = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began_s

    def add(self, part: Part, began_s: float) -> None:
        """Count the time since `began_s` (of `time.perf_counter`)."""
        setattr(self, part, getattr(self, part) + time.perf_counter() - began_s)

    def header(self) -> bytes:
        parts = [b"total;dur=%.3f" % (self.elapsed_s * 1000)]
        if self.broker:
            parts.append(b"broker;dur=%.3f" % (self.broker * 1000))
        if self.store:
            parts.append(b"store;dur=%.3f" % (self.store * 1000))
        if self.encode:
            parts.append(b"encode;dur=%.3f" % (self.encode * 1000))
        return b", ".join(parts)


_CURRENT: ContextVar[Timings | None] = ContextVar("tierlog_timings", default=None)


def begin() -> Timings:
    """The timings of a request that comes in now; in its task, `took` adds to them."""
    timings = Timings()
    _CURRENT.set(timings)
    return timings


def took(part: Part, began_s: float) -> None:
    """As `Timings.add`, for the current request."""
    timings = _CURRENT.get()
    if timings is not None:
        timings.add(part, began_s)
