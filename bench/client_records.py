"""Claim: a record costs a Python program no more through our client than through Kafka's.

* Measured: CPU of the program per record, and records per second, for records of 100 bytes with a
  key, one partition: `send` of each and a flush at the end (acks=all), the same with asyncio, and
  reading them all record by record.
* Peers: kafka-python and aiokafka, which are Python like ours, and confluent-kafka, a thin layer
  over C; all with Apache Kafka 4.3.1, the same batches and the same linger time.
* The two brokers use the other core; their CPU is not counted.

`python -m bench client_records`; takes a minute, the Kafka of the tests, and
`pip install kafka-python aiokafka confluent-kafka`.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from bench import children
from bench.children import MissingPeer
from bench.kafka import Kafka, kafka
from bench.records import texts
from bench.report import Report, Target
from bench.rounds import interleave
from tierlog.client.batching import Batching
from tierlog.client.client import AsyncClient, Client

ROUNDS: Final = 5
RECORDS: Final = 100_000
BATCH_BYTES: Final = 256 << 10
LINGER_MS: Final = 20
VALUES: Final = texts(RECORDS, 100)
KEYS: Final = [b"customer-%d" % (number % 1000) for number in range(RECORDS)]
KAFKAS: Final[dict[str, Any]] = {"acks": "all", "linger_ms": LINGER_MS}


class Spent(NamedTuple):
    cpu_us: float
    per_s: float


def measure(folder: Path, *, rounds: int) -> Report:
    kafka_python, aiokafka, confluent = map(_peer, ("kafka", "aiokafka", "confluent_kafka"))
    report = Report(name="client_records", title="Records through the Python client", peer="peer")
    with kafka(folder) as peer, children.broker(folder) as broker, Client(broker.url) as client:
        client.create_topic("sent")
        client.create_topic("kept")
        _send(client, "kept")
        _confluent_send(confluent, peer, "kept")
        seen = interleave(
            {
                "send": _spent(lambda: _send(client, "sent")),
                "send, kafka-python": _spent(lambda: _kafka_python_send(kafka_python, peer)),
                "send, confluent-kafka": _spent(lambda: _confluent_send(confluent, peer, "sent")),
                "send by asyncio": _spent(lambda: asyncio.run(_send_async(broker.url))),
                "send by asyncio, aiokafka": _spent(
                    lambda: asyncio.run(_aiokafka_send(aiokafka, peer))
                ),
                "read": _spent(lambda: _read(client)),
                "read, kafka-python": _spent(lambda: _kafka_python_read(kafka_python, peer)),
                "read, confluent-kafka": _spent(lambda: _confluent_read(confluent, peer)),
            },
            rounds=rounds,
        )
    at_most = Target(value=1.0, at_most=True)
    for what, name, target in (
        ("send", "kafka-python", at_most),
        ("send", "confluent-kafka", None),
        ("send by asyncio", "aiokafka", at_most),
        ("read", "kafka-python", at_most),
        ("read", "confluent-kafka", None),
    ):
        ours, theirs = seen[what], seen[f"{what}, {name}"]
        shown = f"{what} (peer: {name})"
        cpu_us = [one.cpu_us for one in ours], [one.cpu_us for one in theirs]
        report.add(shown, "CPU µs/record", *cpu_us, target=target)
        report.add(shown, "records/s", [one.per_s for one in ours], [one.per_s for one in theirs])
    return report


def _spent(run: Callable[[], None]) -> Callable[[], Spent]:
    def measured() -> Spent:
        began_s, cpu_s = time.perf_counter(), time.process_time()
        run()
        seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        return Spent(cpu_s / RECORDS * 1e6, RECORDS / seconds)

    return measured


# --- ours ----------------------------------------------------------------------------------------


def _send(client: Client, topic: str) -> None:
    with client.producer(Batching(linger_ms=LINGER_MS, batch_bytes=BATCH_BYTES)) as producer:
        for value, key in zip(VALUES, KEYS, strict=True):
            sent = producer.send(topic, value, key=key)
    sent.result()


async def _send_async(url: str) -> None:
    batching = Batching(linger_ms=LINGER_MS, batch_bytes=BATCH_BYTES)
    async with AsyncClient(url) as client:
        async with client.producer(batching) as producer:
            for value, key in zip(VALUES, KEYS, strict=True):
                sent = await producer.send("sent", value, key=key)
        await sent


def _read(client: Client) -> None:
    _expect_all(sum(len(record.value or b"") for record in client.consume("kept")))


# --- Kafka's -------------------------------------------------------------------------------------


def _kafka_python_send(kafka_python: Any, peer: Kafka) -> None:
    producer = kafka_python.KafkaProducer(
        bootstrap_servers=peer.server, batch_size=BATCH_BYTES, **KAFKAS
    )
    for value, key in zip(VALUES, KEYS, strict=True):
        sent = producer.send("sent", value, key=key)
    producer.flush()
    sent.get()
    producer.close()


def _kafka_python_read(kafka_python: Any, peer: Kafka) -> None:
    consumer = kafka_python.KafkaConsumer(
        bootstrap_servers=peer.server, enable_auto_commit=False, group_id=None
    )
    partition = kafka_python.TopicPartition("kept", 0)
    consumer.assign([partition])
    consumer.seek_to_beginning(partition)
    size = 0
    for count, record in enumerate(consumer, 1):
        size += len(record.value)
        if count == RECORDS:
            break
    consumer.close()
    _expect_all(size)


def _confluent_send(confluent: Any, peer: Kafka, topic: str) -> None:
    settings = {"acks": "all", "linger.ms": LINGER_MS, "batch.size": BATCH_BYTES}
    producer = confluent.Producer({"bootstrap.servers": peer.server, **settings})
    for value, key in zip(VALUES, KEYS, strict=True):
        while True:
            try:
                producer.produce(topic, value, key)
                break
            except BufferError:
                producer.poll(0.1)
    producer.flush()


def _confluent_read(confluent: Any, peer: Kafka) -> None:
    consumer = confluent.Consumer(
        {"bootstrap.servers": peer.server, "group.id": "g", "enable.auto.commit": False}
    )
    consumer.assign([confluent.TopicPartition("kept", 0, confluent.OFFSET_BEGINNING)])
    size = count = 0
    while count < RECORDS:
        for record in consumer.consume(1000, 1.0):
            if record.error():
                raise RuntimeError(str(record.error()))
            size, count = size + len(record.value()), count + 1
    consumer.close()
    _expect_all(size)


async def _aiokafka_send(aiokafka: Any, peer: Kafka) -> None:
    producer = aiokafka.AIOKafkaProducer(
        bootstrap_servers=peer.server, max_batch_size=BATCH_BYTES, **KAFKAS
    )
    await producer.start()
    for value, key in zip(VALUES, KEYS, strict=True):
        sent = await producer.send("sent", value, key=key)
    await producer.stop()
    await sent


def _peer(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingPeer(f"{module} is not installed: see this claim's docstring") from None


def _expect_all(size: int) -> None:
    if size != sum(map(len, VALUES)):
        raise RuntimeError(f"{size} bytes were read")
