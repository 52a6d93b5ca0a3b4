"""Kafka and we take and refuse the same produce requests, answer the same questions about what was
taken, and are left with the same files.

What only one of the two takes stands in `produce_requests.DIFFERENT`, with the reason. The random
requests print their seed; `TIERLOG_SEED` sets another.
"""

import os
import random
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from api.http.app import create_app
from api.http.server import RunningServer
from api.http.settings import HttpSettings
from broker.broker import Broker
from broker.settings import BrokerSettings
from cold_tier.open import open_store
from record_format.batch import BatchHeader, iter_headers, stamp
from record_format.decode import decode_batch
from record_format.encode import encode_batch
from record_format.producer_snapshot import parse_snapshot
from tests.fakes.kafka_wire import Appended, Wire
from tests.fakes.produce_requests import DIFFERENT, HOUR_MS, NOW_MS, ODD, RandomRequests

pytestmark = pytest.mark.kafka

SEED = int(os.environ.get("TIERLOG_SEED", "7"))
BATCHES = "application/vnd.apache.kafka.recordbatch.v2"
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
# Kafka looks less closely at times that it overwrites, and at what it compresses anew.
DIFFERENT_THERE = {
    "odd-stamped": {"a time beyond 64 bits"},
    "odd-zstd": {f"{codec}: offset deltas 0, 2" for codec in ("gzip", "snappy", "lz4")},
}
TRIMMED_TO = 60
REQUESTS, STEPS = 150, 120
# Kafka's error, and what we may call it. What it has no name for is a fault of its own.
SAME = {
    "CORRUPT_MESSAGE": {"corrupt-batch"},
    "INVALID_RECORD": {"corrupt-batch", "invalid-record"},
    "INVALID_TIMESTAMP": {"invalid-record", "corrupt-batch"},
    "MESSAGE_TOO_LARGE": {"record-too-large"},
    "OUT_OF_ORDER_SEQUENCE_NUMBER": {"out-of-order-sequence"},
    "INVALID_PRODUCER_EPOCH": {"producer-fenced", "corrupt-batch"},
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": {"invalid-record"},
    "error -1": {"corrupt-batch"},
}


def requests_to(topic: str) -> list[tuple[str, bytes]]:
    if topic == "odd-different":
        return [(name, ODD[name]) for name in DIFFERENT]
    if topic.startswith("odd"):
        left_out = DIFFERENT.keys() | DIFFERENT_THERE.get(topic, set())
        return [(name, batch) for name, batch in ODD.items() if name not in left_out]
    rng = random.Random(f"{SEED} {topic}")
    # In small segments only what is taken: Kafka also rolls for a request that it then refuses.
    source = RandomRequests(rng, sound=topic == "random-sound")
    return [source.next() for _ in range(REQUESTS)]


# --- Kafka's side ---------------------------------------------------------------------------------


class Asked(NamedTuple):
    """What a topic's requests were answered, and then the questions about it."""

    appended: list[Any]
    by_time: dict[int, tuple[int, int] | None]
    by_time_trimmed: dict[int, tuple[int, int] | None]
    fetched: dict[tuple[int, int], bytes]


class Transactions(NamedTuple):
    """`committed`: the offsets of all committed records, by where the read began."""

    committed: dict[int, list[int]]
    by_time: dict[int, tuple[int, int] | None]
    last_stable_offset: int
    high_watermark: int


class Theirs(NamedTuple):
    data: Path
    topics: dict[str, Asked]
    transactions: Transactions


@pytest.fixture(scope="module")
def theirs(kafka, tmp_path_factory):
    print(f"TIERLOG_SEED={SEED}")
    data = tmp_path_factory.mktemp("theirs") / "kafka"
    topics = {topic: as_kafka_has_it(config) for topic, config in TOPICS.items()}
    topics["transactions"] = as_kafka_has_it(SMALL)
    with kafka.broker(data, topics) as server:
        wire = Wire(server)
        asked = {topic: ask_kafka(wire, topic) for topic in TOPICS}
        play_transactions(wire, random.Random(SEED))
        transactions = ask_of_transactions(wire)
        wire.close()
    return Theirs(data, asked, transactions)


