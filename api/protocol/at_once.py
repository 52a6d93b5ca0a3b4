"""Responses that wait for nothing, sent from the callback at the end of a request's head: no task.

For a fetch of 64 KiB, uvicorn's cycle, its task and the ASGI messages cost more than the fetch.

* Only for a GET without a body, on a plain connection that is idle: in every other case uvicorn
  keeps the order.
* Only a small number of bytes that are in memory, and one response per read of the socket: nothing
  here waits for a disk or takes another's turn.
* What the socket does not accept of a file is sent by a task, as if the first part had been sent
  there.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping, Sequence
from typing import Any, Final, NamedTuple, Protocol

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from api.protocol.file_send import SMALL_BYTES
from api.protocol.zerocopy import ZeroCopyProtocol, encode_head
from record_format import page_cache
from record_format.file_slice import FileSlice

Scope = MutableMapping[str, Any]

AT_ONCE_BYTES: Final = SMALL_BYTES
_OF_A_BODY: Final = frozenset((b"content-length", b"transfer-encoding", b"expect"))


class ReadyAnswer(NamedTuple):
    """A whole head, followed by either bytes or slices of files."""

    status: int
    headers: Sequence[tuple[bytes, bytes]]
    body: bytes = b""
    slices: tuple[FileSlice, ...] = ()


class Front(Protocol):
    """The part of the application that answers before there is a task."""

    def answer_at_once(self, scope: Scope) -> ReadyAnswer | None: ...

    def went_out(self, scope: Scope, *, left: tuple[FileSlice, ...]) -> None: ...


class AtOnceProtocol(ZeroCopyProtocol):
    front: Front
    _may_answer = True  # nothing was answered yet in this read of the socket
    _is_answered = False  # the request whose end the parser has not reported yet
    _left_bytes = 0  # of a response whose head, and maybe more, was sent

    def data_received(self, data: bytes) -> None:
        self._may_answer = True
        super().data_received(data)

    def _answered_at_once(self) -> bool:
        if not self._may_answer or not self._is_usual():
            return False
        path, _, query = self.url.partition(b"?")
        if b"%" in path or b"#" in self.url or self.root_path:
            return False
        scope: dict[str, Any] = self.scope  # type: ignore[assignment]
        scope |= {"method": "GET", "path": path.decode("ascii"), "raw_path": path}
        scope["query_string"] = query
        answer = self.front.answer_at_once(scope)
        if answer is None:
            return False
        head = encode_head(answer.status, [*self.server_state.default_headers, *answer.headers])
        left: tuple[FileSlice, ...] = ()
        if not answer.slices:
            self.transport.write(head + answer.body)
        elif all(map(_is_resident, answer.slices)):
            left = self._send_now(head, answer.slices)
        else:
            return False
        self.front.went_out(scope, left=left)
        if left:
            self._left_bytes = sum(piece.size_bytes for piece in left)
            return False
        self._is_answered, self._may_answer = True, False
        self.server_state.total_requests += 1
        return True

    def _is_usual(self) -> bool:
        last = self.cycle
        return (
            self._sends_files
            and self.app is self.front
            and (last is None or last.response_complete)
            and self.parser.get_method() == b"GET"
            and self.parser.get_http_version() == "1.1"
            and self.parser.should_keep_alive()
            and not self.parser.should_upgrade()
            and _OF_A_BODY.isdisjoint([name for name, _ in self.headers])
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
            except BlockingIOError:
                sent = 0
            except OSError:
                self.transport.abort()
                return ()
            if sent < size_bytes:
                rest = FileSlice(file, position + sent, size_bytes - sent)
                return (rest, *slices[index + 1 :])
        return ()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        if self._left_bytes:
            cycle.response_started, cycle.chunked_encoding = True, False
            cycle.expected_content_length, self._left_bytes = self._left_bytes, 0
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        if self._is_answered:
            self._is_answered = False
        else:
            super().on_message_complete()


def _is_resident(piece: FileSlice) -> bool:
    return page_cache.is_resident(piece.file.fd, piece.position, piece.size_bytes)
