"""What every kind of request makes of every kind of answer: who tries again, and what is named."""

from contextlib import closing, nullcontext

import pytest

from tests.fakes.manifests import entry
from tests.fakes.scripted_s3 import HangUp, Reply, scripted_s3
from tierlog.cold_tier.ranged_reader import read_range
from tierlog.cold_tier.segment_check import check_segment
from tierlog.host.retry import RetryPolicy
from tierlog.object_store.s3 import S3Store
from tierlog.object_store.s3_connection import S3Options
from tierlog.object_store.s3_multipart import MULTIPART_FROM_BYTES
from tierlog.object_store.store import IncompleteUpload
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import (
    ClockSkewTooLarge,
    ConfigurationError,
    OutcomeUnknownError,
    StoreUnavailable,
)
from tierlog.record_format.findings import ProblemKind

TWICE = RetryPolicy(attempts=2, sleep=lambda _: None)
BODY = bytes(MULTIPART_FROM_BYTES + 1)
CUT_XML = b"<ListBucketResult><IsTr"

REFUSED = {
    "expired": (Reply(400, "ExpiredToken"), "the credentials have expired"),
    "forbidden": (Reply(403, "AccessDenied"), "no permission to"),
    "archived": (Reply(403, "InvalidObjectState"), "InvalidObjectState"),
    "no bucket": (Reply(404, "NoSuchBucket"), "there is no such bucket"),
    "no S3 server": (Reply(404), "no S3 server at this endpoint"),
    "plain HTTP to a TLS port": (Reply(400, body=b"HTTPS, please"), "may need https"),
    "the clock": (Reply(400, "RequestTimeTooSkewed"), "this machine's clock differs too much"),
    "an encryption key": (Reply(400, "KMS.DisabledException"), "KMS.DisabledException"),
    "the way to HTTPS": (
        Reply(302, headers={"Location": "https://store.example/"}),
        "the endpoint redirects to https://store.example/",
    ),
    "another region": (
        Reply(301, "PermanentRedirect", headers={"x-amz-bucket-region": "eu-west-9"}),
        "the bucket is in another region (eu-west-9)",
    ),
}
"""Final: an operator has to mend it."""

NOT_DONE = {
    "throttled": (Reply(503, "SlowDown"), "503 SlowDown"),
    "throttled without XML": (Reply(429), "429"),
    "throttled by the key's service": (Reply(400, "ThrottlingException"), "ThrottlingException"),
    "too new a bucket": (
        Reply(307, "TemporaryRedirect", headers={"Location": "http://127.0.0.1:1/"}),
        "307 TemporaryRedirect",
    ),
    "conflict": (Reply(409, "ConditionalRequestConflict"), "409 ConditionalRequestConflict"),
    "half a body": (Reply(400, "IncompleteBody"), "400 IncompleteBody"),
}
"""Nothing was done: also a create may be sent again."""

NOT_DONE_WITH_200 = {"throttled with 200": (Reply(200, "SlowDown"), "SlowDown")}
"""The same, for requests whose response is not an object's bytes."""

UNKNOWN = {
    "failed": (Reply(500, "InternalError"), "500 InternalError"),
    "failed without XML": (Reply(503), "503"),
    "given up by a proxy": (Reply(504), "504"),
    "timed out by a proxy": (Reply(408), "408"),
    "failed encryption": (Reply(500, "KMS.InternalException"), "500 KMS.InternalException"),
    "timed out": (Reply(400, "RequestTimeout"), "400 RequestTimeout"),
    "closed": (HangUp(), "connection-broken"),
}
"""Something may have been done: a create has to be read back."""

UNKNOWN_WITH_200 = {
    "an error": (Reply(200, "InternalError"), "500 InternalError"),
    "half an XML document": (Reply(200, body=CUT_XML), "500"),
    "half a body": (Reply(200, body=CUT_XML, claims_bytes=99), "500"),
}
"""The same, for requests whose response is not an object's bytes."""


def open_store(endpoint):
    options = S3Options(
        endpoint=endpoint, region="us-east-1", access_key_id="ak", secret_access_key="sk"
    )
    return S3Store("bucket", "", options, policy=TWICE)


def upload(store, path):
    path.write_bytes(BODY)
    store.put_file("k", path, size_bytes=len(BODY), crc32c=crc32c_of(BODY), part_bytes=1)


CALLS = {
    "put": lambda store, _: store.put("k", b"x"),
    "create": lambda store, _: store.put("k", b"x", if_absent=True),
    "start upload": upload,
    "part": upload,
    "complete": upload,
    "abort": lambda store, _: store.abort_upload(IncompleteUpload("k", "u", 0)),
    "get": lambda store, _: store.get("k", max_bytes=100),
    "range": lambda store, _: read_range(store, "k", 0, 10),
    "head": lambda store, _: store.head("k"),
    "list": lambda store, _: store.list("", limit=1),
    "delete": lambda store, _: store.delete(["k", "l"]),
}

