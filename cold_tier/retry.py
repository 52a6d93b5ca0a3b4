"""Retrying what may be retried: few attempts, growing delays with full jitter, one deadline.

* Only one layer retries: whoever calls something that retries does not retry it again.
* No attempt begins that would end after the deadline if it took as long as the one before: this
  limits the wait for a store that accepts connections but does not answer. The last error is
  raised.
* How long to go on is decided where a store is opened: a broker's callers wait for an answer, who
  reads a bucket alone would rather wait than fail.
* Wrong bytes are no silence: they are fetched once more, since the network may be at fault, and are
  CorruptObject then, however long a policy would go on.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from record_format.errors import CorruptObject, StoreUnavailable

log = logging.getLogger(__name__)

ENDLESS: Final = 2**63
TELL_AFTER_S: Final = 5.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    attempts: int = 5
    first_delay_s: float = 0.1
    max_delay_s: float = 5.0
    deadline_s: float = 60.0
    monotonic: Callable[[], float] = field(default=time.monotonic, repr=False)
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)
    jitter: Callable[[], float] = field(default=random.random, repr=False)

    def run(self, attempt: Callable[[], T]) -> T:
        """Call `attempt` until it answers. Errors other than StoreUnavailable, and ones marked
        final, pass.
        """
        first = self.monotonic()
        deadline, tell_at = first + self.deadline_s, first + TELL_AFTER_S
        for number in range(1, self.attempts + 1):
            began = self.monotonic()
            try:
                return attempt()
            except StoreUnavailable as error:
                if number == self.attempts or is_final(error):
                    raise
                delay_s, now = self.delay_s(number), self.monotonic()
                if now + delay_s + (now - began) >= deadline:
                    raise
                if now >= tell_at:
                    log.warning("still trying after %.0f s: %s", now - first, error)
                    tell_at = deadline
                self.sleep(delay_s)
        raise AssertionError("a policy has at least one attempt")

    def delay_s(self, failures: int) -> float:
        """After `failures` failed attempts: between a tenth and the whole of the ceiling."""
        step = self.first_delay_s * 2.0 ** min(failures - 1, 64)
        ceiling = min(self.max_delay_s, step)
        return ceiling * (0.1 + 0.9 * self.jitter())


# Somebody waits for it: refused at once, it fails within a second.
OF_A_READ: Final = RetryPolicy(attempts=4, max_delay_s=2.0, deadline_s=30.0)
# For readers of a bucket alone: by time, since a store that is down refuses at once.
OVER_AN_OUTAGE: Final = RetryPolicy(attempts=ENDLESS, deadline_s=30.0)


class WrongBytes(StoreUnavailable):
    """What arrived whole is not what its checksum says."""

    final = True  # counted apart from what the store could not do


def once_more_for_wrong_bytes(
    fetch: Callable[[], T], *, file: str, position: int | None = None
) -> T:
    """Raises CorruptObject if they are wrong again."""
    try:
        return fetch()
    except WrongBytes:
        pass
    try:
        return fetch()
    except WrongBytes as error:
        raise CorruptObject(str(error), file=file, position=position) from error


def is_final(error: StoreUnavailable) -> bool:
    """Whether this layer should pass the error on: the same bytes would be refused again."""
    return getattr(error, "final", False)
