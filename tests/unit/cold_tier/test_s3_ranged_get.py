"""Ranged GETs past boto3: one connection for many, and boto3's word where the way is barred."""

import shutil
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from cold_tier.object_store import PIECE_BYTES
from cold_tier.retry import RetryPolicy
from cold_tier.s3 import S3Store
from cold_tier.s3_options import S3Options
from record_format.errors import ConfigurationError, StoreUnavailable
from tests.fakes.scripted_s3 import Say, scripted_s3

BODY = bytes(range(256)) * 4096


def ranged(start, end, **more):
    span = {"Content-Range": f"bytes {start}-{end - 1}/{len(BODY)}"}
    return Say(206, body=BODY[start:end], headers=span, **more)


def open_store(endpoint, **more):
    given = {"access_key_id": "ak", "secret_access_key": "sk", "region": "us-east-1", **more}
    options = S3Options(
        endpoint=endpoint, **{"connect_timeout_s": 2, "range_timeout_s": 2, **given}
    )
    return S3Store("bucket", "pre", options, policy=RetryPolicy(attempts=1))


@contextmanager
def s3(*script, **more):
    with scripted_s3(list(script)) as (endpoint, asked):
        store = open_store(endpoint, **more)
        try:
            yield store, asked
        finally:
            store.close()


@contextmanager
def raw_server(*answers):
    """Gives each connection the answers listed for it, one a request, and then closes it.

    Yields the endpoint, and a list that says for each request which connection it came by.
    """
    door, asked = socket.create_server(("127.0.0.1", 0)), []

    def serve():
        for number, told in enumerate(answers):
            with door.accept()[0] as line:
                for answer in told:
                    while b"\r\n\r\n" not in line.recv(65536):
                        pass
                    asked.append(number)
                    line.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"http://127.0.0.1:{door.getsockname()[1]}", asked
    finally:
        thread.join(10)
        door.close()


def plain(start, end, extra=b""):
    head = f"HTTP/1.1 206 Partial\r\nContent-Range: bytes {start}-{end - 1}/{len(BODY)}\r\n"
    return head.encode() + extra + b"Content-Length: %d\r\n\r\n" % (end - start) + BODY[start:end]


def take(store, start, end):
    return b"".join(store.get_range("k", start, end))


def test_a_url_is_signed_once_for_many_ranges_and_names_no_secret():
    with s3(ranged(0, 10), ranged(10, 20)) as (store, asked):
        assert take(store, 0, 10) + take(store, 10, 20) == BODY[:20]
        assert asked[0][1] == asked[1][1]
        assert asked[0][1].startswith("/bucket/pre/k?")
        assert "X-Amz-Signature=" in asked[0][1]
        assert store.ledger.usage()["manifest", "get"] == (2, 0, 0, 20)


def test_pieces_are_views_of_the_buffer_that_was_given():
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
    with raw_server([plain(0, 10), plain(10, 20)]) as (endpoint, asked):
        store = open_store(endpoint)
        assert take(store, 0, 10) + take(store, 10, 20) == BODY[:20]
        assert asked == [0, 0]
        store.close()


def test_a_connection_that_was_closed_while_idle_is_no_failure():
    with raw_server([plain(0, 10)], [plain(10, 20)]) as (endpoint, asked):
        store = open_store(endpoint)
        assert take(store, 0, 10) + take(store, 10, 20) == BODY[:20]
        assert asked == [0, 1]
        assert store.ledger.usage()["manifest", "get"].failures == 0
        store.close()


def test_a_connection_that_the_server_wants_closed_is_closed():
    close = b"Connection: close\r\n"
    with raw_server([plain(0, 10, close)], [plain(10, 20, close)]) as (endpoint, asked):
        store = open_store(endpoint)
        assert take(store, 0, 10) + take(store, 10, 20) == BODY[:20]
        assert asked == [0, 1]
        store.close()


def test_a_range_that_is_left_early_is_not_what_the_next_reader_gets():
    with raw_server([plain(0, len(BODY))], [plain(10, 20)]) as (endpoint, asked):
        store = open_store(endpoint)
        pieces = store.get_range("k", 0, len(BODY))
        next(pieces)
        pieces.close()
        assert take(store, 10, 20) == BODY[10:20]
        assert asked == [0, 1]
        store.close()


def test_an_answer_that_breaks_off_is_a_fault_and_its_bytes_are_counted():
    with s3(ranged(0, 100, claims_bytes=100)) as (store, _):
        assert take(store, 0, 100) == BODY[:100]
    with s3(Say(206, body=BODY[:60], headers=ranged(0, 100).headers, claims_bytes=100)) as (
        store,
        _,
    ):
        with pytest.raises(StoreUnavailable, match="interrupted after 60 bytes"):
            take(store, 0, 100)
        assert store.ledger.usage()["manifest", "get"].received_bytes == 60


