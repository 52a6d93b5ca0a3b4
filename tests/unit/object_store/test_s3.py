"""How the S3 store handles responses, good and bad, over real HTTP on loopback."""

import gc
import socket
import weakref
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import inf

import pytest

from tests.fakes.scripted_s3 import HangUp, Reply, scripted_s3
from tierlog.cold_tier.ranged_reader import ChunkRef, read_chunk
from tierlog.host.retry import OUTAGE_POLICY, READ_POLICY, RetryPolicy
from tierlog.object_store import s3_ranged_get
from tierlog.object_store.ledger import PriceTable
from tierlog.object_store.open import open_store
from tierlog.object_store.s3 import S3Store
from tierlog.object_store.s3_connection import S3Options
from tierlog.object_store.s3_multipart import encode_crc32c
from tierlog.object_store.s3_responses import ErrorResponse, Fault, advice, classify
from tierlog.object_store.store import Resumable, UploadNotFound
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptObject,
    MissingObject,
    ObjectExists,
    ShuttingDown,
    StoreUnavailable,
)

QUICK = RetryPolicy(attempts=3, sleep=lambda _: None)
OK = Reply(200, headers={"ETag": '"0"'})
BEGUN = Reply(
    200,
    body=b"<InitiateMultipartUploadResult><UploadId>u1</UploadId></InitiateMultipartUploadResult>",
)


def options(endpoint, **more):
    return S3Options(
        endpoint=endpoint,
        region="us-east-1",
        access_key_id="ak",
        secret_access_key="sk",
        connect_timeout_s=2,
        read_timeout_s=2,
        **more,
    )


@contextmanager
def s3(*script, **more):
    with scripted_s3(list(script)) as (endpoint, requests):
        store = S3Store("bucket", "pre/fix", options(endpoint, **more), policy=QUICK)
        try:
            yield store, requests
        finally:
            store.close()


def test_calls_after_close_send_no_request():
    """A verification of large segments would delay the process's exit for minutes."""
    with s3(Reply(200)) as (store, requests):
        store.close()
        for call in (lambda: store.head("key"), lambda: list(store.get_range("key", 0, 1))):
            with pytest.raises(ShuttingDown):
                call()
    assert requests == []


def test_a_put_sends_its_checksum_and_the_prefix():
    with s3(OK) as (store, requests):
        store.put("k", b"hello")
        method, path, headers = requests[0]
        assert (method, path) == ("PUT", "/bucket/pre/fix/k")
        assert headers["x-amz-checksum-crc32c"] == encode_crc32c(crc32c_of(b"hello"))
        assert "If-None-Match" not in headers


def test_a_conditional_put_sends_its_condition():
    with s3(OK) as (store, requests):
        store.put("k", b"hello", if_absent=True)
        assert requests[0][2]["If-None-Match"] == "*"


def test_encryption_and_storage_class_are_sent():
    wanted = {
        "server_side_encryption": "aws:kms",
        "sse_kms_key_id": "k",
        "storage_class": "GLACIER_IR",
    }
    with s3(OK, **wanted) as (store, requests):
        store.put("segments/x.log", b"hello")
        store.put("manifest/1.json", b"{}")
        log, manifest = requests[0][2], requests[1][2]
        assert log["x-amz-server-side-encryption"] == "aws:kms"
        assert log["x-amz-storage-class"] == "GLACIER_IR"
        assert manifest["x-amz-server-side-encryption-aws-kms-key-id"] == "k"
        assert "x-amz-storage-class" not in manifest


@pytest.mark.parametrize(
    "bad", [Reply(503, "SlowDown"), Reply(500, "InternalError"), Reply(408), HangUp()]
)
def test_an_unconditional_put_is_retried(bad):
    with s3(bad, bad, OK) as (store, requests):
        store.put("k", b"hello")
        assert len(requests) == 3
        usage = store.ledger.usage()["manifest", "put"]
        assert (usage.requests, usage.failures, usage.sent_bytes) == (3, 2, 15)


def test_a_conditional_put_on_an_existing_key_raises_object_exists():
    with s3(Reply(412, "PreconditionFailed")) as (store, requests):
        with pytest.raises(ObjectExists):
            store.put("k", b"hello", if_absent=True)
        assert len(requests) == 1


