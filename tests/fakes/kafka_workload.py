"""The same requests for a real Kafka and for tierlog, and Kafka's results: appends, timestamp
lookups and reads of each topic.

No request depends on a response, except in transactions, which need Kafka's coordinator: those run
only on Kafka.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.fakes.kafka_wire import Wire
from tests.fakes.produce_requests import DIFFERENT, HOUR_MS, NOW_MS, ODD, RandomRequests
from tests.fakes.real_kafka import RealKafka
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.decode import decode_batch
from tierlog.record_format.encode import encode_batch

SEED = int(os.environ.get("TIERLOG_SEED", "7"))
SMALL = {"segment.bytes": 4096, "index.interval.bytes": 200}
STAMPED = {"message.timestamp.type": "LogAppendTime"}
LIMITS = {"message.timestamp.before.max.ms": HOUR_MS, "message.timestamp.after.max.ms": HOUR_MS}
TOPICS: dict[str, dict[str, object]] = {
    "odd": {},
    "odd-stamped": STAMPED,
    "odd-limits": {**LIMITS, "max.message.bytes": 500},
    "odd-compacted": {"cleanup.policy": "compact"},
    "odd-zstd": {"compression.type": "zstd"},
    "odd-different": SMALL,
    "random": {"index.interval.bytes": 200},
    "random-sound": {**SMALL, "segment.ms": HOUR_MS},
    "random-stamped": {"index.interval.bytes": 200, **STAMPED},
    "random-gzip": {"compression.type": "gzip"},
}
# Kafka checks timestamps that it overwrites, and batches that it recompresses, less strictly.
DIFFERENT_THERE = {
    "odd-stamped": {"a time beyond 64 bits"},
    "odd-zstd": {f"{codec}: offset deltas 0, 2" for codec in ("gzip", "snappy", "lz4")},
}
TRIMMED_TO = 60
REQUESTS, STEPS = 150, 120


def requests_to(topic: str) -> list[tuple[str, bytes]]:
    if topic == "odd-different":
        larger_than_a_segment = "size 4097"  # refused if it would need a segment to itself
        return [(name, ODD[name]) for name in (*DIFFERENT, larger_than_a_segment)]
    if topic.startswith("odd"):
        left_out = DIFFERENT.keys() | DIFFERENT_THERE.get(topic, set())
        return [(name, batch) for name, batch in ODD.items() if name not in left_out]
    rng = random.Random(f"{SEED} {topic}")
    # With small segments only accepted requests: Kafka also rolls for one that it then refuses.
    source = RandomRequests(rng, sound=topic == "random-sound")
    return [source.next() for _ in range(REQUESTS)]


class Results(NamedTuple):
    """The results of a topic's appends, and then of its lookups and reads."""

    appended: list[Any]
    by_time: dict[int, tuple[int, int] | None]
    by_time_trimmed: dict[int, tuple[int, int] | None]
    fetched: dict[tuple[int, int], bytes]


class Transactions(NamedTuple):
    """`committed`: the offsets of all committed records, by the offset at which the read began."""

    committed: dict[int, list[int]]
    by_time: dict[int, tuple[int, int] | None]
    last_stable_offset: int
    high_watermark: int


class Theirs(NamedTuple):
    data: Path
    topics: dict[str, Results]
    transactions: Transactions


def run_on_kafka(kafka: RealKafka, data: Path) -> Theirs:
    """Run the whole workload on a new broker in this folder."""
    topics = {topic: kafka_config(config) for topic, config in TOPICS.items()}
    topics["transactions"] = kafka_config(SMALL)
    with kafka.broker(data, topics) as server:
        wire = Wire(server)
        results = {topic: run_workload(wire, topic) for topic in TOPICS}
        run_transactions(wire, random.Random(SEED))
        transactions = read_transactions(wire)
        wire.close()
    return Theirs(data, results, transactions)


def kafka_config(config: dict[str, object]) -> dict[str, object]:
    """The configuration for Kafka, whose public segment.bytes has a minimum of 1 MiB."""
    known = {"segment.bytes": "internal.segment.bytes"}
    return {known.get(key, key): value for key, value in config.items()}


