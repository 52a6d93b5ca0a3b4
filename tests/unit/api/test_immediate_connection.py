"""Immediate responses, over real sockets, on both event loops."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.protocol_server import serving_protocol
from tests.fakes.waiting import until
from tierlog.api.protocol.asgi_cycle import SEND_FILE
from tierlog.api.protocol.service import ConnectionLimits, ImmediateResponse, Service
from tierlog.api.serving.deadline import Deadline
from tierlog.host import page_cache
from tierlog.host.file_slice import FileSlice, OpenFile

SIZE = 9_000_001


class App:
    """`/now?position-count[,…]` and `/said?text` get immediate responses if possible; `/held` and
    `/busy` hold the event loop, until `gate` is set or for a while; others says `later`.
    """

    def __init__(self, path) -> None:
        self.file = OpenFile(path)
        self.immediate, self.tasks, self.begun = 0, [], []
        self.gate = threading.Event()

    def try_respond(self, scope: Any) -> ImmediateResponse | None:
        self.begun.append(scope["path"])
        if scope["path"] == "/held":
            self.gate.wait(10)
            return ImmediateResponse(204, [(b"content-length", b"0")])
        if scope["path"] == "/busy":
            time.sleep(0.001)
            return ImmediateResponse(204, [(b"content-length", b"0")])
        if scope["path"] == "/said":
            text = scope["query_string"]
            return ImmediateResponse(200, [(b"content-length", b"%d" % len(text))], text)
        slices = self.slices_of(scope)
        if not slices:
            return None
        size = sum(piece.size_bytes for piece in slices)
        return ImmediateResponse(200, [(b"content-length", b"%d" % size)], slices=slices)

    def slices_of(self, scope: Any) -> tuple[FileSlice, ...]:
        if scope["path"] != "/now":
            return ()
        parts = [part.split(b"-") for part in scope["query_string"].split(b",")]
        return tuple(FileSlice(self.file, int(at), int(count)) for at, count in parts)

    def response_sent(self, scope: Any, *, unsent: tuple[FileSlice, ...]) -> None:
        self.immediate += 1
        scope["slices"], scope["head_sent"] = unsent, True

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST":
            self.begun.append("POST")
        if scope["path"] == "/slow":
            await asyncio.sleep(0.01)
        if scope["path"] != "/settled":
            self.tasks.append(scope["path"])
        while (await receive()).get("more_body"):
            pass
        slices = scope.get("slices") or self.slices_of(scope)
        if not scope.get("head_sent"):
            size = sum(piece.size_bytes for piece in slices) or len(b"later")
            headers = [(b"content-length", b"%d" % size)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        if not slices:
            await send({"type": "http.response.body", "body": b"later"})
        for index, (file, position, count) in enumerate(slices):
            more = index < len(slices) - 1
            message = {"file": file, "offset": position, "count": count, "more_body": more}
            await send({"type": SEND_FILE, **message})


class Running:
    def __init__(self, app: App, data: bytes, port: int) -> None:
        self.app, self.data, self.port = app, data, port

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def ask(self, *requests: bytes) -> list[bytes]:
        """The bodies of the responses to requests sent in one piece."""
        with self.connect() as sock:
            sock.sendall(b"".join(requests))
            with sock.makefile("rb") as answers:
                bodies = [body_of(answers) for _ in requests]
        self.settle()
        return bodies

    def settle(self) -> None:
        """Wait until the server has finished with the responses so far."""
        with self.connect() as sock, sock.makefile("rb") as answers:
            sock.sendall(get("/settled"))
            body_of(answers)


def body_of(answers: Any) -> bytes:
    size = None
    while (line := answers.readline()) not in (b"\r\n", b""):
        name, _, value = line.partition(b": ")
        size = int(value) if name == b"content-length" else size
    assert size is not None
    return answers.read(size)


def get(target: str, *headers: str) -> bytes:
    lines = [f"GET {target} HTTP/1.1", "host: x", *headers, "", ""]
    return "\r\n".join(lines).encode()


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def loop(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def shared(loop, tmp_path_factory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("served"), loop=loop) as one:
        yield one


@pytest.fixture
def running(shared) -> Running:
    shared.app.immediate, shared.app.tasks = 0, []
    return shared


@contextmanager
def serving(tmp_path: Path, **config: Any) -> Iterator[Running]:
    data = os.urandom(SIZE)
    path = tmp_path / "file"
    path.write_bytes(data)
    app = App(path)
    limits = ConnectionLimits(
        connections_max=100,
        header_max_bytes=8192,
        header_timeout_s=10,
        drain_max_bytes=1 << 20,
        drain_timeout_s=1,
    )
    service = Service(limits=limits, error_response=lambda error: b"", immediate_app=app)
    with serving_protocol(app, service, **config) as server:
        yield Running(app, data, server.port)


def test_a_small_response_needs_no_task(running):
    body = running.ask(get("/now?5-100,900-7"))[0]
    assert body == running.data[5:105] + running.data[900:907]
    assert (running.app.immediate, running.app.tasks) == (1, [])


def test_a_task_sends_what_the_socket_did_not_accept(running):
    with running.connect() as sock, sock.makefile("rb") as answers:
        sock.sendall(get(f"/now?0-{SIZE},3-4"))
        until(lambda: running.app.tasks)  # reading meanwhile makes room for all of it
        assert body_of(answers) == running.data + running.data[3:7]
    running.settle()
    assert (running.app.immediate, running.app.tasks) == (1, ["/now"])


def test_a_connection_gets_many_immediate_responses(running):
    with running.connect() as sock, sock.makefile("rb") as answers:
        for position in range(20):
            sock.sendall(get(f"/now?{position}-50000"))
            assert body_of(answers) == running.data[position : position + 50000]
            sock.sendall(get("/later"))
            assert body_of(answers) == b"later"
            sock.sendall(get(f"/said?{position}"))
            assert body_of(answers) == b"%d" % position
    running.settle()
    assert (running.app.immediate, len(running.app.tasks)) == (40, 20)


def test_a_write_does_not_wait_until_all_reads_that_came_before_it_are_answered(running):
    app = running.app
    app.begun, app.gate = [], threading.Event()
    with ExitStack() as stack:
        socks = [stack.enter_context(running.connect()) for _ in range(12)]
        running.settle()  # after the others, so they are accepted
        socks[0].sendall(get("/held"))
        until(lambda: "/held" in app.begun)
        for sock in socks[1:-1]:
            sock.sendall(get("/busy"))
        socks[-1].sendall(b"POST /write HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n")
        app.gate.set()
        for sock in socks:
            with sock.makefile("rb") as answers:
                body_of(answers)
    assert app.begun.count("/busy") == 10
    assert app.begun.index("POST") <= 5, app.begun


def test_reads_that_wait_for_their_turn_are_answered_though_their_clients_closed_their_side(
    running,
):
    running.app.begun, running.app.gate = [], threading.Event()
    with ExitStack() as stack:
        socks = [stack.enter_context(running.connect()) for _ in range(10)]
        socks[0].sendall(get("/held"))
        until(lambda: "/held" in running.app.begun)
        for sock in socks[1:]:
            sock.sendall(get("/busy"))
            sock.shutdown(socket.SHUT_WR)
        running.app.gate.set()
        for sock in socks[1:]:
            with sock.makefile("rb") as answers:
                assert answers.readline().startswith(b"HTTP/1.1 204")


def test_pipelined_responses_keep_the_order_of_requests(running):
    targets = [f"/now?{number}-1000" if number % 3 else "/later" for number in range(40)]
    bodies = running.ask(*map(get, targets))
    assert bodies == [
        running.data[number : number + 1000] if number % 3 else b"later" for number in range(40)
    ]
    assert running.app.immediate <= 1, "the others of one read of the socket are not put first"


def test_bytes_in_memory_need_no_task_and_no_descriptor(running, monkeypatch):
    monkeypatch.setattr(os, "dup", None)
    assert running.ask(get("/said?" + "a" * 4000)) == [b"a" * 4000]
    assert (running.app.immediate, running.app.tasks) == (1, [])


@pytest.mark.parametrize(
    "headers",
    [("content-length: 2",), ("connection: close",), ("connection: upgrade", "upgrade: h2c")],
)
def test_a_request_with_more_than_a_plain_get_is_served_by_a_task(running, headers):
    body = b"{}" if headers == ("content-length: 2",) else b""
    running.ask(get("/now?0-10", *headers) + body)
    assert (running.app.immediate, len(running.app.tasks)) == (0, 1)


def test_the_usual_headers_of_clients_allow_an_immediate_response(running):
    running.ask(get("/now?0-10", "connection: keep-alive", "accept-encoding: gzip"))
    assert (running.app.immediate, running.app.tasks) == (1, [])


def test_an_immediate_response_does_not_wait_for_the_disk(running, monkeypatch):
    monkeypatch.setattr(page_cache, "is_resident", lambda *_: False)
    assert running.ask(get("/now?0-10")) == [running.data[:10]]
    assert (running.app.immediate, running.app.tasks) == (0, ["/now"])


def test_a_disconnected_client_does_no_harm(loop, tmp_path):
    with serving(tmp_path, loop=loop) as running:
        for _ in range(20):
            sock = running.connect()
            sock.sendall(get(f"/now?0-{SIZE}"))
            sock.close()
        assert running.ask(get("/now?0-10")) == [running.data[:10]]


def test_the_keep_alive_time_starts_after_the_response_behind_an_immediate_one(loop, tmp_path):
    with serving(tmp_path, loop=loop, timeout_keep_alive=0) as running, running.connect() as sock:
        sock.sendall(get("/now?0-10") + get("/slow"))
        with sock.makefile("rb") as answers:
            assert [body_of(answers), body_of(answers)] == [running.data[:10], b"later"]
            assert answers.read() == b"", "then the connection is at rest, and has none to spare"


def test_an_empty_line_between_requests_does_not_keep_a_connection(loop, tmp_path):
    with serving(tmp_path, loop=loop, timeout_keep_alive=0.2) as running, running.connect() as sock:
        sock.sendall(get("/now?0-10"))
        with sock.makefile("rb") as answers:
            assert body_of(answers) == running.data[:10]
            with suppress(ConnectionError):  # it may have ended already
                sock.sendall(b"\r\n")
                assert answers.read() == b""


def test_a_response_is_sent_without_a_file_descriptor_left(running, monkeypatch, caplog):
    def dup(_: int) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "dup", dup)
    with running.connect() as sock:
        for _ in range(2):
            sock.sendall(get("/now?0-10"))
            with sock.makefile("rb") as answers:
                assert body_of(answers) == running.data[:10]
            running.settle()  # a request is immediate only once the response before it has ended
    assert (running.app.immediate, caplog.messages) == (2, [])


class _Loop:
    """The clock and the timers of an event loop, moved by hand."""

    def __init__(self) -> None:
        self.now, self.made, self.timers = 0.0, 0, []

    def time(self) -> float:
        return self.now

    def call_later(self, after_s: float, call: Any) -> Any:
        self.made += 1
        self.timers.append((self.now + after_s, call))
        timer = type("Timer", (), {"cancel": lambda _: self.timers.clear()})
        return timer()

    def run_until(self, now: float) -> None:
        while self.timers and self.timers[0][0] <= now:
            self.now, call = self.timers.pop(0)
            call()
        self.now = now


def test_postponing_a_deadline_creates_no_timer():
    loop, rung = _Loop(), []
    deadline = Deadline(loop, lambda: rung.append(loop.now))  # type: ignore[arg-type]
    for second in range(9):
        loop.run_until(second)
        deadline.set(10)
    assert loop.made == 1
    loop.run_until(17)
    assert rung == []
    loop.run_until(100)
    assert rung == [18]


def test_a_cleared_deadline_does_not_fire():
    loop, rung = _Loop(), []
    deadline = Deadline(loop, lambda: rung.append(loop.now))  # type: ignore[arg-type]
    deadline.set(1)
    deadline.clear()
    loop.run_until(5)
    deadline.set(1)
    deadline.stop()
    loop.run_until(10)
    assert (rung, loop.timers) == ([], [])