def test_a_conditional_put_that_never_reached_the_store_is_retried():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store = S3Store("b", "", options(f"http://127.0.0.1:{port}"), policy=QUICK)
    with pytest.raises(StoreUnavailable):
        store.put("k", b"x", if_absent=True)
    assert store.ledger.failures == 3, "it was retried"
    store.close()


def test_requests_that_never_reached_the_store_cost_nothing():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store = S3Store("b", "", options(f"http://127.0.0.1:{port}"), policy=QUICK)
    for call in (
        lambda: store.get("k", max_bytes=1),
        lambda: store.put("k", b"x"),
        lambda: next(store.get_range("k", 0, 1)),
    ):
        before = store.ledger.failures
        with pytest.raises(StoreUnavailable):
            call()
        assert store.ledger.failures > before
    assert store.ledger.requests() == 0
    uses = store.ledger.usage().items()
    assert sum(PriceTable().cost(operation, usage) for (_, operation), usage in uses) == 0
    assert all(usage.sent_bytes == 0 for _, usage in uses)
    store.close()


def test_an_unknown_error_code_gives_a_one_line_error():
    with s3(Reply(400, "SomethingNew")) as (store, _):
        with pytest.raises(ConfigurationError, match="refused to get k: scripted") as refused:
            store.get("k", max_bytes=10)
        assert "\n" not in str(refused.value)
        assert str(refused.value).startswith("store s3://bucket/pre/fix: ")


def test_a_forbidden_head_is_not_a_missing_object():
    with s3(Reply(403)) as (store, _), pytest.raises(ConfigurationError, match="no permission"):
        store.head("k")
    with s3(Reply(404)) as (store, _):
        assert store.head("k") is None


RANGE = {"Content-Range": "bytes 2-4/10"}


def test_the_requested_range_is_returned():
    with s3(Reply(206, body=b"234", headers=RANGE)) as (store, requests):
        assert b"".join(store.get_range("k", 2, 5)) == b"234"
        assert requests[0][2]["Range"] == "bytes=2-4"


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (Reply(206, body=b"123", headers={"Content-Range": "bytes 1-3/10"}), StoreUnavailable),
        (Reply(206, body=b"23", headers={"Content-Range": "bytes 2-3/10"}), StoreUnavailable),
        (Reply(206, body=b"23", headers={"Content-Range": "bytes 2-3/4"}), CorruptObject),
        (Reply(200, body=b"0123456789"), StoreUnavailable),
        (Reply(206, body=b"234"), StoreUnavailable),
        (Reply(206, body=b"23", headers=RANGE, claims_bytes=3), StoreUnavailable),
        (Reply(416, "InvalidRange"), CorruptObject),
        (Reply(404, "NoSuchKey"), MissingObject),
        (Reply(404, body=b"404 page not found"), ConfigurationError),  # a proxy's
        (Reply(503, "SlowDown"), StoreUnavailable),
        (HangUp(), StoreUnavailable),
    ],
)
def test_a_response_with_another_range_is_refused(response, error):
    with s3(response) as (store, requests):
        with pytest.raises(error):
            list(store.get_range("k", 2, 5))
        assert len(requests) == 1


def test_an_interrupted_body_is_requested_again():
    with s3(Reply(200, body=b"hel", claims_bytes=5), Reply(200, body=b"hello")) as (
        store,
        requests,
    ):
        assert store.get("k", max_bytes=10) == b"hello"
        assert len(requests) == 2


def test_a_body_that_fails_the_stores_checksum_is_requested_again():
    right = {"x-amz-checksum-crc32c": encode_crc32c(crc32c_of(b"hello"))}
    with s3(Reply(200, body=b"jello", headers=right), Reply(200, body=b"hello", headers=right)) as (
        store,
        _,
    ):
        assert store.get("k", max_bytes=10) == b"hello"


