"""Kill -9 under a real client: each record that was acknowledged is there, and none twice."""

import random
import threading
import time
from pathlib import Path

import confluent_kafka

from tests.fakes.broker_process import BrokerProcess, free_port
from tests.fakes.copying import copy_under_kills

KILLS = 2


def test_an_idempotent_producer_loses_and_repeats_nothing(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    listen = f"127.0.0.1:{free_port()}"
    broker = BrokerProcess(tmp_path, "--kafka-listen", listen).start()
    settings = {"bootstrap.servers": listen, "log_level": 0}
    try:
        producing = _Producing(settings)
        producing.start()
        for _ in range(KILLS):
            time.sleep(rng.uniform(0.3, 0.8))
            broker.kill()
            broker.start()
        producing.stop()
        found = _consumed(settings, producing.acknowledged)
    finally:
        broker.kill()
    assert len(producing.acknowledged) > 100
    assert len(set(found.values())) == len(found), "a record is there twice"
    assert {at: found.get(at) for at in producing.acknowledged} == producing.acknowledged


def test_an_exactly_once_copy_survives_kills_of_the_broker_and_of_the_copier(
    tmp_path: Path,
) -> None:
    copy_under_kills(tmp_path, kills=3, records=300)


class _Producing(threading.Thread):
    """`acknowledged`: the values by partition and offset."""

    def __init__(self, settings: dict[str, object]) -> None:
        super().__init__(daemon=True)
        self._producer = confluent_kafka.Producer(
            {
                **settings,
                "enable.idempotence": True,
                "linger.ms": 1,
                "reconnect.backoff.max.ms": 200,
                "message.timeout.ms": 60_000,
            }
        )
        self._ends = threading.Event()
        self.acknowledged: dict[tuple[int, int], bytes] = {}

    def run(self) -> None:
        number = 0
        while not self._ends.is_set():
            value = b"%08d" % number
            self._producer.produce("t", value, on_delivery=self._on_delivery)
            number += 1
            self._producer.poll(0.001)

    def stop(self) -> None:
        self._ends.set()
        self.join()
        assert self._producer.flush(60) == 0

    def _on_delivery(self, error: object, message: confluent_kafka.Message) -> None:
        assert error is None, error
        at = message.partition(), message.offset()
        assert at not in self.acknowledged, "an offset was assigned twice"
        self.acknowledged[at] = message.value()


def _consumed(
    settings: dict[str, object], acknowledged: dict[tuple[int, int], bytes]
) -> dict[tuple[int, int], bytes]:
    consumer = confluent_kafka.Consumer(
        {**settings, "group.id": "none", "enable.auto.commit": False}
    )
    place = confluent_kafka.TopicPartition("t", 0, 0)
    consumer.assign([place])
    _, end = consumer.get_watermark_offsets(place, timeout=20)
    assert end >= len(acknowledged)
    found: dict[tuple[int, int], bytes] = {}
    while (0, end - 1) not in found:
        message = consumer.poll(20)
        assert message is not None
        assert message.error() is None
        found[message.partition(), message.offset()] = message.value()
    consumer.close()
    return found
