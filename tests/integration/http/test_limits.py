"""Stalled bodies, limits of bytes in flight, shutdown, and TLS."""

import shutil
import socket
import ssl
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx2
import pytest

from tests.fakes.certificate import make_certificate
from tests.fakes.served_broker import served_broker
from tests.fakes.waiting import until
from tests.integration.http.conftest import BATCHES, problem, records_path, served
from tierlog.api.http.server import Tls
from tierlog.api.http.settings import HttpSettings
from tierlog.host import page_cache


def test_a_request_aborted_by_shutdown_gets_a_503(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.settimeout(10)
        with served(tmp_path, HttpSettings(shutdown_timeout_ms=1000)) as server:
            sock.connect(("127.0.0.1", server.port))
            head = f"POST {records_path('t')} HTTP/1.1\r\nHost: localhost\r\n"
            sock.sendall(f"{head}Expect: 100-continue\r\nContent-Length: 100\r\n\r\n".encode())
            assert sock.recv(100).startswith(b"HTTP/1.1 100")  # its task awaits the body
        response = sock.makefile("rb").read()
    assert response.startswith(b"HTTP/1.1 503")
    for said in (b"retry-after:", b"x-request-id:", b'"shutting-down"', b'"outcome":"unknown"'):
        assert said in response


@pytest.mark.parametrize("version", ["1.1", "1.0"])
def test_shutdown_does_not_wait_for_an_unread_tail(tmp_path: Path, version: str) -> None:
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with served(tmp_path, HttpSettings()) as server:
            body = {"records": [{"value": "x" * 900_000}]}
            for _ in range(8):  # more than the buffers of a connection hold
                taken = httpx2.post(server.url + records_path("t"), json=body)
                assert taken.status_code == 200
            sock.connect(("127.0.0.1", server.port))
            path = "/v1/topics/t/partitions/0/tail?offset=earliest"
            sock.sendall(f"GET {path} HTTP/{version}\r\nHost: localhost\r\n\r\n".encode())
            assert sock.recv(12) == b"HTTP/1.1 200"
            began = time.monotonic()
        assert time.monotonic() - began < 10, "shutdown waited for the timeout"


def test_a_stalled_body_is_refused(tmp_path: Path) -> None:
    with (
        served(tmp_path, HttpSettings(body_idle_timeout_ms=200)) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock,
    ):
        head = (
            f"POST {records_path('t')} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
        )
        sock.sendall(head.encode() + b'{"records"')
        response = b""
        while part := sock.recv(10_000):
            response += part
    assert response.startswith(b"HTTP/1.1 400")
    assert b"no byte of the body arrived" in response


def test_a_body_sent_a_byte_at_a_time_is_refused(tmp_path: Path) -> None:
    settings = HttpSettings(body_idle_timeout_ms=300, body_rate_min=1000)
    head = f"POST {records_path('t')} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n"

    def refusal(port: int) -> bytes:
        with suppress(ConnectionError), socket.create_connection(("127.0.0.1", port)) as sock:
            sock.sendall(head.encode())
            sock.settimeout(0.05)
            for _ in range(100):
                try:
                    return sock.recv(10_000)
                except TimeoutError:
                    sock.sendall(b" ")
        return b""

    with served(tmp_path, settings) as server:
        # A stall of the test itself is refused for the idle timeout instead: try again.
        until(lambda: b"less than 1000 bytes per second" in refusal(server.port))


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="needs TCP_USER_TIMEOUT")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_client_that_never_reads_its_response_is_disconnected(tmp_path: Path, loop: str) -> None:
    with (
        served(tmp_path, HttpSettings(send_idle_timeout_ms=500), loop=loop) as server,
        httpx2.Client(base_url=server.url) as client,
        socket.socket() as sock,
    ):
        for _ in range(8):
            body = {"records": [{"value": "x" * 1_000_000}]}
            assert client.post(records_path("t"), json=body).status_code == 200
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        head = f"GET {records_path('t')}?max_bytes=8000000 HTTP/1.1\r\nHost: localhost\r\n"
        sock.sendall(f"{head}Accept: {BATCHES}\r\n\r\n".encode())
        ended = 'method="GET",path="/v1/topics/{topic}/partitions/{partition}/records"'
        until(lambda: ended in client.get("/metrics").text)  # the request has ended