@pytest.mark.parametrize(
    "checksum",
    [
        {"x-amz-checksum-crc32c": encode_crc32c(crc32c_of(b"hello"))},
        {"x-amz-checksum-crc32": "NhCmhg=="},  # which boto3 compares
    ],
)
def test_a_body_that_fails_the_stores_checksum_twice_is_corrupt(checksum):
    """Retrying it as an unavailable store would not help."""
    with s3(Reply(200, body=b"jello", headers=checksum)) as (store, requests):
        with pytest.raises(CorruptObject, match="k: ") as corrupt:
            store.get("k", max_bytes=10)
        assert (corrupt.value.file, len(requests)) == ("k", 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda store: store.get("k", max_bytes=9),
        lambda store: store.head("k"),
        lambda store: store.list("", limit=9),
    ],
)
def test_a_read_waits_for_a_silent_store_only_once(call, monkeypatch):
    """For 20 s, so that a client with a timeout of 30 s sees the error."""
    now_s = [0.0]
    policy = replace(READ_POLICY, monotonic=lambda: now_s[0], sleep=lambda _: None)
    monkeypatch.setattr(s3_ranged_get, "READ_POLICY", policy)

    def silent(_):
        now_s[0] += S3Options.read_timeout_s
        return HangUp()

    with scripted_s3(silent) as (endpoint, requests):
        store = S3Store("bucket", "", options(endpoint))
        with pytest.raises(StoreUnavailable):
            call(store)
        store.close()
    assert len(requests) == 1


def outage_policy(now_s):
    def sleep(seconds):
        now_s[0] += seconds

    return replace(OUTAGE_POLICY, monotonic=lambda: now_s[0], sleep=sleep)


CRC = "x-amz-checksum-crc32c"
CHUNK = ChunkRef("k.log", ("k", 0), 2, 3, crc32c_of(b"234"))


EACH_READ = pytest.mark.parametrize(
    "read", [lambda store: store.get("k", max_bytes=9), lambda store: read_chunk(store, CHUNK)]
)


@EACH_READ
def test_a_reader_without_a_broker_rides_out_an_outage(read, caplog):
    now_s, until_s = [0.0], 25.0

    def respond(_):
        return (
            Reply(503, "SlowDown") if now_s[0] < until_s else Reply(206, body=b"234", headers=RANGE)
        )

    with scripted_s3(respond) as (endpoint, _):
        store = S3Store("bucket", "", options(endpoint), policy=outage_policy(now_s))
        assert bytes(read(store)) == b"234"
        assert 25 <= now_s[0] < 30
        assert len(caplog.records) == 1, "one warning"
        now_s[0], until_s = 0.0, inf
        with pytest.raises(StoreUnavailable):
            read(store)
        assert 25 <= now_s[0] < 30
        store.close()


@EACH_READ
@pytest.mark.parametrize(
    ("response", "error"),
    [
        (Reply(403, "AccessDenied"), ConfigurationError),
        (Reply(404, "NoSuchKey"), MissingObject),
        (Reply(206, body=b"235", headers=RANGE | {CRC: encode_crc32c(1)}), CorruptObject),
    ],
)
def test_a_definite_error_is_not_retried(read, response, error):
    now_s = [0.0]
    with scripted_s3([response]) as (endpoint, requests):
        store = S3Store("bucket", "", options(endpoint), policy=outage_policy(now_s))
        with pytest.raises(error):
            read(store)
        store.close()
    assert (now_s[0], len(requests) <= 2) == (0.0, True)


def test_a_failed_deletion_in_a_multi_object_response_raises(monkeypatch):
    body = b"<DeleteResult><Error><Key>k</Key><Code>%s</Code></Error></DeleteResult>"
    monkeypatch.setattr("tierlog.object_store.s3.DELETE_PAGE", 1)
    for code, text in (
        (b"AccessDenied", r"no permission to delete k;.* \[AccessDenied\]"),
        (b"InvalidRequest", r"refused to delete k: .*\[InvalidRequest\]"),  # MinIO's, for a lock
    ):
        with s3(Reply(200, body=body % code), Reply(200, body=b"<DeleteResult/>")) as (
            store,
            requests,
        ):
            with pytest.raises(ConfigurationError, match=text):
                store.delete(["k", "l"])
            assert len(requests) == 2, "the rest was deleted"
    for code in (b"InternalError", b"ServiceUnavailable", b"SlowDownWrite"):
        with (
            s3(Reply(200, body=body % code)) as (store, _),
            pytest.raises(StoreUnavailable),
        ):
            store.delete(["k"])
    with s3(Reply(200, body=body % b"NoSuchKey")) as (store, _):
        store.delete(["k"])