SAYING_WHY = [call for call in CALLS if call != "head"]

_STARTED = b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
GOOD = {"start upload": Reply(200, body=_STARTED), "part": Reply(200, headers={"ETag": '"e"'})}


def kind_of(request):
    if "partNumber=" in request.path:
        return "part"
    if request.method == "POST" and "delete" not in request.path:
        return "start upload" if "uploads" in request.path else "complete"
    return request.method


@pytest.fixture
def outcome(call, tmp_path):
    """A function: the error of the call if each of its requests gets this reply, and how many
    requests there were.
    """
    reply = None

    def respond(request):
        is_other = call in {"part", "complete"} and kind_of(request) != call
        return GOOD.get(kind_of(request), Reply(204)) if is_other else reply

    def outcome_of(given):
        nonlocal reply
        reply, before = given, len(requests)
        with pytest.raises(Exception) as raised:
            CALLS[call](store, tmp_path / "file")
        return raised.value, len(requests) - before

    with scripted_s3(respond) as (endpoint, requests), closing(open_store(endpoint)) as store:
        yield outcome_of


@pytest.mark.parametrize("call", SAYING_WHY)
def test_what_an_operator_must_mend_is_named(outcome):
    for answer, (reply, text) in REFUSED.items():
        error, _ = outcome(reply)
        kind = ClockSkewTooLarge if answer == "the clock" else ConfigurationError
        assert type(error) is kind, (answer, error)
        assert text in str(error), (answer, error)


@pytest.mark.parametrize("call", SAYING_WHY)
def test_a_request_that_did_nothing_is_sent_again(call, outcome):
    answers = NOT_DONE if call in {"get", "range"} else NOT_DONE | NOT_DONE_WITH_200
    for answer, (reply, text) in answers.items():
        error, requests = outcome(reply)
        assert type(error) is StoreUnavailable, (answer, error)
        assert text in str(error), (answer, error)
        assert requests >= 2, answer


@pytest.mark.parametrize("call", SAYING_WHY)
def test_only_a_create_that_may_have_succeeded_is_not_sent_again(call, outcome):
    answers = UNKNOWN if call in {"get", "range"} else UNKNOWN | UNKNOWN_WITH_200
    for answer, (reply, text) in answers.items():
        error, requests = outcome(reply)
        assert type(error) is (OutcomeUnknownError if call == "create" else StoreUnavailable)
        assert text in str(error), (answer, error)
        assert (requests == 1) is (call == "create"), answer


HEAD = {
    ConfigurationError: (301, 302, 400, 403, 405, 501),
    StoreUnavailable: (408, 409, 429, 500, 503, 504),
}


@pytest.mark.parametrize("call", ["head"])
def test_a_head_has_only_a_status(outcome):
    for kind, statuses in HEAD.items():
        for status in statuses:
            error, requests = outcome(Reply(status))
            assert type(error) is kind, (status, error)
            assert f"{status}" in str(error)
            assert requests >= 2 or kind is ConfigurationError


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (Reply(404, "NoSuchBucket"), ConfigurationError),
        (Reply(404, body=b"404 page not found"), ConfigurationError),  # a proxy's
        (Reply(206, body=b"x", headers={"Content-Range": "bytes 0-0/9"}), StoreUnavailable),
        (Reply(404, "NoSuchKey"), None),
    ],
)
def test_a_head_that_finds_nothing_makes_no_object_missing(reply, error):
    """A repair would give it up for lost."""
    answers = scripted_s3(lambda request: Reply(404) if request.method == "HEAD" else reply)
    raises = pytest.raises(error) if error else nullcontext()
    with answers as (endpoint, _), closing(open_store(endpoint)) as store, raises:
        found = check_segment(store, entry(0), partition=0, deep=False)
        assert {problem.kind for problem in found.problems} == {ProblemKind.OBJECT_MISSING}


@pytest.mark.parametrize("call", ["put", "create", "list", "start upload", "part"])
@pytest.mark.parametrize("body", [b"", b"<html><body>Welcome to the hotel</body></html>"])
def test_a_response_without_what_was_asked_for_is_no_success(call, outcome, body):
    """It is of another kind of server, such as a captive portal."""
    error, _ = outcome(Reply(200, body=body))
    assert type(error) is (OutcomeUnknownError if call == "create" else StoreUnavailable)
    assert "the response has no " in str(error)