def test_in_flight_bytes_are_limited_and_health_still_responds(tmp_path: Path) -> None:
    settings = HttpSettings(inflight_max_bytes=100_000)
    with (
        served(tmp_path, settings) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock,
        httpx2.Client(base_url=server.url) as client,
    ):
        head = (
            f"POST {records_path('t')} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 90000\r\n\r\n"
        )
        sock.sendall(head.encode() + b" ")
        until(lambda: "in_progress 2.0" in client.get("/metrics").text)
        refused = client.post(records_path("t"), content=b" " * 20_000)
        problem(refused, 429, "throttled")
        assert int(refused.headers["retry-after"]) >= 1
        assert client.get("/healthz").status_code == 200


def test_appends_with_acks_0_count_as_in_flight_until_they_are_written(tmp_path: Path) -> None:
    with (
        served_broker(tmp_path / "data", http=HttpSettings(inflight_max_bytes=100_000)) as one,
        httpx2.Client(base_url=one.server.url, timeout=20) as client,
    ):
        one.broker.create_topic("t")
        body = {"records": [{"value": "x" * 20_000}]}
        inflight, params = one.app.context.inflight, {"acks": "0"}
        with one.broker.partition("t", 0)._log._state.lock:  # a disk that hangs
            responses = [client.post(records_path("t"), json=body, params=params) for _ in range(9)]
        assert [response.status_code for response in responses] == [202] * 4 + [429] * 5
        until(lambda: inflight.held == 0)
        assert client.post(records_path("t"), json=body, params=params).status_code == 202


def test_health_and_hot_reads_respond_while_all_read_threads_wait(tmp_path: Path) -> None:
    released = threading.Event()
    with (
        served_broker(tmp_path / "data") as one,
        httpx2.Client(base_url=one.server.url, timeout=20) as client,
    ):
        one.broker.create_topic("t")
        assert client.post(records_path("t"), json={"records": [{"value": "x"}]}).is_success
        for _ in range(100):
            one.app.context.workers.readers.submit(released.wait)
        try:
            for path in ("/healthz", "/readyz", records_path("t")):
                assert client.get(path).status_code == 200
            assert client.post(records_path("t"), json={"records": [{"value": "y"}]}).is_success
        finally:
            released.set()


def test_a_process_that_may_have_no_more_threads_serves_with_those_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with served(tmp_path, HttpSettings()) as server, monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", refused)
        large = {"records": [{"value": "x" * 100_000}]}  # not parsed on the event loop
        produced = httpx2.post(server.url + records_path("t"), json=large)
        assert produced.status_code == 200, produced.text
        altered = httpx2.patch(server.url + "/v1/topics/t", json={"config": {"flush.ms": 1}})
        assert altered.status_code == 200, altered.text


@pytest.mark.parametrize("secure", [False, True])
def test_no_thread_is_started_to_read_what_is_sent(
    tmp_path: Path, tls: Tls, monkeypatch: pytest.MonkeyPatch, secure: bool
) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    context = ssl.create_default_context(cafile=tls.certificate)
    with (
        served(tmp_path, HttpSettings(), tls=tls if secure else None) as server,
        httpx2.Client(base_url=server.url, verify=context) as client,
        monkeypatch.context() as limited,
    ):
        body = {"records": [{"value": "x" * 100_000}]}
        assert client.post(records_path("t"), json=body).status_code == 200
        limited.setattr(page_cache, "is_resident", lambda *_: False)
        limited.setattr(threading.Thread, "start", refused)
        got = client.get(records_path("t"), headers={"accept": BATCHES})
        assert len(got.content) > 100_000


