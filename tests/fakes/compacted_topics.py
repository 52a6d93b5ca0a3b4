"""Compacted topics of a `BrokerHarness`: filled, cleaned, and read from the bucket alone."""

import random

from tests.fakes.records import iter_records
from tests.fakes.waiting import until
from tierlog.hot_tier.log_writer import Acks
from tierlog.record_format.produced import build_produced

COMPACT = {
    "cleanup.policy": "compact",
    "segment.bytes": 4096,
    "min.cleanable.dirty.ratio": 0.01,
}


def put(harness, topic, pairs, *, acks=Acks.ALL):
    batches = build_produced(
        [value for _, value in pairs],
        keys=[key for key, _ in pairs],
        timestamps=[harness.broker.clock()] * len(pairs),
        max_message_bytes=1 << 20,
    )
    return harness.broker.partition(topic, 0).append(batches, acks=acks).result(10)


def fill(harness, topic, count, *, keys=20, seed=1):
    """Write records; return the last value of each key."""
    rng, last = random.Random(seed), {}
    for _ in range(0, count, 10):
        pairs = [(b"key-%d" % rng.randrange(keys), rng.randbytes(100)) for _ in range(10)]
        result = put(harness, topic, pairs)
        for number, (key, value) in enumerate(pairs):
            last[key] = (result.base_offset + number, value)
    return last


def last_of(records):
    return {record.key: (record.offset, record.value) for record in records}


def compacted(harness, topic):
    """Clean all of it. An upload meanwhile ends a round, which the next one repeats: no segment may
    span where the bucket ends.
    """
    log = harness.broker.partition(topic, 0)._log
    log.roll()
    before = log.size_bytes

    def is_clean():
        harness.broker.background.compactor.run_round()
        return cleaned(harness, topic) == log.active_base_offset

    until(is_clean)
    assert log.size_bytes < before
    return log


def cleaned(harness, topic="t"):
    broker = harness.broker
    return broker._topics.compaction_offsets.cleaned(broker.partition(topic, 0))


def offload(harness, topic):
    harness.offload(topic)
    assert harness.broker.partition(topic, 0).is_mirrored


def cold_records(harness, topic):
    """The partition's records in the bucket."""
    cold = harness.broker.partition(topic, 0)._cold
    found = []
    for entry in cold.reads.cold_entries(0):
        pieces = cold.reads.byte_range(entry, start=0, end=entry.size_bytes)
        found += iter_records(b"".join(piece.read() for piece in pieces))
    return found
