"""boto3's client: how it is created, where it looks for what, and what its exceptions mean.

* boto3 does not retry: its own retry of a conditional PUT would meet its own success with 412, and
  its retries cannot be counted for the bill.
* `answer_of` gives the facts of any exception that boto3 lets out; what follows from them is in
  `s3_errors`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    HTTPClientError,
    MetadataRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    ProxyConnectionError,
    SSLError,
)
from botocore.httpsession import get_cert_path
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from cold_tier.s3_connection import NeverConnected
from cold_tier.s3_errors import NEVER_CONNECTED, Answer
from cold_tier.s3_options import S3Options
from record_format.errors import ConfigurationError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

URL_EXPIRES_S: Final = 900
_ONE_ATTEMPT: Final[Any] = {"total_max_attempts": 1, "mode": "standard"}
FOREIGN = (ClientError, BotoCoreError, ResponseParserError, HTTPError, OSError)

_NEVER_CONNECTED = (
    NeverConnected,
    ConnectTimeoutError,
    EndpointConnectionError,
    ProxyConnectionError,
    CredentialRetrievalError,  # whoever gives out credentials does not answer
    MetadataRetrievalError,
)


def make_client(options: S3Options) -> S3Client:
    session = _session(options)
    own_server = options.endpoint is not None
    config = Config(
        retries=_ONE_ATTEMPT,
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        max_pool_connections=options.max_connections,
        tcp_keepalive=True,
        proxies={} if options.is_on_this_machine else None,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={
            "addressing_style": _addressing_style(options),
            # Under TLS the CRC is enough; without it the signature covers the bytes too.
            "payload_signing_enabled": bool(own_server and not _is_tls(options.endpoint)),
        },
    )
    client = session.client(
        "s3", endpoint_url=options.endpoint, config=config, verify=options.ca_bundle
    )
    client.meta.events.register("before-call.s3.HeadBucket", _not_to_be_redirected)
    return client


def _not_to_be_redirected(params: Any, **_: Any) -> None:
    """boto3 asks for the bucket's region where a request was redirected, and again where that
    question was, without an end: an endpoint that only sends on to HTTPS would exhaust the stack.
    """
    params["context"]["s3_redirect"]["redirected"] = True


def url_signer(options: S3Options) -> Callable[[str, str], str]:
    """A function that makes a presigned URL of a bucket and a key, valid for `URL_EXPIRES_S`."""

    @cache
    def client() -> S3Client:
        # One of its own: for URLs boto3 still defaults to a signature that many stores refuse.
        config = Config(
            signature_version="s3v4",
            retries=_ONE_ATTEMPT,
            response_checksum_validation="when_required",
            s3={"addressing_style": _addressing_style(options)},
        )
        return _session(options).client("s3", endpoint_url=options.endpoint, config=config)

    def sign(bucket: str, key: str) -> str:
        return client().generate_presigned_url(
            "get_object", Params={"Bucket": bucket, "Key": key}, ExpiresIn=URL_EXPIRES_S
        )

    return sign


def ca_file(options: S3Options) -> str:
    """Whose certificates boto3 trusts; one that only AWS's own files name is not seen here."""
    given = options.ca_bundle or os.environ.get("AWS_CA_BUNDLE")
    return str(given or os.environ.get("REQUESTS_CA_BUNDLE") or get_cert_path(True))


def _session(options: S3Options) -> boto3.session.Session:
    """Raises ConfigurationError for half of a credential, with which botocore ends in a bug."""
    pair = (options.access_key_id, options.secret_access_key)
    if pair.count(None) == 1 or (options.session_token is not None and None in pair):
        raise ConfigurationError(
            "S3 credentials: an access key's id and its secret go together, and a session token "
            "with both"
        )
    return boto3.session.Session(
        aws_access_key_id=options.access_key_id,
        aws_secret_access_key=options.secret_access_key,
        aws_session_token=options.session_token,
        region_name=options.region,
        profile_name=options.profile,
    )


def _addressing_style(options: S3Options) -> Literal["path", "auto"]:
    own_server = options.endpoint is not None
    path_style = own_server if options.path_style is None else options.path_style
    return "path" if path_style else "auto"


def _is_tls(endpoint: str | None) -> bool:
    return endpoint is not None and endpoint.lower().startswith("https:")


def answer_of(error: Exception) -> Answer:
    """The facts of a foreign exception."""
    if isinstance(error, ClientError):
        return _answer_of_store(error.response)
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return Answer(0, "NoCredentials")
    if isinstance(error, _NEVER_CONNECTED):
        return Answer(0, NEVER_CONNECTED, str(error))
    if isinstance(error, SSLError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return Answer(0, "bad-setting", f"its certificate is not trusted: {error}")
    if isinstance(error, BlockingIOError | TimeoutError):  # as the kernel names it, and TLS
        return Answer(0, "broke-off", "no answer in time")
    if isinstance(error, HTTPClientError | HTTPError | OSError | ResponseParserError):
        return Answer(0, "broke-off", str(error))
    return Answer(0, "bad-setting", str(error))


def _answer_of_store(response: Any) -> Answer:
    fault: Mapping[str, str] = response.get("Error", {})
    about = response.get("ResponseMetadata", {})
    headers = about.get("HTTPHeaders", {})
    status = about.get("HTTPStatusCode", 0)
    code, detail = fault.get("Code", ""), fault.get("Message", "")
    if not code and "location" in headers:
        return Answer(0, "elsewhere", headers["location"])
    region = headers.get("x-amz-bucket-region") or fault.get("Region") or ""
    return Answer(status, code or str(status), detail or f"HTTP status {status}", region)