def test_a_failed_part_aborts_the_multipart_upload(tmp_path):
    path = tmp_path / "f"
    body = b"x" * (6 << 20)
    path.write_bytes(body)
    with s3(BEGUN, Reply(403, "AccessDenied")) as (store, requests):
        with pytest.raises(ConfigurationError):
            store.put_file("k.log", path, size_bytes=len(body), crc32c=1, part_bytes=5 << 20)
        assert requests[-1][0] == "DELETE"
        assert "uploadId=u1" in requests[-1][1]


def test_a_failed_upload_keeps_none_of_its_parts_in_memory(tmp_path):
    """Not even until the next garbage collection."""
    path, size = tmp_path / "f", 6 << 20
    path.write_bytes(bytes(size))
    with s3(BEGUN, Reply(403, "AccessDenied")) as (store, _):
        gc.disable()
        try:
            with pytest.raises(ConfigurationError) as refused:
                store.put_file("k.log", path, size_bytes=size, crc32c=1, part_bytes=5 << 20)
            error = weakref.ref(refused.value)
            del refused
            assert error() is None
        finally:
            gc.enable()


def test_an_upload_interrupted_by_a_shutdown_is_not_aborted(tmp_path):
    path = tmp_path / "f"
    path.write_bytes(b"x" * (6 << 20))

    def stopped(_):
        raise ShuttingDown("now")

    ids = []
    with s3(BEGUN) as (store, requests), pytest.raises(ShuttingDown):
        store.put_file(
            "k.log",
            path,
            size_bytes=6 << 20,
            crc32c=1,
            part_bytes=5 << 20,
            pace=stopped,
            resumable=Resumable("", ids.append),
        )
    assert ids == ["u1"]
    assert [method for method, *_ in requests] == ["POST"]


@pytest.mark.parametrize("refusal", [Reply(403, "AccessDenied"), Reply(404, "NoSuchUpload")])
def test_an_upload_whose_parts_cannot_be_listed_is_lost(tmp_path, refusal):
    path = tmp_path / "f"
    body = b"x" * (6 << 20)
    path.write_bytes(body)
    with s3(refusal) as (store, requests), pytest.raises(UploadNotFound):
        store.put_file(
            "k.log",
            path,
            size_bytes=len(body),
            crc32c=1,
            part_bytes=5 << 20,
            resumable=Resumable("u1", lambda _: None),
        )
    assert [method for method, *_ in requests] == ["GET"]


def test_an_upload_that_is_aborted_while_its_parts_are_sent_is_lost(tmp_path):
    """By the store's lifecycle rule, say. Nothing is missing that a manifest names."""
    path = tmp_path / "f"
    path.write_bytes(bytes(6 << 20))
    with (
        s3(BEGUN, Reply(404, "NoSuchUpload")) as (store, _),
        pytest.raises(UploadNotFound),
    ):
        store.put_file("k.log", path, size_bytes=6 << 20, crc32c=1, part_bytes=5 << 20)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_completion_whose_response_was_lost_is_decided_by_what_the_store_has(tmp_path, is_there):
    path = tmp_path / "f"
    path.write_bytes(bytes(6 << 20))
    stored = {"ETag": '"e"', "Last-Modified": "Thu, 01 Jan 1970 00:00:09 GMT"}
    there = Reply(200, body=bytes(6 << 20), headers=stored) if is_there else Reply(404)
    with s3(BEGUN, OK, OK, HangUp(), Reply(404, "NoSuchUpload"), there) as (
        store,
        requests,
    ):
        upload = partial(store.put_file, "k.log", path, size_bytes=6 << 20, crc32c=1)
        if is_there:
            assert upload(part_bytes=5 << 20).size_bytes == 6 << 20
        else:
            with pytest.raises(StoreUnavailable, match="accepted it but does not have it"):
                upload(part_bytes=5 << 20)
        assert requests[-1][0] == "HEAD"


def test_a_store_that_may_not_list_uploads_has_none():
    with s3(Reply(403, "AccessDenied")) as (store, _):
        assert store.incomplete_uploads("topics/", limit=10) == []


def test_missing_credentials_are_a_configuration_error(no_credentials):
    store = open_store("s3://b/p", S3Options(endpoint="http://127.0.0.1:1", region="us-east-1"))
    with pytest.raises(ConfigurationError, match="no credentials found"):
        store.head("k")
    store.close()


