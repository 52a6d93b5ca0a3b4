"""Seeded steps on a log and on a plain list; they must agree after each step.

A crash may lose unsynced writes. Flushed records stay at their offsets, and the log stays a prefix
of what was appended. The seed is in the test's name; `TIERLOG_SEED` runs only that one.
"""

from __future__ import annotations

import shutil
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from tests.fakes.clock import NOW_MS, Clock
from tests.fakes.lossy_disk import LossyDisk
from tests.fakes.partition_logs import TOPIC_ID, batch, produced, records_of
from tests.simulation.steps import run, seeds
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.log_config import LogConfig
from tierlog.hot_tier.log_writer import Append
from tierlog.hot_tier.recovery_scan import OpenRequest
from tierlog.record_format.errors import CorruptDataError, OffsetTrimmed, OutOfOrderSequence

STEPS = 150


class Line(NamedTuple):
    """A record of the plain list."""

    value: bytes
    timestamp: int
    producer: int
    sequence: int
    first: bool  # of its batch


class World:
    """The log under test beside the list."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = Random(seed)
        self.folder = folder
        self.clock = Clock()
        self.lines: list[Line] = []
        self.flushed = 0
        self.log_start = 0
        self.checkpoint = 0  # a recovery point saved earlier
        self.epoch = 0
        self.life = 0
        self.config = LogConfig.parse(
            {
                "segment.bytes": self.random.choice((1024, 3000, 20_000)),
                "index.interval.bytes": self.random.choice((0, 300, 4096)),
                "segment.index.bytes": self.random.choice((48, 4096)),
                "segment.ms": self.random.choice((1000, 10**9)),
                "preallocate": self.random.random() < 0.2,
            }
        )
        self.open(LossyDisk(), clean=False)

    # --- steps ------------------------------------------------------------------------------------

    def open(self, disk: LossyDisk, *, clean: bool) -> None:
        folder, self.disk = self.folder / str(self.life), disk
        self.log = self._open(folder, self.disk, clean=clean)
        assert self.log.recovery.clean == clean or not self.lines
        self.epoch += 1
        self.log.bump_epoch(self.epoch)

    def _open(self, folder: Path, disk: LossyDisk, *, clean: bool) -> PartitionLog:
        return PartitionLog.open(
            folder,
            topic="t",
            partition=0,
            topic_id=TOPIC_ID,
            config=self.config,
            clock=self.clock,
            monotonic_clock=self.clock,
            request=OpenRequest(
                clean=clean, recovery_point=self.checkpoint, log_start_offset=self.log_start
            ),
            disk=disk,
        )

    def append(self) -> None:
        appends = [self._new_append() for _ in range(self.random.choice((1, 1, 2, 5)))]
        for outcome, (append, lines) in zip(
            self.log.writer.append([append for append, _ in appends]), appends, strict=True
        ):
            assert not isinstance(outcome, Exception)
            assert outcome.base_offset == len(self.lines)
            assert not outcome.duplicate
            assert append is not None
            self.lines += lines

    def _new_append(self) -> tuple[Append, list[Line]]:
        random = self.random
        count = random.randint(1, 5)
        values = [random.randbytes(random.choice((0, 10, 300))) for _ in range(count)]
        times = [NOW_MS + random.randint(0, 3000) for _ in values]
        # One producer per append: sequences in one call would depend on each other.
        producer = random.choice((-1, 1 << 40 | len(self.lines) | random.getrandbits(20) << 41))
        fields = (
            {"producer_id": producer, "producer_epoch": 0, "base_sequence": 0}
            if producer >= 0
            else {}
        )
        data = batch(values, timestamps=times, codec=random.choice((0, 0, 3, 4)), **fields)
        lines = [
            Line(value, timestamp, producer, number, number == 0)
            for number, (value, timestamp) in enumerate(zip(values, times, strict=True))
        ]
        return Append(produced(data)), lines

    def repeat(self) -> None:
        """Repeat an idempotent producer's request, and send one that would leave a gap."""
        known = [n for n, line in enumerate(self.lines) if line.producer >= 0 and line.first]
        if not known:
            return
        first = self.random.choice(known)
        producer = self.lines[first].producer
        lines = [line for line in self.lines if line.producer == producer]
        fields = {"producer_id": producer, "producer_epoch": 0}
        again = batch(
            [line.value for line in lines],
            timestamps=[line.timestamp for line in lines],
            base_sequence=0,
            **fields,
        )
        gap = batch([b"gap"], base_sequence=len(lines) + 1, **fields)
        duplicate, refused = self.log.writer.append(
            [Append(produced(again)), Append(produced(gap))]
        )
        assert (duplicate.base_offset, duplicate.duplicate) == (first, True)
        assert isinstance(refused, OutOfOrderSequence)

    def flush(self) -> None:
        assert self.log.writer.flush() == len(self.lines)
        self.flushed = len(self.lines)

    def save_checkpoint(self) -> None:
        self.checkpoint = self.log.flushed_end

    def roll(self) -> None:
        before = len(self.log.segments())
        if self.log.roll():
            self.flushed = len(self.lines)
            assert len(self.log.segments()) == before + 1

    def trim(self) -> None:
        if self.flushed > self.log_start:
            self.log_start = self.random.randint(self.log_start, self.flushed)
            assert self.log.trim(self.log_start) == self.log_start

    def delete(self) -> None:
        """Delete segments below the log start."""
        self.log.delete_local(min(self.log_start, self.flushed))
        assert self.log.local_log_start_offset == self.log_start
        self.log.reap(at_once=self.random.random() < 0.5)

    def read(self) -> None:
        offset = self.random.randint(0, max(self.flushed, 1))
        limit = self.random.choice((1, 500, 5000, 10**6))
        if offset < self.log_start:
            with pytest.raises(OffsetTrimmed):
                self.log.read_hot(offset, max_bytes=limit)
        elif offset <= self.flushed:
            end = self.random.choice((self.flushed, self._batch_end_before(self.flushed)))
            if offset <= end:
                self._check_records(offset, max_bytes=limit, end_offset=end)

    def _batch_end_before(self, offset: int) -> int:
        starts = [n for n, line in enumerate(self.lines[:offset]) if line.first]
        return self.random.choice(starts) if starts else offset

    def _check_records(self, offset: int, *, of: PartitionLog | None = None, **limits: int) -> None:
        log = of or self.log
        end = limits.get("end_offset", log.high_watermark)
        records = records_of(log, offset, **limits)
        assert [(r.offset, r.value, r.timestamp) for r in records] == [
            (offset + n, line.value, line.timestamp)
            for n, line in enumerate(self.lines[offset:end])
        ]

    def look_up_time(self) -> None:
        timestamp = NOW_MS + self.random.randint(-10, 3010)
        later = (
            (offset, line.timestamp)
            for offset, line in enumerate(self.lines[: self.flushed])
            if offset >= self.log_start and line.timestamp >= timestamp
        )
        assert self.log.offset_for_timestamp(timestamp) == next(later, None)

    def restart(self) -> None:
        assert self.log.close()
        self.flushed = self.checkpoint = len(self.lines)
        self.open(self.disk, clean=True)

    def kill(self) -> None:
        """Kill the process: everything written is kept, but still unsynced."""
        self.open(self.disk, clean=False)
        assert self.log.log_end_offset == len(self.lines)
        self.flushed = self.checkpoint = len(self.lines)

    def crash(self) -> None:
        """Power failure: a new folder with what was synced, and some unsynced writes."""
        flushed = self.flushed
        self.life += 1
        self.disk.crash_into(self.folder / str(self.life), self.random, of=self.log.folder)
        self.close()
        self.open(LossyDisk(), clean=False)
        end = self.log.log_end_offset
        assert flushed <= end <= len(self.lines), "an acknowledged record is lost"
        del self.lines[end:]
        self.flushed = self.checkpoint = end
        self._check_records(max(self.log_start, self.log.local_log_start_offset))

    def crash_within(self) -> None:
        """Like `crash`, at a disk call in the middle of a step. The log itself continues."""
        step = self.random.choice((World.append, World.flush, World.roll, World.delete))
        crashed = self.folder / "crashed"
        flushed, calls = self.flushed, self.random.randint(0, 12)

        def crash_at_call(_call: str) -> None:
            nonlocal calls
            if calls == 0:
                self.disk.crash_into(crashed, self.random, of=self.log.folder)
            calls -= 1

        self.disk.before_call = crash_at_call
        step(self)
        self.disk.before_call = lambda call: None
        if calls < 0:
            disk = LossyDisk()
            log = self._open(crashed, disk, clean=False)
            assert flushed <= log.log_end_offset <= len(self.lines), (
                "an acknowledged record is lost"
            )
            self._check_records(max(self.log_start, log.local_log_start_offset), of=log)
            log.close()
            shutil.rmtree(crashed)

    # --- after each step --------------------------------------------------------------------------

    def check(self) -> None:
        log = self.log
        assert log.log_end_offset == len(self.lines)
        assert log.high_watermark == log.flushed_end == self.flushed
        assert log.log_start_offset == self.log_start
        segments = log.segments()
        assert segments[0].base_offset <= max(self.log_start, log.local_log_start_offset)
        for left, right in pairwise(segments):
            assert left.last_offset + 1 == right.base_offset
        assert segments[-1].last_offset + 1 == len(self.lines)

    def finish(self) -> None:
        self.crash()
        self.check()

    def close(self) -> None:
        self.log.close()


WEIGHTS = {
    World.append: 30,
    World.flush: 12,
    World.read: 20,
    World.repeat: 6,
    World.look_up_time: 8,
    World.roll: 3,
    World.trim: 3,
    World.delete: 4,
    World.save_checkpoint: 4,
    World.restart: 3,
    World.kill: 4,
    World.crash: 5,
    World.crash_within: 8,
}


@pytest.mark.parametrize("seed", seeds(12))
def test_the_log_agrees_with_a_plain_list(seed, tmp_path):
    run(World(seed, tmp_path), WEIGHTS, STEPS)


class NonsyncingDisk(LossyDisk):
    """Planted bug: claims to sync, but does not."""

    def sync_bytes(self, fd: int) -> None:
        pass


def test_the_simulation_catches_a_flush_that_does_not_sync(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.simulation.test_log_simulation.LossyDisk", NonsyncingDisk)

    def run_all() -> None:
        for seed in range(20):
            run(World(seed, tmp_path / str(seed)), WEIGHTS, STEPS)

    with pytest.raises((AssertionError, CorruptDataError)):
        run_all()
