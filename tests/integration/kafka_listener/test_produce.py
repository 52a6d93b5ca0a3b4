"""What a comparison with Kafka's answers cannot show: order, threads, no answer, two doors."""

import gc
import random
import sys
import threading
import zlib

import pytest

from tests.fakes.kafka_caller import KafkaCaller, request_frame
from tests.fakes.kafka_requests import batch_of, partitions_of, produce_request, values_in
from tests.fakes.served_broker import Served
from tests.fakes.waiting import until
from tierlog.api.kafka import produce
from tierlog.api.kafka.context import KafkaContext
from tierlog.api.kafka.error_codes import Code
from tierlog.client.client import Client
from tierlog.hot_tier.log_writer import LogWriter
from tierlog.record_format import codecs
from tierlog.record_format.kafka_messages.messages import (
    InitProducerIdRequest,
    MetadataRequest,
    ProduceRequest,
)

VERSION = 9
IN_ANY_THREAD = pytest.mark.parametrize("size_bytes", [100, 200_000, 3_000_000])


def ask(caller: KafkaCaller, *records: tuple[str, int, bytes | None], acks: int = -1) -> list:
    return partitions_of(caller.ask(produce_request(*records, acks=acks), VERSION))


def log_bytes(served: Served, topic: str) -> list[bytes]:
    partition = served.broker.partition(topic, 0)
    fetched = partition.read(0, max_bytes=1 << 30)
    data = b"".join(piece.read() for piece in fetched.slices)
    fetched.close()
    return values_in(data)


