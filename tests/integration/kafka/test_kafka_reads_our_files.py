"""Kafka reads what we write: its dump tool, its broker and consumer, its recovery.

One data folder holds folders that Kafka wrote (tests/fixtures/kafka), adopted and appended to by
our broker, and topics of our own. It is closed cleanly and then opened by Kafka.
"""

import base64
import random
import shutil
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fakes.damage import flip
from tests.fakes.real_kafka import complaints
from tests.fakes.waiting import until
from tierlog.broker.broker import Broker
from tierlog.broker.settings import BrokerSettings
from tierlog.broker.transaction_coordinator.transaction import V1, V2
from tierlog.hot_tier.log_writer import Acks
from tierlog.record_format.batch import iter_headers, parse_header
from tierlog.record_format.decode import decode_batch
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.produced import (
    ProducedBatches,
    ProduceLimits,
    check_produced,
    recompress,
)

pytestmark = pytest.mark.kafka

FIXTURES = Path(__file__).parents[2] / "fixtures" / "kafka"
NOW_MS = 1_790_000_000_000
# Topics with another index.interval.bytes: indexes that Kafka rebuilds have other entries.
OTHER_INTERVAL = ("dense-index", "index-full-roll", "unclean", "compacted")
OWN = {
    "ours-plain": {"segment.bytes": 16384},
    "ours-codecs": {"segment.bytes": 32768},
    "ours-recompressed": {"compression.type": "zstd"},
    "ours-stamped": {"message.timestamp.type": "LogAppendTime", "segment.bytes": 16384},
    "ours-idempotent": {"segment.bytes": 8192},
    "ours-index-full": {"segment.index.bytes": 24, "segment.bytes": 1 << 20},
    "ours-empty": {},
    "ours-trimmed": {"segment.bytes": 8192},
    "ours-transactional": {"segment.bytes": 1024},
}


class Ours(NamedTuple):
    """The data folder after a clean stop, and what our broker served from it."""

    data: Path
    folders: dict[str, Path]
    records: dict[str, list]
    committed_offsets: dict[str, list[int]]
    offsets: dict[str, tuple[int, int, int]]


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    data = tmp_path_factory.mktemp("ours") / "data"
    shutil.copytree(FIXTURES / "_broker", data)
    adopted = sorted(path.parent.name for path in FIXTURES.glob("*/partition.metadata"))
    for name in adopted:
        shutil.copytree(FIXTURES / name, data / name)
    settings = BrokerSettings(data_dir=data, disk_reserve_bytes=0)
    broker = Broker.open(settings, store=None)
    for name in adopted:
        append(broker.partition(*partition_of(name)), [b"appended by tierlog", b""])
    for topic, config in OWN.items():
        broker.create_topic(topic, partitions=1, config=config)
        fill(broker, topic)
    broker.trim("ours-trimmed", 0, 77)
    names = adopted + [f"{topic}-0" for topic in OWN]
    partitions = {name: broker.partition(*partition_of(name)) for name in names}
    found = Ours(
        data,
        {name: data / name for name in names},
        {name: served(partition) for name, partition in partitions.items()},
        {name: committed(partition) for name, partition in partitions.items()},
        {name: offsets(partition) for name, partition in partitions.items()},
    )
    broker.close()
    return found


def partition_of(name: str) -> tuple[str, int]:
    topic, _, number = name.rpartition("-")
    return topic, int(number)


def append(partition, values, **fields):
    rng = random.Random(len(values))
    fields = {"timestamps": [NOW_MS + rng.randint(-999, 999) for _ in values], **fields}
    codec = fields.pop("recompress", None)
    body = encode_batch(values, **fields)
    produced = check_produced(body, ProduceLimits(max_message_bytes=1 << 26, now_ms=NOW_MS))
    if codec is not None:
        produced = recompress(produced, codec)
    return partition.append(produced, acks=Acks.ALL).result(10)


def fill(broker, topic):
    """Append batches of all sizes: null and empty keys and values, headers, random timestamps."""
    if topic == "ours-empty":
        return
    if topic == "ours-transactional":
        fill_with_transactions(broker, topic)
        return
    partition, rng = broker.partition(topic, 0), random.Random(topic)
    sequences = [0, 0]
    for number in range(60):
        count = rng.choice((1, 1, 2, 7, 40))
        values = [rng.choice((None, b"", rng.randbytes(rng.randint(1, 200)))) for _ in range(count)]
        fields = {
            "keys": [rng.choice((None, b"", rng.randbytes(5))) for _ in range(count)],
            "headers": [rng.choice(((), (("a", b"1"), ("a", None), ("é", b"")))) for _ in values],
        }
        if topic == "ours-codecs":
            fields["codec"] = number % 5
        if topic == "ours-recompressed":
            fields |= {"codec": number % 5, "recompress": 4}
        if topic == "ours-idempotent":
            producer = number % 2
            fields |= {"producer_id": 7 + producer, "producer_epoch": 3}
            fields["base_sequence"] = sequences[producer]
            sequences[producer] += count
        append(partition, values, **fields)