def as_kafka_has_it(config):
    """Its public name for the size has a floor of 1 MiB."""
    known = {"segment.bytes": "internal.segment.bytes"}
    return {known.get(key, key): value for key, value in config.items()}


def ask_kafka(wire, topic):
    appended = [wire.produce(topic, batch) for _, batch in requests_to(topic)]
    times = times_to_ask(topic)
    by_time = {time: wire.list_offset(topic, time) for time in times}
    end = wire.fetch(topic, 0, max_bytes=1, committed=False).high_watermark
    fetched = {
        (offset, size): wire.fetch(topic, offset, max_bytes=size, committed=False).records
        for offset, size in reads_to_try(topic, end)
    }
    if topic.startswith("random"):
        wire.delete_records(topic, TRIMMED_TO)
    by_time_trimmed = {time: wire.list_offset(topic, time) for time in times}
    return Asked(appended, by_time, by_time_trimmed, fetched)


def times_to_ask(topic):
    """Around every time that was sent."""
    if not topic.startswith("random"):
        return []
    times = {1, 2**62}
    for _, batch in requests_to(topic):
        header = next(iter_headers(batch))
        times |= {record.timestamp for record in decode_batch(batch, header)[-2:]}
    return sorted(
        {time + step for time in times for step in (-1, 0, 1)}
    )  # -1 and -2 are other questions


def reads_to_try(topic, end):
    if not topic.startswith("random"):
        return
    for offset in range(0, end, 5):
        yield offset, (1, 300, 2000, 1 << 20)[offset % 4]


def ask_of_transactions(wire):
    end = wire.fetch("transactions", 0, max_bytes=1, committed=False)
    starts = range(0, end.last_stable_offset, 5)
    committed = {start: read_committed(wire, "transactions", start) for start in starts}
    times = range(NOW_MS, NOW_MS + STEPS, 5)
    by_time = {time: wire.list_offset("transactions", time) for time in times}
    return Transactions(committed, by_time, end.last_stable_offset, end.high_watermark)


