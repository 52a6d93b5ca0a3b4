"""An exactly-once copy (`tests.fakes.copier`) whose broker and copier are killed at any moment."""

import random
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import confluent_kafka

from tests.fakes.broker_process import BrokerProcess, free_port
from tests.fakes.forked import ROOT
from tierlog.client.client import Client
from tierlog.record_format.errors import UnknownGroup

# A librdkafka whose broker was killed between AddOffsetsToTxn and TxnOffsetCommit may never send
# the latter, and waits for it without a time limit: whoever runs a copier starts it again.
STUCK_S = 20


def copy_under_kills(root: Path, *, kills: int, records: int) -> None:
    """Each record is there once, in the order of its partition, however the copy was killed."""
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    listen = f"127.0.0.1:{free_port()}"
    broker = BrokerProcess(root, "--kafka-listen", listen).start()
    settings = {"bootstrap.servers": listen, "log_level": 0}
    wanted = _fill(broker, settings, records)
    copiers = [_copier(listen)]
    try:
        copied, since_s = 0, time.monotonic()
        while (now := _copied(broker)) < records or kills:
            if now > copied:
                copied, since_s = now, time.monotonic()
            time.sleep(rng.uniform(0.2, 0.9))
            if kills and rng.random() < 0.5:
                broker.kill()
                broker.start()
                kills -= 1
            elif kills or copiers[-1].poll() is not None or time.monotonic() > since_s + STUCK_S:
                since_s = time.monotonic()
                copiers[-1].kill()
                copiers[-1].wait(20)
                copiers.append(_copier(listen))
                kills = max(0, kills - 1)
        copiers[-1].kill()
        found = {number: _committed(settings, number) for number in wanted}
    finally:
        for one in copiers:
            one.kill()
            one.wait(20)
        broker.kill()
    assert found == wanted


def _copier(listen: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "tests.fakes.copier", listen], cwd=ROOT)


def _fill(
    broker: BrokerProcess, settings: dict[str, object], records: int
) -> dict[int, list[bytes]]:
    with Client(broker.url) as client:
        for topic in "in", "out":
            client.create_topic(topic, partitions=2)
    producer = confluent_kafka.Producer({**settings, "linger.ms": 1})
    wanted: dict[int, list[bytes]] = {0: [], 1: []}
    for number in range(records):
        value = b"%06d" % number
        producer.produce("in", value, partition=number % 2)
        wanted[number % 2].append(value)
    assert producer.flush(60) == 0
    return wanted


def _copied(broker: BrokerProcess) -> int:
    """How much of the input is committed."""
    with Client(broker.url) as client, suppress(UnknownGroup):
        return sum(one.offset for one in client.group("copy").offsets)
    return 0


def _committed(settings: dict[str, object], partition: int) -> list[bytes]:
    consumer = confluent_kafka.Consumer(
        {
            **settings,
            "group.id": "none",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    consumer.assign([confluent_kafka.TopicPartition("out", partition, 0)])
    found: list[bytes] = []
    while True:
        message = consumer.poll(20)
        assert message is not None
        if message.error():
            consumer.close()
            return found
        found.append(message.value())