def fill_with_transactions(broker, topic):
    """Of three producers at a time, of V1 and V2, committed or aborted; the last stay open."""
    transactions, rng = broker.transactions, random.Random(topic)
    transactions.log.ensure_topic()
    place, partition = (topic, 0), broker.partition(topic, 0)

    def ask(call, *arguments, **fields):
        answer = Future()
        call(*arguments, **fields, reply=answer.set_result)
        outcome = answer.result(10)
        assert outcome.reason == "NONE", outcome
        return outcome.producer

    for number in range(60):
        name, version = f"copy-{number % 3}", V2 if number % 2 else V1
        begin, coordinator = number // 3 % 2 == 0, transactions.coordinator
        if begin:
            until(partial(is_settled, coordinator, name))
            producer = ask(coordinator.init_producer, name, timeout_ms=60_000, expected=None)
            ask(coordinator.add_partitions, name, producer, [place], version=version)
            for sequence in range(rng.randint(1, 3)):
                body = encode_batch(
                    [rng.randbytes(90)],
                    timestamps=[NOW_MS + number],
                    producer_id=producer.producer_id,
                    producer_epoch=producer.epoch,
                    base_sequence=sequence,
                    transactional=True,
                )
                batches = ProducedBatches(body, [parse_header(body)], [NOW_MS + number])
                verify = transactions.verify(name, place)
                partition.append(batches, acks=Acks.ALL, verify=verify).result(10)
        elif number < 57:
            producer = coordinator.describe(name).producer
            commit = rng.random() < 0.5
            ask(coordinator.end_transaction, name, producer, commit=commit, version=version)


def is_settled(coordinator, name):
    found = coordinator.describe(name)
    return found is None or not found.state.is_decided


def batches(partition, *, committed):
    now = partition.offsets()
    offset, end = now.log_start_offset, now.high_watermark
    end = now.last_stable_offset if committed else end
    while offset < end:
        fetched = partition.read(offset, max_bytes=1 << 20, committed=committed)
        for piece in fetched.slices:
            data = piece.read()
            for header in iter_headers(data):
                if not header.is_control and header.last_offset >= now.log_start_offset:
                    yield fetched, header, decode_batch(data, header)
        offset = fetched.next_offset


def served(partition):
    start = partition.offsets().log_start_offset
    return [
        (r.offset, r.timestamp, encoded(r.key), encoded(r.value), headers_of(r))
        for _, _, records in batches(partition, committed=False)
        for r in records
        if r.offset >= start
    ]


def headers_of(record):
    return [[name, encoded(value)] for name, value in record.headers]


def encoded(data):
    return None if data is None else base64.b64encode(data).decode()


def committed(partition):
    found, start = [], partition.offsets().log_start_offset
    for fetched, header, records in batches(partition, committed=True):
        aborted = header.is_transactional and any(
            txn.producer_id == header.producer_id
            and txn.first_offset <= header.base_offset <= txn.last_offset
            for txn in fetched.aborted
        )
        found += [] if aborted else [r.offset for r in records if r.offset >= start]
    return found


def offsets(partition):
    now = partition.offsets()
    return now.log_start_offset, now.high_watermark, now.last_stable_offset


def comparable(records):
    return [(r.offset, r.timestamp, r.key, r.value, r.headers) for r in records]


def is_kafkas_own(path):
    """The tool complains about some files that Kafka's own cleaner wrote."""
    fixture = FIXTURES / path.parent.name / path.name
    return fixture.exists() and fixture.read_bytes() == path.read_bytes()


def test_the_dump_tool_finds_nothing_wrong_with_our_files(kafka, ours):
    for compacted in (False, True):
        files = [
            path
            for name, folder in ours.folders.items()
            if name.startswith("compacted") == compacted
            for path in sorted(folder.iterdir())
            if path.suffix in (".log", ".index", ".timeindex", ".txnindex", ".snapshot")
            and not is_kafkas_own(path)
        ]
        text = kafka.dump(files)
        assert text.count("Dumping ") == len(files)
        assert complaints(text, gaps_are_valid=compacted) == []


def test_the_dump_tool_detects_damage(kafka, ours, tmp_path):
    folder = tmp_path / "bad"
    shutil.copytree(ours.folders["ours-plain-0"], folder)
    log, index = sorted(folder.glob("*.log"))[0], sorted(folder.glob("*.index"))[0]
    flip(log, -1)
    assert complaints(kafka.dump([log]))
    log.write_bytes(ours.folders["ours-plain-0"].joinpath(log.name).read_bytes())
    flip(index, 3)
    assert complaints(kafka.dump([index]))


def assert_served_as_ours(seen, ours):
    assert seen.warnings == [], "Kafka read the checkpoints, epochs and metadata"
    for name, records in ours.records.items():
        assert comparable(seen.records.get(name, [])) == records, name
        assert [r.offset for r in seen.committed.get(name, [])] == ours.committed_offsets[name]
        assert seen.offsets[name] == ours.offsets[name], name


@pytest.fixture(scope="module")
def prepared(kafka, ours, tmp_path_factory):
    data = tmp_path_factory.mktemp("prepared") / "kafka"
    return kafka.prepare(ours.folders, data, top_level=ours.data)


def test_a_kafka_broker_serves_our_data_folder(kafka, ours, prepared):
    seen = kafka.serve(ours.folders, prepared, top_level=ours.data)
    assert_served_as_ours(seen, ours)


def test_a_kafka_broker_recovering_our_folders_builds_the_same_indexes(kafka, ours, prepared):
    seen = kafka.serve(ours.folders, prepared, top_level=ours.data, clean=False)
    assert_served_as_ours(seen, ours)
    compared = 0
    for name, folder in ours.folders.items():
        if name.startswith(OTHER_INTERVAL):
            continue
        for path in folder.iterdir():
            if path.suffix in (".log", ".index", ".timeindex", ".txnindex"):
                theirs = seen.folder / name / path.name
                assert theirs.read_bytes() == path.read_bytes(), f"{name}/{path.name}"
                compared += 1
    assert compared > 200
