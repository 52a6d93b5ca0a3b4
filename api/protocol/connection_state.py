"""What a client's next bytes are, on one HTTP/1.1 connection, what moves that on, and a timer for
how long it may last.

* An event is the table of where it leads from each state. A state that is not in it cannot see the
  event: a KeyError here is our mistake, not the client's.
* Requests are parsed ahead of their responses, so this is the state of what arrives. What is sent
  is the response to the oldest unanswered request: AWAITED, STARTED, COMPLETE.
* A new connection is in HEAD: whoever says nothing has as long as a head may take.
* After LAST, LOST and EOF no request follows: once the responses are sent, the connection ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from enum import IntEnum, auto
from typing import Final


class Input(IntEnum):
    IDLE = auto()  # nothing of the next request has come
    HEAD = auto()  # its head is arriving
    BODY = auto()  # the last request's body is arriving
    DIRECT = auto()  # the same, past the parser, into the buffer of its handler
    REST = auto()  # the rest of a body whose response is complete: discarded, within limits
    LAST = auto()  # the last request asked to close the connection, and is complete
    LOST = auto()  # nobody knows where a request would begin: discarded, within limits
    EOF = auto()  # the client has closed its sending side


class Response(IntEnum):
    AWAITED = auto()
    STARTED = auto()  # its head was given
    COMPLETE = auto()


Event = Mapping[Input, Input]
HEAD_BEGINS: Final[Event] = {Input.IDLE: Input.HEAD, Input.HEAD: Input.HEAD}
HEAD_ENDS: Final[Event] = {Input.HEAD: Input.BODY}
TAKEN_OVER: Final[Event] = {Input.BODY: Input.DIRECT}
BODY_ENDS: Final[Event] = dict.fromkeys((Input.BODY, Input.DIRECT, Input.REST), Input.IDLE)
LAST_BODY_ENDS: Final[Event] = dict.fromkeys((Input.BODY, Input.DIRECT, Input.REST), Input.LAST)
RESPONSE_ENDS: Final[Event] = {
    **{state: state for state in Input},
    Input.BODY: Input.REST,
}
REFUSED: Final[Event] = {
    **dict.fromkeys(Input, Input.LOST),
    Input.EOF: Input.EOF,  # nothing is left to discard
}
EOF: Final[Event] = dict.fromkeys(Input, Input.EOF)
ENDED: Final = frozenset((Input.LAST, Input.LOST, Input.EOF))
INCOMPLETE: Final = frozenset((Input.BODY, Input.DIRECT))  # the last request


class Deadline:
    """Calls `on_expiry` once, `after_s` seconds after the last `set`, unless it was cleared.

    Every request postpones it, and it rarely expires: to postpone it makes no timer. The loop's
    timer fires when it was first due; if it has been postponed meanwhile, a new one is made for the
    rest.
    """

    __slots__ = ("_due_s", "_loop", "_on_expiry", "_timer", "_timer_s")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_expiry: Callable[[], object]) -> None:
        self._loop, self._on_expiry = loop, on_expiry
        self._due_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0  # when it fires

    def set(self, after_s: float) -> None:
        self._due_s = self._loop.time() + after_s
        if self._timer is None or self._due_s < self._timer_s:
            self._start_timer(after_s)

    def clear(self) -> None:
        self._due_s = None

    def stop(self) -> None:
        """Cancel for good, and drop the callback, which refers to the connection."""
        self._due_s, self._on_expiry = None, _nothing
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self, after_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = self._loop.time() + after_s
        self._timer = self._loop.call_later(after_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        if self._due_s is None:
            return
        left_s = self._due_s - self._loop.time()
        if left_s > 0:
            self._start_timer(left_s)
        else:
            self._due_s = None
            self._on_expiry()


def _nothing() -> None:
    return
