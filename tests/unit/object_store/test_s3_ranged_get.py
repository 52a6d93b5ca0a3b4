"""Ranged GETs and HEADs without boto3 on a kept connection, and the fallback to boto3."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress

import pytest

from tests.fakes.certificate import make_certificate, needs_openssl
from tests.fakes.scripted_s3 import Reply, scripted_s3
from tierlog.host.retry import RetryPolicy
from tierlog.object_store.s3 import S3Store
from tierlog.object_store.s3_connection import S3Options
from tierlog.object_store.store import PIECE_BYTES
from tierlog.record_format.errors import ConfigurationError, StoreUnavailable

BODY = bytes(range(256)) * 4096


def ranged(start, end, **more):
    span = {"Content-Range": f"bytes {start}-{end - 1}/{len(BODY)}"}
    return Reply(206, body=BODY[start:end], headers=span, **more)


def open_store(endpoint, **more):
    given = {"access_key_id": "ak", "secret_access_key": "sk", "region": "us-east-1", **more}
    options = S3Options(
        endpoint=endpoint, **{"connect_timeout_s": 2, "range_timeout_s": 2, **given}
    )
    return S3Store("bucket", "pre", options, policy=RetryPolicy(attempts=1))


@contextmanager
def s3(*script, **more):
    with scripted_s3(list(script)) as (endpoint, requests):
        store = open_store(endpoint, **more)
        try:
            yield store, requests
        finally:
            store.close()


@contextmanager
def raw_server(*connections):
    """Sends each connection the responses listed for it, one per request, and then closes it.

    Yields the endpoint, and a list of the connection number of each request.
    """
    listener, requests = socket.create_server(("127.0.0.1", 0)), []

    def serve():
        for number, responses in enumerate(connections):
            with listener.accept()[0] as connection:
                for response in responses:
                    while b"\r\n\r\n" not in connection.recv(65536):
                        pass
                    requests.append(number)
                    connection.sendall(response)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
    finally:
        thread.join(10)
        listener.close()


def plain(start, end, extra=b""):
    head = f"HTTP/1.1 206 Partial\r\nContent-Range: bytes {start}-{end - 1}/{len(BODY)}\r\n"
    return head.encode() + extra + b"Content-Length: %d\r\n\r\n" % (end - start) + BODY[start:end]


def read(store, start, end):
    return b"".join(store.get_range("k", start, end))


def test_a_signed_url_is_reused_for_many_ranges():
    with s3(ranged(0, 10), ranged(10, 20)) as (store, requests):
        assert read(store, 0, 10) + read(store, 10, 20) == BODY[:20]
        assert requests[0][1] == requests[1][1]
        assert requests[0][1].startswith("/bucket/pre/k?")
        assert "X-Amz-Signature=" in requests[0][1]
        assert store.ledger.usage()["manifest", "get"] == (2, 0, 0, 20)


def test_a_signed_url_that_expired_early_is_signed_anew():
    """As after a machine was suspended, for every URL at once."""
    expired = Reply(403, "AccessDenied")
    with s3(*[ranged(0, 10), expired] * 4, ranged(0, 10)) as (store, requests):
        for _ in range(5):
            assert read(store, 0, 10) == BODY[:10]
        assert not any("Authorization" in headers for *_, headers in requests)


def test_pieces_are_views_of_the_given_buffer():
    end = PIECE_BYTES * 3 + 5
    buffer = memoryview(bytearray(PIECE_BYTES))
    with s3(ranged(0, end)) as (store, _):
        pieces = [
            (piece.obj is buffer.obj, bytes(piece))
            for piece in store.get_range("k", 0, end, into=buffer)
        ]
    assert all(is_view for is_view, _ in pieces)
    assert [len(piece) for _, piece in pieces] == [PIECE_BYTES] * 3 + [5]
    assert b"".join(piece for _, piece in pieces) == BODY[:end]


def test_a_connection_is_kept_for_the_next_range():
    with raw_server([plain(0, 10), plain(10, 20)]) as (endpoint, requests):
        store = open_store(endpoint)
        assert read(store, 0, 10) + read(store, 10, 20) == BODY[:20]
        assert requests == [0, 0]
        store.close()


def test_a_connection_closed_while_idle_is_not_a_failure():
    with raw_server([plain(0, 10)], [plain(10, 20)]) as (endpoint, requests):
        store = open_store(endpoint)
        assert read(store, 0, 10) + read(store, 10, 20) == BODY[:20]
        assert requests == [0, 1]
        assert store.ledger.usage()["manifest", "get"].failures == 0
        store.close()


def test_a_connection_is_closed_if_the_server_asks_for_it():
    close = b"Connection: close\r\n"
    with raw_server([plain(0, 10, close)], [plain(10, 20, close)]) as (endpoint, requests):
        store = open_store(endpoint)
        assert read(store, 0, 10) + read(store, 10, 20) == BODY[:20]
        assert requests == [0, 1]
        store.close()


def test_an_abandoned_range_does_not_reach_the_next_reader():
    with raw_server([plain(0, len(BODY))], [plain(10, 20)]) as (endpoint, requests):
        store = open_store(endpoint)
        pieces = store.get_range("k", 0, len(BODY))
        next(pieces)
        pieces.close()
        assert read(store, 10, 20) == BODY[10:20]
        assert requests == [0, 1]
        store.close()


def test_an_interrupted_response_raises_and_its_bytes_are_counted():
    with s3(ranged(0, 100, claims_bytes=100)) as (store, _):
        assert read(store, 0, 100) == BODY[:100]
    with s3(Reply(206, body=BODY[:60], headers=ranged(0, 100).headers, claims_bytes=100)) as (
        store,
        _,
    ):
        with pytest.raises(StoreUnavailable, match="interrupted after 60 bytes"):
            read(store, 0, 100)
        assert store.ledger.usage()["manifest", "get"].received_bytes == 60


@contextmanager
def trickling_store():
    """A store that sends 50 bytes of its response, one at a time."""
    done = threading.Event()

    def trickle(listener):
        with listener.accept()[0] as connection, suppress(ConnectionError):
            while b"\r\n\r\n" not in connection.recv(65536):
                pass
            connection.sendall(plain(0, len(BODY))[: -len(BODY)])
            for byte in BODY[:50]:
                connection.sendall(bytes([byte]))
                if done.wait(0.02):
                    return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = open_store(f"http://127.0.0.1:{listener.getsockname()[1]}", range_timeout_s=0.2)
        with ThreadPoolExecutor(1) as pool, closing(store):
            serving = pool.submit(trickle, listener)
            try:
                yield store
            finally:
                done.set()
            serving.result(10)


def test_slow_bytes_are_returned_before_a_piece_is_complete(monkeypatch):
    """Otherwise a reader would miss its deadline."""
    monkeypatch.setattr("tierlog.object_store.s3_connection.PARTIAL_PIECE_AFTER_S", 0)
    monkeypatch.setattr("tierlog.object_store.s3_connection.SLOWEST_BYTES_PER_S", 0)
    with trickling_store() as store:
        pieces = store.get_range("segments/x.log", 0, len(BODY))
        with closing(pieces):
            assert BODY.startswith(bytes(next(pieces)))


def test_a_store_that_trickles_times_out(monkeypatch):
    monkeypatch.setattr("tierlog.object_store.s3_connection.PARTIAL_PIECE_AFTER_S", 0)
    with (
        trickling_store() as store,
        pytest.raises(StoreUnavailable, match=r"interrupted after \d+ bytes: .* timed out"),
    ):
        read(store, 0, len(BODY))
    assert store.ledger.usage()["manifest", "get"].received_bytes > 0


def test_a_silent_store_times_out():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store = open_store(f"http://127.0.0.1:{listener.getsockname()[1]}", range_timeout_s=0.05)
        with closing(store), pytest.raises(StoreUnavailable, match="timed out"):
            read(store, 0, 10)


def test_a_refused_signed_url_falls_back_to_boto3():
    with s3(Reply(403, "AccessDenied"), ranged(0, 10)) as (store, requests):
        assert read(store, 0, 10) == BODY[:10]
        assert "Authorization" not in requests[0][2]
        assert "Authorization" in requests[1][2]


def test_a_store_that_refuses_signed_urls_is_read_by_boto3_alone():
    script = [Reply(403, "AccessDenied"), ranged(0, 10)] * 3 + [ranged(0, 10)]
    with s3(*script) as (store, requests):
        for _ in range(5):
            assert read(store, 0, 10) == BODY[:10]
        assert len(requests) == 8


def test_a_refusal_of_boto3_too_is_a_configuration_error():
    with s3(Reply(403, "SignatureDoesNotMatch")) as (store, requests):
        with pytest.raises(ConfigurationError, match="secret key is wrong"):
            read(store, 0, 10)
        assert len(requests) == 2


def test_a_response_without_a_length_falls_back_to_boto3():
    chunked = b"HTTP/1.1 206 Partial\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with raw_server([chunked], [plain(0, 10)]) as (endpoint, requests):
        store = open_store(endpoint)
        assert read(store, 0, 10) == BODY[:10]
        assert requests == [0, 1]
        store.close()


def test_a_throttled_store_is_not_asked_once_more_by_boto3():
    """S3's errors have no length."""
    body = b"2b\r\n<Error><Code>SlowDown</Code></Error>\r\n0\r\n\r\n"
    chunked = b"HTTP/1.1 503 Slow Down\r\nTransfer-Encoding: chunked\r\n\r\n" + body
    with raw_server([chunked]) as (endpoint, requests):
        store = open_store(endpoint)
        with pytest.raises(StoreUnavailable, match="k: get: 503"):
            read(store, 0, 10)
        assert requests == [0]
        store.close()


