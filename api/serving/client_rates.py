"""A limit of requests per second for each client, by token name or address: a token bucket that
after a pause has `BURST_S` seconds' worth. HTTP and Kafka share one: a client has one rate, through
whichever door it comes.
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
    """At most `CLIENTS_MAX` clients are tracked: the least recent one is evicted, and starts again
    with a full bucket. Used on the event loop only.
    """

    def __init__(self, per_second: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second, self._clock = per_second, clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, client: str) -> None:
        """Count one request. Raises Throttled, with the time until the next is allowed."""
        left = self._left(client)
        if left < 1:
            raise Throttled(
                f"more than {self._per_second} requests per second from this client",
                retry_after_s=(1 - left) / self._per_second,
            )
        self._keep(client, left - 1)

    def take_in_advance(self, client: str) -> float:
        """Count one request, which is served in any case. Returns for how many seconds the client's
        next ones have to wait: Kafka's quotas.
        """
        left = self._left(client) - 1
        self._keep(client, left)
        return max(0.0, -left / self._per_second)

    def _left(self, client: str) -> float:
        now, full = self._clock(), max(1.0, self._per_second * BURST_S)
        left, since = self._buckets.pop(client, (full, now))
        left = min(full, left + (now - since) * self._per_second)
        self._keep(client, left)
        return left

    def _keep(self, client: str, left: float) -> None:
        self._buckets[client] = (left, self._clock())
        if len(self._buckets) > CLIENTS_MAX:
            self._buckets.popitem(last=False)
