"""Producer: what it sends again, for how long, and what its records' errors say."""

import threading

import httpx2
import pytest

import tierlog
from tests.fakes.tiny_broker import TinyBroker, client, description, refused
from tierlog.client.batching import Batching
from tierlog.client.exchange import AnswerLost, BrokerUnreachable, RetryPolicy
from tierlog.client.producer import Producer
from tierlog.record_format import errors


def test_lost_responses_do_not_duplicate_records():
    broker = TinyBroker("lost", "lost", None, refused(503, "starting"), "lost")
    with client(broker) as c, c.producer(Batching(batch_bytes=300)) as producer:
        for n in range(50):
            producer.send("t", f"v{n}", partition=0)
    assert broker.logs[0] == [b"v%d" % n for n in range(50)]
    assert broker.identities == 1


def test_a_refused_batch_fails_alone_and_its_sequence_is_reused(caplog):
    broker = TinyBroker(refused(413, "record-too-large"))
    with client(broker) as c, c.producer() as producer:
        first = producer.send("t", "too large", partition=0)
        producer.flush()
        second = producer.send("t", "fits", partition=0)
    with pytest.raises(errors.RecordTooLarge):
        first.result(0)
    assert "a batch of 1 records for t-0 failed: record-too-large" in caplog.text
    assert second.result(0).offset == 0
    assert broker.identities == 1


def test_a_broker_that_responded_before_is_waited_for():
    broker = TinyBroker(None, *["lost"] * 20, refused(502, ""), refused(503, "starting"))
    with client(broker) as c, c.producer() as producer:
        for n in range(3):
            producer.send("t", f"{n}", partition=0)
            producer.flush()
    assert broker.logs[0] == [b"0", b"1", b"2"]
    assert broker.identities == 1


def test_the_first_batch_outlives_a_failover_that_its_answer_is_lost_in():
    """Its producer's id came from a broker of the cluster. While no other leads, what is passed on
    is lost.
    """
    document = {"code": "broker-unavailable", "outcome": "unknown"}
    broker = TinyBroker("lost", *[httpx2.Response(503, json=document)] * 5)
    with client(broker) as c, c.producer() as producer:
        sent = producer.send("t", "a", partition=0)
    assert sent.result(0).offset == 0
    assert broker.logs[0] == [b"a"]
    assert broker.identities == 1


@pytest.mark.parametrize("attempt_s", [0.5, 30])
def test_a_batch_is_retried_until_its_delivery_timeout(attempt_s):
    """By time, not by attempts: with a frozen broker an attempt takes long."""
    broker, now_s, all_sent = TinyBroker(None, *["lost"] * 1000), [0.0], threading.Event()

    def timed(request: httpx2.Request) -> httpx2.Response:
        if broker.faults[0]:
            assert all_sent.wait(60), "all records have the same age"
            now_s[0] += attempt_s
        return broker(request)

    policy = RetryPolicy(attempts=3, first_pause_s=0.0, clock=lambda: now_s[0])
    batching = Batching(batch_bytes=100, delivery_timeout_s=120)
    with tierlog.Client(retries=policy, transport=httpx2.MockTransport(timed)) as c:
        producer = Producer(c, batching, clock=lambda: int(now_s[0] * 1000))
        sent = [producer.send("t", bytes(100), partition=0) for _ in range(6)]
        all_sent.set()
        assert producer.flush()
        assert 120 <= now_s[0] <= 120 + attempt_s
        del broker.faults[:-1]
        broker.faults[0] = None
        sent.append(producer.send("t", b"later", partition=0))
        producer.close()
    kinds = [type(delivery.exception(0)).__name__ for delivery in sent]
    assert kinds == ["NoneType", "AnswerLost", *["BrokerUnreachable"] * 4, "NoneType"]
    assert "not sent" in str(sent[2].exception(0))


SLOW = [refused(429, "throttled")] * 5


@pytest.mark.parametrize(
    "faults", [(refused(409, "producer-fenced"),), (None, *SLOW, refused(413, "record-too-large"))]
)
def test_one_delivery_timeout_bounds_all_requests_for_a_batch(faults):
    """Also the request of a new identity, and the parts of a batch that was split."""
    broker, now_s = TinyBroker(None, *faults, *["lost"] * 1000), [0.0]
    broker.identity_faults = SLOW[:]

    def timed(request: httpx2.Request) -> httpx2.Response:
        now_s[0] += 10
        return broker(request)

    policy = RetryPolicy(attempts=3, first_pause_s=0.0, clock=lambda: now_s[0])
    with tierlog.Client(retries=policy, transport=httpx2.MockTransport(timed)) as c:
        batching = Batching(linger_ms=60_000, delivery_timeout_s=120)
        producer = Producer(c, batching, clock=lambda: int(now_s[0] * 1000))
        for values in ("a", "b", "cd"):
            due_s = now_s[0] + 60
            sent = [producer.send("t", value, partition=0) for value in values]
            producer.flush()
        assert due_s + 120 <= now_s[0] <= due_s + 130
        producer.close()
    assert "AnswerLost" in {type(delivery.exception(0)).__name__ for delivery in sent}


