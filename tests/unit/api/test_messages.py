"""Requests out of bytes, without a socket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.api.protocol import connection_state as state
from tierlog.api.protocol.connection_state import Input
from tierlog.api.protocol.messages import Head, HeaderTooLarge, RequestParser
from tierlog.record_format.errors import InvalidRequest

UPGRADE = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
STREAM = (
    b"GET /a?b=c HTTP/1.1\r\nHost: x\r\n\r\n"
    b"POST /p HTTP/1.1\r\nContent-Length: 5\r\n\r\n12345"
    b"POST /u HTTP/1.1\r\n" + UPGRADE + b"Content-Length: 3\r\n\r\nabc"
    b"GET /g HTTP/1.1\r\n" + UPGRADE + b"\r\n"
    b"POST /c HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"2\r\nde\r\n1\r\nf\r\n0\r\nX: trailer\r\n\r\n"
    b"GET /last HTTP/1.1\r\nConnection: close\r\n\r\n"
)
REQUESTS = [
    ("GET", b"/a?b=c", b"", True),
    ("POST", b"/p", b"12345", True),
    ("POST", b"/u", b"abc", True),
    ("GET", b"/g", b"", True),
    ("POST", b"/c", b"def", True),
    ("GET", b"/last", b"", False),
]


class Requests:
    """A sink that keeps what it is given, and checks the order."""

    def __init__(self) -> None:
        self.complete: list[tuple[str, bytes, bytes, bool]] = []
        self.input = Input.HEAD

    def head_begins(self) -> None:
        self.input = state.HEAD_BEGINS[self.input]

    def head_ends(self, head: Head) -> None:
        self.input = state.HEAD_ENDS[self.input]
        self.head, self.body = head, b""

    def body_part(self, part: bytes) -> None:
        assert self.input is Input.BODY
        self.body += part

    def request_ends(self) -> None:
        self.input = state.BODY_ENDS[self.input]
        head = self.head
        self.complete.append((head.method, head.target, self.body, head.keep_alive))


def parse(*pieces: bytes) -> Requests:
    requests = Requests()
    parser = RequestParser(requests, head_max_bytes=300)
    for piece in pieces:
        parser.feed(memoryview(piece))
    return requests


@given(st.lists(st.integers(0, len(STREAM))))
def test_requests_are_the_same_however_they_are_cut(cuts: list[int]) -> None:
    ends = [*sorted(cuts), len(STREAM)]
    pieces = [STREAM[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    assert parse(*pieces).complete == REQUESTS


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_head_is_limited_however_it_is_cut(size: int) -> None:
    head = b"GET / HTTP/1.1\r\nX: " + b"y" * 300 + b"\r\n\r\n"
    with pytest.raises(HeaderTooLarge):
        parse(*(head[at : at + size] for at in range(0, len(head), size)))


def test_a_malformed_head_says_what_is_wrong() -> None:
    with pytest.raises(InvalidRequest, match="malformed request: Invalid method"):
        parse(b"no http\r\n\r\n")


def test_a_body_past_the_parser_is_skipped() -> None:
    requests = Requests()
    parser = RequestParser(requests, head_max_bytes=300)
    parser.feed(memoryview(b"POST /p HTTP/1.1\r\nContent-Length: 50\r\n\r\n12345"))
    assert parser.body_left == 45
    parser.skip_body()
    parser.feed(memoryview(STREAM))
    assert requests.complete == [("POST", b"/p", b"12345", True), *REQUESTS]


def test_nothing_but_the_clients_end_follows_the_last_request() -> None:
    events = (state.HEAD_BEGINS, state.HEAD_ENDS, state.BODY_ENDS, state.TAKEN_OVER)
    for event in events:
        assert not state.ENDED & event.keys()
    assert {state.EOF[ended] for ended in state.ENDED} == {Input.EOF}
