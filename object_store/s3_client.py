"""Creates boto3's clients and presigned URLs, and converts their exceptions.

* boto3 does not retry: its retry of a conditional PUT that had succeeded would get 412, and its
  retries could not be counted for the bill.
* `error_response_of` converts any exception that boto3 raises; `s3_responses` classifies it.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from ssl import SSLCertVerificationError
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

from tierlog.object_store.s3_connection import ConnectFailed, S3Options
from tierlog.object_store.s3_responses import CONNECT_FAILED, ErrorResponse
from tierlog.object_store.workarounds import keep_from_following_redirects
from tierlog.record_format.errors import ConfigurationError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

SignedOperation = Literal["get_object", "head_object"]

URL_EXPIRES_S: Final = 900
URL_REUSE_S: Final = 300.0  # a third of its validity
URLS_MAX: Final = 8192  # an owner checks each partition again and again, with one HEAD
_ONE_ATTEMPT: Final[Any] = {"total_max_attempts": 1, "mode": "standard"}
FOREIGN = (ClientError, BotoCoreError, ResponseParserError, HTTPError, OSError)

_CONNECT_FAILURES = (
    ConnectFailed,
    ConnectTimeoutError,
    EndpointConnectionError,
    ProxyConnectionError,
    CredentialRetrievalError,  # the credential provider does not respond
    MetadataRetrievalError,
)


def make_client(options: S3Options) -> S3Client:
    session = _boto3_session(options)
    config = Config(
        retries=_ONE_ATTEMPT,
        connect_timeout=options.connect_timeout_s,
        read_timeout=options.read_timeout_s,
        max_pool_connections=options.max_connections,
        tcp_keepalive=True,
        proxies={} if options.is_loopback else None,
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        s3={
            "addressing_style": _addressing_style(options),
            # With TLS the CRC is enough; without it the signature covers the body too.
            "payload_signing_enabled": _is_plain_http(options.endpoint),
        },
    )
    client = session.client(
        "s3", endpoint_url=options.endpoint, config=config, verify=options.ca_bundle
    )
    keep_from_following_redirects(client)
    return client


def url_signer(options: S3Options) -> Callable[[SignedOperation, str, str], str]:
    """A function that presigns the URL of an operation for a bucket and a key, valid for
    `URL_EXPIRES_S`.
    """

    @cache
    def client() -> S3Client:
        # A separate client: for URLs boto3 still defaults to SigV2, which many stores reject.
        config = Config(
            signature_version="s3v4",
            retries=_ONE_ATTEMPT,
            response_checksum_validation="when_required",
            s3={"addressing_style": _addressing_style(options)},
        )
        return _boto3_session(options).client("s3", endpoint_url=options.endpoint, config=config)

    def sign(operation: SignedOperation, bucket: str, key: str) -> str:
        target = {"Bucket": bucket, "Key": key}
        if operation == "head_object":
            target["ChecksumMode"] = "ENABLED"
        return client().generate_presigned_url(operation, Params=target, ExpiresIn=URL_EXPIRES_S)

    return sign


class PresignedUrls:
    """A cache of presigned URLs made by `sign`. Thread-safe."""

    def __init__(self, sign: Callable[[SignedOperation, str], str]) -> None:
        self._sign, self._lock = sign, threading.Lock()
        self._urls: OrderedDict[tuple[SignedOperation, str], tuple[float, str]] = OrderedDict()

    def presigned_url(self, operation: SignedOperation, key: str) -> tuple[str, bool]:
        """The URL, and whether it was signed just now."""
        now, place = time.monotonic(), (operation, key)
        with self._lock:
            signed_at, url = self._urls.get(place, (0.0, ""))
        if url and now - signed_at < URL_REUSE_S:
            return url, False
        url = self._sign(operation, key)
        with self._lock:
            self._urls[place] = (now, url)
            self._urls.move_to_end(place)
            if len(self._urls) > URLS_MAX:
                self._urls.popitem(last=False)
        return url, True

    def discard(self, operation: SignedOperation, key: str) -> None:
        with self._lock:
            self._urls.pop((operation, key), None)


def ca_file(options: S3Options) -> str:
    """The CA bundle that boto3 uses, except for one that only AWS's config file names. Raises
    ValueError if TLS needs it and it does not exist.
    """
    given = options.ca_bundle or os.environ.get("AWS_CA_BUNDLE")
    found = str(given or os.environ.get("REQUESTS_CA_BUNDLE") or get_cert_path(True))
    if not (_is_plain_http(options.endpoint) or Path(found).exists()):
        raise ValueError(f"there is no file of certificate authorities {found}")
    return found


def _boto3_session(options: S3Options) -> boto3.session.Session:
    """Raises ConfigurationError for incomplete credentials, for which botocore fails with a bug."""
    pair = (options.access_key_id, options.secret_access_key)
    if pair.count(None) == 1 or (options.session_token is not None and None in pair):
        raise ConfigurationError(
            "S3 credentials: set the access key id and its secret together; a session token needs "
            "both"
        )
    return boto3.session.Session(
        aws_access_key_id=options.access_key_id,
        aws_secret_access_key=options.secret_access_key,
        aws_session_token=options.session_token,
        region_name=options.region,
        profile_name=options.profile,
    )


def _addressing_style(options: S3Options) -> Literal["path", "auto"]:
    has_endpoint = options.endpoint is not None
    path_style = has_endpoint if options.path_style is None else options.path_style
    return "path" if path_style else "auto"


def _is_plain_http(endpoint: str | None) -> bool:
    return endpoint is not None and not endpoint.lower().startswith("https:")


def error_response_of(error: Exception) -> ErrorResponse:
    """Convert an exception of boto3, urllib3 or the operating system."""
    if isinstance(error, ClientError):
        return _client_error_response(error.response)
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return ErrorResponse(0, "NoCredentials")
    if isinstance(error, _CONNECT_FAILURES):
        return ErrorResponse(0, CONNECT_FAILED, str(error))
    if isinstance(error, SSLError) and _is_untrusted(error):
        return ErrorResponse(0, "misconfigured", f"its certificate is not trusted: {error}")
    if isinstance(error, BlockingIOError | TimeoutError):  # of plain sockets, and of TLS
        return ErrorResponse(0, "connection-broken", "the response timed out")
    if isinstance(error, HTTPClientError | HTTPError | OSError | ResponseParserError):
        return ErrorResponse(0, "connection-broken", str(error))
    return ErrorResponse(0, "misconfigured", str(error))


def _is_untrusted(error: SSLError) -> bool:
    wrapped = error.kwargs.get("error")  # urllib3's, which wraps the one of `ssl`
    return any(
        isinstance(inner, SSLCertVerificationError) for inner in getattr(wrapped, "args", ())
    )


def _client_error_response(response: Any) -> ErrorResponse:
    error: Mapping[str, str] = response.get("Error", {})
    metadata = response.get("ResponseMetadata", {})
    headers = metadata.get("HTTPHeaders", {})
    status = metadata.get("HTTPStatusCode", 0)
    code, detail = error.get("Code", ""), error.get("Message", "")
    if code in {"", str(status)} and "location" in headers:
        return ErrorResponse(0, "redirected", headers["location"])
    region = headers.get("x-amz-bucket-region") or error.get("Region") or ""
    return ErrorResponse(status, code or str(status), detail or f"HTTP status {status}", region)
