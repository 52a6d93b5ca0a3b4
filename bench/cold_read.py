"""Claim: the cold tier is read about as fast as the bucket delivers, by one reader or a hundred.

* Measured through the broker: the first sequential read of a topic that is only in the bucket; the
  second; requests to the store for one record; memory with 100 concurrent readers; the first read
  with 50 ms added to each request to the store.
* The first read is measured with the chunk cache full of another topic, as on a broker that has run
  for a while, so that each new chunk reuses the pages of an old one. It is also measured into an
  empty cache: on a virtual machine that returns free memory to its host, an untouched page costs
  more than everything else, and the peer that writes files shows how much.
* Measured in this process: fetches of chunks, 50 ms away, where 2% of the GETs wait 2 s.
* Peer of the first read: a loop of 8 MiB ranged GETs by boto3 with as many in flight, nothing
  written; and the same loop into files. Peer of the second: the same bytes hot. One versitygw on
  loopback serves all.
* Through a broker each byte is moved once more, on the cores that store and reader use too: if they
  are busy, the ratio of the speeds is that of the CPU of all three, shown beside it.

`python -m bench cold_read`; takes about three minutes.
"""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import mean
from typing import Any, Final, NamedTuple

from bench import cold_topic, s3
from bench.children import Server
from bench.cold_topic import BATCH_BYTES, COLD_BYTES, MIB, SEGMENT_BYTES, Pass, Reader
from bench.records import batch_of_size
from bench.report import Report, Target, percentile
from bench.rounds import cpu_seconds_of_tree, resident_mib_of
from bench.s3 import Bucket, SlowProxy
from tierlog.cold_tier.chunk_fills import WINDOW_MAX
from tierlog.cold_tier.ranged_reader import ChunkRef, Hedging, RangedReader
from tierlog.object_store.open import open_store
from tierlog.object_store.s3_connection import S3Options
from tierlog.record_format.batch import parse_header
from tierlog.record_format.crc32c import crc32c_of

ROUNDS: Final = 3
RE_READS: Final = 20  # of 200 MB: in less than a second the machine's noise counts more than we do
CHUNK_BYTES: Final = 8 * MIB
READERS: Final = 100
READERS_S: Final = 8.0
DELAY_S: Final = 0.05
SLOW_S, SLOW_EVERY, FETCHES = 2.0, 50, 400


class Round(NamedTuple):
    first: Pass
    into_empty: Pass
    second: Pass
    hot: Pass
    bare: Pass
    into_files: Pass


def measure(folder: Path, *, rounds: int) -> Report:
    report = Report(name="cold_read", title="Reads of the cold tier", peer="peer")
    with s3.versitygw(folder) as bucket:
        cold_topic.fill(folder, *bucket.flags)
        key = _segment_key(bucket)
        seen = [_round(folder, bucket, key) for _ in range(rounds + 1)][1:]
        _add_passes(report, seen)
        _count_requests(report, folder, bucket)
        _many_readers(report, folder, bucket)
        _distant_store(report, folder, bucket, rounds=rounds)
        _slow_responses(report, bucket, key)
    return report


# --- what to read --------------------------------------------------------------------------------


def _segment_key(bucket: Bucket) -> str:
    """The key of one segment of the cold topic, from the bucket's root."""
    client: Any = s3.client(bucket)
    found = client.list_objects_v2(Bucket=s3.BUCKET, Prefix="bench/topics/cold/")["Contents"]
    logs = [one["Key"] for one in found if one["Size"] == SEGMENT_BYTES]
    return str(logs[0])


# --- one reader ----------------------------------------------------------------------------------


def _round(folder: Path, bucket: Bucket, key: str) -> Round:
    first = cold_topic.first_read(folder, *bucket.flags, store_pid=bucket.pid)
    bare = _bare_gets(bucket, key)
    with cold_topic.broker(folder, *bucket.flags) as broker:
        cold_topic.settle(broker)
        into_empty = cold_topic.read_all(broker, "cold")
        cold_topic.settle(broker)
        second = cold_topic.read_all(broker, "cold", times=RE_READS)
        hot = cold_topic.read_all(broker, "hot", times=RE_READS)
    with tempfile.TemporaryDirectory(dir=folder) as written:
        into_files = _bare_gets(bucket, key, written)
    return Round(first, into_empty, second, hot, bare, into_files)


