"""One call as a value, and the conversation it takes: no sockets and no sleeping here.

Rules that keep it honest:

* A `Call` is what to send, how to read the answer, and whether sending it twice is harmless. The
  drivers (`Client`, `AsyncClient`) send and wait; every decision is made in this file.
* A call that writes is sent again only if the first copy certainly did nothing: it was never sent
  (`Unsent`), or the broker refused it and said so. A broken connection in between is
  `OutcomeUnknownError`, for the caller to settle; so is what a gateway answers in the broker's
  place, and a broker that stopped in the middle of it.
* A write that is sent again may be refused, or find nobody, although a copy took effect: then
  `AnswerLost` is the cause.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, NamedTuple, TypeVar

from record_format.errors import OutcomeUnknownError, RetriableError
from tierlog.client.problems import (
    error_of,
    is_by_gateway,
    is_cut_by_stop,
    is_refusal,
    retry_after_s,
)
from tierlog.client.wire import Reply, Request

log = logging.getLogger(__name__)

TELL_EVERY_S: Final = 10.0

T = TypeVar("T")


class Repeat(Enum):
    """What a second copy of a request does."""

    HARMLESS = "reads, and writes that say the same thing twice"
    DUPLICATES = "a plain produce: records would be there twice"


class Unsent(NamedTuple):
    """The request did not leave: no connection could be made."""

    reason: str


class Broken(NamedTuple):
    """The connection failed after some of the request had left."""

    reason: str


class Pause(NamedTuple):
    """Wait before going on."""

    seconds: float


class BrokerUnreachable(RetriableError):
    """No connection to the broker, or none that lasted long enough for an answer."""


class AnswerLost(OutcomeUnknownError):
    """The connection broke after a write was sent: it may or may not have landed."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request and how to read its answer."""

    request: Request
    read: Callable[[Reply], T]
    repeat: Repeat = Repeat.HARMLESS
    # Statuses outside 200 to 299 that are answers to this call, not failures of it.
    answered_by: frozenset[int] = frozenset()


RESTART_S: Final = 120.0  # as long as a broker's restart may take; Kafka's delivery.timeout.ms
ENDLESS: Final = 2**63


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, after how long, and for how long.

    * No attempt begins later than `deadline_s` after the first: a broker whose store hangs refuses
      after half a minute, and is not asked five times. The time that a call itself asks to wait is
      added, up to as long again.
    * A `Retry-After` above `max_pause_s` ends a few attempts. Who asks on (ENDLESS) waits as long
      as was told, within the deadline, at which it asks once more.
    """

    attempts: int = 5
    first_pause_s: float = 0.1
    max_pause_s: float = 5.0
    deadline_s: float = 30.0
    jitter: Callable[[], float] = field(default=random.random)
    clock: Callable[[], float] = field(default=time.monotonic)

    def pause_s(self, attempt: int) -> float:
        """Before attempt number `attempt` + 1; between half and all of an exponential step."""
        step = min(self.first_pause_s * 2.0 ** min(attempt - 1, 64), self.max_pause_s)
        return step * (0.5 + self.jitter() / 2)

    @property
    def asks_on(self) -> bool:
        return self.attempts >= ENDLESS


NO_RETRIES: Final = RetryPolicy(attempts=1)
OVER_A_RESTART: Final = RetryPolicy(attempts=ENDLESS, deadline_s=RESTART_S)

Step = Request | Pause
Outcome = Reply | Unsent | Broken | None
Steps = Generator[Step, Outcome, T]


def exchange(call: Call[T], policy: RetryPolicy) -> Steps[T]:
    """Yield what to do next, be sent what came of it, return the call's answer.

    Raises the error that the problem document stands for, BrokerUnreachable, or AnswerLost; from
    AnswerLost if a copy of a write may have taken effect.
    """
    attempt, began_s = 0, policy.clock()
    told_s = began_s
    until_s = began_s + policy.deadline_s + min(call.request.extra_wait_s, policy.deadline_s)
    lost: AnswerLost | None = None
    while True:
        attempt += 1
        outcome = yield call.request
        if isinstance(outcome, Reply) and _is_answer(outcome, call):
            return call.read(outcome)
        if (
            _may_be_done(outcome)
            and call.request.method != "GET"
            and call.repeat is Repeat.HARMLESS
        ):
            lost = AnswerLost(f"the answer to copy {attempt} of this request was lost")
        now_s = policy.clock()
        told_to_s = retry_after_s(outcome) if isinstance(outcome, Reply) else 0.0
        if policy.asks_on:
            told_to_s = min(told_to_s, until_s - now_s)
        wait_s = max(policy.pause_s(attempt), told_to_s)
        late = now_s + wait_s > until_s
        told_off = told_to_s > policy.max_pause_s and not policy.asks_on
        if late or told_off or attempt >= policy.attempts or not _may_repeat(call.repeat, outcome):
            raise _failure(call, outcome) from lost
        if max(now_s - told_s, wait_s) >= TELL_EVERY_S:
            pause = f", next in {wait_s:.0f} s" if wait_s >= TELL_EVERY_S else ""
            waited_s = now_s - began_s
            log.warning("still trying after %.0f s%s: %s", waited_s, pause, _failure(call, outcome))
            told_s = now_s
        yield Pause(wait_s)


def _is_answer(reply: Reply, call: Call[T]) -> bool:
    return 200 <= reply.status < 300 or reply.status in call.answered_by


def _may_repeat(repeat: Repeat, outcome: Outcome) -> bool:
    if isinstance(outcome, Unsent) or (isinstance(outcome, Reply) and is_refusal(outcome)):
        return True
    return repeat is Repeat.HARMLESS and _may_be_done(outcome)


def _may_be_done(outcome: Outcome) -> bool:
    if isinstance(outcome, Reply):
        return is_by_gateway(outcome) or is_cut_by_stop(outcome)
    return isinstance(outcome, Broken)


def _failure(call: Call[T], outcome: Outcome) -> Exception:
    where = f"{call.request.method} {call.request.path}"
    if isinstance(outcome, Reply):
        if is_by_gateway(outcome) and call.repeat is Repeat.DUPLICATES:
            return AnswerLost(f"{where}: {outcome.status} by a gateway; it may have been done")
        return error_of(outcome, call.request)
    assert isinstance(outcome, (Unsent, Broken)), "a request is answered by its outcome"
    if isinstance(outcome, Unsent):
        return BrokerUnreachable(f"cannot reach the broker: {outcome.reason}")
    if call.repeat is Repeat.DUPLICATES:
        return AnswerLost(f"{where}: {outcome.reason}; it is not known whether it was done")
    return BrokerUnreachable(f"{where}: {outcome.reason}")