def test_what_trickles_in_is_given_out_before_the_piece_is_whole(monkeypatch):
    """Else a reader's deadline would pass unseen: a byte now and then is no silence."""
    monkeypatch.setattr("cold_tier.s3_connection.PARTIAL_PIECE_AFTER_S", 0)
    taken = threading.Event()

    def trickle(door):
        with door.accept()[0] as line:
            while b"\r\n\r\n" not in line.recv(65536):
                pass
            line.sendall(plain(0, len(BODY))[: -len(BODY)])
            for byte in BODY:
                line.sendall(bytes([byte]))
                if taken.wait(0.02):
                    return

    with socket.create_server(("127.0.0.1", 0)) as door:
        store = open_store(f"http://127.0.0.1:{door.getsockname()[1]}", range_timeout_s=0.2)
        with ThreadPoolExecutor(1) as pool, closing(store):
            serving = pool.submit(trickle, door)
            pieces = store.get_range("segments/x.log", 0, len(BODY))
            try:
                assert BODY.startswith(bytes(next(pieces)))
            finally:
                taken.set()
                pieces.close()
            serving.result(10)


def test_a_store_that_says_nothing_gave_no_answer_in_time():
    with socket.create_server(("127.0.0.1", 0)) as door:
        store = open_store(f"http://127.0.0.1:{door.getsockname()[1]}", range_timeout_s=0.05)
        with closing(store), pytest.raises(StoreUnavailable, match="timed out"):
            take(store, 0, 10)


def test_where_the_signed_url_is_refused_boto3_has_the_word():
    with s3(Say(403, "AccessDenied"), ranged(0, 10)) as (store, asked):
        assert take(store, 0, 10) == BODY[:10]
        assert "Authorization" not in asked[0][2]
        assert "Authorization" in asked[1][2]


def test_a_store_that_never_takes_signed_urls_is_not_asked_twice_for_ever():
    script = [Say(403, "AccessDenied"), ranged(0, 10)] * 3 + [ranged(0, 10)]
    with s3(*script) as (store, asked):
        for _ in range(5):
            assert take(store, 0, 10) == BODY[:10]
        assert len(asked) == 8


def test_what_boto3_is_refused_too_is_one_clear_line():
    with s3(Say(403, "SignatureDoesNotMatch")) as (store, asked):
        with pytest.raises(ConfigurationError, match="secret key is wrong"):
            take(store, 0, 10)
        assert len(asked) == 2


def test_an_answer_without_a_length_is_left_to_boto3():
    chunked = b"HTTP/1.1 206 Partial\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with raw_server([chunked], [plain(0, 10)]) as (endpoint, asked):
        store = open_store(endpoint)
        assert take(store, 0, 10) == BODY[:10]
        assert asked == [0, 1]
        store.close()


def test_behind_a_proxy_boto3_alone_knows_the_way(monkeypatch):
    with raw_server([plain(0, 10)]) as (proxy, asked):
        monkeypatch.setenv("http_proxy", proxy)
        monkeypatch.setenv("no_proxy", "")
        store = open_store("http://store.invalid:9000")
        assert take(store, 0, 10) == BODY[:10]
        assert asked == [0]
        store.close()


def test_the_environment_s_proxy_is_not_for_a_store_on_this_machine(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    with s3(Say(200, body=b"whole"), ranged(0, 10)) as (store, asked):
        assert store.get("k", max_bytes=10) == b"whole"
        assert take(store, 0, 10) == BODY[:10]
        assert "X-Amz-Signature=" in asked[1][1]


def test_what_aws_is_told_of_its_own_retries_is_not_asked(monkeypatch):
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "many")
    monkeypatch.setenv("AWS_RETRY_MODE", "eager")
    with s3(ranged(0, 10)) as (store, _):
        assert take(store, 0, 10) == BODY[:10]


def test_without_credentials_a_range_too_is_one_clear_line(no_credentials):
    store = open_store("http://127.0.0.1:1", access_key_id=None, secret_access_key=None)
    with pytest.raises(ConfigurationError, match="no credentials found"):
        take(store, 0, 10)
    store.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate")
def test_under_tls_a_range_comes_from_whom_the_certificate_names_and_nobody_else(tmp_path):
    pair = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    made += ["-nodes", "-days", "2", "-out", pair[0], "-keyout", pair[1], "-subj", "/CN=store"]
    made += ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(made, check=True, capture_output=True)
    with scripted_s3([ranged(0, 600_000)], tls=pair) as (endpoint, asked):
        store = open_store(endpoint, ca_bundle=str(pair[0]))
        assert take(store, 0, 600_000) == BODY[:600_000]
        assert "X-Amz-Signature=" in asked[0][1]
        store.close()
        stranger = open_store(endpoint)
        with pytest.raises(ConfigurationError, match="certificate is not trusted"):
            take(stranger, 0, 600_000)
        stranger.close()
        assert len(asked) == 1
