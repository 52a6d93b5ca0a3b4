"""A folder in which a share group has read is opened by a real Kafka and goes on there, and then
here again: what somebody was done with stays so, and of the rest nothing is lost.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Producer

from tests.fakes import real_kafka
from tests.fakes.served_broker import served_broker
from tests.fakes.share_member import ShareMember
from tests.fakes.waiting import until
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.record_format.kafka_messages import messages as m

pytestmark = pytest.mark.kafka

TOPICS = {
    "__consumer_offsets": {"cleanup.policy": "compact"},
    "__share_group_state": {"cleanup.policy": "delete"},
}
COUNT = 40


@contextmanager
def ours(data: Path) -> Iterator[int]:
    settings = {"group_share_assignment_interval_ms": 0}
    with served_broker(data, kafka=KafkaSettings(), **settings) as served:
        served.broker.alter_group("g", {"share.auto.offset.reset": "earliest"})
        yield served.kafka_port


@contextmanager
def theirs(kafka: real_kafka.RealKafka, data: Path) -> Iterator[int]:
    """Without what is ours alone, which Kafka takes for its partitions'."""
    aside = data.with_name("aside")
    aside.mkdir()
    names = ["tierlog", *(one.name for one in data.glob("__group_configs-*"))]
    for name in names:
        shutil.move(data / name, aside / name)
    with kafka.opened(data) as server:
        yield int(server.rpartition(":")[2])
    for name in names:
        shutil.move(aside / name, data / name)
    aside.rmdir()


def produce(port: int) -> None:
    producer = Producer({"bootstrap.servers": f"127.0.0.1:{port}"})
    for number in range(COUNT):
        producer.produce("t", f"{number}", partition=0)
    assert producer.flush(60) == 0


def given(port: int, name: str, accepted: range, released: range) -> dict[int, int]:
    """The deliveries of all that a member is given, of which it accepts and releases a part."""
    with ShareMember(port, name, "t") as one:

        def reads() -> bool:
            one.beat()
            if not one.places:
                return False
            answer = one.fetch(max_records=500)
            rows = [row for topic in answer.responses for row in topic.partitions]
            if answer.error_code or any(row.error_code for row in rows):
                one.session_epoch = 0
            return bool(one.acquired)

        until(reads, patience_s=90)
        place = one.places[0]
        found = dict(one.acquired[place])
        while one.fetch(max_records=500) and one.acquired:
            found |= one.acquired[place]
        acks = sorted([(accepted[0], accepted[-1], 1), (released[0], released[-1], 2)])
        rows = one.fetch({place: acks}, max_records=0).responses[0].partitions
        assert [row.acknowledge_error_code for row in rows] == [0]
        one.ask(m.ShareGroupHeartbeatRequest("g", name, -1))
    return found


def test_a_share_group_goes_on_in_kafka_and_then_here_again(tmp_path: Path) -> None:
    if not real_kafka.is_available():
        pytest.skip("no Kafka: it needs Maven and a JDK")
    kafka = real_kafka.RealKafka()
    partitions = ["t-0", *(f"{topic}-0" for topic in TOPICS)]
    data = kafka.prepare(partitions, tmp_path / "data", topics=TOPICS)
    with ours(data) as port:
        produce(port)
        assert set(given(port, "a", range(5, 10), range(20, 25))) == set(range(COUNT))
    with theirs(kafka, data) as port:
        found = given(port, "b", range(10, 20), range(5))
        assert set(found) == set(range(COUNT)) - set(range(5, 10))
        assert {found[offset] for offset in range(20, 25)} == {2}
    with ours(data) as port:
        found = given(port, "c", range(5), range(20, 40))
        assert set(found) == {*range(5), *range(20, COUNT)}
