"""A task of the sink over a line that loses answers, without Spark."""

import httpx
import pyarrow as pa

import tierlog.client
from spark_reader.sink import Sink, parse_write_options
from tests.fakes.two_tiers import two_tiers
from tierlog.client import Client


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