def test_a_batch_aged_by_a_slow_broker_is_still_sent():
    now_s, slow = [0.0], refused(429, "throttled")
    broker = TinyBroker(None, slow, slow, None, slow, slow)

    def timed(request: httpx2.Request) -> httpx2.Response:
        now_s[0] += 200
        return broker(request)

    policy = RetryPolicy(attempts=3, first_pause_s=0.0)
    with tierlog.Client(retries=policy, transport=httpx2.MockTransport(timed)) as c:
        producer = Producer(c, Batching(batch_bytes=100), clock=lambda: int(now_s[0] * 1000))
        sent = [producer.send("t", bytes(100), partition=0) for _ in range(3)]
        producer.close()
    assert [delivery.result(0).offset for delivery in sent] == [0, 1, 2]


def test_a_batch_that_was_due_after_the_last_failure_waited_for_none():
    """It is late because its producer was stopped, for example."""
    now_ms, broker, gone = [0], TinyBroker(), [True] * 3

    def away_at_first(request: httpx2.Request) -> httpx2.Response:
        if gone:
            gone.pop()
            raise httpx2.ConnectError("refused", request=request)
        return broker(request)

    with client(away_at_first) as c:
        producer = Producer(c, Batching(linger_ms=10), clock=lambda: now_ms[0])
        failed = producer.send("t", "a", partition=0)
        assert producer.flush()
        now_ms[0] += 1000
        late = producer.send("t", "b", partition=0)
        now_ms[0] += 200_000
        producer.close()
    assert isinstance(failed.exception(0), BrokerUnreachable)
    assert late.result(0).offset == 0


def test_a_batch_too_large_for_its_topic_is_split():
    too_large = {"code": "record-too-large", "limit_bytes": 500, "size_bytes": 1500}
    broker = TinyBroker()

    def limited(request: httpx2.Request) -> httpx2.Response:
        if len(request.content) > 500:
            return httpx2.Response(413, json={**too_large, "size_bytes": len(request.content)})
        return broker(request)

    with client(limited) as c, c.producer() as producer:
        values = [bytes([n]) * (600 if n == 17 else n) for n in range(40)]
        sent = [producer.send("t", value, partition=0) for value in values]
    with pytest.raises(errors.RecordTooLarge):
        sent.pop(17).result(0)
    assert broker.logs[0] == values[:17] + values[18:]
    assert [delivery.result(0).offset for delivery in sent] == list(range(39))
    assert broker.identities == 1


LOST_FOR_GOOD = "lost", refused(401, "unauthorized")


@pytest.mark.parametrize("faults", [LOST_FOR_GOOD, (refused(409, "producer-fenced"),)])
def test_an_unknown_outcome_makes_the_producer_take_a_new_id(faults):
    broker = TinyBroker(*faults)
    with client(broker) as c, c.producer() as producer:
        first = producer.send("t", "a", partition=0)
        producer.flush()
        second = producer.send("t", "b", partition=0)
    with pytest.raises((AnswerLost, errors.ProducerFenced)):
        first.result(0)
    assert second.result(0).partition == 0
    assert broker.identities == 2


@pytest.mark.parametrize("refusal", [(401, "unauthorized"), (413, "record-too-large")])
@pytest.mark.parametrize("fault", ["lost", "shutdown"])
def test_a_sequence_whose_retry_is_refused_is_not_reused(fault, refusal):
    broker = TinyBroker(fault, refused(*refusal))
    with client(broker) as c, c.producer(Batching(linger_ms=10_000)) as producer:
        first = [producer.send("t", value, partition=0) for value in "ab"]
        producer.flush()
        second = [producer.send("t", value, partition=0) for value in "cd"]
    assert all(isinstance(delivery.exception(0), AnswerLost) for delivery in first), (
        "they were appended"
    )
    assert refusal[1] in str(first[0].exception(0))
    assert [delivery.result(0).offset for delivery in second] == [2, 3]
    assert broker.logs[0] == [b"a", b"b", b"c", b"d"]
    assert broker.identities == 2


def test_a_batch_that_was_never_sent_fails_with_broker_unreachable():
    def no_producer_ids(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/producers":
            raise httpx2.ReadError("gone", request=request)
        return httpx2.Response(200, json=description())

    with client(no_producer_ids) as c, c.producer() as producer:
        sent = producer.send("t", "a")
    assert isinstance(sent.exception(0), BrokerUnreachable)


def test_a_batch_interrupted_by_a_shutdown_is_retried():
    broker = TinyBroker("shutdown")
    with client(broker) as c, c.producer() as producer:
        sent = producer.send("t", "a", partition=0)
    assert sent.result(0).offset == 0
    assert broker.logs[0] == [b"a"]


def test_a_batch_in_flight_keeps_its_producer_id_when_another_partition_takes_a_new_one():
    broker, lost, release = TinyBroker(*LOST_FOR_GOOD), [], threading.Event()

    def slow(request: httpx2.Request) -> httpx2.Response:
        if "partitions/1" not in request.url.path or lost:
            return broker(request)
        lost.append(broker.append(1, request.content))
        assert release.wait(10)
        raise httpx2.ReadError("gone", request=request)

    with client(slow) as c, c.producer(Batching(max_in_flight=2)) as producer:
        failed, kept = [producer.send("t", "a", partition=partition) for partition in (0, 1)]
        assert isinstance(failed.exception(10), AnswerLost)
        later = [producer.send("t", "b", partition=0)]
        assert later[0].result(10).offset == 1
        release.set()
        assert kept.result(10).offset == 0
        later.append(producer.send("t", "b", partition=1))
    assert later[1].result(0).offset == 1
    assert broker.logs == {0: [b"a", b"b"], 1: [b"a", b"b"]}
