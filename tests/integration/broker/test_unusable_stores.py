"""An unusable store is one clear line at start, by the error responses of AWS.

A scripted server on loopback sends the responses; those of other real servers are tested in
`tests/integration/s3/test_unusable_stores.py`.
"""

from pathlib import Path
from urllib.parse import parse_qs

import pytest

from tests.fakes.command_line import Program
from tests.fakes.scripted_s3 import Reply, Request, scripted_s3
from tierlog.broker.broker import Broker
from tierlog.broker.settings import BrokerSettings
from tierlog.object_store.open import open_store
from tierlog.object_store.s3_connection import S3Options
from tierlog.record_format.errors import ConfigurationError

ELSEWHERE = (
    "The bucket you are attempting to access must be addressed using the specified endpoint."
)
REDIRECT = Reply(301, code="PermanentRedirect", message=ELSEWHERE)
WITH_REGION = {"x-amz-bucket-region": "eu-central-1"}
MALFORMED = Reply(
    400,
    code="AuthorizationHeaderMalformed",
    message="The authorization header is malformed; a non-empty Access Key must be provided",
)
WRONG_REGION = Reply(
    400,
    code="AuthorizationHeaderMalformed",
    message="the region 'us-east-1' is wrong; expecting 'eu-central-1'",
    more="<Region>eu-central-1</Region>",
)
PAGE = b"<html>It works!</html>"

EVERY_CALL = {
    "a wrong bucket": (
        Reply(404, code="NoSuchBucket"),
        "there is no such bucket; create it, or correct the URL or the endpoint [NoSuchBucket]",
    ),
    "no permission": (
        Reply(403, code="AccessDenied"),
        "no permission to get cluster.json; grant s3:GetObject and s3:ListBucket to the "
        "credentials in use [AccessDenied]",
    ),
    "a wrong region, with a hint": (
        Reply(301, code="PermanentRedirect", message=ELSEWHERE, headers=WITH_REGION),
        "the bucket is in another region (eu-central-1); set the region [PermanentRedirect]",
    ),
    "a wrong region": (
        REDIRECT,
        "the bucket is in another region; set the region [PermanentRedirect]",
    ),
    "a signature for another region": (
        WRONG_REGION,
        "the bucket is in another region (eu-central-1); set the region "
        "[AuthorizationHeaderMalformed]",
    ),
    "malformed credentials": (
        MALFORMED,
        "the store does not accept the format of the credentials: The authorization header "
        "is malformed; a non-empty Access Key must be provided [AuthorizationHeaderMalformed]",
    ),
    "expired credentials": (
        Reply(400, code="ExpiredToken", message="The provided token has expired."),
        "the credentials have expired; renew them [ExpiredToken]",
    ),
    "an unknown key": (
        Reply(403, code="InvalidAccessKeyId"),
        "the store does not know the access key; correct the credentials [InvalidAccessKeyId]",
    ),
    "a wrong secret": (
        Reply(403, code="SignatureDoesNotMatch"),
        "the secret key is wrong, or a proxy modifies requests [SignatureDoesNotMatch]",
    ),
    "a wrong clock": (
        Reply(403, code="RequestTimeTooSkewed"),
        "this machine's clock differs too much from the store's; correct it [RequestTimeTooSkewed]",
    ),
    "a redirecting endpoint": (
        Reply(308, body=PAGE, headers={"Location": "https://store.example/"}),
        "the endpoint redirects to https://store.example/; set the endpoint to that address",
    ),
    "a redirecting endpoint that boto3 follows": (
        Reply(301, body=PAGE, headers={"Location": "https://store.example/"}),
        "the endpoint redirects to https://store.example/; set the endpoint to that address",
    ),
    "a web server": (
        Reply(200, body=PAGE),
        "cluster.json: not a sealed JSON document: JSON is malformed: invalid character "
        "(byte 0); is another kind of server listening there?",
    ),
    "a web server that responds 404": (
        Reply(404, body=PAGE),
        "no S3 server at this endpoint, or no such bucket; correct the URL or the endpoint [404]",
    ),
}


DENIED = Reply(403, code="AccessDenied", message="Access Denied")
NOT_DELETED = b"<DeleteResult><Error><Code>AccessDenied</Code></Error></DeleteResult>"

