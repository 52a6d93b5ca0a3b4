"""The sink and a stream with lost responses and a broker that restarts, without Spark."""

import pickle

import httpx2
import pyarrow as pa
import pytest

import tierlog.client.client
from tests.fakes.two_tiers import two_tiers
from tierlog.client.client import Client
from tierlog.client.exchange import BrokerUnreachable, RetryPolicy
from tierlog.record_format.errors import InvalidRecord, UnknownTopic
from tierlog.spark_reader.options import parse_options
from tierlog.spark_reader.sink import Sink, TierlogWriter, parse_write_options


class LossyTransport(httpx2.HTTPTransport):
    """Loses the response of every other append."""

    def __init__(self):
        super().__init__()
        self.appends = 0

    def handle_request(self, request):
        answer = super().handle_request(request)
        if request.method == "POST" and request.url.path.endswith("/records"):
            answer.read()
            self.appends += 1
            if self.appends % 2:
                raise httpx2.ReadError("the connection was cut", request=request)
        return answer


def test_a_request_whose_response_is_lost_is_retried_and_appended_once(tmp_path, monkeypatch):
    transport = LossyTransport()
    monkeypatch.setattr(
        tierlog.client.client, "Client", lambda *a, **k: Client(*a, **k, transport=transport)
    )
    values = [b"%d" % n for n in range(3000)]
    rows = pa.RecordBatch.from_pydict({"key": values, "value": values})
    with two_tiers(tmp_path) as tiers:
        tiers.create("out", partitions=3)
        options = parse_write_options({"server": tiers.url, "topic": "out"})
        Sink(options).write(iter([rows]))
        with Client(tiers.url) as client:
            assert sorted(record.value for record in client.consume("out")) == sorted(values)
    transport.close()
    assert transport.appends == 2 * 3


def test_the_tasks_of_a_worker_share_a_producer_until_one_fails(tmp_path, monkeypatch):
    init, identities = Client.init_producer, []

    def recording(client):
        identities.append(init(client))
        return identities[-1]

    monkeypatch.setattr(Client, "init_producer", recording)
    rows = pa.RecordBatch.from_pydict({"value": [b"v"] * 100})
    wrong = rows.append_column("partition", pa.array([7] * 100, pa.int32()))
    with two_tiers(tmp_path) as tiers:
        options = parse_write_options({"server": tiers.url, "topic": "out"})
        for number in (1, 2):  # the second topic is another of the same name
            tiers.create("out", partitions=1)
            for _ in range(3):
                Sink(options).write(iter([rows, rows]))
            assert len(identities) == number
            with pytest.raises(InvalidRecord):
                Sink(options).write(iter([rows, wrong]))
            Sink(options).write(iter([rows]))
            assert len(identities) == number + 1
            with Client(tiers.url) as client:
                assert len(list(client.consume("out"))) == 700
            tiers.broker.delete_topic("out")


def test_a_task_without_rows_makes_no_request():
    options = parse_write_options({"server": "http://127.0.0.1:1", "topic": "out"})
    empty = pa.RecordBatch.from_pydict({"value": pa.array([], pa.binary())})
    Sink(options).write(iter([]))
    Sink(options).write(iter([empty]))


class RefusingTransport(httpx2.HTTPTransport):
    """Refuses the next `requests` connections, as a restarting broker does."""

    requests = 0

    def handle_request(self, request):
        if self.requests:
            self.requests -= 1
            raise httpx2.ConnectError("refused", request=request)
        return super().handle_request(request)


@pytest.fixture
def transport(monkeypatch):
    transport = RefusingTransport()
    monkeypatch.setattr(
        tierlog.client.client, "Client", lambda *a, **k: Client(*a, **k, transport=transport)
    )
    monkeypatch.setattr(RetryPolicy, "pause_s", lambda *_: 0.0)
    yield transport
    transport.close()


def test_every_task_waits_for_a_broker_that_restarts_during_a_write(tmp_path, transport):
    def rows():
        yield pa.RecordBatch.from_pydict({"value": [b"a"], "partition": pa.array([0], pa.int32())})
        transport.requests = 20

    with two_tiers(tmp_path) as tiers:
        tiers.create("out", partitions=1)
        sink = Sink(parse_write_options({"server": tiers.url, "topic": "out"}))
        for _ in range(2):
            transport.requests = 20  # also before the first response in this process
            sink.write(rows())
        transport.requests = 0
        with Client(tiers.url) as client:
            assert [record.value for record in client.consume("out")] == [b"a", b"a"]


def test_a_batch_waits_for_a_broker_that_restarts_before_it(tmp_path, transport):
    rows = pa.RecordBatch.from_pydict({"value": [b"a"], "partition": pa.array([0], pa.int32())})
    with two_tiers(tmp_path) as tiers:
        tiers.create("out", partitions=1)
        options = parse_write_options({"server": tiers.url, "topic": "out"})
        transport.requests = 20
        with pytest.raises(BrokerUnreachable):
            TierlogWriter(options)
        transport.requests = 0
        with pytest.raises(UnknownTopic):
            TierlogWriter(parse_write_options({"server": tiers.url, "topic": "nothing"}))
        writer = pickle.loads(pickle.dumps(TierlogWriter(options)))
        transport.requests = 20
        writer.write(iter([rows]))
        with Client(tiers.url) as client:
            assert [record.value for record in client.consume("out")] == [b"a"]


def test_a_stream_waits_for_a_broker_that_restarts(tmp_path, transport):
    pytest.importorskip("pyspark.sql.streaming.datasource", reason="streams need pyspark 4.2")
    from tierlog.spark_reader.stream_source import TierlogStreamReader

    extra = {"subscribe": "t", "startingOffsets": "earliest"}
    with two_tiers(tmp_path) as tiers:
        tiers.create("t", partitions=1)
        options = parse_options({"server": tiers.url, **extra}, streaming=True)
        stream = TierlogStreamReader(options, ("offset",))
        transport.requests = 20
        with pytest.raises(BrokerUnreachable):
            stream.initialOffset()
        transport.requests = 0
        start = stream.latestOffset(stream.initialOffset(), stream.getDefaultReadLimit())
        tiers.produce("t", 50)
        transport.requests = 20
        end = stream.latestOffset(start, stream.getDefaultReadLimit())
        (split,) = stream.partitions(start, end)
        transport.requests = 20
        assert sum(batch.num_rows for batch in stream.read(split)) == 50
