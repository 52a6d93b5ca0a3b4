"""Claim: compaction keeps up with a disk on one core, and ten million keys need one round.

* Measured: one round over 512 MiB of 1 KiB records in batches of 16 KiB, each of 100,000 keys about
  five times: bytes of log per CPU second, including writing, syncing and swapping in the result.
* Measured: ten million keys once, and a tenth of them twice, in small records: how many rounds it
  takes with a table of 128 MiB (`log.cleaner.dedupe.buffer`), and bytes per CPU second.
* Peer: a bare loop that reads the same files twice, as compaction has to, and writes as many bytes
  as are left.

`python -m bench compaction`; takes about two minutes and 3 GB of disk.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench.logs import open_log, opened, produced
from bench.records import START_MS, texts
from bench.report import Report, Target
from tierlog.hot_tier.log_writer import Append
from tierlog.record_format import native
from tierlog.record_format.compaction import make_key_table
from tierlog.record_format.encode import encode_batch

ROUNDS: Final = 3
MIB: Final = 1 << 20
TABLE_BYTES: Final = 128 * MIB
TOTAL_BYTES: Final = 512 * MIB
KEYS: Final = 100_000
MANY_KEYS: Final = 10_000_000
CONFIG: Final[dict[str, Any]] = {
    "cleanup_policy": "compact",
    "segment_bytes": 64 * MIB,
    "min_cleanable_dirty_ratio": 0.01,
}


class Cleaned(NamedTuple):
    cpu_s: float
    rounds: int
    left_bytes: int


def measure(folder: Path, *, rounds: int) -> Report:
    native.load()
    report = Report(name="compaction", title="Compaction of one log", peer="read twice + write")
    for name, batches in (
        ("1 KiB records", _repeated_keys()),
        ("10 million keys", _distinct_keys()),
    ):
        source = folder / name.replace(" ", "-")
        size = _fill(source, batches)
        cleaned, bare = [], []
        for number in range(rounds + 1):  # the first is discarded
            copy = folder / f"round-{number}"
            shutil.copytree(source, copy)
            done = _clean(copy)
            bare.append(size / 1e6 / _bare_cpu_s(copy, source, done.left_bytes))
            cleaned.append(done)
            shutil.rmtree(copy)
        speed = [size / 1e6 / one.cpu_s for one in cleaned[1:]]
        target = Target(value=150, of_ratio=False) if name == "1 KiB records" else None
        report.add(f"{name}: log a CPU second", "MB", speed, bare[1:], target=target)
        left = [one.left_bytes / size for one in cleaned[1:]]
        report.add(f"{name}: what is left of it", "", left)
        once = Target(value=1, at_most=True, of_ratio=False)
        taken = [float(one.rounds) for one in cleaned[1:]]
        report.add(f"{name}: rounds with a table of 128 MiB", "", taken, target=once)
        shutil.rmtree(source)
    return report


def _repeated_keys() -> Iterator[bytes]:
    rng = random.Random(2)
    values = texts(64, 1000)
    for number in range(TOTAL_BYTES // (16 << 10)):
        keys: list[bytes | None] = [b"key-%09d" % rng.randrange(KEYS) for _ in range(15)]
        chosen = [values[(number + i) % 64] for i in range(15)]
        yield bytes(encode_batch(chosen, keys=keys, timestamps=[START_MS] * 15))


def _distinct_keys() -> Iterator[bytes]:
    step = 1000
    for first in range(0, MANY_KEYS + MANY_KEYS // 10, step):
        keys: list[bytes | None] = [b"%d" % (k % MANY_KEYS) for k in range(first, first + step)]
        yield bytes(encode_batch([b"v"] * step, keys=keys, timestamps=[START_MS] * step))


def _fill(folder: Path, batches: Iterator[bytes]) -> int:
    with opened(folder, **CONFIG) as log:
        for batch in batches:
            log.writer.append([Append(produced(batch))])
        log.roll()
        log.writer.flush()
        return log.size_bytes


def _clean(folder: Path) -> Cleaned:
    log = open_log(folder, **CONFIG)
    table = make_key_table(TABLE_BYTES)
    checkpoint, rounds = None, 0
    began = time.process_time()
    while (cleanable := log.sealed.cleanable(checkpoint)).dirty_bytes:
        done = log.sealed.clean(cleanable, table)
        checkpoint, rounds = done.end_offset, rounds + 1
    cpu_s = time.process_time() - began
    left = log.size_bytes
    log.close()
    return Cleaned(cpu_s, rounds, left)


def _bare_cpu_s(folder: Path, source: Path, left_bytes: int) -> float:
    """CPU seconds of the work that no compaction can avoid."""
    began = time.process_time()
    for _ in range(2):
        for path in sorted(source.glob("*.log")):
            _read(path, lambda _: None)
    with (folder / "bare").open("wb", buffering=0) as out:
        for _ in range(max(1, left_bytes // MIB)):
            out.write(bytes(MIB))
    return time.process_time() - began


def _read(path: Path, take: Callable[[bytes], None]) -> None:
    with path.open("rb", buffering=0) as file:
        while piece := file.read(MIB):
            take(piece)
