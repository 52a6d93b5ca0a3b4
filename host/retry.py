"""Retries: a limited number of attempts, exponential backoff with jitter, one deadline.

* Only one layer retries: a caller of something that retries does not retry it again.
* An attempt is not started if it would miss the deadline when taking as long as the previous one.
  This limits the wait for a store that accepts connections but does not respond. The last error is
  raised.
* The policy is chosen where a store is opened: clients of a broker are waiting for a response,
  while a process that reads only from the bucket would rather wait than fail.
* A checksum mismatch is not an outage: the bytes are fetched once more, since the network may be at
  fault, and then it is CorruptObject, whatever the policy.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeVar

from tierlog.record_format.errors import CorruptObject, StoreUnavailable

log = logging.getLogger(__name__)

UNLIMITED: Final = 2**63
WARN_AFTER_S: Final = 5.0

T = TypeVar("T")


def backoff_s(failures: int, *, first_s: float, max_s: float, jitter: float = 1.0) -> float:
    """The wait after `failures` failures in a row, in the whole tree: it doubles from `first_s` up
    to `max_s`. `jitter`, in [0, 1], takes between half and all of that.
    """
    step_s = first_s * 2.0 ** max(0, min(failures - 1, 64))
    return min(max_s, step_s) * (0.5 + jitter / 2)


@dataclass(frozen=True, kw_only=True)
class RetryPolicy:
    attempts: int = 5
    first_delay_s: float = 0.1
    max_delay_s: float = 5.0
    deadline_s: float = 60.0
    monotonic: Callable[[], float] = field(default=time.monotonic, repr=False)
    sleep: Callable[[float], None] = field(default=time.sleep, repr=False)
    jitter: Callable[[], float] = field(default=random.random, repr=False)

    def call_with_retries(self, attempt: Callable[[], T]) -> T:
        """Call `attempt` until it succeeds. Retries StoreUnavailable, unless it is final."""
        first = self.monotonic()
        deadline, warn_at = first + self.deadline_s, first + WARN_AFTER_S
        for number in range(1, self.attempts + 1):
            began = self.monotonic()
            try:
                return attempt()
            except StoreUnavailable as error:
                if number == self.attempts or error.is_final:
                    raise
                delay_s, now = self.delay_s(number), self.monotonic()
                if now + delay_s + (now - began) >= deadline:
                    raise
                if now >= warn_at:
                    log.warning("still retrying after %.0f s: %s", now - first, error)
                    warn_at = deadline
                self.sleep(delay_s)
        raise AssertionError("a policy has at least one attempt")

    def delay_s(self, failures: int) -> float:
        """The delay after `failures` failed attempts."""
        return backoff_s(
            failures, first_s=self.first_delay_s, max_s=self.max_delay_s, jitter=self.jitter()
        )


# A client waits for the result: if connections are refused, a read fails within a second.
READ_POLICY: Final = RetryPolicy(attempts=4, max_delay_s=2.0, deadline_s=30.0)
# For processes that read only from the bucket. Limited by time alone, since a store that is down
# refuses connections at once.
OUTAGE_POLICY: Final = RetryPolicy(attempts=UNLIMITED, deadline_s=30.0)


class ChecksumMismatch(StoreUnavailable):
    """All bytes arrived, but they do not match their checksum."""

    is_final = True  # `retry_on_checksum_mismatch` retries it, not a policy


def retry_on_checksum_mismatch(
    fetch: Callable[[], T], *, file: str, position: int | None = None
) -> T:
    """Call `fetch`, and once more after a ChecksumMismatch; a second one is CorruptObject."""
    try:
        return fetch()
    except ChecksumMismatch:
        pass
    try:
        return fetch()
    except ChecksumMismatch as error:
        raise CorruptObject(str(error), file=file, position=position) from error