@pytest.mark.parametrize(
    "url",
    [
        "",
        "bucket/prefix",
        "http://x/y",
        "s3://",
        "s3://b/a//b",
        "s3://[b",
        "s3://b\u2100/x",
        "file://host/x",
        "file:x",
    ],
)
def test_an_invalid_store_url_is_refused(url):
    with pytest.raises(ConfigurationError):
        open_store(url)


def test_secrets_in_a_url_are_refused_and_not_shown():
    with pytest.raises(ConfigurationError) as refused:
        open_store("s3://ak:sesame@bucket/p")
    assert "sesame" not in str(refused.value)


def test_the_repr_of_options_shows_no_secrets():
    assert "sesame" not in repr(S3Options(secret_access_key="sesame", session_token="sesame"))


def test_every_advice_can_be_formatted():
    for code in ("AccessDenied", "301", "NotImplemented", "misconfigured", "Unheard"):
        for status in (0, 400):
            line = advice(ErrorResponse(status, code, "why", "eu-west-9"), operation="put", key="k")
            assert "{" not in line


def test_unknown_statuses_are_classified_by_their_range():
    assert classify(ErrorResponse(599, "Odd")) is Fault.UNKNOWN
    assert classify(ErrorResponse(418, "Odd")) is Fault.MISCONFIGURED
    assert classify(ErrorResponse(429, "Odd")) is Fault.REFUSED
    assert classify(ErrorResponse(0, "")) is Fault.UNKNOWN


def test_a_store_that_ignores_start_after_is_reported():
    """Paging through its keys would never end."""
    stat = b"<Size>1</Size><LastModified>2026-01-01T00:00:00Z</LastModified>"
    whole = b"<ListBucketResult><IsTruncated>false</IsTruncated>%b</ListBucketResult>"
    body = whole % b"".join(
        b"<Contents><Key>pre/fix/k/%d</Key>%b</Contents>" % (number, stat) for number in (1, 2)
    )
    with s3(Reply(200, body=body)) as (store, _):
        assert [stat.key for stat in store.list("k/", limit=2)] == ["k/1", "k/2"]
        with pytest.raises(StoreUnavailable, match="ignores StartAfter"):
            store.list("k/", start_after="k/2", limit=2)


def test_a_list_is_complete_or_an_error():
    """Also if a page is empty, or the store says that there is more, but not where."""
    page = b"<ListBucketResult><IsTruncated>%b</IsTruncated>%b</ListBucketResult>"
    token = b"<NextContinuationToken>t</NextContinuationToken>"
    key = b"<Contents><Key>pre/fix/k</Key><Size>1</Size>"
    key += b"<LastModified>2026-01-01T00:00:00Z</LastModified></Contents>"
    empty, last = Reply(200, body=page % (b"true", token)), Reply(200, body=page % (b"false", key))
    with s3(empty, last) as (store, requests):
        assert [stat.key for stat in store.list("", limit=9)] == ["k"]
        assert "continuation-token=t" in requests[1][1]
    for stuck in (empty, Reply(200, body=page % (b"true", key))):
        with (
            s3(stuck) as (store, _),
            pytest.raises(StoreUnavailable, match="truncated but has no continuation token"),
        ):
            store.list("", limit=9)


def test_authorities_that_do_not_exist_are_a_configuration_error(tmp_path, monkeypatch):
    missing = str(tmp_path / "ca.pem")
    with pytest.raises(ConfigurationError, match=rf"no file of certificate authorities {missing}"):
        S3Store("bucket", "", options("https://127.0.0.1:1", ca_bundle=missing))
    monkeypatch.setenv("AWS_CA_BUNDLE", missing)
    with pytest.raises(ConfigurationError, match=missing):
        S3Store("bucket", "", options("https://127.0.0.1:1"))
    with s3(OK) as (store, _):
        store.put("k", b"plain HTTP needs none")


@pytest.mark.parametrize("given", ["access_key_id", "secret_access_key", "session_token"])
def test_an_incomplete_credential_is_refused(given):
    none = replace(options("http://127.0.0.1:1"), access_key_id=None, secret_access_key=None)
    half = replace(none, **{given: "x"})
    with pytest.raises(ConfigurationError, match="access key id and its secret together"):
        S3Store("bucket", "", half)