@pytest.mark.parametrize(
    ("call", "requests_sent", "body"),
    [
        (lambda store: read(store, 0, 10), 2, b"0\r\n\r\n"),
        (lambda store: store.get("k", max_bytes=10), 1, b"0\r\n\r\n"),
        (lambda store: store.head("k"), 2, b""),
    ],
    ids=["range", "get", "head"],
)
def test_a_response_without_a_length_for_boto3_too_is_reported(call, requests_sent, body):
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + body
    with raw_server(*[[chunked]] * requests_sent) as (endpoint, requests):
        store = open_store(endpoint)
        with pytest.raises(StoreUnavailable, match="k: the response has no ContentLength"):
            call(store)
        assert len(requests) == requests_sent
        store.close()


def test_behind_a_proxy_boto3_is_used(monkeypatch):
    with raw_server([plain(0, 10)]) as (proxy, requests):
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.setenv("no_proxy", "")
        store = open_store("http://store.invalid:9000")
        assert read(store, 0, 10) == BODY[:10]
        assert requests == [0]
        store.close()


def test_a_store_on_loopback_is_not_reached_through_the_proxy(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    with s3(Reply(200, body=b"whole"), ranged(0, 10)) as (store, requests):
        assert store.get("k", max_bytes=10) == b"whole"
        assert read(store, 0, 10) == BODY[:10]
        assert "X-Amz-Signature=" in requests[1][1]


def test_aws_retry_variables_are_ignored(monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "many")
    monkeypatch.setenv("AWS_RETRY_MODE", "eager")
    with s3(ranged(0, 10)) as (store, _):
        assert read(store, 0, 10) == BODY[:10]


def test_missing_credentials_are_a_configuration_error_for_ranges_too(no_credentials):
    store = open_store("http://127.0.0.1:1", access_key_id=None, secret_access_key=None)
    with pytest.raises(ConfigurationError, match="no credentials found"):
        read(store, 0, 10)
    store.close()


MISSING = b"HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_missing_object_costs_a_signature_and_a_connection_only_once():
    with raw_server([MISSING, MISSING, plain(0, 10)]) as (endpoint, requests):
        store = open_store(endpoint)
        assert store.head("k") is store.head("k") is None
        assert read(store, 0, 10) == BODY[:10]
        assert requests == [0, 0, 0]
        assert len(store._ranges._urls._urls) == 2, "one for each operation"
        store.close()


def test_a_head_without_boto3_describes_an_object_as_boto3_does():
    crc = {"x-amz-checksum-crc32c": "4waSgw==", "x-amz-checksum-type": "FULL_OBJECT"}
    time = {"Last-Modified": "Thu, 26 Nov 2026 12:00:00 GMT"}
    composed = crc | {"x-amz-checksum-type": "COMPOSITE"}
    for more, reported in (({}, None), (crc, 0xE3069283), (composed, None)):
        with s3(Reply(200, body=b"body", headers=time | more)) as (store, requests):
            assert store.head("k") == store._head_by_boto3("k")
            assert store.head("k").crc32c == reported
            assert [method for method, *_ in requests] == ["HEAD"] * 3
            assert "X-Amz-Signature=" in requests[0][1]
            assert [it["x-amz-checksum-mode"] for *_, it in requests] == ["ENABLED"] * 3


def test_a_head_that_does_not_describe_the_object_falls_back_to_boto3():
    whole = Reply(200, body=b"body", headers={"Last-Modified": "Thu, 26 Nov 2026 12:00:00 GMT"})
    for reply in (Reply(403), Reply(200, body=b"body")):
        with s3(reply, whole) as (store, requests):
            assert store.head("k").size_bytes == 4
            assert len(requests) == 2
            assert "Authorization" in requests[1][2]


def test_only_consecutive_fallbacks_leave_all_requests_to_boto3():
    whole = Reply(200, body=b"body", headers={"Last-Modified": "Thu, 26 Nov 2026 12:00:00 GMT"})
    fallback = (Reply(403), whole)
    with s3(*fallback * 2, whole, *fallback * 3, whole) as (store, requests):
        for number in range(7):
            assert store.head(f"k{number}").size_bytes == 4
        by_boto3 = ["Authorization" in headers for *_, headers in requests]
        assert by_boto3 == [False, True] * 2 + [False] + [False, True] * 3 + [True]


@needs_openssl
def test_tls_certificates_are_verified(tmp_path):
    pair = make_certificate(tmp_path)
    with scripted_s3([ranged(0, 600_000)], tls=pair) as (endpoint, requests):
        store = open_store(endpoint, ca_bundle=str(pair[0]))
        assert read(store, 0, 600_000) == BODY[:600_000]
        assert "X-Amz-Signature=" in requests[0][1]
        store.close()
        untrusting = open_store(endpoint)
        with pytest.raises(ConfigurationError, match="certificate is not trusted"):
            read(untrusting, 0, 600_000)
        untrusting.close()
        assert len(requests) == 1
