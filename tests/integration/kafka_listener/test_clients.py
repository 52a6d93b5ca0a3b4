"""Real clients, as they are, over both tiers; and the other door over the same log."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiokafka
import confluent_kafka
import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from tests.fakes.served_broker import Served, served_broker
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.client.client import Client
from tierlog.object_store.open import open_store

SMALL = {"segment.bytes": 16384, "local.retention.bytes": 16384, "retention.ms": -1}


@pytest.fixture
def tiered(tmp_path: Path) -> Iterator[Served]:
    store = open_store(f"file://{tmp_path / 'bucket'}")
    with served_broker(
        tmp_path / "data", store=store, kafka=KafkaSettings(), cache_bytes=64 << 20
    ) as served:
        yield served


def address(served: Served) -> str:
    return f"127.0.0.1:{served.kafka_port}"


def produce(served: Served, topic: str, values: list[bytes], **settings: object) -> list[int]:
    producer = KafkaProducer(bootstrap_servers=address(served), acks="all", **settings)
    try:
        sent = [producer.send(topic, value, key=b"k") for value in values]
        producer.flush(20)
        return [one.get(20).offset for one in sent]
    finally:
        producer.close()


def consume(served: Served, topic: str, count: int, **settings: object) -> list[bytes]:
    consumer = KafkaConsumer(
        bootstrap_servers=address(served), consumer_timeout_ms=20_000, **settings
    )
    try:
        place = TopicPartition(topic, 0)
        consumer.assign([place])
        consumer.seek(place, 0)
        found = []
        for record in consumer:
            assert record.offset == len(found)
            found.append(record.value)
            if len(found) == count:
                return found
        pytest.fail(f"{len(found)} of {count}")
    finally:
        consumer.close()


@pytest.mark.parametrize("codec", [None, "gzip", "lz4", "zstd"])
def test_kafka_python(served: Served, codec: str | None) -> None:
    served.broker.create_topic("flights")
    for idempotent, first in (True, 0), (False, 1000):
        values = [b"value %d" % number for number in range(first, first + 1000)]
        offsets = produce(
            served, "flights", values, compression_type=codec, enable_idempotence=idempotent
        )
        assert offsets == list(range(first, first + 1000))
    everything = [b"value %d" % number for number in range(2000)]
    assert consume(served, "flights", 2000) == everything
    assert consumed_over_http(served, "flights") == everything


def consumed_over_http(served: Served, topic: str) -> list[bytes | None]:
    with Client(served.server.url) as client:
        end = client.offsets(topic, 0).high_watermark
        return [one.value for one in client.consume(topic, end_offset=end)]


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_confluent_kafka(tiered: Served, codec: str) -> None:
    """librdkafka: without fetch sessions, idempotent."""
    tiered.broker.create_topic("flights", config=SMALL)
    settings = {"bootstrap.servers": address(tiered)}
    producer = confluent_kafka.Producer(
        {**settings, "enable.idempotence": True, "compression.type": codec, "linger.ms": 2}
    )
    delivered: list[int] = []

    def on_delivery(error: object, message: confluent_kafka.Message) -> None:
        assert error is None
        delivered.append(message.offset())

    values = [b"%06d" % number * 20 for number in range(2000)]
    for part in values[:1500], values[1500:]:
        for value in part:
            producer.produce("flights", value, key=b"k", on_delivery=on_delivery)
        assert producer.flush(30) == 0
        tiered.broker.offload("flights", wait_ms=20_000)
    assert delivered == list(range(2000))
    consumer = confluent_kafka.Consumer(
        {**settings, "group.id": "none", "enable.auto.commit": False}
    )
    place = confluent_kafka.TopicPartition("flights", 0, 0)
    consumer.assign([place])
    found = []
    while len(found) < 2000:
        message = consumer.poll(30)
        assert message is not None
        assert message.error() is None
        found.append(message.value())
    assert found == values
    assert consumer.get_watermark_offsets(place) == (0, 2000)
    consumer.close()
    assert consumed_over_http(tiered, "flights") == values


def test_aiokafka(served: Served) -> None:
    served.broker.create_topic("flights")
    values = [b"value %d" % number for number in range(500)]

    async def run() -> list[bytes]:
        settings = {"bootstrap_servers": address(served)}
        producer = aiokafka.AIOKafkaProducer(**settings, enable_idempotence=True)
        await producer.start()
        sent = [await producer.send("flights", value) for value in values]
        assert [(await one).offset for one in sent] == list(range(500))
        await producer.stop()
        consumer = aiokafka.AIOKafkaConsumer(**settings)
        await consumer.start()
        place = aiokafka.TopicPartition("flights", 0)
        consumer.assign([place])
        await consumer.seek_to_beginning(place)
        found: list[bytes] = []
        while len(found) < 500:
            got = await consumer.getmany(timeout_ms=20_000)
            found += [one.value for records in got.values() for one in records]
        await consumer.stop()
        return found

    assert asyncio.run(run()) == values


def test_what_http_writes_a_kafka_client_reads(served: Served) -> None:
    served.broker.create_topic("flights")
    values = [b"value %d" % number for number in range(100)]
    with Client(served.server.url) as client:
        client.produce("flights", values)
    assert consume(served, "flights", 100) == values


def test_records_in_the_bucket_are_read_as_those_on_disk(tiered: Served) -> None:
    tiered.broker.create_topic("flights", config=SMALL)
    values = [b"%05d" % number * 100 for number in range(1000)]
    produce(tiered, "flights", values[:900])
    tiered.broker.offload("flights", wait_ms=20_000)
    produce(tiered, "flights", values[900:])
    now = tiered.broker.partition("flights", 0).offsets()
    assert 0 < now.local_log_start_offset < now.high_watermark
    assert consume(tiered, "flights", 1000) == values
    consumer = KafkaConsumer(bootstrap_servers=address(tiered))
    place = TopicPartition("flights", 0)
    assert consumer.beginning_offsets([place]) == {place: 0}
    assert consumer.end_offsets([place]) == {place: 1000}
    assert consumer.offsets_for_times({place: 0})[place].offset == 0
    consumer.close()
