"""HTTP/1.1 byte by byte, against a broker."""

import re
import socket

import pytest

from tests.integration.http.conftest import Api, records_path

BODY = b'{"records":[{"value":"x"}]}'
CHUNKED = b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
JSON = "Content-Type: application/json"
LENGTH = f"Content-Length: {len(BODY)}"
TO_H2C = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB"


def post(path: str, *headers: str, body: bytes = BODY, version: str = "1.1") -> bytes:
    return "\r\n".join(
        (f"POST {path} HTTP/{version}", "Host: localhost", JSON, *headers, "", "")
    ).encode() + (body)


def get(path: str, *headers: str, version: str = "1.1") -> bytes:
    return "\r\n".join((f"GET {path} HTTP/{version}", "Host: localhost", *headers, "", "")).encode()


LAST = get("/healthz", "Connection: close")


def exchange(api: Api, *pieces: bytes) -> bytes:
    """Everything received until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", api.port), timeout=30) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            sock.sendall(piece)
        return sock.makefile("rb").read()


def statuses(responses: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3}) ", responses)]


def log_end(api: Api, topic: str) -> int:
    return int(api.get(f"/v1/topics/{topic}/partitions/0/offsets").json()["log_end_offset"])


@pytest.mark.parametrize("is_truncated", [False, True])
@pytest.mark.parametrize(
    ("framing", "body"), [(LENGTH, BODY), ("Transfer-Encoding: chunked", CHUNKED + b"\r\n")]
)
def test_a_request_to_upgrade_to_http2_is_served_as_http1(
    api: Api, framing: str, body: bytes, is_truncated: bool
) -> None:
    topic = api.topic()
    produce = post(records_path(topic), TO_H2C, framing, body=body)
    sent = (produce + get("/healthz", TO_H2C)) * 2 + produce + LAST
    pieces = [sent[at : at + 50] for at in range(0, len(sent), 50)] if is_truncated else [sent]
    assert statuses(exchange(api, *pieces)) == [200] * 6
    assert [r["value"] for r in api.fetch(topic).json()["records"]] == ["x"] * 3


def test_the_body_of_an_upgrade_request_is_never_a_request(api: Api) -> None:
    topic = api.topic()
    inner = post(records_path(topic), LENGTH)
    outer = post("/v1/fetch", TO_H2C, f"Content-Length: {len(inner)}", body=b"")
    assert statuses(exchange(api, outer, inner, LAST)) == [400, 200]
    assert log_end(api, topic) == 0


@pytest.mark.parametrize(
    "trailer",
    ["If-Offset-Match: 99", "Host: evil.example", "Content-Encoding: gzip", "Producer-Id: 5"],
)
def test_trailers_are_not_headers(api: Api, trailer: str) -> None:
    topic = api.topic()
    body = CHUNKED + trailer.encode() + b"\r\n\r\n"
    head = post(records_path(topic), "Transfer-Encoding: chunked", body=b"")
    assert statuses(exchange(api, head + body + LAST)) == [200, 200]


@pytest.mark.parametrize("blanks", [" ", "\t "])
def test_whitespace_after_a_header_value_is_not_part_of_it(api: Api, blanks: str) -> None:
    topic = api.topic()
    producer = ("Producer-Id: 5000000000", "Producer-Epoch: 0", "Producer-Sequence: 0")
    headers = [f"{header}{blanks}" for header in (*producer, "If-Offset-Match: 0", LENGTH)]
    assert statuses(exchange(api, post(records_path(topic), *headers) + LAST)) == [200, 200]
    resumed = get(f"/v1/topics/{topic}/tail", f"Last-Event-ID: 0:7{blanks}", "Connection: close")
    assert statuses(exchange(api, resumed)) == [416]


@pytest.mark.parametrize(
    "piece",
    [b"x: " + b"y" * 1000 + b"\r\n", b"y" * 1000],
    ids=["many trailers", "a long trailer"],
)
def test_trailers_are_limited_like_a_head(api: Api, piece: bytes) -> None:
    topic = api.topic()
    head = post(records_path(topic), "Transfer-Encoding: chunked", body=CHUNKED + b"x: ")
    response = exchange(api, head, piece * 1000)  # more than one read of the socket returns
    assert statuses(response) == [431]
    assert b'"code":"header-too-large"' in response
    assert log_end(api, topic) == 0


@pytest.mark.parametrize(
    ("request_line", "header", "said"),
    [
        ("GET /v1/topics HTTP/2.0", "X-Any: 1", b"HTTP/2.0 is not supported"),
        ("POST /v1/producers HTTP/1.1", "Transfer-Encoding: gzip, chunked", b"Transfer-Encoding"),
        ("POST /v1/producers HTTP/1.1", "Transfer-Encoding: gzip,chunked", b"Transfer-Encoding"),
    ],
)
def test_unknown_framing_is_refused(api: Api, request_line: str, header: str, said: bytes) -> None:
    response = exchange(
        api, f"{request_line}\r\nHost: localhost\r\n{header}\r\n\r\n".encode(), b"0\r\n\r\n"
    )
    assert statuses(response) == [400]
    assert said in response


@pytest.mark.parametrize(
    ("following", "status"),
    [
        (b"\0no http\r\n\r\n", 400),
        (get("/healthz", "X: " + "a" * (70 << 10)), 431),
        (post("/v1/fetch", "Transfer-Encoding: chunked", body=b"zz\r\n"), 400),
        (post("/v1/fetch", "Transfer-Encoding: br", body=b""), 400),
    ],
)
def test_an_error_after_pipelined_produces_displaces_no_response(
    api: Api, following: bytes, status: int
) -> None:
    topic = api.topic()
    responses = exchange(api, post(records_path(topic), LENGTH) * 2 + following)
    assert statuses(responses) == [200, 200, status]
    assert responses.count(b"\r\ndate: ") == 3, "RFC 9110, 6.6.1"
    assert b'"base_offset":1' in responses
    assert log_end(api, topic) == 2


def test_a_client_that_keeps_sending_reads_the_whole_error_response(api: Api) -> None:
    with socket.create_connection(("127.0.0.1", api.port), timeout=30) as sock:
        sock.sendall(get("/healthz", "X: " + "a" * (70 << 10)))
        assert sock.recv(12) == b"HTTP/1.1 431"
        for _ in range(3):  # the second would hit a reset
            sock.sendall(b"a" * 50_000)
        assert b"header-too-large" in sock.makefile("rb").read()


def test_a_malformed_body_after_expect_continue_is_the_clients_error(api: Api) -> None:
    """The client sends without waiting for 100; the error response ends the connection."""
    lines = ("Expect: 100-continue", "Transfer-Encoding: chunked")
    expects = post(records_path(api.topic()), *lines, body=b"no length\r\n")
    assert statuses(exchange(api, expects)) == [400]
    assert 'tierlog_http_errors_total{code="internal"} 0.0\n' in api.get("/metrics").text


@pytest.mark.parametrize("header", ["Connection: close", "Expect: 100-continue"])
def test_an_error_response_reaches_a_client_that_is_still_sending_its_body(
    api: Api, header: str
) -> None:
    size = 16 << 20
    head = post(records_path("nope"), header, f"Content-Length: {size}", body=b"")
    with socket.create_connection(("127.0.0.1", api.port), timeout=30) as sock:
        sock.sendall(head)
        for _ in range(size >> 20):
            sock.sendall(b"-" * (1 << 20))
        response = sock.makefile("rb").read()
    assert statuses(response) == [404]
    assert b"\r\nconnection: close\r\n" in response


def test_a_connection_closes_after_refusing_an_expected_body(api: Api) -> None:
    expects = post(records_path("nope"), "Expect: 100-continue", LENGTH, body=b"")
    with socket.create_connection(("127.0.0.1", api.port), timeout=30) as sock:
        sock.sendall(expects)
        refusal = sock.recv(12)
        sock.sendall(get("/healthz"))
        responses = refusal + sock.makefile("rb").read()
    assert statuses(responses) == [404], "the connection was closed"


def test_an_http_1_0_client_gets_no_100_continue(api: Api) -> None:
    topic = api.topic()
    produce = post(records_path(topic), "Expect: 100-continue", LENGTH, version="1.0")
    assert statuses(exchange(api, produce)) == [200]


def test_an_http_1_0_client_gets_an_unbounded_response_without_chunks(api: Api) -> None:
    topic = api.topic()
    api.values(topic, "one")
    tail = get(f"/v1/topics/{topic}/partitions/0/tail?offset=0", version="1.0")
    with socket.create_connection(("127.0.0.1", api.port), timeout=30) as sock:
        sock.sendall(tail)
        sock.shutdown(socket.SHUT_WR)
        head, _, body = sock.makefile("rb").read().partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"\r\nconnection: close" in head.lower()
    assert body.startswith(b":\n\nid: 0\ndata: {")
    assert body.endswith(b"\n\n")