def play_transactions(wire, rng, topic="transactions"):
    """Three producers' transactions, across each other, and records outside of any."""
    names = ["one", "two", "three"]
    producers = {name: wire.begin_producer(name) for name in names}
    sequences, is_open = dict.fromkeys(names, 0), set()
    for number in range(STEPS):
        name = rng.choice(names)
        step = rng.choice(("plain", *["send"] * 6, "end", "end", "begin anew"))
        if step == "plain":
            assert wire.produce(topic, a_batch(rng, number)).error == "NONE"
        elif step == "begin anew":  # under the next epoch, which aborts what is open
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
            batch = a_batch(
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
        wire.add_to_transaction(name, producers[name], topic)  # once the last one's marker is there


def a_batch(rng, number, **fields):
    values = [rng.randbytes(rng.randint(0, 60)) for _ in range(rng.choice((1, 2, 9)))]
    times = [NOW_MS + number for _ in values]
    return bytes(encode_batch(values, timestamps=times, codec=rng.choice((0, 4)), **fields))


def read_committed(wire, topic, offset):
    """As Kafka's consumer does: batches of a producer are left out from the first offset of each
    of its aborted transactions to the marker.
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


# --- our side -------------------------------------------------------------------------------------


class Ours(NamedTuple):
    data: Path
    topics: dict[str, Asked]


@pytest.fixture(scope="module")
def ours(tmp_path_factory, theirs):
    data = tmp_path_factory.mktemp("ours") / "data"
    with api_on(data) as (broker, api):
        for topic, config in TOPICS.items():
            everything = {"max.message.bytes": 64 << 20, "retention.ms": -1, **config}
            broker.create_topic(topic, partitions=1, config=everything)
        return Ours(data, {topic: ask_us(broker, api, topic, theirs) for topic in TOPICS})


@contextmanager
def api_on(data, store=None):
    broker = Broker.open(BrokerSettings(data_dir=data, disk_reserve_bytes=0), store=store)
    settings = HttpSettings()
    try:
        with (
            RunningServer(create_app(broker, settings), settings) as server,
            httpx.Client(base_url=server.url, timeout=60) as api,
        ):
            yield broker, api
    finally:
        broker.close()


def ask_us(broker, api, topic, theirs):
    appended = [produce(api, topic, batch) for _, batch in requests_to(topic)]
    times = times_to_ask(topic)
    by_time = {time: list_offset(api, topic, time) for time in times}
    reads = theirs.topics[topic].fetched
    fetched = {(offset, size): fetch(api, topic, offset, size) for offset, size in reads}
    if topic.startswith("random"):
        broker.trim(topic, 0, TRIMMED_TO)
    by_time_trimmed = {time: list_offset(api, topic, time) for time in times}
    return Asked(appended, by_time, by_time_trimmed, fetched)


def produce(api, topic, batch):
    path, headers = f"/v1/topics/{topic}/partitions/0/records", {"content-type": BATCHES}
    return api.post(path, content=batch, headers=headers).json()


def list_offset(api, topic, time):
    path = f"/v1/topics/{topic}/partitions/0/offsets"
    found = api.get(path, params={"timestamp": time}).raise_for_status().json()
    return None if found["offset"] is None else (found["offset"], found["timestamp"])


def fetch(api, topic, offset, max_bytes):
    path, headers = f"/v1/topics/{topic}/partitions/0/records", {"accept": BATCHES}
    params = {"offset": offset, "max_bytes": max_bytes}
    return api.get(path, params=params, headers=headers).raise_for_status().content


# --- the answers ----------------------------------------------------------------------------------


def is_same(topic: str, kafkas: Appended, answer: dict[str, Any]) -> bool:
    if kafkas.error != "NONE":
        return answer.get("code") in SAME[kafkas.error]
    if "results" not in answer:
        return False
    (result,) = answer["results"]
    has_time = result["log_append_time"] is not None
    return result["base_offset"] == kafkas.base_offset and has_time == (
        "stamped" in topic and kafkas.log_append_time >= 0
    )


@pytest.mark.parametrize("topic", [topic for topic in TOPICS if topic != "odd-different"])
def test_the_same_requests_are_taken_at_the_same_offsets(theirs, ours, topic):
    unlike = [
        (number, name, kafkas, answer)
        for number, ((name, _), kafkas, answer) in enumerate(
            zip(
                requests_to(topic),
                theirs.topics[topic].appended,
                ours.topics[topic].appended,
                strict=True,
            )
        )
        if not is_same(topic, kafkas, answer)
    ]
    assert unlike == [], f"TIERLOG_SEED={SEED}"
    errors = {kafkas.error for kafkas in theirs.topics[topic].appended}
    assert errors == {"NONE"} if topic == "random-sound" else len(errors) > 1


def test_what_differs_is_known(theirs, ours):
    taken_by = {
        name: (kafkas.error == "NONE", "results" in answer)
        for name, kafkas, answer in zip(
            DIFFERENT,
            theirs.topics["odd-different"].appended,
            ours.topics["odd-different"].appended,
            strict=True,
        )
    }
    assert {name for name, (kafka, us) in taken_by.items() if kafka == us} == set()


@pytest.mark.parametrize("topic", [topic for topic in TOPICS if topic.startswith("random")])
def test_times_and_offsets_find_the_same(theirs, ours, topic):
    kafkas, own = theirs.topics[topic], ours.topics[topic]
    if "stamped" not in topic:  # the broker's own clock
        assert own.by_time == kafkas.by_time
        for time, found in kafkas.by_time_trimmed.items():
            # Kafka looks into one segment alone, also where that one's part is below the start.
            assert own.by_time_trimmed[time] == (found or own.by_time_trimmed[time])
        assert own.by_time != own.by_time_trimmed
    bases = {int(path.stem) for path in (theirs.data / f"{topic}-0").glob("*.log")}
    for asked, data in kafkas.fetched.items():
        wanted = list(iter_headers(data))
        found = list(iter_headers(own.fetched[asked]))
        assert [like(h) for h in found[: len(wanted)]] == [like(h) for h in wanted], asked
        # We read on where a segment ends.
        assert len(found) == len(wanted) or found[len(wanted)].base_offset in bases, asked


def like(header: BatchHeader) -> BatchHeader:
    """But for what the clock and a compressor of another make decide. Our epochs begin at 1; bits
    that have no meaning stay where we compress anew.
    """
    return header._replace(
        leader_epoch=0,
        attributes=header.attributes & 0x7F,
        position=0,
        crc=0,
        size_bytes=0,
        max_timestamp=0 if header.timestamp_type else header.max_timestamp,
    )


# --- the files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", [topic for topic in TOPICS if topic != "odd-different"])
def test_the_same_files_are_left(theirs, ours, topic):
    kafkas, own = theirs.data / f"{topic}-0", ours.data / f"{topic}-0"
    assert names(own) == names(kafkas)
    exact = not topic.endswith(("stamped", "zstd", "gzip"))
    for name in names(own):
        found, wanted = (own / name).read_bytes(), (kafkas / name).read_bytes()
        if name.endswith(".snapshot"):
            assert states(found, exact=exact) == states(wanted, exact=exact), name
        elif name.endswith(".log") and exact:
            assert in_epoch_0(found) == wanted, name
        elif exact:
            assert found == wanted, name
        elif name.endswith(".log"):
            assert batches(found) == batches(wanted), name


def in_epoch_0(data):
    changed = bytearray(data)
    for header in iter_headers(data):
        assert header.leader_epoch == 1
        stamp(changed, header.position, base_offset=header.base_offset, leader_epoch=0)
    return changed


def names(folder):
    suffixes = (".log", ".index", ".timeindex", ".snapshot")
    return sorted(path.name for path in folder.iterdir() if path.suffix in suffixes)


def states(data, *, exact):
    entries = parse_snapshot(data)
    return {entry if exact else entry._replace(timestamp=0) for entry in entries}


def batches(data):
    return [
        (like(header), [r._replace(timestamp=0) if header.timestamp_type else r for r in records])
        for header in iter_headers(data)
        for records in (decode_batch(data, header),)
    ]


# --- transactions, in a folder taken over from Kafka ----------------------------------------------


@pytest.mark.parametrize("tier", ["hot", "cold", "recovered"])
def test_what_was_committed_is_read_alike(theirs, tmp_path, tier):
    data, wanted = tmp_path / "data", theirs.transactions
    shutil.copytree(theirs.data / "transactions-0", data / "transactions-0")
    shutil.copy(theirs.data / "meta.properties", data)
    if tier == "recovered":  # out of the log alone
        for path in (data / "transactions-0").iterdir():
            if path.suffix in (".index", ".timeindex", ".txnindex", ".snapshot"):
                path.unlink()
    else:
        for name in (".kafka_cleanshutdown", "recovery-point-offset-checkpoint"):
            shutil.copy(theirs.data / name, data)
    with api_on(data, open_store(f"file://{tmp_path}/bucket")) as (broker, api):
        if tier == "cold":
            broker.alter_topic("transactions", config={"local.retention.ms": 0})
            broker.offload("transactions", wait_ms=20_000)
        now = api.get("/v1/topics/transactions/partitions/0/offsets").json()
        assert (now["local_log_start_offset"] > wanted.last_stable_offset) == (tier == "cold")
        assert now["last_stable_offset"] == wanted.last_stable_offset < now["high_watermark"]
        assert now["high_watermark"] == wanted.high_watermark
        for start, offsets in wanted.committed.items():
            size = 1 << 20 if start else 1
            assert committed(api, start, size) == offsets, f"{start}, TIERLOG_SEED={SEED}"
        for time, found in wanted.by_time.items():
            assert list_offset(api, "transactions", time) == found


def committed(api, start, max_bytes):
    """From `start` on: offsets of raw batches, and of records; they are the same."""
    found = {form: [] for form in (BATCHES, "application/json")}
    for form, offsets in found.items():
        at = start
        while True:
            path = "/v1/topics/transactions/partitions/0/records"
            params = {"offset": at, "max_bytes": max_bytes, "isolation": "read_committed"}
            answer = api.get(path, params=params, headers={"accept": form}).raise_for_status()
            offsets += offsets_of(answer, form, start)
            if int(answer.headers["log-next-offset"]) == at:
                break
            at = int(answer.headers["log-next-offset"])
    assert found[BATCHES] == found["application/json"]
    return found[BATCHES]


def offsets_of(answer, form, start):
    if form != BATCHES:
        return [record["offset"] for record in answer.json()["records"]]
    data = answer.content
    headers = [header for header in iter_headers(data) if not header.is_control]
    records = [record for header in headers for record in decode_batch(data, header)]
    return [record.offset for record in records if record.offset >= start]
