"""Real clients, as they are, over both tiers; and the other door over the same log."""

from collections.abc import Iterator
from pathlib import Path

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
@pytest.mark.parametrize("idempotent", [True, False])
def test_what_is_produced_is_consumed(
    served: Served, codec: str | None, *, idempotent: bool
) -> None:
    served.broker.create_topic("flights")
    values = [b"value %d" % number for number in range(1000)]
    offsets = produce(
        served, "flights", values, compression_type=codec, enable_idempotence=idempotent
    )
    assert offsets == list(range(1000))
    assert consume(served, "flights", 1000) == values
    with Client(served.server.url) as client:
        assert [one.value for one in client.fetch("flights", 0).records[:3]] == values[:3]


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