def _bare_gets(bucket: Bucket, key: str, folder: str = "") -> Pass:
    """Ranged GETs of the same size in order, with as many in flight. The bodies are discarded, or
    each is written to a new file in `folder`.
    """
    client: Any = s3.client(bucket)

    def get(position: int) -> int:
        span = f"bytes={position}-{position + CHUNK_BYTES - 1}"
        body = client.get_object(Bucket=s3.BUCKET, Key=key, Range=span)["Body"]
        with open(f"{folder}/{secrets.token_hex(4)}" if folder else os.devnull, "wb", 0) as file:
            return sum(file.write(piece) for piece in body.iter_chunks(256 << 10))

    places = list(range(0, SEGMENT_BYTES, CHUNK_BYTES)) * 3
    size, began = 0, time.perf_counter()
    cpu_began, store_began = time.process_time(), cpu_seconds_of_tree(bucket.pid)
    with ThreadPoolExecutor(WINDOW_MAX + 1) as pool:
        ahead: deque[Future[int]] = deque()
        for place in places:
            ahead.append(pool.submit(get, place))
            if len(ahead) > WINDOW_MAX:
                size += ahead.popleft().result()
        size += sum(future.result() for future in ahead)
    seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    all_cpu_s = cpu_s + cpu_seconds_of_tree(bucket.pid) - store_began
    return Pass(size, seconds, cpu_s, all_cpu_s)


def _add_passes(report: Report, seen: Sequence[Round]) -> None:
    def add(what: str, ours: str, peer: str, **targets: Target | None) -> None:
        own, other = [getattr(r, ours) for r in seen], [getattr(r, peer) for r in seen]
        report.add(
            what,
            "MB/s",
            [one.mb_per_s for one in own],
            [one.mb_per_s for one in other],
            target=targets["speed"],
        )
        report.add(
            f"{what}, server",
            "CPU s/GB",
            [one.cpu_s_per_gb for one in own],
            [one.cpu_s_per_gb for one in other],
            target=targets["cpu"],
        )

    add(
        "first read (peer: bare GETs)",
        "first",
        "bare",
        speed=Target(value=0.7),
        cpu=Target(value=2.0, at_most=True, of_ratio=False),
    )
    report.add(
        "first read (peer: bare GETs), reader, broker and store",
        "CPU s/GB",
        [one.first.all_cpu_s / one.first.size_bytes * 1e9 for one in seen],
        [one.bare.all_cpu_s / one.bare.size_bytes * 1e9 for one in seen],
    )
    add("into an empty cache (peer: into files)", "into_empty", "into_files", speed=None, cpu=None)
    add(
        "second read (peer: hot)",
        "second",
        "hot",
        speed=Target(value=0.95),
        cpu=Target(value=1.1, at_most=True),
    )


# --- requests, memory ----------------------------------------------------------------------------


