"""Connections over real sockets, with a tiny application and plain files, on both event loops."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.fakes.protocol_server import ProtocolServer, serving_protocol
from tests.fakes.waiting import until
from tierlog.api.protocol.asgi_cycle import SEND_FILE, Cycle
from tierlog.api.protocol.connection import HttpConnection
from tierlog.api.protocol.connection_state import Input
from tierlog.api.protocol.service import ConnectionLimits, Service
from tierlog.api.serving.deadline import Deadline
from tierlog.host import page_cache

SIZE = 9_000_001


class App:
    """`/file?offset-count[,…]` sends slices of one file; `/echo` a body; `/wait` waits."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("rb")
        self.left = threading.Event()
        self.failures: list[BaseException] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        try:
            await self.respond(scope, receive, send)
        except EOFError as error:
            self.failures.append(error)
            raise

    async def respond(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/file":
            await self.send_slices(scope, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message["body"], message["more_body"]
        if scope["path"] == "/broken-line":
            headers = [(b"content-length", b"0"), (b"x-given", b"1\r\nx-injected: 2")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["path"] == "/chunks":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"one, ", "more_body": True})
            await send({"type": "http.response.body", "body": b"two"})
            return
        if scope["path"] == "/wait":
            while (await receive())["type"] != "http.disconnect":
                pass
            self.left.set()
        await self.head(send, len(body))
        await send({"type": "http.response.body", "body": body})

    async def send_slices(self, scope: Any, send: Any) -> None:
        slices = [
            tuple(map(int, part.split("-"))) for part in scope["query_string"].decode().split(",")
        ]
        await self.head(send, sum(count for _, count in slices))
        for index, (offset, count) in enumerate(slices):
            more = index < len(slices) - 1
            message = {"file": self.file, "offset": offset, "count": count, "more_body": more}
            await send({"type": SEND_FILE, **message})

    async def head(self, send: Any, size: int) -> None:
        headers = [(b"content-length", str(size).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})


async def busy(scope: Any, receive: Any, send: Any) -> None:
    await send(
        {"type": "http.response.start", "status": 429, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})


class Running:
    def __init__(self, app: App, service: Service, data: bytes, server: ProtocolServer) -> None:
        self.app, self.service, self.data = app, service, data
        self.server, self.port = server
        self.url = f"http://127.0.0.1:{self.port}"

    def connect(self, *, receive_buffer: int | None = None) -> socket.socket:
        sock = socket.socket()
        if receive_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        sock.settimeout(10)
        sock.connect(("127.0.0.1", self.port))
        return sock


def read_all(sock: socket.socket) -> bytes:
    parts = []
    while part := sock.recv(1 << 20):
        parts.append(part)
    return b"".join(parts)


@pytest.fixture
def running(server: Running) -> Running:
    server.app.left.clear()
    server.app.failures.clear()
    server.server.server_state.total_requests = 0
    return server


@pytest.fixture
def impatient(running: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
    """For clients that may time out, as any client on a stalled machine."""
    limits = running.service.limits._replace(header_timeout_s=0.3, drain_timeout_s=0.2)
    monkeypatch.setattr(running.service, "limits", limits)
    return running


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    data = bytes(range(251)) * (SIZE // 251 + 1)
    path = tmp_path_factory.mktemp("zerocopy") / "file"
    path.write_bytes(data[:SIZE])
    app = App(path)
    limits = ConnectionLimits(
        connections_max=20,
        header_max_bytes=8192,
        header_timeout_s=60,
        drain_max_bytes=1 << 20,
        drain_timeout_s=60,
    )
    with ThreadPoolExecutor(2) as threads:
        service = Service(
            limits=limits,
            error_response=lambda error: (
                f"HTTP/1.1 400 {error}\r\ncontent-length: 0\r\n\r\n".encode()
            ),
            busy_app=busy,
            threads=threads,
        )
        with serving_protocol(
            app,
            service,
            loop=request.param,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=1,
        ) as server:
            yield Running(app, service, data[:SIZE], server)
    app.file.close()


def test_slices_are_sent_in_order_and_completely(running: Running) -> None:
    with httpx2.Client() as client:
        response = client.get(f"{running.url}/file?5-100,1000-3000000,0-1,{SIZE - 7}-7")
    data = running.data
    assert response.content == data[5:105] + data[1000:3001000] + data[:1] + data[-7:]


def test_a_connection_is_kept_alive_between_files_and_small_bodies(running: Running) -> None:
    with httpx2.Client(base_url=running.url) as client:
        for _ in range(3):
            assert client.get(f"/file?0-{SIZE}").content == running.data
            assert client.post("/echo", content=b"abc" * 100_000).content == b"abc" * 100_000
            assert client.post("/echo", content=b"").content == b""
    state = running.server.server_state
    until(lambda: state.total_requests >= 9)  # counted once the last byte is sent
    assert state.total_requests == 9


def test_head_sends_no_byte_of_the_file(running: Running) -> None:
    with httpx2.Client(base_url=running.url) as client:
        response = client.head("/file?0-5000000")
        assert response.headers["content-length"] == "5000000"
        assert response.content == b""
        assert client.get("/file?0-10").content == running.data[:10]


def test_a_header_with_a_line_break_closes_the_connection(running: Running) -> None:
    with running.connect() as sock:
        sock.sendall(b"GET /broken-line HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"x-injected" not in read_all(sock)


def test_a_body_without_a_length_is_chunked(running: Running) -> None:
    with httpx2.Client(base_url=running.url) as client:
        for _ in range(2):
            response = client.get("/chunks")
            assert response.headers["transfer-encoding"] == "chunked"
            assert response.text == "one, two"
        assert client.head("/chunks").content == b""


def test_an_http_1_0_client_gets_connection_close(running: Running) -> None:
    with running.connect() as sock:
        sock.sendall(b"GET /file?0-5 HTTP/1.0\r\n\r\n")
        head, body = read_all(sock).split(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head
    assert body == running.data[:5]


def test_pipelined_requests_are_answered_in_order(running: Running) -> None:
    with running.connect() as sock:
        one = b"GET /file?0-1000000 HTTP/1.1\r\nHost: x\r\n\r\n"
        two = b"GET /file?7-5 HTTP/1.1\r\nHost: x\r\n\r\n"
        three = b"GET /file?3-400000 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        sock.sendall(one + two + three)
        got = read_all(sock)
    bodies = b"".join(
        part.split(b"\r\n\r\n", 1)[1] for part in got.split(b"HTTP/1.1 200 OK\r\n")[1:]
    )
    assert bodies == running.data[:1_000_000] + running.data[7:12] + running.data[3:400_003]


@pytest.mark.parametrize("body", [b"", b"x" * 100_000], ids=["first", "behind a body"])
def test_pipelined_requests_wait_unparsed(
    running: Running, monkeypatch: pytest.MonkeyPatch, body: bytes
) -> None:
    count, waiting = 8_000, []
    ended = HttpConnection.response_ended

    def ends(connection: HttpConnection, request: Cycle) -> None:
        waiting.append(len(connection._requests))
        ended(connection, request)

    monkeypatch.setattr(HttpConnection, "response_ended", ends)
    requests = b"".join(b"GET /file?%d-1 HTTP/1.1\r\nHost: x\r\n\r\n" % n for n in range(count))
    first = b"POST /echo HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    with running.connect() as sock, ThreadPoolExecutor(1) as sender:
        sent = sender.submit(sock.sendall, first + requests + b"end")
        sent.add_done_callback(lambda _: sock.shutdown(socket.SHUT_WR))
        parts = read_all(sock).split(b"\r\n\r\n")[1:]
    assert parts[0][: len(body)] == body
    assert b"".join(part[:1] for part in parts[1:]) == running.data[:count]
    assert max(waiting) < 1000, "not all of a read, and more for each response"


def test_a_body_of_known_length_is_parsed_in_the_pieces_that_were_read(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, body = [], b"x" * 3_000_000
    body_part = HttpConnection.body_part

    def on_piece(connection: HttpConnection, piece: bytes) -> None:
        pieces.append(len(piece))
        body_part(connection, piece)

    monkeypatch.setattr(HttpConnection, "body_part", on_piece)
    with httpx2.Client(base_url=running.url) as client:
        assert client.post("/echo", content=body).content == body
    assert max(pieces) > 16 << 10, "not cut up as pipelined requests are"


def test_the_body_of_a_pipelined_request_waits_unread(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting, body = [], b"x" * 8_000_000
    ended = HttpConnection.response_ended

    def ends(connection: HttpConnection, request: Cycle) -> None:
        if len(connection._requests) > 1:
            waiting.append(len(connection._requests[-1].body))
        ended(connection, request)

    monkeypatch.setattr(HttpConnection, "response_ended", ends)
    first = b"GET /file?0-400000 HTTP/1.1\r\nHost: x\r\n\r\n" * 20
    last = b"POST /echo HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
    with running.connect() as sock, ThreadPoolExecutor(1) as sender:
        sender.submit(sock.sendall, first + last % len(body) + body)
        assert read_all(sock).endswith(body)
    assert max(waiting) < 1 << 20, "not one read more for each response before it"


def test_a_half_closed_client_still_gets_its_response(running: Running) -> None:
    with running.connect() as sock:
        sock.sendall(f"GET /file?0-{SIZE} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        sock.shutdown(socket.SHUT_WR)
        assert read_all(sock).split(b"\r\n\r\n", 1)[1] == running.data


@pytest.mark.parametrize(
    ("framing", "body", "last"),
    [
        (b"Content-Length: 10", b"cut", b""),
        (b"Transfer-Encoding: chunked", b"5\r\ncut", b""),
        (b"Transfer-Encoding: chunked", b"malformed", b"HTTP/1.1 400 malformed request"),
    ],
)
def test_a_client_that_closes_within_a_body_still_gets_the_responses_before_it(
    running: Running, framing: bytes, body: bytes, last: bytes
) -> None:
    with running.connect() as sock:
        sock.sendall(b"GET /file?0-%d HTTP/1.1\r\nHost: x\r\n\r\n" % SIZE * 2)
        sock.sendall(b"POST /echo HTTP/1.1\r\nHost: x\r\n" + framing + b"\r\n\r\n" + body)
        sock.shutdown(socket.SHUT_WR)
        responses = read_all(sock)
    for _ in range(2):
        head, responses = responses.split(b"\r\n\r\n", 1)
        assert head.startswith(b"HTTP/1.1 200 ")
        assert responses[:SIZE] == running.data
        responses = responses[SIZE:]
    assert responses.startswith(last)
    assert bool(responses) == bool(last)
    until(lambda: not running.server.server_state.connections)


def test_a_file_shorter_than_announced_aborts_the_connection(running: Running) -> None:
    with httpx2.Client(base_url=running.url) as client:
        with pytest.raises(httpx2.TransportError):
            client.get(f"/file?{SIZE - 10}-20")
        assert client.get("/file?0-10").content == running.data[:10]
    assert len(running.app.failures) == 1


def test_a_slow_reader_does_not_hold_up_others(running: Running) -> None:
    with (
        running.connect(receive_buffer=4096) as slow,
        httpx2.Client(base_url=running.url) as client,
    ):
        slow.sendall(
            f"GET /file?0-{SIZE} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
        )
        for _ in range(5):
            assert client.get("/file?0-100000").content == running.data[:100_000]
        assert read_all(slow).split(b"\r\n\r\n", 1)[1] == running.data


def test_a_disconnect_in_the_middle_of_a_file_leaks_nothing(running: Running) -> None:
    for _ in range(5):
        with running.connect(receive_buffer=4096) as sock:
            sock.sendall(f"GET /file?0-{SIZE} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            sock.recv(1000)
    state = running.server.server_state
    until(lambda: not state.tasks and not state.connections)
    assert not running.app.failures


def test_a_waiting_request_learns_of_its_clients_disconnect(running: Running) -> None:
    with running.connect() as sock:
        sock.sendall(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n")
        until(lambda: running.server.server_state.tasks)
    assert running.app.left.wait(5)


def test_a_waiting_request_learns_of_a_disconnect_behind_a_pipelined_request(
    running: Running,
) -> None:
    with running.connect() as sock:
        sock.sendall(b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n" * 2)
        until(lambda: running.server.server_state.tasks)
    assert running.app.left.wait(5)


def test_an_endless_head_times_out(impatient: Running) -> None:
    with impatient.connect() as sock:
        sock.sendall(b"GET /file?0-1 HTTP/1.1\r\nHost:")
        assert not read_until_the_end(sock)


def test_an_endless_head_is_limited_in_size(running: Running) -> None:
    with running.connect() as sock:
        sock.sendall(b"GET /file?0-1 HTTP/1.1\r\nX: " + b"a" * 20_000)
        assert read_all(sock).startswith(b"HTTP/1.1 400")


def test_a_head_does_not_time_out_while_responses_are_in_progress(
    impatient: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    came, ring = threading.Event(), Deadline._fire

    def rings(deadline: Deadline) -> None:
        ring(deadline)
        came.set()

    monkeypatch.setattr(Deadline, "_fire", rings)
    long, short = (b"GET /file?0-%d HTTP/1.1\r\nHost: x\r\n\r\n" % size for size in (SIZE, 1))
    last = b"GET /file?5-2 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    with impatient.connect(receive_buffer=4096) as sock:
        sock.sendall(long + short + last[:20])
        assert came.wait(10)
        sock.sendall(last[20:])
        assert read_all(sock).endswith(impatient.data[5:7])


LONG_HEAD = b"GET /file?0-1 HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 9_000 + b"\r\n\r\n"


@pytest.mark.parametrize("cut_at", [len(LONG_HEAD), 30, 8_000])
def test_a_head_is_limited_however_it_is_split_into_packets(running: Running, cut_at: int) -> None:
    with running.connect() as sock:
        sock.sendall(LONG_HEAD[:cut_at])
        time.sleep(0.02)
        sock.sendall(LONG_HEAD[cut_at:])
        assert read_all(sock).startswith(b"HTTP/1.1 400 the request line and headers have 9")


CHUNKED = b"POST /echo HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_malformed_body_gets_an_error_response(running: Running) -> None:
    for between_s in (0, 0.02):
        with running.connect() as sock:
            sock.sendall(CHUNKED)
            time.sleep(between_s)
            sock.sendall(b"zz\r\n")
            assert read_all(sock).startswith(b"HTTP/1.1 400 malformed request: Inv")


def test_an_error_response_is_never_the_response_to_the_request_before_it(running: Running) -> None:
    with running.connect() as sock:
        wait = b"GET /wait HTTP/1.1\r\nHost: x\r\n\r\n"
        sock.sendall(wait + b"no http\r\n\r\n" + wait)
        statuses = re.findall(rb"HTTP/1\.1 (\d+) ", read_all(sock))
    assert statuses == [b"200", b"400"], "nothing more can come, so nothing more is waited for"
    assert running.app.left.wait(5)


def test_a_malformed_pipelined_request_is_refused_in_order(running: Running) -> None:
    with running.connect() as sock:
        sock.sendall(b"GET /file?0-400000 HTTP/1.1\r\nHost: x\r\n\r\n" + CHUNKED + b"zz\r\n")
        first, second = read_all(sock).split(b"HTTP/1.1 ")[1:]
    assert first.endswith(running.data[399_900:400_000])
    assert second.startswith(b"400 malformed request: Invalid character in chunk")


UNREAD = b"POST /file?0-5 HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"


def test_a_request_after_an_unread_body_is_served(running: Running) -> None:
    connections, got = running.server.server_state.connections, b""
    with running.connect() as sock:
        sock.sendall(UNREAD % 900_000 + b"-" * 900_000)
        sock.sendall(b"GET /file?5-2 HTTP/1.1\r\nHost: x\r\n\r\n")
        while not got.endswith(b"\r\n\r\n" + running.data[5:7]):
            got += sock.recv(1000) or pytest.fail("the connection ended")
        until(lambda: all(each._input is not Input.REST for each in connections))  # it arrived
    assert got.count(b"HTTP/1.1 200") == 2


def test_draining_a_body_is_limited_in_bytes(running: Running) -> None:
    with running.connect() as sock:
        sock.sendall(UNREAD % (1 << 30))
        assert send_until_the_end(sock, most=64 << 20) < 64 << 20


def test_draining_a_body_is_limited_in_time(impatient: Running) -> None:
    with impatient.connect() as sock:
        sock.sendall(UNREAD % 900_000)
        read_until_the_end(sock)


def read_until_the_end(sock: socket.socket) -> bytes:
    """As read_all, but a reset counts as an end."""
    got = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(1 << 20):
            got += part
    return got


def send_until_the_end(sock: socket.socket, *, most: int) -> int:
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < most:
            sent += sock.send(b"-" * 65_536)
    return sent


def test_above_the_connection_limit_the_busy_application_responds(running: Running) -> None:
    with contextlib.ExitStack() as connections:
        for _ in range(20):  # idle connections may last longer than the timeout of a head
            sock = connections.enter_context(running.connect())
            sock.sendall(b"GET /file?0-1 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert sock.recv(1 << 16).startswith(b"HTTP/1.1 200")
        with httpx2.Client(base_url=running.url) as client:
            assert client.get("/file?0-1").status_code == 429


def test_bytes_that_are_not_in_memory_are_loaded_by_a_thread(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, loaders, prefetch = set(), set(), page_cache.prefetch

    def never(*_: int) -> bool:
        loop.add(threading.get_ident())
        return False

    def loading(*args: Any) -> None:
        loaders.add(threading.get_ident())
        prefetch(*args)

    monkeypatch.setattr(page_cache, "is_resident", never)
    monkeypatch.setattr(page_cache, "prefetch", loading)
    with httpx2.Client(base_url=running.url) as client:
        assert client.get(f"/file?0-{SIZE}").content == running.data
    assert loaders
    assert not loaders & loop


def test_a_file_is_sent_without_a_file_descriptor_left(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dup(_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "dup", dup)
    expected = running.data[:-1] + running.data[7:8]
    with httpx2.Client(base_url=running.url) as client:
        for _ in range(2):
            assert client.get(f"/file?0-{SIZE - 1},7-1").content == expected
        with pytest.raises(httpx2.TransportError):
            client.get(f"/file?0-{SIZE + 1}")
    assert [type(error) for error in running.app.failures] == [EOFError]
