"""Which partition a producer's record goes to, and when its topic is described again."""

from itertools import pairwise

import httpx2
import msgspec
import pytest

from tests.fakes.tiny_broker import TinyBroker, client, description, record, refused, topic
from tierlog.client import responses
from tierlog.client.batching import Delivery
from tierlog.client.producer import Producer
from tierlog.client.sender import Partitioner
from tierlog.record_format import errors


class GrowingBroker(TinyBroker):
    partitions = (0,)
    fault = (503, "starting")

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.method != "GET":
            return super().__call__(request)
        if self.partitions is None:
            return refused(*self.fault)
        return httpx2.Response(200, json=description(*self.partitions))


def test_records_with_a_key_share_its_partition_and_others_fill_batches():
    partitioner = Partitioner(batch_bytes=10_000)
    partitioner.update(topic("t", 12), now_ms=0)
    keyed = [partitioner.choose("t", record(b"v", key=b"k")) for _ in range(5)]
    assert len(set(keyed)) == 1
    keyless = [partitioner.choose("t", record(b"v" * 100)) for _ in range(500)]
    assert sum(a != b for a, b in pairwise(keyless)) <= 6
    assert len(set(keyless)) > 3


def test_a_damaged_partition_does_not_change_the_partition_of_a_key():
    partitioner, found = Partitioner(batch_bytes=100), []
    for shape in (description(0, 1, 2, 3), description(0, 3, damaged=(1, 2))):
        partitioner.update(msgspec.convert(shape, responses.TopicDescription), now_ms=0)
        found.append([partitioner.choose("t", record(b"", key=b"%d" % n)) for n in range(50)])
    assert found[0] == found[1]
    keyless = {partitioner.choose("t", record(b"v" * 100)) for _ in range(9)}
    assert keyless == {0, 3}


@pytest.mark.parametrize("fault", [(503, "starting"), (502, "")])
def test_new_partitions_are_found_after_a_refresh(fault):
    now_ms, broker = [0], GrowingBroker()
    broker.fault = fault
    with client(broker) as c, Producer(c, clock=lambda: now_ms[0]) as producer:

        def partitions_used():
            sent = [producer.send("t", "v", key=str(n)) for n in range(20)]
            producer.flush()
            return {delivery.result(0).partition for delivery in sent}

        assert partitions_used() == {0}
        broker.partitions = (0, 1)
        assert partitions_used() == {0}
        now_ms[0] += 300_000
        broker.partitions = None  # cannot be loaded now: the known ones are used
        assert partitions_used() == {0}
        now_ms[0] += 300_000
        broker.partitions = (0, 1)
        assert partitions_used() == {0, 1}


def test_a_topic_with_fewer_partitions_is_described_again_once_one_is_unknown():
    broker = GrowingBroker()
    broker.partitions = (0, 1)

    def respond(request: httpx2.Request) -> httpx2.Response:
        if "/partitions/1/" in request.url.path and broker.partitions == (0,):
            return refused(404, "unknown-partition")
        return broker(request)

    def send_keys() -> list[Delivery]:
        sent = [producer.send("t", "v", key=str(n)) for n in range(20)]
        producer.flush()
        return sent

    with client(respond) as c, c.producer() as producer:
        assert {delivery.result(0).partition for delivery in send_keys()} == {0, 1}
        broker.partitions = (0,)  # the topic is deleted, and created again
        assert {type(delivery.exception(0)) for delivery in send_keys()} == {
            type(None),
            errors.UnknownPartition,
        }
        assert {delivery.result(0).partition for delivery in send_keys()} == {0}


def test_a_deleted_topic_is_described_for_each_record_until_it_is_back():
    """It may have more partitions then, and keys have to go where other producers send them."""
    broker, deleted = GrowingBroker(), refused(404, "unknown-topic")
    broker.fault = (404, "unknown-topic")

    def respond(request: httpx2.Request) -> httpx2.Response:
        is_append = request.url.path.endswith("/records")
        return deleted if is_append and broker.partitions is None else broker(request)

    with client(respond) as c, c.producer() as producer:
        assert producer.send("t", "v", key="k").result(10).partition == 0
        broker.partitions = None
        assert isinstance(producer.send("t", "v", key="k").exception(10), errors.UnknownTopic)
        for _ in range(2):
            with pytest.raises(errors.UnknownTopic):
                producer.send("t", "v", key="k")
        broker.partitions = (0, 1)
        sent = [producer.send("t", "v", key=str(n)) for n in range(20)]
        assert {delivery.result(10).partition for delivery in sent} == {0, 1}


def test_only_one_of_many_senders_refreshes_a_topic():
    partitioner = Partitioner(batch_bytes=100)
    assert all(partitioner.claim_refresh("t", now_ms=0) for _ in range(2))
    partitioner.update(topic("t", 2), now_ms=0)
    assert not partitioner.claim_refresh("t", now_ms=299_999)
    assert [partitioner.claim_refresh("t", now_ms=300_000) for _ in range(3)] == [
        True,
        False,
        False,
    ]


def test_many_small_producers_spread_over_all_partitions():
    first = []
    for number in range(200):
        partitioner = Partitioner(batch_bytes=10_000)
        partitioner.update(topic("t", 4), now_ms=0)
        first.append(partitioner.choose("t", record(b"%d" % number)))
    assert set(first) == {0, 1, 2, 3}


def test_each_topic_starts_at_a_random_partition_and_takes_turns():
    partitioner = Partitioner(batch_bytes=100, first=lambda count: count - 1)
    for name, count in (("t", 3), ("u", 5)):
        partitioner.update(topic(name, count), now_ms=0)
        filled = [partitioner.choose(name, record(b"v" * 100)) for _ in range(count)]
        assert filled == [count - 1, *range(count - 1)]
