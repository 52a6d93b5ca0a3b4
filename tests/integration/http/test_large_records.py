"""Records far larger than their batch, read as text from a broker in a process of its own."""

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest

from tests.fakes.broker_process import BrokerProcess
from tests.fakes.produce_requests import around
from tests.integration.http.conftest import BATCHES, NDJSON, records_path
from tierlog.record_format import codecs
from tierlog.record_format.varint import zigzag

MIB = 1 << 20
NULS = 230 * MIB
READERS = 12
MOST_MIB = 1024
PATIENCE_S = 60

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


def batch_of_nuls(codec: int) -> bytes:
    """One record of NULs, in a batch of about a megabyte or less."""
    fields = b"".join((b"\0\0\0\1", zigzag(NULS), bytes(NULS), b"\0"))
    return around(zigzag(len(fields)) + fields, count=1, codec=codec)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path_factory.mktemp("large")).start()
    with httpx2.Client(base_url=process.url, timeout=PATIENCE_S) as client:
        assert client.post("/v1/topics", json={"name": "t"}).status_code == 201
        body = batch_of_nuls(codecs.LZ4)
        assert len(body) < 1 << 20
        accepted = client.post(records_path("t"), content=body, headers={"content-type": BATCHES})
        assert accepted.status_code == 200, accepted.text
        client.post(records_path("t"), json={"records": [{"value": "next"}]})
    yield process
    assert process.stop() == 0


def peak_mib(process: BrokerProcess) -> float:
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024


def in_threads(count: int, call: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def test_twelve_readers_of_a_record_of_230_mib_cost_less_than_a_gibibyte(
    broker: BrokerProcess,
) -> None:
    def read_some() -> None:
        with (
            httpx2.Client(base_url=broker.url, timeout=PATIENCE_S) as client,
            client.stream("GET", records_path("t"), params={"offset": 0}) as response,
        ):
            assert response.status_code == 200, response.read()
            assert response.headers["log-next-offset"] == "1"
            size = 0
            for part in response.iter_bytes():
                size += len(part)
                if size > 16 * MIB:
                    return

    in_threads(READERS, read_some)
    assert peak_mib(broker) < MOST_MIB


def test_one_record_always_comes_however_large(broker: BrokerProcess) -> None:
    headers = {"accept": NDJSON}
    with (
        httpx2.Client(base_url=broker.url, timeout=PATIENCE_S) as client,
        client.stream("GET", records_path("t"), params={"offset": 0}, headers=headers) as response,
    ):
        parts = response.iter_bytes()
        head = next(parts)
        assert head.startswith(b'{"partition":0,"offset":0,"timestamp":')
        size, last = len(head), head
        for part in parts:
            size, last = size + len(part), (last + part[-100:])[-100:]
    around_it = head[: head.index(b"\\u0000")] + b'","headers":[]}\n'
    assert last.endswith(b'\\u0000","headers":[]}\n')
    assert size == len(around_it) + NULS * len("\\u0000")


@pytest.mark.parametrize(
    ("method", "path", "json"),
    [
        ("GET", "/v1/topics/t/partitions/0/tail?offset=0", None),
        ("GET", "/v1/topics/t/tail?offset=earliest", None),
        ("POST", "/v1/fetch", {"partitions": [{"topic": "t", "partition": 0, "offset": 0}]}),
    ],
)
def test_every_call_that_gives_records_as_text_gives_it_in_pieces(
    broker: BrokerProcess, method: str, path: str, json: object
) -> None:
    with (
        httpx2.Client(base_url=broker.url, timeout=PATIENCE_S) as client,
        client.stream(method, path, json=json) as response,
    ):
        assert response.status_code == 200, response.read()
        seen = b""
        for part in response.iter_bytes():
            seen += part
            if len(seen) > MIB:
                break
    assert b'"offset":0,"timestamp":' in seen
    assert seen.count(b"\\u0000") > MIB // 7
    assert peak_mib(broker) < MOST_MIB


def test_the_console_shows_how_it_begins(broker: BrokerProcess) -> None:
    with httpx2.Client(base_url=broker.url, timeout=PATIENCE_S) as client:
        page = client.get("/console/topics/t/partitions/0/records", params={"at": "0"})
    assert page.status_code == 200
    assert "00000000  00 00" in page.text
    assert peak_mib(broker) < MOST_MIB


@pytest.mark.soak
def test_a_million_records_in_each_of_five_bodies_cost_less_than_a_gibibyte(
    tmp_path: Path,
) -> None:
    process = BrokerProcess(tmp_path, TIERLOG_DISK_RESERVE_BYTES="1MiB").start()
    record = b'{"value":"%s"}' % (b"x" * 50)
    body = b'{"records":[%s]}' % b",".join([record] * 1_000_000)

    def produce() -> None:
        with httpx2.Client(base_url=process.url, timeout=PATIENCE_S) as client:
            sent = client.post(
                records_path("t"), content=body, headers={"content-type": "application/json"}
            )
            assert sent.status_code == 200, sent.text

    with httpx2.Client(base_url=process.url, timeout=PATIENCE_S) as client:
        assert client.post("/v1/topics", json={"name": "t"}).status_code == 201
        in_threads(5, produce)
        assert peak_mib(process) < MOST_MIB
    assert process.stop() == 0


def test_twelve_produces_of_such_a_record_cost_less_than_a_gibibyte_and_keep_nobody_waiting(
    tmp_path: Path,
) -> None:
    process = BrokerProcess(tmp_path, TIERLOG_DISK_RESERVE_BYTES="1MiB").start()
    large = batch_of_nuls(codecs.LZ4)
    accepted: list[int] = []

    def produce() -> None:
        with httpx2.Client(base_url=process.url, timeout=PATIENCE_S) as client:
            sent = client.post(records_path("t"), content=large, headers={"content-type": BATCHES})
            accepted.append(sent.status_code)

    with httpx2.Client(base_url=process.url, timeout=PATIENCE_S) as client:
        assert client.post("/v1/topics", json={"name": "t"}).status_code == 201
        producing = threading.Thread(target=in_threads, args=(READERS, produce))
        producing.start()
        served_meanwhile = 0
        while producing.is_alive():
            small = client.post(records_path("t"), json={"records": [{"value": "small"}]})
            assert small.status_code == 200, small.text
            served_meanwhile += len(accepted) < READERS
        producing.join()
    assert accepted == [200] * READERS
    assert served_meanwhile > 0
    assert peak_mib(process) < MOST_MIB
    assert process.stop() == 0
