"""Claim: many producers that wait for the disk share its flushes.

* Measured: `GroupCommit`, acks=all: 64 coroutines of one event loop, like the server's requests,
  each of which waits for its append of a 16 KiB batch before it sends the next; appends per second.
* Peers: the same log with one flush per append; and a bare group commit with the same coroutines
  and futures, one file, and one `writev` and one `fdatasync` for all waiting appends.
* The same with 64 threads, for programs that embed a log: there each hand-over is one of the
  interpreter's lock, in ours as in the peer.

Where a flush costs next to nothing (many virtual disks), the first ratio is small; the last row has
the cost of one `fdatasync`.

`python -m bench hot_durable`; takes a minute.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Final

from bench.logs import opened, produced
from bench.records import batch_of_size
from bench.report import Report, Target
from bench.rounds import interleave
from tierlog.hot_tier.group_commit import FlushTimer, GroupCommit
from tierlog.hot_tier.log_writer import Acks, Append, AppendResult
from tierlog.record_format import native

ROUNDS: Final = 7
PRODUCERS: Final = 64
DURATION_S: Final = 1.0
BATCH_BYTES: Final = 16 << 10

Submit = Callable[[bytearray], "Future[AppendResult]"]
Produce = Callable[[Submit, bytes], float]


def measure(folder: Path, *, rounds: int) -> Report:
    native.load()
    report = Report(
        name="hot_durable", title="Durable 16 KiB appends, 64 waiting producers", peer="peer"
    )
    body = batch_of_size(BATCH_BYTES)
    runs = {
        "ours": lambda: _group_commit(folder / "log", body, _by_threads),
        "single": lambda: _flush_each(folder / "log", body),
        "bare": lambda: _bare_group_commit(folder / "bare", body, _by_threads),
        "ours on a loop": lambda: _group_commit(folder / "log", body, _by_coroutines),
        "bare on a loop": lambda: _bare_group_commit(folder / "bare", body, _by_coroutines),
        "sync": lambda: _sync_ms(folder / "bare", body),
    }
    seen = interleave(runs, rounds=rounds)
    for name, ours, bare, targets in (
        ("64 requests of a server", "ours on a loop", "bare on a loop", (4.0, 0.7)),
        ("64 threads", "ours", "bare", (None, None)),
    ):
        for peer, theirs, target in (
            ("one flush an append", "single", targets[0]),
            ("bare group commit", bare, targets[1]),
        ):
            report.add(
                f"{name}, peer: {peer}",
                "appends/s",
                seen[ours],
                seen[theirs],
                target=Target(value=target) if target else None,
            )
    report.add("one writev and fdatasync of this disk", "ms", seen["sync"])
    return report


def _group_commit(folder: Path, body: bytes, produce: Produce) -> float:
    timer = FlushTimer()
    with opened(folder) as log, ThreadPoolExecutor(8) as executor:
        commit = GroupCommit(log.writer, executor.submit, timer)
        rate = produce(lambda own: commit.submit(Append(produced(own)), acks=Acks.ALL), body)
        commit.close()
    timer.close()
    shutil.rmtree(folder)
    return rate


def _flush_each(folder: Path, body: bytes) -> float:
    appends, own, began = 0, bytearray(body), time.perf_counter()
    with opened(folder) as log:
        while time.perf_counter() - began < DURATION_S:
            log.writer.append([Append(produced(own))])
            log.writer.flush()
            appends += 1
        rate = appends / (time.perf_counter() - began)
    shutil.rmtree(folder)
    return rate


def _by_threads(submit: Submit, body: bytes) -> float:
    """Appends per second of all producers, each with one in flight."""
    counts = [0] * PRODUCERS
    end = time.perf_counter() + DURATION_S

    def producer(number: int) -> None:
        own = bytearray(body)
        while time.perf_counter() < end:
            submit(own).result()
            counts[number] += 1

    began = time.perf_counter()
    threads = [threading.Thread(target=producer, args=(number,)) for number in range(PRODUCERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began)


def _by_coroutines(submit: Submit, body: bytes) -> float:
    """As `_by_threads`, with coroutines."""

    async def producer(end: float) -> int:
        own, count = bytearray(body), 0
        while time.perf_counter() < end:
            await asyncio.wrap_future(submit(own))
            count += 1
        return count

    async def produce() -> float:
        began = time.perf_counter()
        running = [producer(began + DURATION_S) for _ in range(PRODUCERS)]
        return sum(await asyncio.gather(*running)) / (time.perf_counter() - began)

    return asyncio.run(produce())


class _BareCommit:
    """The least that group commit needs: a list, a thread, one write, one flush, the results."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT)
        self._changed = threading.Condition()
        self._waiting: list[tuple[bytearray, Future[AppendResult]]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def submit(self, body: bytearray) -> Future[AppendResult]:
        future: Future[AppendResult] = Future()
        with self._changed:
            self._waiting.append((body, future))
            self._changed.notify()
        return future

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()
        os.close(self._file)

    def _run(self) -> None:
        result = AppendResult(0, 0, None, duplicate=False, log_start_offset=0)
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                group, self._waiting = self._waiting, []
            os.writev(self._file, [body for body, _ in group])
            os.fdatasync(self._file)
            for _, future in group:
                future.set_result(result)


def _bare_group_commit(path: Path, body: bytes, produce: Produce) -> float:
    commit = _BareCommit(path)
    try:
        return produce(commit.submit, body)
    finally:
        commit.close()
        path.unlink()


def _sync_ms(path: Path, body: bytes) -> float:
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    spent = []
    for _ in range(200):
        began = time.perf_counter()
        os.writev(file, [body])
        os.fdatasync(file)
        spent.append((time.perf_counter() - began) * 1000)
    os.close(file)
    path.unlink()
    return median(spent)
