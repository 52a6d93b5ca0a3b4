import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx2
import pytest

from tests.fakes.broker_process import BrokerProcess
from tests.fakes.waiting import until, until_waiting
from tests.integration.http.conftest import records_path
from tierlog.api.app import create_app
from tierlog.api.http.server import serve
from tierlog.api.http.settings import HttpSettings
from tierlog.api.serving.listening import bind
from tierlog.broker.broker import Broker
from tierlog.broker.settings import BrokerSettings

MALFORMED = (
    b"POST /v1/fetch HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n"
)
PATH = records_path("t")


def test_sigterm_ends_long_polls_and_exits_0(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path).start()
    with httpx2.Client(base_url=broker.url, timeout=30) as client, ThreadPoolExecutor(1) as pool:
        assert client.post("/v1/topics", json={"name": "t"}).status_code == 201
        body = {"records": [{"value": "a"}]}
        assert client.post(PATH, json=body, params={"acks": "all"}).status_code == 200
        waiting = pool.submit(httpx2.get, f"{broker.url}{PATH}?offset=1&wait_ms=60000", timeout=30)
        until_waiting(lambda: client.get("/metrics").text)
        with socket.create_connection(("127.0.0.1", broker.port)) as refused:
            refused.sendall(MALFORMED)
            assert refused.recv(12) == b"HTTP/1.1 400"
            assert broker.stop() == 0
    response = waiting.result()
    assert response.status_code == 200
    assert response.json()["records"] == []


def test_unread_responses_are_aborted_at_the_shutdown_timeout_without_an_error(
    tmp_path: Path,
) -> None:
    broker = BrokerProcess(tmp_path, "--shutdown-timeout", "3").start()
    value, octets = b"x" * 900_000, {"content-type": "application/octet-stream"}
    with httpx2.Client(base_url=broker.url) as client:
        client.post("/v1/topics", json={"name": "t"})
        for _ in range(20):
            assert client.post(PATH, content=value, headers=octets).status_code == 200
    readers = []
    for form in ("application/json", "application/vnd.apache.kafka.recordbatch.v2"):
        sock = socket.create_connection(("127.0.0.1", broker.port))
        request = (
            f"GET {PATH}?max_bytes=67108864 HTTP/1.1\r\nHost: localhost\r\nAccept: {form}\r\n\r\n"
        )
        sock.sendall(request.encode())
        assert sock.recv(12) == b"HTTP/1.1 200"
        readers.append(sock)
    assert broker.stop() == 0
    for sock in readers:
        sock.close()
    lines = (tmp_path / "broker.log").read_text().splitlines()
    # uvicorn's own timeout, which on a stalled machine may end together with the responses.
    faults = [line for line in lines if "graceful shutdown exceeded" not in line]
    assert not [line for line in faults if '"level": "error"' in line]


def test_a_second_ctrl_c_ends_the_wait_for_clients_without_an_error(tmp_path: Path) -> None:
    broker, log = BrokerProcess(tmp_path).start(), tmp_path / "broker.log"
    with socket.create_connection(("127.0.0.1", broker.port)) as client:
        client.sendall(b"POST /v1/topics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
        assert broker.process is not None
        broker.process.send_signal(signal.SIGINT)
        until(lambda: '"stopping"' in log.read_text())
        assert broker.stop(signal.SIGINT) == 0
    assert '"level": "error"' not in log.read_text()


def test_an_address_that_another_process_took_meanwhile_is_an_error(tmp_path: Path) -> None:
    """uvloop reports it to a handler of its own, and serves nothing."""
    with (
        closing(Broker.open(BrokerSettings(data_dir=tmp_path / "data"), store=None)) as broker,
        bind("127.0.0.1", 0) as sock,
        socket.socket() as other,
    ):
        for one in (sock, other):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(sock.getsockname())
        other.listen()
        with pytest.raises(OSError, match="in use"):
            serve(create_app(broker, HttpSettings()), sock=sock)
