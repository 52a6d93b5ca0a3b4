"""Claim: a lookup costs microseconds however many segments a partition has.

* Measured: looking up a random offset in a partition of 10,000 segments, with its indexes already
  used and for the first time; the same by timestamp; how long that partition takes to open after a
  clean stop, and the memory it then holds.
* Peer: the least possible, a bisection in one sorted list of every batch in memory.

Ours returns an open slice of the right file, the peer a position.

`python -m bench hot_lookup`; takes about a minute, most of it to write the segments.
"""

from __future__ import annotations

import bisect
import random
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Final

from bench.logs import open_log, produced
from bench.records import START_MS
from bench.report import Report, Target
from bench.rounds import interleave
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.log_writer import Append, AppendResult
from tierlog.record_format.encode import encode_batch

ROUNDS: Final = 5
SEGMENTS: Final = 10_000
BATCHES: Final = 4
RECORDS: Final = 5
VALUE_BYTES: Final = 1024
LOOKUPS: Final = 5_000
END: Final = SEGMENTS * BATCHES * RECORDS


def measure(folder: Path, *, rounds: int) -> Report:
    report = Report(name="hot_lookup", title="10,000 segments in one partition", peer="bisect")
    segment_bytes = _fill(folder / "log")
    opened_s, memory = [], []
    for _ in range(rounds):
        opened_s.append(_open_seconds(folder / "log", segment_bytes))
        memory.append(_open_memory(folder / "log", segment_bytes))
    log = open_log(folder / "log", segment_bytes=segment_bytes, recovery_point=END)
    try:
        _add_lookups(report, log, rounds)
    finally:
        log.close()
    report.add(
        "open after a clean stop",
        "s",
        opened_s,
        target=Target(value=1, at_most=True, of_ratio=False),
    )
    report.add(
        "memory it holds", "MiB", memory, target=Target(value=30, at_most=True, of_ratio=False)
    )
    return report


def _fill(folder: Path) -> int:
    """Write segments of a few batches each; returns their `segment.bytes`."""
    values = [b"v" * VALUE_BYTES] * RECORDS
    size = len(encode_batch(values, timestamps=[START_MS] * RECORDS))
    segment_bytes = BATCHES * size
    log = open_log(folder, segment_bytes=segment_bytes)
    for number in range(SEGMENTS * BATCHES):
        first = START_MS + number * RECORDS
        batch = encode_batch(values, timestamps=[first + record for record in range(RECORDS)])
        (outcome,) = log.writer.append([Append(produced(batch))])
        assert isinstance(outcome, AppendResult), outcome
    log.close()
    return segment_bytes


def _open_seconds(folder: Path, segment_bytes: int) -> float:
    began = time.perf_counter()
    log = open_log(folder, segment_bytes=segment_bytes, recovery_point=END)
    spent_s = time.perf_counter() - began
    assert len(log.segments()) == SEGMENTS, len(log.segments())
    log.close()
    return spent_s


def _open_memory(folder: Path, segment_bytes: int) -> float:
    tracemalloc.start()
    log = open_log(folder, segment_bytes=segment_bytes, recovery_point=END)
    held = tracemalloc.get_traced_memory()[0] / (1 << 20)
    tracemalloc.stop()
    log.close()
    return held


def _add_lookups(report: Report, log: PartitionLog, rounds: int) -> None:
    rng = random.Random(1)
    offsets = [rng.randrange(END) for _ in range(LOOKUPS)]
    bases = list(range(0, END, RECORDS))
    report.add(
        "random offset, first touch",
        "µs",
        [_median_us(lambda at: log.read_hot(at, max_bytes=1).close(), offsets)],
        [_median_us(lambda at: bisect.bisect_right(bases, at), offsets)],
    )
    first_times = [_median_us(lambda at: log.offset_for_timestamp(START_MS + at), offsets)]
    runs: dict[str, Callable[[], float]] = {
        "offset": lambda: _median_us(lambda at: log.read_hot(at, max_bytes=1).close(), offsets),
        "time": lambda: _median_us(lambda at: log.offset_for_timestamp(START_MS + at), offsets),
        "bisect": lambda: _median_us(lambda at: bisect.bisect_right(bases, at), offsets),
    }
    seen = interleave(runs, rounds=rounds)
    report.add(
        "random offset",
        "µs",
        seen["offset"],
        seen["bisect"],
        target=Target(value=20, at_most=True, of_ratio=False),
    )
    report.add("random timestamp, first touch", "µs", first_times)
    report.add(
        "random timestamp",
        "µs",
        seen["time"],
        seen["bisect"],
        target=Target(value=80, at_most=True, of_ratio=False),
    )


def _median_us(look_up: Callable[[int], object], keys: Sequence[int]) -> float:
    spent = []
    for key in keys:
        began = time.perf_counter_ns()
        look_up(key)
        spent.append(time.perf_counter_ns() - began)
    return median(spent) / 1000
