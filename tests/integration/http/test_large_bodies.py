"""Bodies received past the parser, straight into their buffer, are stored as sent, and the next
request of the connection begins where the body ended.
"""

import errno
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

import httpx2
import pytest

from tests.fakes.served_broker import RunningServer
from tests.fakes.waiting import until
from tests.integration.http.conftest import problem, records_path, served
from tests.integration.http.test_wire import get, statuses
from tierlog.api.http.settings import HttpSettings

SIZE = 700_000
PATH = records_path("t")
LAST = get("/healthz", "Connection: close")
OCTETS = {"content-type": "application/octet-stream"}
STRICT = HttpSettings(body_idle_timeout_ms=300, body_rate_min=1_000_000)


@pytest.fixture(scope="module", params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def server(loop: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with served(tmp_path_factory.mktemp("bodies"), HttpSettings(), loop=loop) as server:
        yield server


@pytest.fixture(scope="module")
def strict_server(loop: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Only for bodies that are late: on a stalled machine any body may be."""
    with served(tmp_path_factory.mktemp("strict_server"), STRICT, loop=loop) as server:
        yield server


@pytest.fixture
def sock(server: RunningServer) -> Iterator[socket.socket]:
    with connected(server) as sock:
        yield sock


def connected(server: RunningServer) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def head(size: int, *lines: str) -> bytes:
    octets = "Content-Type: application/octet-stream"
    first = (f"POST {PATH} HTTP/1.1", "Host: localhost", octets, f"Content-Length: {size}")
    return "\r\n".join((*first, *lines, "", "")).encode()


def value(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size // 2).hex().encode()


def log_end(server: RunningServer) -> int:
    response = httpx2.get(f"{server.url}/v1/topics/t/partitions/0/offsets").json()
    return int(response["log_end_offset"])


def values_from(server: RunningServer, offset: int) -> list[bytes]:
    values: list[bytes] = []
    while offset < log_end(server):  # a response may be cut before `max_bytes`
        params = {"offset": offset, "max_bytes": 64 << 20}
        page = httpx2.get(f"{server.url}{PATH}", params=params).json()
        values += [record["value"].encode() for record in page["records"]]
        offset = page["next_offset"]
    return values


def send_until_closed(sock: socket.socket, *pieces: bytes) -> list[int]:
    """Send `pieces`; the statuses of all responses until the server closes the connection."""

    def send() -> None:
        for piece in pieces:
            sock.sendall(piece)

    sender = threading.Thread(target=send)
    sender.start()
    responses = sock.makefile("rb").read()
    sender.join()
    return statuses(responses)


@pytest.mark.parametrize("seed", range(4))
def test_the_next_request_begins_where_a_body_ends(
    server: RunningServer, sock: socket.socket, seed: int
) -> None:
    random_ = random.Random(seed)
    sizes = [random_.choice((2, 30_000, 90_000, 300_000, SIZE, 1_000_000)) for _ in range(5)]
    bodies = [value(size, seed) for size in sizes]
    stream = b"".join(head(len(body)) + body + get("/healthz") for body in bodies) + LAST
    cuts = sorted(random_.sample(range(len(stream)), k=random_.choice((0, 3, 40))))
    pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
    begin = log_end(server)
    assert send_until_closed(sock, *pieces) == [200] * 11, f"seed {seed}"
    assert values_from(server, begin) == bodies, f"seed {seed}"


@pytest.mark.parametrize(
    "line", ["Expect: 100-continue", "Connection: Upgrade\r\nUpgrade: h2c", "Connection: close"]
)
def test_a_large_body_is_accepted_with_any_connection_header(
    server: RunningServer, sock: socket.socket, line: str
) -> None:
    begin, body = log_end(server), value(SIZE, 1)
    sock.sendall(head(SIZE, line))
    before = []
    if line.startswith("Expect"):
        before = statuses(sock.recv(25))
        assert before == [100]
    following = b"" if line.endswith("close") else LAST
    expected = [200] if line.endswith("close") else [200, 200]
    assert send_until_closed(sock, body, following) == expected
    assert values_from(server, begin) == [body]


def test_a_20_mb_body_is_accepted(server: RunningServer, sock: socket.socket) -> None:
    begin, lines = log_end(server), [value(100_000, seed) for seed in range(200)]
    body = b"\n".join(b'"%b"' % line for line in lines)
    ndjson = head(len(body)).replace(b"octet-stream", b"x-ndjson")
    assert send_until_closed(sock, ndjson, body, LAST) == [200, 200]
    assert values_from(server, begin) == lines


def test_a_half_closed_client_gets_its_response(server: RunningServer, sock: socket.socket) -> None:
    sock.sendall(head(SIZE) + value(SIZE, 2))
    sock.shutdown(socket.SHUT_WR)
    assert statuses(sock.makefile("rb").read()) == [200]


def test_a_body_whose_first_part_is_small_is_stored_whole(
    server: RunningServer, sock: socket.socket
) -> None:
    begin, body = log_end(server), value(SIZE, 7)
    sock.sendall(head(SIZE) + body[:1000])
    until(lambda: "in_progress 2.0" in httpx2.get(f"{server.url}/metrics").text)  # it and this
    assert send_until_closed(sock, body[1000:], LAST) == [200, 200]
    assert values_from(server, begin) == [body]


@pytest.mark.parametrize("resets", [False, True])
def test_a_body_of_a_disconnected_client_is_discarded(
    server: RunningServer, caplog: pytest.LogCaptureFixture, resets: bool
) -> None:
    begin = log_end(server)
    for _ in range(3):
        with connected(server) as sock:
            sock.sendall(head(SIZE) + value(SIZE - 100_000, 3))
            if resets:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    body = value(SIZE, 4)
    assert httpx2.post(server.url + PATH, content=body, headers=OCTETS).status_code == 200
    assert values_from(server, begin) == [body]
    assert not caplog.records, "no response, no warning"


def test_a_half_sent_pipelined_body_is_discarded_without_a_warning(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    begin = log_end(server)
    for _ in range(5):
        with connected(server) as sock:
            sock.sendall(get("/healthz") + head(SIZE) + value(20_000, 7))
            sock.shutdown(socket.SHUT_WR)
            assert statuses(sock.makefile("rb").read()) == [200]
    assert log_end(server) == begin
    assert not caplog.records


def test_a_body_without_a_file_descriptor_left_can_be_retried(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dup(_: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    begin, body = log_end(server), value(SIZE, 8)
    with httpx2.Client(headers=OCTETS) as client:
        with monkeypatch.context() as patched:
            patched.setattr(os, "dup", dup)
            problem(client.post(server.url + PATH, content=body), 429, "throttled")
        assert client.post(server.url + PATH, content=body).status_code == 200
    assert values_from(server, begin) == [body]


def test_a_client_that_disconnects_before_its_413_logs_nothing(
    server: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        with connected(server) as sock:
            sock.sendall(head(1 << 40, "Connection: close"))
    until(lambda: 'status="413"} 20.0' in httpx2.get(f"{server.url}/metrics").text)
    assert not caplog.records


def test_bytes_after_a_stalled_body_are_not_a_request(strict_server: RunningServer) -> None:
    with connected(strict_server) as sock:
        sock.sendall(head(SIZE) + value(300_000, 5))
        responses = sock.recv(12)
        with suppress(ConnectionError):  # reset if the server had closed already
            sock.sendall(get("/healthz") * 10)
            while part := sock.recv(1 << 16):
                responses += part
    assert statuses(responses) == [400]
    assert b"no byte of the body arrived for 0.3 s" in responses


def test_a_large_body_below_the_minimum_rate_is_refused(strict_server: RunningServer) -> None:
    def refusal() -> bytes:
        with suppress(ConnectionError), connected(strict_server) as sock:
            sock.sendall(head(SIZE) + value(100_000, 6))
            sock.settimeout(0.02)
            for _ in range(500):
                try:
                    return sock.recv(10_000)
                except TimeoutError:
                    sock.sendall(b"a")
        return b""

    # A stall of the test itself is refused for the idle timeout instead: try again.
    until(lambda: b"less than 1000000 bytes per second" in refusal())
