"""A response sent immediately, without a task, equals the response of a task.

`read_committed` always takes a task, and without transactions it returns every record. Of requests
pipelined in one packet, only the first is responded to immediately.
"""

import re
import socket

import pytest

from tests.integration.http.conftest import BATCHES, NDJSON, Api, records_path
from tests.integration.http.test_wire import get

PER_RESPONSE = re.compile(rb"\r\n(x-request-id|server-timing|date): [^\r]*")
JSON = "application/json"
REQUEST_ID = re.compile(rb'"request_id":"[^"]*"')


@pytest.fixture(scope="module")
def topic(api: Api) -> str:
    topic = api.topic(segment_bytes=4096)
    for number in range(40):
        api.values(topic, *(f"{number}: {value}" for value in range(number % 7 + 1)))
    api.values(topic, "not JSON", '{"a": 1}', "x" * 100_000)
    return topic


def responses_to(api: Api, request: bytes) -> list[bytes]:
    """The responses to three pipelined copies of `request`, without what differs in each."""
    with socket.create_connection(("127.0.0.1", api.port), timeout=10) as sock:
        sock.sendall(request * 3)
        with sock.makefile("rb") as stream:
            return [read_response(stream) for _ in range(3)]


def read_response(stream) -> bytes:
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        head += stream.readline()
    size = re.search(rb"\r\ncontent-length: (\d+)", head)
    assert size is not None, head
    body = REQUEST_ID.sub(b"", stream.read(int(size[1])))
    # A problem contains the request id, so its length varies as well.
    head = PER_RESPONSE.sub(b"", head)
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
def test_an_immediate_fetch_equals_the_response_of_a_task(
    api: Api, topic: str, query: str, accept: str
) -> None:
    end = api.get(f"/v1/topics/{topic}/partitions/0/offsets").json()["log_end_offset"]
    path = f"{records_path(topic)}?{query.format(end=end)}"
    immediate, *by_tasks = responses_to(api, get(path, f"Accept: {accept}"))
    by_task = responses_to(api, get(f"{path}&isolation=read_committed", f"Accept: {accept}"))[0]
    assert by_tasks == [immediate] * 2
    assert by_task == immediate


@pytest.mark.parametrize("path", ["/v1/topics/nope/partitions/0/records?offset=0", "/v1/nope"])
def test_an_immediate_error_equals_the_response_of_a_task(api: Api, path: str) -> None:
    immediate, *by_tasks = responses_to(api, get(path))
    assert by_tasks == [immediate] * 2
    assert immediate.startswith(b"HTTP/1.1 404")
