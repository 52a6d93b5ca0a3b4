"""Files that a request opened are closed when it ends, however it ends."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.fakes.two_tiers import TwoTiers, two_tiers
from tests.fakes.waiting import until
from tierlog.api.http.context import Context
from tierlog.api.http.settings import HttpSettings
from tierlog.client.client import Client
from tierlog.host.waiting import Wait

TOPIC, RECORDS = "files", 2000


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def tiers(root: Path) -> Iterator[TwoTiers]:
    with two_tiers(root) as tiers:
        tiers.create(TOPIC)
        tiers.produce(TOPIC, RECORDS)
        tiers.offload(TOPIC)
        yield tiers


def holds(root: Path) -> list[str]:
    """What this process has open below the folder, but for what the owner of a folder locks."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            path = str(link.readlink())
        except FileNotFoundError:  # the descriptor of this listing
            continue
        if path.startswith(str(root)) and not path.endswith(".lock"):
            found.append(path)
    return found


def closes_all(tiers: TwoTiers, root: Path) -> None:
    """The topic's own files and the caches go: what is open then is held by a request."""
    with Client(tiers.url) as client:
        client.delete_topic(TOPIC)
    bucket = tiers.broker.bucket
    assert bucket is not None

    def is_closed() -> bool:
        bucket.cache.shrink(1 << 40)
        return not [path for path in holds(root) if ".log" in path or "cache" in path]

    until(is_closed)


def begin(tiers: TwoTiers, request: str, body: bytes = b"") -> socket.socket:
    at = urlsplit(tiers.url)
    assert at.hostname is not None
    sock = socket.create_connection((at.hostname, at.port or 80))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    lines = [request, f"Host: {at.netloc}", f"Content-Length: {len(body)}"]
    if body:
        lines.append("Content-Type: application/json")
    sock.sendall("\r\n".join([*lines, "", ""]).encode() + body)
    return sock


def get(path: str) -> str:
    return f"GET /v1/topics/{TOPIC}/partitions/{path} HTTP/1.1\r\nAccept: {{accept}}"


RAW, TEXT, EVENTS = "application/vnd.tierlog.batches", "application/json", "text/event-stream"


def requests(end: int) -> Iterator[tuple[str, bytes]]:
    for accept in (RAW, TEXT, EVENTS):
        for offset in (0, end // 2, end - 1):
            yield get(f"0/records?offset={offset}&max_bytes=8388608").format(accept=accept), b""
    for accept in (RAW, TEXT):
        waits = f"1/records?offset={end - 1}&min_bytes=1000000&max_bytes=1048576&wait_ms=20000"
        yield get(waits).format(accept=accept), b""
        yield get("2/records?offset=3&max_records=1").format(accept=accept), b""
    yield get("2/segments/0").format(accept="*/*"), b""
    for offset in (0, end - 1):
        wanted = [
            {"topic": TOPIC, "partition": partition, "offset": offset} for partition in range(3)
        ]
        body = {"partitions": wanted, "wait_ms": 20000, "min_bytes": 8 << 20, "max_bytes": 8 << 20}
        yield "POST /v1/fetch HTTP/1.1", json.dumps(body).encode()


def read_a_little(sock: socket.socket) -> None:
    sock.recv(64)


def read_nothing(sock: socket.socket) -> None:
    pass


@pytest.mark.parametrize("before", [read_nothing, read_a_little])
def test_clients_that_disconnect_leave_no_file_open(
    tiers: TwoTiers, root: Path, before: Callable[[socket.socket], None]
) -> None:
    for _ in range(3):
        for request, body in requests(RECORDS):
            sock = begin(tiers, request, body)
            if "wait_ms" not in request and not body:
                before(sock)
            sock.close()
    closes_all(tiers, root)


def test_responses_that_were_read_whole_leave_no_file_open(tiers: TwoTiers, root: Path) -> None:
    with Client(tiers.url) as client:
        for partition in range(3):
            offset = 0
            while offset < RECORDS:
                offset = client.fetch(TOPIC, partition, offset=offset).next_offset
    closes_all(tiers, root)


def test_a_read_that_ends_after_its_request_was_cancelled_is_closed(
    tiers: TwoTiers, root: Path
) -> None:
    context = Context(tiers.broker, HttpSettings())
    partition = tiers.broker.partition(TOPIC, 0)
    begun, go_on = threading.Event(), threading.Event()

    def read_late() -> object:
        begun.set()
        assert go_on.wait(30)
        return partition.read(0, max_bytes=1 << 20, wait=Wait.WAIT)

    async def cancel() -> None:
        reading = asyncio.create_task(context.run_in(context.workers.readers, read_late))
        await asyncio.to_thread(begun.wait, 30)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        go_on.set()

    asyncio.run(cancel())
    context.close()
    closes_all(tiers, root)


def test_the_count_sees_a_file_that_a_request_forgot(tiers: TwoTiers, root: Path) -> None:
    fetched = tiers.broker.partition(TOPIC, 0).read(0, max_bytes=1)
    with Client(tiers.url) as client:
        client.delete_topic(TOPIC)
    forgotten = str(Path(f"/proc/self/fd/{fetched.slices[0].file.fd}").readlink())
    assert forgotten in holds(root)
    fetched.close()
    assert forgotten not in holds(root)
