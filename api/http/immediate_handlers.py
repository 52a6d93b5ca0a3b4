"""Begins a handler in the parser's callback: if it need not wait, no task is made for it.

* A handler is written once. Before it waits it calls `until_task`, and goes on from there in the
  request's task, which has the request's context, and from which the client's disconnect is seen.
* Used only on the event loop: while a handler is begun nothing else runs there.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Coroutine, Generator
from functools import partial
from typing import Any, Final, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Begun(NamedTuple, Generic[T]):
    """What a handler returned, or the rest of it, to be awaited in a task."""

    result: T | None
    rest: Awaitable[T] | None


class _UntilTask:
    def __await__(self) -> Generator[None, None, None]:
        yield  # a task that is given nothing goes on in the next iteration of the loop


_UNTIL_TASK: Final = _UntilTask()


@types.coroutine
def _resumed(coroutine: Coroutine[Any, Any, T], awaited: Any) -> Generator[Any, Any, T]:
    """The rest of a coroutine that waits for `awaited`: `await` begins only new ones."""
    while True:
        try:
            sent = yield awaited
        except BaseException as error:  # noqa: BLE001  it is the coroutine's
            resume = partial(coroutine.throw, error)
        else:
            resume = partial(coroutine.send, sent)
        try:
            awaited = resume()
        except StopIteration as done:
            result: T = done.value
            return result


class ImmediateHandlers:
    def __init__(self) -> None:
        self._without_task = False

    def begin(self, handler: Coroutine[Any, Any, T]) -> Begun[T]:
        """Begin a handler without a task."""
        self._without_task = True
        try:
            awaited = handler.send(None)
        except StopIteration as done:
            return Begun(done.value, None)
        finally:
            self._without_task = False
        return Begun(None, _resumed(handler, awaited))

    async def until_task(self) -> None:
        """Go on in the request's task; call before a wait."""
        if self._without_task:
            await _UNTIL_TASK