@IN_ANY_THREAD
@pytest.mark.parametrize("codec", [codecs.NONE, codecs.LZ4])
def test_a_batch_of_any_size_is_in_the_log_as_it_was_sent(
    served: Served, caller: KafkaCaller, codec: int, size_bytes: int
) -> None:
    served.broker.create_topic("a", config={"max.message.bytes": 10_000_000})
    values = [random.Random(n).randbytes(size_bytes // 50) for n in range(50)]
    sent = batch_of(*values, codec=codec)
    (answer,) = ask(caller, ("a", 0, sent))
    assert (answer.error_code, answer.base_offset) == (Code.NONE, 0)
    until(lambda: served.broker.partition("a", 0).high_watermark == 50)
    with Client(served.server.url) as client:
        raw = client.fetch_batches("a", 0)
    assert raw.batches[61:] == sent[61:]
    assert values_in(raw.batches) == values


def test_requests_of_a_connection_are_appended_in_their_order(
    served: Served, caller: KafkaCaller
) -> None:
    """Small ones are checked on the event loop, large ones in a thread; an idempotent producer
    would be refused if one overtook another.
    """
    served.broker.create_topic("a", config={"max.message.bytes": 10_000_000})
    identity = caller.ask(InitProducerIdRequest(None, 1000), 4)
    sizes = [10, 2_000_000, 10, 10, 900_000, 1_500_000, 20]
    requests = []
    for sequence, size in enumerate(sizes):
        sent = batch_of(
            random.Random(sequence).randbytes(size),
            codec=codecs.GZIP if size > 1000 else codecs.NONE,
            producer_id=identity.producer_id,
            producer_epoch=identity.producer_epoch,
            base_sequence=sequence,
        )
        requests.append(produce_request(("a", 0, sent)))
    for request in requests:
        caller.send(request, VERSION)
    answers = [partitions_of(caller.answer(request, VERSION))[0] for request in requests]
    assert [(one.error_code, one.base_offset) for one in answers] == [
        (Code.NONE, number) for number in range(len(sizes))
    ]


def test_requests_that_arrive_together_are_one_write_and_one_flush(
    served: Served, caller: KafkaCaller
) -> None:
    served.broker.create_topic("a")
    ask(caller, ("a", 0, batch_of(b"first")))
    times = served.broker.commit_times
    before = [one.snapshot().counts[-1] for one in (times.write, times.flush)]
    request = produce_request(("a", 0, batch_of(b"x")))
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # a thread that has something to write gets to do it
    try:
        for _ in range(10):
            caller.sock.sendall(request_frame(request, VERSION) * 5)
            for _ in range(5):
                caller.answer(request, VERSION)
    finally:
        sys.setswitchinterval(interval_s)
    after = [one.snapshot().counts[-1] for one in (times.write, times.flush)]
    assert [now - then for now, then in zip(after, before, strict=True)] == [10, 10]


def test_partitions_fail_each_for_itself(served: Served, caller: KafkaCaller) -> None:
    served.broker.create_topic("a", partitions=2)
    served.broker.create_topic("compacted", config={"cleanup.policy": "compact"})
    damaged = bytearray(batch_of(b"x"))
    damaged[-1] ^= 1
    good, keyless, bad, none, last = ask(
        caller,
        ("a", 0, batch_of(b"1")),
        ("compacted", 0, batch_of(b"1", b"2", b"3", keys=[b"k", None, None])),
        ("a", 1, bytes(damaged)),
        ("a", 1, None),
        ("a", 1, batch_of(b"2")),
    )
    assert (good.error_code, last.error_code, last.base_offset) == (Code.NONE, Code.NONE, 0)
    assert keyless.error_code == Code.INVALID_RECORD
    assert [one.batch_index for one in keyless.record_errors] == [1, 2]
    assert (bad.error_code, none.error_code) == (Code.CORRUPT_MESSAGE, Code.INVALID_RECORD)
    assert log_bytes(served, "a") == [b"1"]


def test_acks_0_has_no_answer(served: Served, caller: KafkaCaller) -> None:
    served.broker.create_topic("a")
    for value in b"1", b"2":
        caller.send(produce_request(("a", 0, batch_of(value)), acks=0), VERSION)
    (answer,) = ask(caller, ("a", 0, batch_of(b"3")))
    assert answer.base_offset == 2
    assert log_bytes(served, "a") == [b"1", b"2", b"3"]


@pytest.mark.parametrize("topic", ["none", "a"], ids=["no topic", "a bad batch"])
def test_acks_0_and_an_error_end_the_connection(
    served: Served, caller: KafkaCaller, topic: str
) -> None:
    served.broker.create_topic("a")
    caller.send(produce_request((topic, 0, b"no batch"), acks=0), VERSION)
    assert caller.is_closed()


@pytest.mark.parametrize("codec", [codecs.GZIP, codecs.ZSTD])
def test_a_batch_that_expands_too_far_is_refused(
    served: Served, caller: KafkaCaller, monkeypatch: pytest.MonkeyPatch, codec: int
) -> None:
    served.broker.create_topic("a")
    few = batch_of(bytes(4 << 20), codec=codec)
    assert len(few) < produce._INLINE_COMPRESSED_BYTES
    (answer,) = ask(caller, ("a", 0, few))
    assert answer.error_code == Code.NONE  # in a thread
    bomb = batch_of(bytes(300 << 20), codec=codecs.ZSTD) if codec == codecs.ZSTD else _bomb()
    (answer,) = ask(caller, ("a", 0, bomb))
    assert answer.error_code == Code.MESSAGE_TOO_LARGE
    assert served.broker.partition("a", 0).high_watermark == 1


def _bomb() -> bytes:
    """A batch whose gzip goes on for 300 MiB."""
    whole = batch_of(bytes(1 << 20))
    compressor = zlib.compressobj(wbits=31)
    data = compressor.compress(whole[61:]) + b"".join(
        compressor.compress(bytes(1 << 20)) for _ in range(300)
    )
    from tests.fakes.produce_requests import _with_body

    return _with_body(whole, data + compressor.flush(), codecs.GZIP)


def test_a_batch_is_compressed_as_the_topic_says(served: Served, caller: KafkaCaller) -> None:
    served.broker.create_topic("a", config={"compression.type": "zstd"})
    (answer,) = ask(caller, ("a", 0, batch_of(b"x" * 500)))
    assert answer.error_code == Code.NONE
    with Client(served.server.url) as client:
        assert client.fetch_batches("a", 0).batches[22] & 7 == codecs.ZSTD
    assert log_bytes(served, "a") == [b"x" * 500]


def test_a_transactions_batch_needs_a_transactional_id(served: Served, caller: KafkaCaller) -> None:
    served.broker.create_topic("a")
    sent = batch_of(b"x", producer_id=5, producer_epoch=0, base_sequence=0, transactional=True)
    (answer,) = ask(caller, ("a", 0, sent))
    assert answer.error_code == Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED


def test_a_topic_is_named_by_its_id(served: Served, caller: KafkaCaller) -> None:
    import uuid

    from tierlog.record_format.checkpoint_files import parse_topic_id

    topic_id = parse_topic_id(served.broker.create_topic("a").topic_id).bytes
    for wanted, code in (topic_id, Code.NONE), (uuid.uuid4().bytes, Code.UNKNOWN_TOPIC_ID):
        data = [ProduceRequest.PartitionProduceData(0, batch_of(b"x"))]
        named = ProduceRequest.TopicProduceData(topic_id=wanted, partition_data=data)
        answer = caller.ask(ProduceRequest(None, -1, 30_000, [named]), 13)
        assert answer.responses[0].topic_id == wanted
        assert partitions_of(answer)[0].error_code == code


def test_a_frame_counts_until_it_is_written_also_without_its_client(
    served: Served, caller: KafkaCaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or clients that come and go would fill the memory while a disk hangs."""
    served.broker.create_topic("a")
    gate, flush = threading.Event(), LogWriter.flush

    def slow_flush(writer: LogWriter) -> int:
        assert gate.wait(30)
        return flush(writer)

    monkeypatch.setattr(LogWriter, "flush", slow_flush)
    contexts = [one for one in gc.get_objects() if type(one) is KafkaContext]
    context = next(one for one in contexts if one.broker is served.broker)
    caller.send(produce_request(("a", 0, batch_of(bytes(200_000)))), VERSION)
    until(lambda: served.broker.partition("a", 0).log_end_offset == 1)
    caller.close()
    other = KafkaCaller(served.kafka_port)
    other.ask(MetadataRequest(topics=None), 9)  # the end of the first was seen before it
    assert context.memory.held >= 200_000
    gate.set()
    until(lambda: context.memory.held == 0)
    other.close()