def test_a_chunked_body_is_accepted_up_to_the_limit(tmp_path: Path) -> None:
    with (
        served(tmp_path, HttpSettings(body_max_bytes=1000)) as server,
        httpx2.Client(base_url=server.url) as client,
    ):
        taken = client.post(records_path("t"), content=iter([b'{"records":', b'[{"value":1}]}']))
        assert taken.status_code == 200
        refused = client.post(records_path("t"), content=iter([b" " * 600] * 3))
        problem(refused, 413, "request-too-large")


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make a certificate")
    certificate, key = make_certificate(tmp_path_factory.mktemp("tls"))
    return Tls(certificate=str(certificate), key=str(key))


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_batches_and_segments_arrive_under_tls(tmp_path: Path, tls: Tls, loop: str) -> None:
    context = ssl.create_default_context(cafile=tls.certificate)
    with (
        httpx2.Client(verify=context) as idle,
        served(tmp_path, HttpSettings(), loop=loop, tls=tls) as server,
        httpx2.Client(base_url=server.url, verify=context) as client,
    ):
        assert idle.get(f"{server.url}/healthz").status_code == 200
        for _ in range(3):
            body = {"records": [{"value": "x" * 900_000}]}
            assert client.post(records_path("t"), json=body).status_code == 200
        params = {"max_bytes": 8 << 20}
        got = client.get(records_path("t"), params=params, headers={"accept": BATCHES})
        assert len(got.content) > 2_700_000
        segment = client.get("/v1/topics/t/partitions/0/segments/0", headers={"range": "bytes=1-"})
        assert segment.content == got.content[1:]
        began = time.monotonic()
    assert time.monotonic() - began < 10, "shutdown waited for an idle client"


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("said", [b"", b"\x16\x03\x01"])
def test_a_tls_handshake_times_out(tmp_path: Path, tls: Tls, loop: str, said: bytes) -> None:
    settings = HttpSettings(header_timeout_ms=300)
    with (
        served(tmp_path, settings, loop=loop, tls=tls) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=30) as sock,
    ):
        sock.sendall(said)
        with suppress(ConnectionError):
            assert sock.recv(1) == b"", "not after asyncio's own minute"


def test_a_connection_too_many_gets_a_429_that_is_counted_and_health(tmp_path: Path) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(served(tmp_path, HttpSettings(connections_max=1)))
        first, beyond = (stack.enter_context(httpx2.Client(base_url=server.url)) for _ in range(2))
        assert first.get("/healthz").status_code == 200
        assert beyond.get("/healthz").status_code == 200
        refused = beyond.post(records_path("t"), json={"records": [{"value": "a"}]})
        assert problem(refused, 429, "throttled")["detail"] == "too many connections"
        assert refused.headers["connection"] == "close"
        assert int(refused.headers["retry-after"]) >= 1
        assert 'tierlog_http_errors_total{code="throttled"} 1.0' in first.get("/metrics").text


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_tls_handshake_counts_as_a_connection(tmp_path: Path, tls: Tls, loop: str) -> None:
    context = ssl.create_default_context(cafile=tls.certificate)
    settings = HttpSettings(connections_max=2, header_timeout_ms=2000)
    with ExitStack() as stack:
        server = stack.enter_context(served(tmp_path, settings, loop=loop, tls=tls))

        def connect() -> socket.socket:
            address = ("127.0.0.1", server.port)
            return stack.enter_context(socket.create_connection(address, timeout=30))

        handshaking = [connect() for _ in range(4)]
        beyond = connect()
        with suppress(ConnectionError):
            assert beyond.recv(1) == b""
        for sock in handshaking:
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.recv(1)
        handshaking.pop().close()
        with httpx2.Client(base_url=server.url, verify=context) as client:
            until(lambda: responds(client))


def responds(client: httpx2.Client) -> bool:
    try:
        return client.get("/healthz").status_code == 200
    except httpx2.TransportError:
        return False


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_connection_during_shutdown_does_not_hold_it_up(
    tmp_path: Path, tls: Tls, loop: str
) -> None:
    context = ssl.create_default_context(cafile=tls.certificate)
    with socket.socket() as late, socket.socket() as early:

        def connect_late() -> None:
            with suppress(OSError):
                idle.recv(1)  # until shutdown begins
            with suppress(OSError), context.wrap_socket(late, server_hostname="localhost") as sock:
                sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
                while sock.recv(1000):
                    pass

        with served(tmp_path, HttpSettings(), loop=loop, tls=tls) as server:
            for sock in (late, early):
                sock.settimeout(30)
                sock.connect(("127.0.0.1", server.port))
            idle = context.wrap_socket(early, server_hostname="localhost")  # and late is accepted
            connecting = threading.Thread(target=connect_late)
            connecting.start()
            began = time.monotonic()
        assert time.monotonic() - began < 10, "shutdown waited for a new connection"
        connecting.join()
        idle.close()
