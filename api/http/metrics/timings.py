"""How long each part of a request took, for the `Server-Timing` header, in milliseconds.

`broker`: the log and the local disk, including the wait for a flush. `store`: reads from the cold
tier. `encode`: encoding and decoding records as text. `total`: from the head of the request to the
head of the response; it alone includes the wait of a long poll.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from typing import Literal

Part = Literal["broker", "store", "encode"]


class Timings:
    """The timings of one request; used on the event loop."""

    __slots__ = ("_began_s", "broker", "encode", "store")

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self.broker = self.store = self.encode = 0.0

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began_s

    def add(self, part: Part, began_s: float) -> None:
        """Add the time since `began_s`, a value of `time.perf_counter`."""
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
    """Start the timings of a request; in its task, `record` adds to them."""
    timings = Timings()
    _CURRENT.set(timings)
    return timings


def record(part: Part, began_s: float) -> None:
    """Add the time since `began_s` to the current request's timings."""
    timings = _CURRENT.get()
    if timings is not None:
        timings.add(part, began_s)
