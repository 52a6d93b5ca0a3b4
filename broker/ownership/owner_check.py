"""The look at the manifest in force on which an answer to a producer rests: does this folder still
own the partition?

* An answer rests on a look that began at most `fence.check.ms` before it, on a clock that counts
  suspension: a process that slept looks before it answers. `FenceChecker` looks at half that
  interval, so that an owner that is awake compares two clock values and never waits.
* Only a store that does not answer lets an owner go on. All partitions share that knowledge, and
  the checker renews it: an outage is waited for once, by whoever finds it, not by each group.
* Damage is not a claim: what cannot be read fences nobody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Final, NamedTuple

from tierlog.broker.ownership.ownership import Ownership
from tierlog.host.clock import boottime_ms
from tierlog.host.threads import run_in_daemon_thread
from tierlog.record_format.errors import ConfigurationError, StoreUnavailable

NEVER_MS: Final = -(2**63)
LEAST_PATIENCE_MS: Final = 1000  # of a store across the ocean, whatever `fence.check.ms` is


class Silence:
    """Whether the store answers looks; `reason` is None while it does. Shared by all partitions."""

    def __init__(self, *, check_ms: int, boot_clock: Callable[[], int] = boottime_ms) -> None:
        patience_ms = max(LEAST_PATIENCE_MS, check_ms // 5)
        self.check_ms, self.boot_clock, self.patience_s = check_ms, boot_clock, patience_ms / 1000
        # The next look of the checker begins after half the interval, and fails that much later.
        self._excused_ms = max(check_ms, check_ms // 2 + 2 * patience_ms)
        self._began_ms = self._answered_ms = NEVER_MS
        self.reason: str | None = None

    def excuses(self, now_ms: int) -> bool:
        return now_ms - self._began_ms <= self._excused_ms

    def note_unanswered(self, began_ms: int, reason: str) -> None:
        self.reason = reason
        self._began_ms = max(began_ms, self._began_ms)

    def note_waited(self, since_ms: int) -> None:
        """Looks have been waiting since then. A sleep meanwhile says nothing about the store."""
        has_slept = self.boot_clock() - since_ms > self.check_ms
        if self._answered_ms < since_ms and not has_slept:
            self.note_unanswered(since_ms, f"no answer within {self.patience_s:g} s")

    def note_answered(self, began_ms: int) -> None:
        self._answered_ms = self.boot_clock()
        if began_ms >= self._began_ms:
            self._began_ms, self.reason = NEVER_MS, None


class _Look(NamedTuple):
    began_ms: int
    done: Future[None]


class OwnerCheck:
    """Of one partition. Thread-safe."""

    def __init__(self, ownership: Ownership, silence: Silence) -> None:
        self._ownership, self._silence = ownership, silence
        self._lock = threading.Lock()
        self._look: _Look | None = None
        self.looked_ms = silence.boot_clock()  # when the last look that was answered began

    @property
    def is_due(self) -> bool:
        """Whether an answer has to wait for a look."""
        now_ms = self._silence.boot_clock()
        is_old = now_ms - self.looked_ms > self._silence.check_ms
        return is_old and not self._silence.excuses(now_ms)

    def look(self, *, log_end_offset: int) -> None:
        """Look now, however long it takes. Raises as `look_in_time` does."""
        began_ms = self._silence.boot_clock()
        try:
            self._check(began_ms, log_end_offset)
        except (StoreUnavailable, ConfigurationError) as error:
            self._silence.note_unanswered(began_ms, str(error))
            raise

    def look_in_time(self, *, log_end_offset: int) -> None:
        """Look now, in a thread that is left behind if the store takes too long: what it answers
        later still counts. Raises FencedError, UnknownTopic, StoreUnavailable, and what a look at a
        damaged manifest raises.
        """
        look = self._begin(log_end_offset)
        try:
            look.done.result(self._silence.patience_s)
        except TimeoutError as error:
            reason = f"no answer within {self._silence.patience_s:g} s"
            self._silence.note_unanswered(look.began_ms, reason)
            raise StoreUnavailable(reason) from error
        except (StoreUnavailable, ConfigurationError) as error:
            self._silence.note_unanswered(look.began_ms, str(error))
            raise

    def _begin(self, log_end_offset: int) -> _Look:
        """The look in progress, unless it began too long ago: before a sleep, or in an outage."""
        with self._lock:
            now_ms, look = self._silence.boot_clock(), self._look
            if look is None or look.done.done() or now_ms - look.began_ms > self._silence.check_ms:
                call = partial(self._check, now_ms, log_end_offset)
                look = self._look = _Look(now_ms, run_in_daemon_thread(call, name="owner-check"))
            return look

    def _check(self, began_ms: int, log_end_offset: int) -> None:
        try:
            self._ownership.check_fence(log_end_offset=log_end_offset)
        except (StoreUnavailable, ConfigurationError):
            raise
        except BaseException:
            self._note_answered(began_ms)
            raise
        self._note_answered(began_ms)

    def _note_answered(self, began_ms: int) -> None:
        self.looked_ms = max(self.looked_ms, began_ms)
        self._silence.note_answered(began_ms)
