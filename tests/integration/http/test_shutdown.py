import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

from tests.fakes.broker_process import BrokerProcess

SCRIPT = Path(__file__).with_name("serve_once.py")
MALFORMED = (
    b"POST /v1/fetch HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n"
)
ROOT = Path(__file__).parents[3]


def test_sigterm_answers_who_waits_keeps_what_was_taken_and_exits_0(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        lines = (line for line in process.stdout if line.strip().isdigit())
        url = f"http://127.0.0.1:{int(next(lines))}"
        path = "/v1/topics/t/partitions/0/records"
        answers: list[httpx.Response] = []
        with httpx.Client(base_url=url, timeout=30) as client:
            assert client.post("/v1/topics", json={"name": "t"}).status_code == 201
            body = {"records": [{"value": "a"}]}
            assert client.post(path, json=body, params={"acks": "all"}).status_code == 200
            waiting = threading.Thread(
                target=lambda: answers.append(
                    httpx.get(f"{url}{path}?offset=1&wait_ms=60000", timeout=30)
                )
            )
            waiting.start()
            deadline = time.monotonic() + 10
            while "in_progress 2.0" not in client.get("/metrics").text:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            with socket.create_connection(
                (client.base_url.host, client.base_url.port or 0)
            ) as refused:
                refused.sendall(MALFORMED)
                assert refused.recv(12) == b"HTTP/1.1 400"
                process.send_signal(signal.SIGTERM)
                waiting.join()
                assert process.wait(10) == 0
        assert answers[0].status_code == 200
        assert answers[0].json()["records"] == []
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_answers_that_nobody_reads_are_cut_in_time_and_are_no_fault(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path, "--shutdown-timeout", "3").start()
    path = "/v1/topics/t/partitions/0/records"
    value, octets = b"x" * 900_000, {"content-type": "application/octet-stream"}
    with httpx.Client(base_url=broker.url) as client:
        client.post("/v1/topics", json={"name": "t"})
        for _ in range(20):
            assert client.post(path, content=value, headers=octets).status_code == 200
    readers = []
    for form in ("application/json", "application/vnd.apache.kafka.recordbatch.v2"):
        sock = socket.create_connection(("127.0.0.1", broker.port))
        asked = (
            f"GET {path}?max_bytes=67108864 HTTP/1.1\r\nHost: localhost\r\nAccept: {form}\r\n\r\n"
        )
        sock.sendall(asked.encode())
        assert sock.recv(12) == b"HTTP/1.1 200"
        readers.append(sock)
    assert broker.stop() == 0
    for sock in readers:
        sock.close()
    lines = (tmp_path / "broker.log").read_text().splitlines()
    # uvicorn's of its own patience, which a machine that stands still may end with the answers.
    faults = [line for line in lines if "graceful shutdown exceeded" not in line]
    assert not [line for line in faults if '"level": "error"' in line]
