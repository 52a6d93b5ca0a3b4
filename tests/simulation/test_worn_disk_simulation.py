"""Seeded steps of one owner whose disk fills up, or whose process dies, at any call that changes
the disk: in the midst of a write, a roll, a checkpoint, a deletion, a note of what is in force. The
store fails calls meanwhile, the configuration changes, an idempotent producer repeats its last
request, and segments leave the disk because of its reserve.

After each step what `test_ownership_simulation` demands of an owner, and: a repeat of an
acknowledged request is known. The seed is in the test's name; `TIERLOG_SEED` runs that one.
"""

import errno
import os
from contextlib import suppress
from dataclasses import dataclass

import pytest

from hot_tier import reaper
from hot_tier.append import Acks
from hot_tier.disk import Disk
from record_format.encode import encode_batch
from record_format.errors import DiskFull
from record_format.produced import check_produced
from tests.simulation.steps import run, seeds
from tests.simulation.test_ownership_simulation import World, Wrong

STEPS = 60
TAKES_ROOM = frozenset({"open", "write_at", "rename"})
CALLS = (*TAKES_ROOM, "truncate", "sync_bytes", "sync_file", "sync_folder", "unlink")
CONFIGS = [
    {"segment.bytes": 1024},
    {"segment.bytes": 4096},
    {"local.retention.bytes": 1024},
    {"compression.type": "lz4"},
]


class Crash(BaseException):
    """The process ends here."""


class Wear:
    """From the planned call on, each fails."""

    def __init__(self) -> None:
        self.heal()

    def plan(self, after: int, error: BaseException) -> None:
        self._left, self._error = after, error

    def heal(self) -> None:
        self._left, self._error = 0, None

    def meet(self, call: str, given: tuple) -> None:
        creates = call != "open" or given[1] & os.O_CREAT
        if self._error is None or not creates:
            return
        if isinstance(self._error, OSError) and call not in TAKES_ROOM:
            return
        if self._left:
            self._left -= 1
            return
        raise self._error


@pytest.fixture
def wear(monkeypatch):
    wear = Wear()

    def worn(name):
        real = getattr(Disk, name)

        def call(disk, *given):
            wear.meet(name, given)
            return real(disk, *given)

        return call

    for name in CALLS:
        monkeypatch.setattr(Disk, name, worn(name))
    yield wear
    wear.heal()


@dataclass
class Producer:
    """`last`: its last acknowledged request. `is_unsure`: the one after that had no answer."""

    producer_id: int
    sequence: int = 0
    last: tuple[list[bytes], int, int] | None = None
    is_unsure: bool = False


class WornWorld(World):
    def __init__(self, seed, root, wear) -> None:
        self.wear, self.producers = wear, [Producer(number) for number in range(3)]
        super().__init__(seed, root)

    def _append(self, owner) -> range:
        producer = self.random.choices(self.producers, weights=(8, 2, 1))[0]
        values = [b"%d " % (self.written + n) + b"x" * 60 for n in range(self.random.randint(1, 4))]
        self.written += len(values)
        producer.is_unsure = True
        base_offset = self._send(producer, values, producer.sequence).base_offset
        producer.is_unsure = False
        producer.last = (values, producer.sequence, base_offset)
        producer.sequence += len(values)
        for offset, value in enumerate(values, base_offset):
            if self.acknowledged.setdefault(offset, value) != value:
                raise Wrong(f"offset {offset} is given twice")
        return range(base_offset, base_offset + len(values))

    def _send(self, producer, values, sequence):
        batch = encode_batch(
            values,
            timestamps=[1] * len(values),
            producer_id=producer.producer_id,
            producer_epoch=0,
            base_sequence=sequence,
        )
        produced = check_produced(batch, max_message_bytes=1 << 20, now_ms=1)
        return self.owner.partition.append(produced, acks=Acks.ALL).result(10)

    # --- steps ------------------------------------------------------------------------------------

    def repeat(self) -> None:
        for producer in self.producers:
            if producer.last is not None:
                values, sequence, base_offset = producer.last
                found = self._send(producer, values, sequence)
                if (found.duplicate, found.base_offset) != (True, base_offset):
                    raise Wrong(f"the repeat of {base_offset} is at {found.base_offset}")

    def alter(self) -> None:
        self.owner.broker.alter_topic("t", config=self.random.choice(CONFIGS))

    def relieve(self) -> None:
        self.owner.broker.chores.janitor.relieve_disk(self.random.choice((1, 1 << 20)))

    def save(self) -> None:
        self.owner.broker.chores.checkpoints.save()

    def full_disk(self) -> None:
        self.wear.plan(self.random.randint(0, 30), OSError(errno.ENOSPC, "No space left"))
        for step in self.random.choices(CHANGES, k=4):
            with suppress(DiskFull, OSError):
                step(self)
        for producer in self.producers:
            producer.is_unsure = False  # what was refused is not there
        self.wear.heal()

    def crash_within(self) -> None:
        self.wear.plan(self.random.randint(0, 60), Crash())
        with suppress(Crash):
            for step in self.random.choices(CHANGES, k=4):
                step(self)
        assert self.owner.broker.chores.copier.wait_until_idle(timeout_s=30)
        self.wear.heal()
        self.producers = [
            Producer(one.producer_id + 3) if one.is_unsure else one for one in self.producers
        ]
        self.crash()

    def close(self) -> None:
        self.wear.heal()
        super().close()


CHANGES = (
    WornWorld.produce,
    WornWorld.repeat,
    WornWorld.roll_and_copy,
    WornWorld.copy,
    WornWorld.retain,
    WornWorld.relieve,
    WornWorld.trim,
    WornWorld.collect,
    WornWorld.alter,
    WornWorld.save,
)
WEIGHTS = {
    **dict.fromkeys(CHANGES, 3),
    WornWorld.produce: 8,
    WornWorld.fail: 3,
    WornWorld.heal: 3,
    WornWorld.restart: 2,
    WornWorld.crash: 2,
    WornWorld.full_disk: 6,
    WornWorld.crash_within: 8,
}


@pytest.mark.parametrize("seed", seeds(8))
def test_nothing_acknowledged_is_lost_wherever_the_disk_or_the_process_ends(seed, tmp_path, wear):
    run(WornWorld(seed, tmp_path, wear), WEIGHTS, STEPS)


def test_planted_a_deletion_that_renames_the_log_last(tmp_path, wear, monkeypatch):
    """What a crash leaves is whole, but for the producers before it."""
    monkeypatch.setattr(reaper, "DELETED_IN_ORDER", reaper.REPLACED_IN_ORDER)

    with pytest.raises(Wrong, match="the repeat"):
        run(WornWorld(239, tmp_path, wear), WEIGHTS, STEPS)
