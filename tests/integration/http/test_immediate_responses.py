"""What is answered at once is what a task answers.

Committed records always take a task; where there are no transactions they are all records. And of
equal requests in one packet the first alone is sent at once.
"""

import re
import socket

import pytest

from tests.integration.http.conftest import BATCHES, NDJSON, Api, records_path
from tests.integration.http.test_wire import get

OF_ITS_OWN = re.compile(rb"\r\n(x-request-id|server-timing|date): [^\r]*")
JSON = "application/json"
REQUEST_ID = re.compile(rb'"request_id":"[^"]*"')


@pytest.fixture(scope="module")
def topic(api: Api) -> str:
    topic = api.topic(segment_bytes=4096)
    for number in range(40):
        api.values(topic, *(f"{number}: {value}" for value in range(number % 7 + 1)))
    api.values(topic, "not JSON", '{"a": 1}', "x" * 100_000)
    return topic


def answers_to(api: Api, request: bytes) -> list[bytes]:
    """What three such requests are answered that come together, but for what is each one's own."""
    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as sock:
        sock.sendall(request * 3)
        with sock.makefile("rb") as stream:
            return [answer_in(stream) for _ in range(3)]


def answer_in(stream) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += stream.readline()
    size = re.search(rb"\r\ncontent-length: (\d+)", head)
    assert size is not None, head
    body = REQUEST_ID.sub(b"", stream.read(int(size[1])))
    # The request's id is in a problem, so its length is too.
    head = OF_ITS_OWN.sub(b"", head)
    return re.sub(rb"\r\ncontent-length: \d+", b"", head) + body


@pytest.mark.parametrize("accept", ["*/*", JSON, NDJSON, BATCHES, "text/*;q=0.5, application/json"])
@pytest.mark.parametrize(
    "query",
    [
        "offset=0",
        "offset=7&max_records=1",
        "offset=7&max_records=100",
        "offset=50&max_bytes=300",
        "offset=3&encoding=base64",
        "offset=160&encoding=json",
        "offset={end}",
        "offset={end}&wait_ms=1",
        "offset=0&wait_ms=1000",
        "offset=99999",
        "offset=0&max_bytes=0",
        "offset=0&no=such",
        "offset=-1",
        "timestamp=1",
    ],
)
def test_it_is_the_same_answer(api: Api, topic: str, query: str, accept: str) -> None:
    end = api.get(f"/v1/topics/{topic}/partitions/0/offsets").json()["log_end_offset"]
    path = f"{records_path(topic)}?{query.format(end=end)}"
    at_once, *sent_by_tasks = answers_to(api, get(path, f"Accept: {accept}"))
    by_task = answers_to(api, get(f"{path}&isolation=read_committed", f"Accept: {accept}"))[0]
    assert sent_by_tasks == [at_once] * 2
    assert by_task == at_once


@pytest.mark.parametrize("path", ["/v1/topics/nope/partitions/0/records?offset=0", "/v1/nope"])
def test_it_is_the_same_refusal(api: Api, path: str) -> None:
    at_once, *sent_by_tasks = answers_to(api, get(path))
    assert sent_by_tasks == [at_once] * 2
    assert at_once.startswith(b"HTTP/1.1 404")
