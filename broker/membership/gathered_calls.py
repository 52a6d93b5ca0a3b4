"""Calls to others, gathered: those for one destination go in order, all that wait in one.

* One goes at a time: a destination that does not answer holds up one thread.
* What is given while one is on its way goes with the next one.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

from tierlog.host.threads import Threads, begun
from tierlog.record_format.errors import ShuttingDown, TierlogError

To = TypeVar("To")
Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


class GatheredCalls(Generic[To, Asked, Answer]):
    """Thread-safe. `send` answers at most `most` calls for one destination, an error for each that
    is refused; what it raises is the answer to all.
    """

    def __init__(
        self,
        send: Callable[[To, list[Asked]], Sequence[Answer | TierlogError]],
        *,
        threads: Threads,
        most: int,
    ) -> None:
        self._send, self._threads, self._most = send, threads, most
        self._lock = threading.Lock()
        self._waiting: defaultdict[To, list[tuple[Asked, Future[Answer]]]] = defaultdict(list)
        self._sending: set[To] = set()  # whom a thread is busy with

    def give(
        self, to: To, call: Asked, *, at_once: Callable[[], Future[Answer] | None] = lambda: None
    ) -> Future[Answer]:
        """Does not wait. `at_once` may answer it, if none goes before it: None if it cannot."""
        with self._lock:
            if to not in self._sending and (answer := at_once()) is not None:
                return answer
            done: Future[Answer] = begun()
            self._waiting[to].append((call, done))
            if to in self._sending:
                return done
            self._sending.add(to)
        try:
            self._threads.submit(self._send_all, to)
        except ShuttingDown as error:
            while batch := self._next_batch(to):
                _answer(batch, [error] * len(batch))
        return done

    def _send_all(self, to: To) -> None:
        while batch := self._next_batch(to):
            answers: Sequence[Answer | Exception]
            try:
                answers = self._send(to, [call for call, _ in batch])
            except Exception as error:  # noqa: BLE001  raised by who waits, a bug too
                answers = [error] * len(batch)
            _answer(batch, answers)

    def _next_batch(self, to: To) -> list[tuple[Asked, Future[Answer]]]:
        with self._lock:
            waiting = self._waiting.pop(to, [])
            batch, rest = waiting[: self._most], waiting[self._most :]
            if rest:
                self._waiting[to] = rest
            if not batch:
                self._sending.discard(to)
            return batch


def _answer(
    batch: Sequence[tuple[object, Future[Answer]]], answers: Sequence[Answer | Exception]
) -> None:
    for (_, done), answer in zip(batch, answers, strict=True):
        if isinstance(answer, Exception):
            done.set_exception(answer)
        else:
            done.set_result(answer)