def _count_requests(report: Report, folder: Path, bucket: Bucket) -> None:
    """GETs for one record by a broker that has read nothing, and for one in another chunk."""
    records = parse_header(batch_of_size(BATCH_BYTES)).record_count
    with (
        SlowProxy(bucket, lambda _: 0.0) as proxy,
        cold_topic.broker(folder, *proxy.bucket.flags) as broker,
        Reader(broker, "cold") as reader,
    ):
        cold_topic.settle(broker)
        counts = []
        for place in (SEGMENT_BYTES // 2, SEGMENT_BYTES // 4):
            before = proxy.gets
            reader.read(place // BATCH_BYTES * records, max_bytes=1)
            counts.append(float(proxy.gets - before))
    for what, count, most in zip(
        ("one record, nothing cached", "one record, index loaded"), counts, (3, 1), strict=True
    ):
        target = Target(value=most, at_most=True, of_ratio=False)
        report.add(what, "requests", [count], target=target)


def _many_readers(report: Report, folder: Path, bucket: Bucket) -> None:
    with cold_topic.broker(folder, *bucket.flags) as broker:
        cold_topic.settle(broker)
        before, most = resident_mib_of(broker.pid), 0.0
        ends = time.monotonic() + READERS_S
        with ThreadPoolExecutor(READERS) as pool:
            readers = [pool.submit(_read_until, broker, n, ends=ends) for n in range(READERS)]
            while not all(reader.done() for reader in readers):
                most = max(most, resident_mib_of(broker.pid))
                time.sleep(0.05)
        totals = [reader.result() for reader in readers]
    report.add(
        f"{READERS} readers, memory growth",
        "MiB",
        [most - before],
        target=Target(value=128, at_most=True, of_ratio=False),
    )
    report.add(
        f"{READERS} readers, slowest of the mean",
        "share",
        [min(totals) / mean(totals)],
        target=Target(value=0.3, of_ratio=False),
    )


def _read_until(broker: Server, number: int, *, ends: float) -> int:
    """The bytes that this reader has read."""
    records = parse_header(batch_of_size(BATCH_BYTES)).record_count
    batches = COLD_BYTES // BATCH_BYTES
    offset, total = batches * number // READERS * records, 0
    with Reader(broker, "cold") as reader:
        while time.monotonic() < ends:
            offset, size = reader.read(offset % (batches * records), max_bytes=MIB)
            total += size
    return total


# --- a distant store, and one that is slow at times ----------------------------------------------


def _distant_store(report: Report, folder: Path, bucket: Bucket, *, rounds: int) -> None:
    speeds = []
    for _ in range(rounds):
        with (
            SlowProxy(bucket, lambda _: DELAY_S) as proxy,
            cold_topic.broker(folder, *proxy.bucket.flags) as broker,
        ):
            cold_topic.settle(broker)
            speeds.append(cold_topic.read_all(broker, "cold").mb_per_s)
    target = Target(value=100, of_ratio=False)
    report.add("first read, 50 ms more a request", "MB/s", speeds, target=target)


def _slow_responses(report: Report, bucket: Bucket, key: str) -> None:
    def delay_s(number: int) -> float:
        return SLOW_S if number % SLOW_EVERY == SLOW_EVERY - 1 else DELAY_S

    none_late, _ = _fetches(bucket, key, lambda _: DELAY_S)
    some_late, hedged = _fetches(bucket, key, delay_s)
    report.add(
        "2% of GETs 2 s late, p99 of a chunk (peer: p50 of none late)",
        "ms",
        [percentile(some_late, 0.99)],
        [percentile(none_late, 0.5)],
        target=Target(value=3, at_most=True),
    )
    share = Target(value=5, at_most=True, of_ratio=False)
    report.add("2% of GETs 2 s late, more requests", "%", [hedged * 100], target=share)


def _fetches(
    bucket: Bucket, key: str, delay_s: Callable[[int], float]
) -> tuple[list[float], float]:
    """Milliseconds of each fetch of a chunk, one after another, and the share of hedged ones."""
    hedging, taken = Hedging(), []
    url = f"s3://{s3.BUCKET}"
    with (
        SlowProxy(bucket, delay_s) as proxy,
        closing(open_store(url, S3Options(endpoint=proxy.bucket.endpoint))) as store,
        closing(RangedReader(store, hedging=hedging)) as reader,
        tempfile.TemporaryDirectory() as folder,
    ):
        chunks = [_chunk(store, key, number) for number in range(SEGMENT_BYTES // CHUNK_BYTES)]
        for number in range(FETCHES):
            began = time.perf_counter()
            path = reader.fetch_chunk(
                chunks[number % len(chunks)], lambda: Path(folder) / secrets.token_hex(4)
            )
            taken.append((time.perf_counter() - began) * 1000)
            path.unlink()
    return taken, hedging.spent / FETCHES


def _chunk(store: Any, key: str, number: int) -> ChunkRef:
    position = number * CHUNK_BYTES
    body = b"".join(store.get_range(key, position, position + CHUNK_BYTES))
    return ChunkRef(key, ("bench", number), position, CHUNK_BYTES, crc32c_of(body))
