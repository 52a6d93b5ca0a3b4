"""How much memory (RSS) clients that do not read their response cost the broker."""

import base64
import os
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx2
import pytest

from tests.fakes.broker_process import BrokerProcess
from tests.fakes.waiting import until
from tests.integration.http.conftest import BATCHES, NDJSON, records_path

MIB = 1 << 20
RESPONSE_BYTES = 16 * MIB
PATH = records_path("t") + f"?max_bytes={RESPONSE_BYTES}"


class Broker:
    def __init__(self, pid: int, client: httpx2.Client) -> None:
        self.pid, self.client = pid, client

    @property
    def resident_mib(self) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024

    def gauge(self, name: str) -> float:
        return float(re.findall(rf"^{name} (\S+)", self.client.get("/metrics").text, re.M)[0])


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """A separate process with 17 MiB in topic `t`, read once in each media type."""
    process = BrokerProcess(tmp_path_factory.mktemp("slow")).start()
    with httpx2.Client(base_url=process.url, timeout=60) as client:
        client.post("/v1/topics", json={"name": "t"})
        body = {"records": [{"value": base64.b64encode(os.urandom(150_000)).decode()}] * 5}
        for _ in range(17):
            assert client.post(records_path("t"), json=body).status_code == 200
        for form in (BATCHES, NDJSON):
            assert len(client.get(PATH, headers={"accept": form}).content) > 15 * MIB
        yield Broker(process.process.pid, client)
    assert process.stop() == 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("form", "path", "readers", "most_mib"),
    [
        (BATCHES, PATH, 50, 16),
        ("application/octet-stream", "/v1/topics/t/partitions/0/segments/0", 50, 16),
        ("text/event-stream", "/v1/topics/t/partitions/0/tail?offset=earliest", 20, 64),
        (NDJSON, PATH, 30, 320),  # 64 MiB of unsent responses, and the memory to build one
    ],
)
def test_unread_responses_hold_bounded_memory(
    broker: Broker, form: str, path: str, readers: int, most_mib: int
) -> None:
    before = broker.resident_mib
    with ExitStack() as stack:
        for _ in range(readers):
            sock = stack.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", broker.client.base_url.port))
            request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAccept: {form}\r\n\r\n"
            sock.sendall(request.encode())
            sock.recv(1)  # the response has begun
        assert broker.gauge("tierlog_http_requests_in_progress") == readers + 1
        assert broker.resident_mib - before < most_mib
        if form == NDJSON:
            waiting = ("tierlog_http_unsent_memory_bytes", "tierlog_http_unsent_disk_bytes")
            assert sum(map(broker.gauge, waiting)) >= readers * 15 * MIB
    until(lambda: broker.gauge("tierlog_http_requests_in_progress") == 1)
    assert broker.gauge("tierlog_http_unsent_disk_bytes") == 0
    assert broker.gauge("tierlog_http_unsent_memory_bytes") == 0
