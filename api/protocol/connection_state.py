"""What a client's next bytes are, on one HTTP/1.1 connection, and what moves that on.

* An event is the table of where it leads from each state. A state that is not in it cannot see the
  event: a KeyError here is our mistake, not the client's.
* Requests are parsed ahead of their responses, so this is the state of what arrives. What is sent
  is the response to the oldest unanswered request: AWAITED, STARTED, COMPLETE.
* A new connection is in HEAD: whoever says nothing has as long as a head may take.
* After LAST, LOST and EOF no request follows: once the responses are sent, the connection ends.
"""

from __future__ import annotations

from collections.abc import Mapping
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
