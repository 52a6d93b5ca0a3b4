"""Seeded steps on a compacted log, compared with a plain list of all appended records.

Whatever was compacted and wherever the power failed: each record read is the one appended at its
offset, offsets increase, and the last flushed record of each key exists, unless it is an expired
tombstone. The seed is in the test's name; `TIERLOG_SEED` runs only that one.
"""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from tests.fakes.clock import Clock
from tests.fakes.lossy_disk import LossyDisk
from tests.fakes.partition_logs import TOPIC_ID, batch, produced, records_of
from tests.simulation.steps import run, seeds
from tierlog.hot_tier import segment_swap
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.log_config import LogConfig
from tierlog.hot_tier.log_writer import Append
from tierlog.hot_tier.recovery_scan import OpenRequest
from tierlog.record_format.compaction import PlainKeyTable

STEPS = 100
RETENTION_MS = 5000


class Line(NamedTuple):
    key: bytes
    value: bytes | None
    written_ms: int


class World:
    def __init__(self, seed: int, folder: Path) -> None:
        self.random, self.folder, self.clock = Random(seed), folder, Clock()
        self.lines: list[Line] = []
        self.flushed = self.recovery_point = self.life = self.sequence = 0
        self.checkpoint: int | None = None
        self.config = LogConfig.parse(
            {
                "cleanup.policy": "compact",
                "segment.bytes": self.random.choice((1024, 3000)),
                "index.interval.bytes": self.random.choice((0, 300, 4096)),
                "delete.retention.ms": RETENTION_MS,
                "min.compaction.lag.ms": self.random.choice((0, 0, 2000)),
            }
        )
        self.open(LossyDisk(), clean=False)

    def open(self, disk: LossyDisk, *, clean: bool) -> None:
        self.disk = disk
        self.log = PartitionLog.open(
            self.folder / str(self.life),
            topic="t",
            partition=0,
            topic_id=TOPIC_ID,
            config=self.config,
            clock=self.clock,
            monotonic_clock=self.clock,
            request=OpenRequest(clean=clean, recovery_point=self.recovery_point),
            disk=disk,
        )

    def append(self) -> None:
        random = self.random
        count = random.randint(1, 6)
        keys = [b"k%d" % random.randrange(15) for _ in range(count)]
        values = [random.choice((None, b"", random.randbytes(60))) for _ in keys]
        fields = {}
        if random.random() < 0.5:
            fields = {"producer_id": 9, "producer_epoch": 0, "base_sequence": self.sequence}
        times = [self.clock.now_ms - random.randint(0, 500) for _ in keys]
        data = batch(values, keys=keys, timestamps=times, codec=random.choice((0, 3)), **fields)
        (outcome,) = self.log.writer.append([Append(produced(data))])
        assert not isinstance(outcome, Exception), outcome
        assert outcome.base_offset == len(self.lines)
        self.sequence += count if fields else 0
        rows = zip(keys, values, strict=True)
        self.lines += [Line(key, value, self.clock.now_ms) for key, value in rows]

    def flush(self) -> None:
        self.flushed = self.log.writer.flush()

    def roll(self) -> None:
        if self.log.roll():
            self.flushed = len(self.lines)

    def compact(self) -> None:
        cleanable = self.log.sealed.cleanable(self.checkpoint)
        if cleanable.dirty_bytes:
            self.recovery_point = self.log.flushed_end  # as the broker does before a round
            table = PlainKeyTable(self.random.choice((1 << 20, 160 * 8)))
            self.checkpoint = self.log.sealed.clean(cleanable, table).end_offset

    def reap(self) -> None:
        self.log.reap(at_once=True)

    def wait(self) -> None:
        self.clock.now_ms += self.random.choice((10, 1000, RETENTION_MS))

    def restart(self) -> None:
        assert self.log.close()
        self.flushed = self.recovery_point = len(self.lines)
        self.open(self.disk, clean=True)

    def kill(self) -> None:
        """Kill the process: everything written is kept, but still unsynced."""
        self.open(self.disk, clean=False)
        assert self.log.log_end_offset == len(self.lines)
        self.flushed = self.recovery_point = len(self.lines)

    def crash(self) -> None:
        """Power failure: a new folder with what was synced, and some unsynced writes."""
        flushed, self.life = self.flushed, self.life + 1
        self.disk.crash_into(self.folder / str(self.life), self.random, of=self.log.folder)
        self.close()
        self.open(LossyDisk(), clean=False)
        end = self.log.log_end_offset
        assert flushed <= end <= len(self.lines), "an acknowledged record is lost"
        del self.lines[end:]
        survived = {record.offset for record in records_of(self.log)}
        assert survived.issuperset(range(flushed, end)), "a record is lost, but not all after it"
        self.flushed = self.recovery_point = end
        known = self.log._state.producers.get(9)
        self.sequence = known.last_sequence + 1 if known else 0

    def check(self) -> None:
        records = records_of(self.log)
        offsets = [record.offset for record in records]
        assert offsets == sorted(set(offsets))
        for record in records:
            line = self.lines[record.offset]
            assert (record.key, record.value) == (line.key, line.value)
        found = {record.key: record.offset for record in records}
        last = {line.key: (offset, line) for offset, line in enumerate(self.lines[: self.flushed])}
        for key, (offset, line) in last.items():
            expired = line.value is None and line.written_ms + RETENTION_MS <= self.clock.now_ms
            if expired and key not in found:
                continue
            assert found.get(key) == offset, f"the last record of {key!r} is missing"

    def finish(self) -> None:
        self.crash()
        self.check()

    def close(self) -> None:
        self.log.close()


WEIGHTS = {
    World.append: 40,
    World.flush: 8,
    World.roll: 6,
    World.compact: 14,
    World.reap: 3,
    World.wait: 8,
    World.restart: 3,
    World.kill: 3,
    World.crash: 8,
}


@pytest.mark.parametrize("seed", seeds(8))
def test_a_compacted_log_keeps_the_last_record_of_each_key(seed, tmp_path):
    run(World(seed, tmp_path), WEIGHTS, STEPS)


def test_the_simulation_catches_old_segments_deleted_too_early(tmp_path, monkeypatch):
    """Planted bug: the new segment is renamed unsynced before the old ones are deleted."""

    def publish(state, cleaned):
        for suffix in cleaned.suffixes:
            segment_swap._stage(state, cleaned, suffix)

    class NonsyncingDisk(LossyDisk):
        def sync_bytes(self, fd):
            if Path(f"/proc/self/fd/{fd}").readlink().suffix != ".cleaned":
                super().sync_bytes(fd)

    monkeypatch.setattr(segment_swap, "_publish", publish)
    monkeypatch.setattr("tests.simulation.test_compaction_simulation.LossyDisk", NonsyncingDisk)

    def run_all():
        for seed in range(30):
            run(World(seed, tmp_path / str(seed)), WEIGHTS, STEPS)

    with pytest.raises(AssertionError, match=r"the last record of .* is missing"):
        run_all()
