"""A random walk of a stream: the log grows, rolls, is offloaded and gains partitions; the stream
restarts anywhere with other options. Every record arrives once, in order.
"""

import random

import pytest

from tests.fakes.two_tiers import two_tiers
from tierlog.spark_reader.options import parse_options

pytest.importorskip("pyspark.sql.streaming.datasource", reason="streams need pyspark 4.2")

from tierlog.spark_reader.stream_source import TierlogStreamReader

OPTIONS = (
    {},
    {"store": None},
    {"isolationLevel": "read_committed"},
    {"maxOffsetsPerTrigger": "130"},
    {"maxBytesPerTrigger": "9k"},
    {"maxOffsetsPerTrigger": "77", "minOffsetsPerTrigger": "10", "maxTriggerDelay": "0ms"},
    {"maxRecordsPerPartition": "40"},
    {"minPartitions": "9"},
)


class Walk:
    """`planned`: the end of a batch that is in the checkpoint, but not done."""

    def __init__(self, tiers, rng):
        self.tiers, self.rng, self.read = tiers, rng, {}
        self.restart()
        self.position, self.planned = self.stream.initialOffset(), None

    def restart(self):
        given = {"server": self.tiers.url, "store": self.tiers.store_url, "subscribe": "t"}
        given |= {"startingOffsets": "earliest", **self.rng.choice(OPTIONS)}
        given = {name: value for name, value in given.items() if value is not None}
        self.stream = TierlogStreamReader(
            parse_options(given, streaming=True), ("partition", "offset")
        )

    def plan(self):
        """False if there is nothing new."""
        if self.planned is None:
            end = self.stream.latestOffset(self.position, self.stream.getDefaultReadLimit())
            self.planned = None if end == self.position else end
        return self.planned is not None

    def run(self):
        if not self.plan():
            return False
        for split in self.stream.partitions(self.position, self.planned):
            for batch in self.stream.read(split):
                for row in batch.to_pylist():
                    self.read.setdefault(row["partition"], []).append(row["offset"])
        self.position, self.planned = self.planned, None
        return True

    def run_available_now(self):
        self.restart()
        self.stream.prepareForTriggerAvailableNow()
        self.run()
        self.restart()

    def grow(self):
        partitions = len(self.tiers.written)
        self.tiers.broker.alter_topic("t", partitions=partitions + 1)
        self.tiers.written["t", partitions] = []

    def step(self):
        steps = {
            lambda: self.tiers.produce("t", self.rng.choice((50, 100, 150))): 6,
            lambda: self.tiers.offload("t"): 2,
            self.grow: 1,
            self.restart: 3,
            self.plan: 2,
            self.run: 5,
            self.run_available_now: 1,
        }
        self.rng.choices(list(steps), list(steps.values()))[0]()


@pytest.mark.parametrize("seed", range(4))
def test_every_record_arrives_once_and_in_order_across_restarts(tmp_path, seed):
    with two_tiers(tmp_path) as tiers:
        tiers.create("t", partitions=2)
        tiers.produce("t", 50)
        walk = Walk(tiers, random.Random(seed))
        for _ in range(40):
            walk.step()
        while walk.run():
            pass
        expected = {partition: list(range(len(of))) for (_, partition), of in tiers.written.items()}
        assert walk.read == {
            partition: offsets for partition, offsets in expected.items() if offsets
        }
