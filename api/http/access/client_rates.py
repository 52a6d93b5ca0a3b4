"""Rate limits: a token bucket per client.

* After a pause a client may send a burst of `BURST_S` seconds' worth of requests.
* At most `CLIENTS_MAX` clients are tracked: the least recent one is evicted, and starts again with
  a full bucket.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from tierlog.record_format.errors import Throttled

BURST_S: Final = 2.0
CLIENTS_MAX: Final = 10_000


class ClientRates:
    """Used on the event loop only."""

    def __init__(self, per_second: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second, self._clock = per_second, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str) -> None:
        """Count one request. Raises Throttled, with the time until the next is allowed."""
        rate = self._per_second
        now, full = self._clock(), max(1.0, rate * BURST_S)
        left, since = self._buckets.pop(client, (full, now))
        left = min(full, left + (now - since) * rate)
        self._buckets[client] = (left - 1 if left >= 1 else left, now)
        if len(self._buckets) > CLIENTS_MAX:
            self._buckets.popitem(last=False)
        if left < 1:
            raise Throttled(
                f"more than {rate} requests per second from this client",
                retry_after_s=(1 - left) / rate,
            )
