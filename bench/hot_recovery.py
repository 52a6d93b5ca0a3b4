"""Claim: after a crash a log is checked about as fast as it can be read.

* Measured: opening a partition that was not closed, with nothing of it known to be flushed: every
  batch's CRC is checked and the indexes are rebuilt and synced; bytes per second of one segment.
* The same for a log that idempotent producers wrote in turn: their state is rebuilt too.
* Peer: a bare loop that reads the same files into a buffer of 1 MiB and computes their CRC-32C.

Both read from the page cache, as after a crash of the process.

`python -m bench hot_recovery`; takes half a minute.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench.logs import open_log, opened, produced
from bench.records import batch_of_size
from bench.report import Report, Target
from bench.rounds import interleave, wall_seconds
from tierlog.hot_tier.log_writer import Append, AppendResult
from tierlog.record_format import native
from tierlog.record_format.batch import parse_header, set_producer
from tierlog.record_format.crc32c import crc32c_of

ROUNDS: Final = 7
MIB: Final = 1 << 20
TOTAL_BYTES: Final = 512 * MIB
PRODUCERS: Final = 8


def measure(folder: Path, *, rounds: int) -> Report:
    native.load()
    report = Report(
        name="hot_recovery", title="Recovery scan of an unclean log", peer="read + crc32c"
    )
    for size, producers, name in (
        (MIB, 0, "1 MiB batches"),
        (16 << 10, 0, "16 KiB batches"),
        (16 << 10, PRODUCERS, f"16 KiB batches of {PRODUCERS} idempotent producers"),
    ):
        log_folder = folder / f"{size}-{producers}"
        _fill(log_folder, batch_of_size(size), producers)
        runs = {"ours": _recover_run(log_folder), "bare": _bare_run(log_folder)}
        seen = interleave(runs, rounds=rounds)
        report.add(
            name,
            "MB/s",
            [TOTAL_BYTES / 1e6 / wall_s for wall_s in seen["ours"]],
            [TOTAL_BYTES / 1e6 / wall_s for wall_s in seen["bare"]],
            target=Target(value=0.5),
        )
    return report


def _fill(folder: Path, batch: bytes, producers: int) -> None:
    """`producers`: how many idempotent ones wrote it; 0 for none."""
    own, records = bytearray(batch), parse_header(batch).record_count
    with opened(folder) as log:
        for number in range(TOTAL_BYTES // len(batch)):
            if producers:
                turn, producer = divmod(number, producers)
                set_producer(
                    own, producer_id=producer, producer_epoch=0, base_sequence=turn * records
                )
            (outcome,) = log.writer.append([Append(produced(own))])
            assert isinstance(outcome, AppendResult), outcome


def _recover_run(folder: Path) -> Callable[[], float]:
    def run() -> float:
        logs = []
        wall_s = wall_seconds(lambda: logs.append(open_log(folder, clean=False)))
        assert logs[0].recovery.checked_bytes == TOTAL_BYTES, logs[0].recovery
        logs[0].close()
        return wall_s

    return run


def _bare_run(folder: Path) -> Callable[[], float]:
    def scan() -> None:
        buffer = bytearray(MIB)
        view = memoryview(buffer)
        for path in sorted(folder.glob("*.log")):
            crc = 0
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    crc = crc32c_of(view[:count], crc)

    return lambda: wall_seconds(scan)
