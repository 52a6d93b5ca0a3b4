"""One call as a value, and the exchange of requests that it takes: no sockets, no sleeping.

Rules that keep it honest:

* A `Call` is what to send, how to read the response, and whether it is idempotent. The drivers
  (`Client`, `AsyncClient`) send and wait; every decision is made in this file.
* A write that is not idempotent is retried only if the first attempt certainly had no effect: it
  was never sent (`NotSent`), or the broker refused it and said so. A connection lost in between is
  an `OutcomeUnknownError` for the caller to resolve; so is an error response from a gateway, or
  from a broker that shut down during the request.
* A retried write may be refused, or fail to connect, although an earlier attempt took effect: then
  `AnswerLost` is the cause of the error.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

from tierlog.client.problems import (
    error_from_response,
    is_gateway_error,
    is_interrupted_by_shutdown,
    is_retriable_refusal,
    retry_after_s,
)
from tierlog.client.wire import Request, Response
from tierlog.host.retry import backoff_s
from tierlog.record_format.errors import OutcomeUnknownError, RetriableError

log = logging.getLogger(__name__)

LOG_INTERVAL_S: Final = 10.0

T = TypeVar("T")


class NotSent(NamedTuple):
    """The request was not sent: no connection could be made."""

    reason: str


class ConnectionLost(NamedTuple):
    """The connection failed after part of the request was sent."""

    reason: str


class Pause(NamedTuple):
    """Wait before the next attempt."""

    seconds: float


class BrokerUnreachable(RetriableError):
    """No connection to the broker, or none that lasted until its response."""


class AnswerLost(OutcomeUnknownError):
    """The connection was lost after a write was sent: it may or may not have taken effect."""


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request and how to read its response. `idempotent`: sending it twice does no harm (reads,
    and writes that the broker deduplicates); a plain produce would append its records twice.
    """

    request: Request
    read: Callable[[Response], T]
    idempotent: bool = True
    # Statuses outside 200 to 299 that are results of this call, not failures.
    expected_statuses: frozenset[int] = frozenset()
    once: bool = False  # not retried, whatever the policy


