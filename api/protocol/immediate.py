"""Small responses that are ready now are sent from the parser's callback, without a task.

For a fetch of 64 KiB, uvicorn's cycle, its task and the ASGI messages cost more than the fetch.

* Only for a GET without a body on an idle plain connection. In every other case uvicorn keeps
  pipelined responses in order.
* Only for a few bytes that are in memory, and once per read of the socket: nothing here waits for a
  disk or starves other connections.
* A task sends whatever part of a file the socket does not accept, as if it had sent the first part.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tierlog.api.protocol.file_sender import SMALL_BYTES
from tierlog.api.protocol.zerocopy import ZeroCopyProtocol, encode_head
from tierlog.host import page_cache
from tierlog.host.file_slice import FileSlice

Scope = MutableMapping[str, Any]

IMMEDIATE_MAX_BYTES: Final = SMALL_BYTES
_BODY_HEADERS: Final = frozenset((b"content-length", b"transfer-encoding", b"expect"))


class ImmediateResponse(NamedTuple):
    """A complete head, followed by either bytes or slices of files."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes = b""
    slices: tuple[FileSlice, ...] = ()


class ImmediateApp(Protocol):
    """The part of the application that responds without a task."""

    def try_respond(self, scope: Scope) -> ImmediateResponse | None: ...

    def response_sent(self, scope: Scope, *, unsent: tuple[FileSlice, ...]) -> None: ...


class ImmediateProtocol(ZeroCopyProtocol):
    immediate_app: ImmediateApp
    _may_respond = True  # no immediate response was sent yet in this read of the socket
    _responded = False  # to the request whose end the parser has not reported yet
    _unsent_bytes = 0  # of a response whose head, and maybe more, was sent

    def data_received(self, data: bytes) -> None:
        self._may_respond = True
        super().data_received(data)

    def _try_respond(self) -> bool:
        if not self._may_respond or not self._is_simple_get():
            return False
        path, _, query = self.url.partition(b"?")
        if b"%" in path or b"#" in self.url or self.root_path:
            return False
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope |= {"method": "GET", "path": path.decode("ascii"), "raw_path": path}
        scope["query_string"] = query
        response = self.immediate_app.try_respond(scope)
        if response is None:
            return False
        head = encode_head(response.status, [*self.server_state.default_headers, *response.headers])
        unsent: tuple[FileSlice, ...] = ()
        if not response.slices:
            self.transport.write(head + response.body)
        elif all(map(_is_resident, response.slices)):
            unsent = self._send_now(head, response.slices)
        else:
            return False
        self.immediate_app.response_sent(scope, unsent=unsent)
        if unsent:
            self._unsent_bytes = sum(piece.size_bytes for piece in unsent)
            return False
        self._responded, self._may_respond = True, False
        self.server_state.total_requests += 1
        return True

    def _is_simple_get(self) -> bool:
        last = self.cycle
        return (
            self._is_plain
            and self.app is self.immediate_app
            and (last is None or last.response_complete)
            and self.parser.get_method() == b"GET"
            and self.parser.get_http_version() == "1.1"
            and self.parser.should_keep_alive()
            and not self.parser.should_upgrade()
            and _BODY_HEADERS.isdisjoint([name for name, _ in self.headers])
            and not self.transport.is_closing()
            and not self.transport.get_write_buffer_size()
        )

    def _send_now(self, head: bytes, slices: Sequence[FileSlice]) -> tuple[FileSlice, ...]:
        """The part of the slices that the socket did not accept."""
        head = self._send_head(head, more=True)
        if self.transport.is_closing():
            return ()
        if head:
            self.transport.write(head)
            return tuple(slices)
        out = self._duplicate().fileno()
        for index, (file, position, size_bytes) in enumerate(slices):
            try:
                sent = os.sendfile(out, file.fd, position, size_bytes)
            except OSError:  # the socket is full; any other error will be the task's to report
                sent = 0
            if sent < size_bytes:
                rest = FileSlice(file, position + sent, size_bytes - sent)
                return (rest, *slices[index + 1 :])
        return ()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._unsent_bytes:
            cycle.response_started, cycle.chunked_encoding = True, False
            cycle.expected_content_length, self._unsent_bytes = self._unsent_bytes, 0
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        if self._responded:
            self._responded = False
        else:
            super().on_message_complete()


def _is_resident(piece: FileSlice) -> bool:
    return page_cache.is_resident(piece.file.fd, piece.position, piece.size_bytes)
