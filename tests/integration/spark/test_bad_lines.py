"""The sink and a stream over a bad line and a broker that restarts, without Spark."""

import pickle

import httpx
import pyarrow as pa
import pytest

import tierlog.client
from record_format.errors import UnknownTopic
from spark_reader.options import parse_options
from spark_reader.sink import Sink, TierlogWriter, parse_write_options
from tests.fakes.two_tiers import two_tiers
from tierlog.client import BrokerUnreachable, Client, RetryPolicy


class LosesAnswers(httpx.HTTPTransport):
    """Of two requests that append, the answer of the first is lost."""

    def __init__(self):
        super().__init__()
        self.appends = 0

    def handle_request(self, request):
        answer = super().handle_request(request)
        if request.method == "POST" and request.url.path.endswith("/records"):
            answer.read()
            self.appends += 1
            if self.appends % 2:
                raise httpx.ReadError("the line was cut", request=request)
        return answer


def test_a_request_whose_answer_is_lost_is_sent_again_and_appended_once(tmp_path, monkeypatch):
    line = LosesAnswers()
    monkeypatch.setattr(tierlog.client, "Client", lambda *a, **k: Client(*a, **k, transport=line))
    values = [b"%d" % n for n in range(3000)]
    rows = pa.RecordBatch.from_pydict({"key": values, "value": values})
    with two_tiers(tmp_path) as tiers:
        tiers.create("out", partitions=3)
        options = parse_write_options({"server": tiers.url, "topic": "out"})
        Sink(options).write(iter([rows]))
        with Client(tiers.url) as client:
            assert sorted(one.value for one in client.consume("out")) == sorted(values)
    line.close()
    assert line.appends == 2 * 3


def test_a_task_without_rows_asks_the_broker_for_nothing():
    nobody = parse_write_options({"server": "http://127.0.0.1:1", "topic": "out"})
    nothing = pa.RecordBatch.from_pydict({"value": pa.array([], pa.binary())})
    Sink(nobody).write(iter([]))
    Sink(nobody).write(iter([nothing]))


class Refused(httpx.HTTPTransport):
    """As while a broker restarts, `requests` times."""

    requests = 0

    def handle_request(self, request):
        if self.requests:
            self.requests -= 1
            raise httpx.ConnectError("refused", request=request)
        return super().handle_request(request)


@pytest.fixture
def line(monkeypatch):
    line = Refused()
    monkeypatch.setattr(tierlog.client, "Client", lambda *a, **k: Client(*a, **k, transport=line))
    monkeypatch.setattr(RetryPolicy, "pause_s", lambda *_: 0.0)
    yield line
    line.close()


def test_a_broker_that_restarts_under_a_write_is_waited_for_by_every_task(tmp_path, line):
    def rows():
        yield pa.RecordBatch.from_pydict({"value": [b"a"], "partition": pa.array([0], pa.int32())})
        line.requests = 20

    with two_tiers(tmp_path) as tiers:
        tiers.create("out", partitions=1)
        sink = Sink(parse_write_options({"server": tiers.url, "topic": "out"}))
        for _ in range(2):
            line.requests = 20  # before the first answer of this process too
            sink.write(rows())
        line.requests = 0
        with Client(tiers.url) as client:
            assert [one.value for one in client.consume("out")] == [b"a", b"a"]


def test_a_broker_that_restarts_before_a_batch_is_written_is_waited_for(tmp_path, line):
    rows = pa.RecordBatch.from_pydict({"value": [b"a"], "partition": pa.array([0], pa.int32())})
    with two_tiers(tmp_path) as tiers:
        tiers.create("out", partitions=1)
        options = parse_write_options({"server": tiers.url, "topic": "out"})
        line.requests = 20
        with pytest.raises(BrokerUnreachable):
            TierlogWriter(options)
        line.requests = 0
        with pytest.raises(UnknownTopic):
            TierlogWriter(parse_write_options({"server": tiers.url, "topic": "nothing"}))
        writer = pickle.loads(pickle.dumps(TierlogWriter(options)))
        line.requests = 20
        writer.write(iter([rows]))
        with Client(tiers.url) as client:
            assert [one.value for one in client.consume("out")] == [b"a"]


def test_a_broker_that_restarts_under_a_stream_is_waited_for(tmp_path, line):
    pytest.importorskip("pyspark.sql.streaming.datasource", reason="streams need pyspark 4.2")
    from spark_reader.stream_source import TierlogStreamReader

    given = {"subscribe": "t", "startingOffsets": "earliest"}
    with two_tiers(tmp_path) as tiers:
        tiers.create("t", partitions=1)
        options = parse_options({"server": tiers.url, **given}, streaming=True)
        stream = TierlogStreamReader(options, ("offset",))
        line.requests = 20
        with pytest.raises(BrokerUnreachable):
            stream.initialOffset()
        line.requests = 0
        start = stream.latestOffset(stream.initialOffset(), stream.getDefaultReadLimit())
        tiers.produce("t", 50)
        line.requests = 20
        end = stream.latestOffset(start, stream.getDefaultReadLimit())
        (split,) = stream.partitions(start, end)
        line.requests = 20
        assert sum(batch.num_rows for batch in stream.read(split)) == 50
