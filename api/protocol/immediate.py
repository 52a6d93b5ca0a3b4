"""What an application has that responds in the parser's callback, without a task: for a fetch of
64 KiB, a task and the messages of ASGI cost more than the fetch.

* Only for a GET without a body on an idle plain connection. In every other case the connection
  keeps pipelined responses in order.
* Only for a few bytes that are in memory, and once per read of the socket: nothing here waits for a
  disk or starves other connections.
* A task sends whatever part of a file the socket does not accept, as if it had sent the first part.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from tierlog.api.protocol.slice_sender import SMALL_BYTES
from tierlog.host.file_slice import FileSlice

Scope = MutableMapping[str, Any]

IMMEDIATE_MAX_BYTES: Final = SMALL_BYTES


class ImmediateResponse(NamedTuple):
    """A complete head, followed by either bytes or slices of files."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes = b""
    slices: tuple[FileSlice, ...] = ()


class ImmediateApp(Protocol):
    def try_respond(self, scope: Scope) -> ImmediateResponse | None: ...

    def response_sent(self, scope: Scope, *, unsent: tuple[FileSlice, ...]) -> None: ...