RESTART_TIMEOUT_S: Final = 120.0  # for a broker's restart; Kafka's delivery.timeout.ms
UNLIMITED_ATTEMPTS: Final = 2**63


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a call is attempted, with which pauses, and for how long.

    * No attempt begins later than `deadline_s` after the first: a broker whose store hangs refuses
      after half a minute, and is not asked five times. The time that a call itself asks to wait is
      added, up to as long again.
    * A `Retry-After` above `max_pause_s` ends a limited number of attempts. With
      UNLIMITED_ATTEMPTS it is honoured, up to the deadline, at which one last attempt is made.
    """

    attempts: int = 5
    first_pause_s: float = 0.1
    max_pause_s: float = 5.0
    deadline_s: float = 30.0
    jitter: Callable[[], float] = field(default=random.random)
    clock: Callable[[], float] = field(default=time.monotonic)

    def pause_s(self, attempt: int) -> float:
        """After attempt number `attempt`."""
        return backoff_s(
            attempt, first_s=self.first_pause_s, max_s=self.max_pause_s, jitter=self.jitter()
        )

    @property
    def is_unlimited(self) -> bool:
        return self.attempts >= UNLIMITED_ATTEMPTS


NO_RETRIES: Final = RetryPolicy(attempts=1)
RETRY_OVER_RESTART: Final = RetryPolicy(attempts=UNLIMITED_ATTEMPTS, deadline_s=RESTART_TIMEOUT_S)

Step = Request | Pause
Outcome = Response | NotSent | ConnectionLost | None
Steps = Generator[Step, Outcome, T]


def exchange(call: Call[T], policy: RetryPolicy) -> Steps[T]:
    """Yield each step, receive its outcome, return the call's result.

    Raises the error that the problem document stands for, BrokerUnreachable, or AnswerLost; from
    AnswerLost if an earlier attempt of a write may have taken effect.
    """
    retries = _Retries(call, NO_RETRIES if call.once else policy)
    while True:
        outcome = yield call.request
        if isinstance(outcome, Response) and _is_success(outcome, call):
            return call.read(outcome)
        yield retries.pause_after(outcome)


class _Retries:
    """The attempts of one call: whether there is another, and when."""

    def __init__(self, call: Call[T], policy: RetryPolicy) -> None:
        self._call, self._policy = call, policy
        self._attempt = 0
        self._start_s = self._logged_s = policy.clock()
        requested_wait_s = min(call.request.extra_wait_s, policy.deadline_s)
        self._deadline_s = self._start_s + policy.deadline_s + requested_wait_s
        self._response_lost: AnswerLost | None = None

    def pause_after(self, outcome: Outcome) -> Pause:
        """The pause before the next attempt. Raises the call's error if there is none."""
        self._attempt += 1
        is_write = self._call.request.method != "GET"
        if is_write and self._call.idempotent and _may_have_taken_effect(outcome):
            lost = f"the response to attempt {self._attempt} of this request was lost"
            self._response_lost = AnswerLost(lost)
        now_s = self._policy.clock()
        pause_s = self._pause_s(outcome, now_s)
        if pause_s is None:
            raise _failure(self._call, outcome) from self._response_lost
        self._log(outcome, pause_s, now_s)
        return Pause(pause_s)

    def _pause_s(self, outcome: Outcome, now_s: float) -> float | None:
        policy = self._policy
        if self._attempt >= policy.attempts or not _may_retry(self._call, outcome):
            return None
        requested_s = retry_after_s(outcome) if isinstance(outcome, Response) else 0.0
        left_s = self._deadline_s - now_s
        if policy.is_unlimited:
            requested_s = min(requested_s, left_s)
        elif requested_s > policy.max_pause_s:
            return None
        pause_s = max(policy.pause_s(self._attempt), requested_s)
        return pause_s if pause_s <= left_s else None

    def _log(self, outcome: Outcome, pause_s: float, now_s: float) -> None:
        if max(now_s - self._logged_s, pause_s) < LOG_INTERVAL_S:
            return
        self._logged_s = now_s
        following = f", next in {pause_s:.0f} s" if pause_s >= LOG_INTERVAL_S else ""
        error = _failure(self._call, outcome)
        log.warning("still retrying after %.0f s%s: %s", now_s - self._start_s, following, error)


def _is_success(response: Response, call: Call[T]) -> bool:
    return 200 <= response.status < 300 or response.status in call.expected_statuses


def _may_retry(call: Call[T], outcome: Outcome) -> bool:
    if isinstance(outcome, NotSent):
        return True
    if isinstance(outcome, Response) and is_retriable_refusal(outcome):
        return True
    return call.idempotent and _may_have_taken_effect(outcome)


def _may_have_taken_effect(outcome: Outcome) -> bool:
    if isinstance(outcome, Response):
        return is_gateway_error(outcome) or is_interrupted_by_shutdown(outcome)
    return isinstance(outcome, ConnectionLost)


def _failure(call: Call[T], outcome: Outcome) -> Exception:
    where = f"{call.request.method} {call.request.path}"
    if isinstance(outcome, Response):
        if is_gateway_error(outcome) and not call.idempotent:
            reason = f"status {outcome.status} from a gateway"
            return AnswerLost(f"{where}: {reason}; the request may have taken effect")
        return error_from_response(outcome, call.request)
    assert isinstance(outcome, (NotSent, ConnectionLost)), "a request has an outcome"
    if isinstance(outcome, NotSent):
        return BrokerUnreachable(f"cannot reach the broker: {outcome.reason}")
    if not call.idempotent:
        return AnswerLost(f"{where}: {outcome.reason}; the request may have taken effect")
    return BrokerUnreachable(f"{where}: {outcome.reason}")
