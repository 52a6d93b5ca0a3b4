"""A topic that is only in the bucket, a broker with nothing of it cached, and a reader of batches.

* All topics have the same size and are filled with the same batch. The last segment is active,
  hence local: COLD_BYTES of each are cold.
"""

from __future__ import annotations

import shutil
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NamedTuple

from bench import children
from bench.children import Server
from bench.records import batch_of_size
from bench.rounds import cpu_seconds_of, cpu_seconds_of_tree
from bench.wire import Wire
from tierlog.client.client import Client
from tierlog.client.wire import RECORD_BATCHES

MIB: Final = 1 << 20
BATCH_BYTES: Final = 16 << 10
SEGMENT_BYTES: Final = 128 * MIB
TOPIC_BYTES: Final = 512 * MIB
COLD_BYTES: Final = TOPIC_BYTES - SEGMENT_BYTES
LARGE_CACHE_BYTES: Final = 4 << 30
FETCH_BYTES: Final = 8 * MIB


class Pass(NamedTuple):
    """One read of `size_bytes`."""

    size_bytes: int
    seconds: float
    cpu_s: float  # of the server, or of the reader if there is none
    all_cpu_s: float = 0.0  # of reader, broker and store together

    @property
    def mb_per_s(self) -> float:
        return self.size_bytes / 1e6 / self.seconds

    @property
    def cpu_s_per_gb(self) -> float:
        return self.cpu_s / (self.size_bytes / 1e9)


def fill(folder: Path, *flags: str) -> None:
    """Topics "cold" and "other", which are only in the bucket, and "hot", which is also local."""
    batch = batch_of_size(BATCH_BYTES)
    body = batch * (FETCH_BYTES // BATCH_BYTES)
    config = {"segment.bytes": SEGMENT_BYTES, "retention.ms": -1}
    with (
        children.broker(folder, *flags) as server,
        Client(server.url, timeout_s=120) as client,
    ):
        for topic, local_bytes in ("hot", -2), ("other", 0), ("cold", 0):
            client.create_topic(topic, config={**config, "local.retention.bytes": local_bytes})
            for _ in range(TOPIC_BYTES // len(body)):
                client.produce_batches(topic, body, partition=0, acks="1")
            client.offload(topic, wait_ms=60_000)
        for _ in range(600):
            if all(one.tier == "cold" for one in list(client.segments("cold", 0))[:-1]):
                return
            time.sleep(0.1)
    raise RuntimeError("the topic did not become cold")


def broker(
    folder: Path, *flags: str, cache_bytes: int = LARGE_CACHE_BYTES
) -> AbstractContextManager[Server]:
    """A broker with an empty cache."""
    shutil.rmtree(folder / "data" / "tierlog" / "cache", ignore_errors=True)
    return children.broker(folder, *flags, "--cache-bytes", str(cache_bytes))


def first_read(
    folder: Path, *flags: str, fetch_bytes: int = FETCH_BYTES, store_pid: int = 0
) -> Pass:
    """The first read of a topic by a broker that has run for a while: its cache is full of another
    topic, so that each new chunk reuses the pages of an old one.
    """
    with broker(folder, *flags, cache_bytes=COLD_BYTES) as server:
        read_all(server, "other")
        settle(server)
        others = _cpu_seconds_of_others(store_pid)
        read = read_all(server, "cold", fetch_bytes=fetch_bytes)
        return read._replace(all_cpu_s=read.cpu_s + _cpu_seconds_of_others(store_pid) - others)


def _cpu_seconds_of_others(store_pid: int) -> float:
    return time.process_time() + (cpu_seconds_of_tree(store_pid) if store_pid else 0.0)


def settle(server: Server) -> None:
    """Wait until startup work (kernels, the probe) is done."""
    before = -1.0
    while cpu_seconds_of(server.pid) - before > 0.02:
        before = cpu_seconds_of(server.pid)
        time.sleep(0.4)


def read_all(server: Server, topic: str, *, times: int = 1, fetch_bytes: int = FETCH_BYTES) -> Pass:
    size, cpu_before = 0, cpu_seconds_of(server.pid)
    began = time.perf_counter()
    with Reader(server, topic) as reader:
        for number in range(1, times + 1):
            offset = 0
            while size < COLD_BYTES * number:
                offset, got = reader.read(offset, max_bytes=fetch_bytes)
                size += got
        seconds = time.perf_counter() - began
    return Pass(size, seconds, cpu_seconds_of(server.pid) - cpu_before)


class Reader:
    """Reads raw batches over one connection and discards them. A context manager."""

    def __init__(self, server: Server, topic: str) -> None:
        self._wire = Wire(server)
        self._line = f"GET /v1/topics/{topic}/partitions/0/records?offset=%d&max_bytes=%d"
        self._buffer = memoryview(bytearray(MIB))

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._wire.sock.close()

    def read(self, offset: int, *, max_bytes: int = FETCH_BYTES) -> tuple[int, int]:
        """Return the next offset, and the bytes read."""
        line = self._line % (offset, max_bytes)
        return self._wire.fetch(line, self._buffer, Accept=RECORD_BATCHES)