def run_workload(wire: Wire, topic: str) -> Results:
    appended = [wire.produce(topic, batch) for _, batch in requests_to(topic)]
    times = timestamps_to_look_up(topic)
    by_time = {time: wire.list_offset(topic, time) for time in times}
    end = wire.fetch(topic, 0, max_bytes=1, committed=False).high_watermark
    fetched = {
        (offset, size): wire.fetch(topic, offset, max_bytes=size, committed=False).records
        for offset, size in reads_to_try(topic, end)
    }
    if topic.startswith("random"):
        wire.delete_records(topic, TRIMMED_TO)
    by_time_trimmed = {time: wire.list_offset(topic, time) for time in times}
    return Results(appended, by_time, by_time_trimmed, fetched)


def timestamps_to_look_up(topic: str) -> list[int]:
    """Timestamps around those sent; not -1 and -2, which have a special meaning."""
    if not topic.startswith("random"):
        return []
    times = {1, 2**62}
    for _, batch in requests_to(topic)[::3]:
        header = next(iter_headers(batch))
        times |= {record.timestamp for record in decode_batch(batch, header)[-2:]}
    return sorted({time + step for time in times for step in (-1, 0, 1)})


def reads_to_try(topic: str, end: int) -> Iterator[tuple[int, int]]:
    if not topic.startswith("random"):
        return
    for offset in range(0, end, 5):
        yield offset, (1, 300, 2000, 1 << 20)[offset % 4]


def read_transactions(wire: Wire) -> Transactions:
    end = wire.fetch("transactions", 0, max_bytes=1, committed=False)
    starts = range(0, end.last_stable_offset, 5)
    committed = {start: read_committed(wire, "transactions", start) for start in starts}
    times = range(NOW_MS, NOW_MS + STEPS, 5)
    by_time = {time: wire.list_offset("transactions", time) for time in times}
    return Transactions(committed, by_time, end.last_stable_offset, end.high_watermark)


def run_transactions(wire: Wire, rng: random.Random, topic: str = "transactions") -> None:
    """Interleaved transactions of three producers, and records outside of any."""
    names = ["one", "two", "three"]
    producers = {name: wire.begin_producer(name) for name in names}
    sequences, is_open = dict.fromkeys(names, 0), set()
    for number in range(STEPS):
        name = rng.choice(names)
        step = rng.choice(("plain", *["send"] * 6, "end", "end", "begin anew"))
        if step == "plain":
            assert wire.produce(topic, random_batch(rng, number)).error == "NONE"
        elif step == "begin anew":  # the next epoch aborts what is open
            producers[name], sequences[name] = wire.begin_producer(name), 0
            is_open.discard(name)
        elif step == "end" and name in is_open:
            wire.end_transaction(name, producers[name], commit=rng.random() < 0.5)
            is_open.remove(name)
        else:
            if name not in is_open:
                wire.add_to_transaction(name, producers[name], topic)
                is_open.add(name)
            producer_id, epoch = producers[name]
            batch = random_batch(
                rng,
                number,
                producer_id=producer_id,
                producer_epoch=epoch,
                base_sequence=sequences[name],
                transactional=True,
            )
            sequences[name] += next(iter_headers(batch)).record_count
            assert wire.produce(topic, batch, transactional_id=name).error == "NONE"
    assert is_open, "the log ends above its last stable offset"
    for name in set(names) - is_open:
        wire.add_to_transaction(
            name, producers[name], topic
        )  # waits for the marker of its last one


def random_batch(rng: random.Random, number: int, **fields: Any) -> bytes:
    values = [rng.randbytes(rng.randint(0, 60)) for _ in range(rng.choice((1, 2, 9)))]
    times = [NOW_MS + number for _ in values]
    return bytes(encode_batch(values, timestamps=times, codec=rng.choice((0, 4)), **fields))


def read_committed(wire: Wire, topic: str, offset: int) -> list[int]:
    """Like Kafka's consumer: a producer's batches are left out from the first offset of each of its
    aborted transactions to the marker.
    """
    found, at = [], offset
    while True:
        fetched = wire.fetch(topic, at, max_bytes=1 << 20, committed=True)
        assert fetched.error == "NONE"
        waiting, aborting = sorted(fetched.aborted, key=lambda txn: txn[1]), set()
        headers = list(iter_headers(fetched.records))
        if not headers:
            return found
        for header in headers:
            while waiting and waiting[0][1] <= header.last_offset:
                aborting.add(waiting.pop(0)[0])
            if header.is_control:
                aborting.discard(header.producer_id)
            elif header.producer_id not in aborting or not header.is_transactional:
                records = decode_batch(fetched.records, header)
                found += [record.offset for record in records if record.offset >= offset]
        at = headers[-1].next_offset