SOME_CALLS = {
    "no permission to write": ({"PUT": DENIED}, "no permission to put probe/", "s3:PutObject"),
    "a read-only store": (
        {"PUT": Reply(405, code="MethodNotAllowed")},
        "the store does not allow put requests: it may be read-only",
        "[MethodNotAllowed]",
    ),
    "a web server": (
        {"PUT": Reply(501, body=PAGE), "GET": Reply(404, body=PAGE)},
        "no S3 server at this endpoint",
        "[404]",
    ),
    "a proxy that rejects PUT": (
        {"PUT": Reply(501, body=PAGE)},
        "the store does not support put requests: it may not be an S3 server",
        "[501]",
    ),
    "no permission to list": ({"LIST": DENIED}, "no permission to list probe/", "s3:ListBucket"),
    "no permission to delete": (
        {"POST": Reply(200, body=NOT_DELETED)},
        "no permission to delete probe/",
        "s3:DeleteObject",
    ),
}


class Bucket:
    """The parts of S3 that a start needs; `refuses` has the responses to refused calls."""

    def __init__(self, refuses: dict[str, Reply]) -> None:
        self._refuses = refuses
        self._objects: dict[str, bytes] = {}

    def __call__(self, request: Request) -> Reply:
        path, _, query = request.path.partition("?")
        call = "LIST" if "list-type=2" in query else request.method
        if call in self._refuses:
            return self._refuses[call]
        if call == "PUT":
            if path in self._objects and "If-None-Match" in request.headers:
                return Reply(412, code="PreconditionFailed")
            self._objects[path] = request.body
            return Reply(200, headers={"ETag": "e"})
        if call == "LIST":
            (prefix,) = parse_qs(query)["prefix"]
            return Reply(200, body=_listed(prefix))
        found = self._objects.get(path)
        return Reply(404, code="NoSuchKey") if found is None else Reply(200, body=found)


def _listed(key: str) -> bytes:
    """A LIST response with this one key."""
    entry = f"<Key>{key}</Key><Size>1</Size><LastModified>2026-11-21T12:00:00Z</LastModified>"
    more = "<IsTruncated>false</IsTruncated>"
    return f"<ListBucketResult>{more}<Contents>{entry}</Contents></ListBucketResult>".encode()


def options(endpoint: str) -> S3Options:
    return S3Options(
        endpoint=endpoint, region="us-east-1", access_key_id="ak", secret_access_key="sk"
    )


def start(endpoint: str, data_dir: Path) -> str:
    """The error of a start."""
    settings = BrokerSettings(data_dir=data_dir, cache_bytes=1 << 20, disk_reserve_bytes=0)
    with pytest.raises(ConfigurationError) as refused:
        Broker.open(settings, store=open_store("s3://bucket/p", options(endpoint))).close()
    return str(refused.value)


@pytest.mark.parametrize(("response", "line"), EVERY_CALL.values(), ids=EVERY_CALL)
def test_a_store_that_refuses_every_call_is_explained(response, line, tmp_path):
    with scripted_s3([response]) as (endpoint, requests):
        assert start(endpoint, tmp_path) == f"store s3://bucket/p: {line}"
    assert len(requests) < 10


@pytest.mark.parametrize(("refuses", "says", "names"), SOME_CALLS.values(), ids=SOME_CALLS)
def test_a_store_that_refuses_some_calls_is_explained(refuses, says, names, tmp_path):
    with scripted_s3(Bucket(refuses)) as (endpoint, _):
        line = start(endpoint, tmp_path)
    assert line.startswith(f"store s3://bucket/p: {says}")
    assert names in line


def test_a_region_corrected_by_the_store_is_adopted():
    """boto3 signs again for the region that the response names."""

    def response(request: Request) -> Reply:
        right = "/eu-central-1/s3/" in request.headers["Authorization"]
        return Reply(200, body=b"body") if right else WRONG_REGION

    with scripted_s3(response) as (endpoint, requests):
        store = open_store("s3://bucket/p", options(endpoint))
        assert [store.get("k", max_bytes=10) for _ in range(2)] == [b"body"] * 2
        store.close()
    assert len(requests) == 3, "the right region is learnt once"


def test_tierlog_serve_prints_one_line_and_does_not_start(tmp_path):
    program = Program()
    program.environment |= {"AWS_ACCESS_KEY_ID": "ak", "AWS_SECRET_ACCESS_KEY": "sk"}
    where = ("--data-dir", tmp_path / "new", "--store", "s3://bucket/p", "--listen", "127.0.0.1:0")
    with scripted_s3([EVERY_CALL["expired credentials"][0]]) as (endpoint, _):
        named = ("--s3-endpoint", endpoint, "--s3-region", "us-east-1")
        line = program.fails(1, "serve", *where, *named)
    assert line == (
        "tierlog: store s3://bucket/p: the credentials have expired; renew them [ExpiredToken]\n"
    )
    assert not (tmp_path / "new").exists(), "no data folder is created"
