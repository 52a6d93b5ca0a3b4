"""What a response of S3 says: the fault, the range, the checksum. No I/O, no boto3.

* Errors are classified by one table; codes are S3's own. Responses to HEAD carry no code, nor do
  those of servers other than S3: the HTTP status takes its place.
* A create whose response was lost has not failed: `Fault.UNKNOWN` means that it may have succeeded.
* An error that an operator must fix is reported in one line that says what is wrong and how to fix
  it.
* A ranged response is accepted only if its Content-Range is the one that was requested.
* A checksum counts only if it covers the whole object; composite checksums do not.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from enum import Enum, auto
from typing import Any, NamedTuple

from tierlog.host.clock import wall_clock_ms
from tierlog.object_store.s3_connection import UnsupportedResponse
from tierlog.object_store.store import ChecksumRefused, ObjectStat
from tierlog.record_format.errors import (
    ClockSkewTooLarge,
    ConfigurationError,
    CorruptObject,
    MissingObject,
    ObjectExists,
    OutcomeUnknownError,
    StoreUnavailable,
    StoreUnreachable,
    TierlogError,
)


class Fault(Enum):
    EXISTS = auto()  # the condition failed: the key exists
    MISSING = auto()
    RANGE = auto()  # the object ends before the range
    CHECKSUM = auto()
    MISCONFIGURED = auto()
    REFUSED = auto()  # nothing was done, and a retry may succeed: throttled, a concurrent request
    UNKNOWN = auto()  # no response, or one that does not say whether anything was done


class ErrorResponse(NamedTuple):
    """An error response; without a response, status 0 and a code of the client's."""

    status: int
    code: str
    detail: str = ""
    region: str = ""


CONNECT_FAILED = "connect-failed"

_BY_CODE = {
    "PreconditionFailed": Fault.EXISTS,
    "412": Fault.EXISTS,
    "ConditionalRequestConflict": Fault.REFUSED,
    "OperationAborted": Fault.REFUSED,
    "409": Fault.REFUSED,
    "NoSuchKey": Fault.MISSING,
    "NotFound": Fault.MISSING,
    "404": Fault.MISSING,
    "NoSuchUpload": Fault.MISSING,
    "InvalidRange": Fault.RANGE,
    "416": Fault.RANGE,
    "BadDigest": Fault.CHECKSUM,
    "InvalidDigest": Fault.CHECKSUM,
    "XAmzContentChecksumMismatch": Fault.CHECKSUM,
    "XAmzContentSHA256Mismatch": Fault.CHECKSUM,
    "SlowDown": Fault.REFUSED,
    "Throttling": Fault.REFUSED,
    "ThrottlingException": Fault.REFUSED,
    "KMS.ThrottlingException": Fault.REFUSED,
    "TemporaryRedirect": Fault.REFUSED,  # a new bucket's DNS name has not propagated yet
    "TooManyRequests": Fault.REFUSED,
    "429": Fault.REFUSED,
    "IncompleteBody": Fault.REFUSED,  # the connection broke, for S3 or a proxy before it
    "InternalError": Fault.UNKNOWN,
    "ServiceUnavailable": Fault.UNKNOWN,
    "SlowDownRead": Fault.UNKNOWN,  # MinIO's, for too few disks
    "SlowDownWrite": Fault.UNKNOWN,
    "RequestTimeout": Fault.UNKNOWN,
    "408": Fault.UNKNOWN,  # a proxy's, or Google's
    CONNECT_FAILED: Fault.REFUSED,
    "connection-broken": Fault.UNKNOWN,
}

CLOCK_SKEW_CODES = frozenset(("RequestTimeTooSkewed", "RequestExpired"))
_CLOCK_SKEW = "this machine's clock differs too much from the store's; correct it"

_ADVICE = {
    "NoSuchBucket": "there is no such bucket; create it, or correct the URL or the endpoint",
    "InvalidBucketName": "the bucket name is invalid; correct the URL",
    "AccessDenied": "no permission to {operation} {key}; grant {actions} to the credentials in use",
    "AllAccessDisabled": "all access to the bucket is disabled",
    "400": "refused to {operation} {key}, without saying why: the credentials may have expired, or "
    "the endpoint may need https",
    "403": "no permission to {operation} {key}, or credentials that the store does not accept",
    "InvalidAccessKeyId": "the store does not know the access key; correct the credentials",
    # versitygw's code, sent with status 404: no object is missing.
    "XAdminUserNotFound": "the store does not know the access key; correct the credentials",
    "SignatureDoesNotMatch": "the secret key is wrong, or a proxy modifies requests",
    "ExpiredToken": "the credentials have expired; renew them",
    "ExpiredTokenException": "the credentials have expired; renew them",
    "TokenRefreshRequired": "the credentials have expired; renew them",
    "InvalidToken": "the session token is not valid; renew the credentials",
    **dict.fromkeys(CLOCK_SKEW_CODES, _CLOCK_SKEW),
    "AuthorizationHeaderMalformed": "the bucket is in another region{region}; set the region",
    "PermanentRedirect": "the bucket is in another region{region}; set the region",
    "IllegalLocationConstraintException": "the bucket is in another region{region}; set the region",
    "301": "the bucket is in another region{region}; set the region",
    "redirected": "the endpoint redirects to {detail}; set the endpoint to that address",
    "404": "no S3 server at this endpoint, or no such bucket; correct the URL or the endpoint",
    "MethodNotAllowed": "the store does not allow {operation} requests: it may be read-only",
    "405": "the store does not allow {operation} requests: it is read-only, or not an S3 server",
    "NotImplemented": "the store does not support a {operation} that tierlog needs: {detail}",
    "501": "the store does not support {operation} requests: it may not be an S3 server",
    "InvalidStorageClass": "the store has no such storage class",
    "NoCredentials": "no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "a profile, or a role",
    "misconfigured": "{detail}",
}

# Without permission to list the bucket, S3 reports a missing object as AccessDenied.
_READING = "s3:GetObject and s3:ListBucket"
_ACTIONS = {
    "get": _READING,
    "head": _READING,
    "put": "s3:PutObject",
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject and s3:AbortMultipartUpload",
}


def classify(response: ErrorResponse, *, operation: str = "get") -> Fault:
    if response.code == "404" and operation != "head":
        return Fault.MISCONFIGURED  # S3 would say what is missing: this is another server
    if response.code in _BY_CODE:
        return _BY_CODE[response.code]
    if response.code in _ADVICE:
        return Fault.MISCONFIGURED
    if response.status >= 500 or response.status == 0:
        return Fault.UNKNOWN
    by_status = _BY_CODE.get(str(response.status))
    # With any other 3xx or 4xx, the same request can never succeed.
    return by_status if by_status is not None else Fault.MISCONFIGURED


def advice(response: ErrorResponse, *, operation: str, key: str) -> str:
    """One line for an error that an operator must fix."""
    region = f" ({response.region})" if response.region else ""
    line = _ADVICE.get(response.code, "refused to {operation} {key}: {detail}")
    if response.code == "AuthorizationHeaderMalformed" and not region:
        line = "the store does not accept the format of the credentials: {detail}"
    text = line.format(
        operation=operation,
        key=key,
        region=region,
        detail=response.detail,
        actions=_ACTIONS.get(operation, "it"),
    )
    return f"{text} [{response.code}]" if response.status else text


def error_for(
    response: ErrorResponse, *, operation: str, key: str, url: str, creates: bool = False
) -> TierlogError:
    """The error of `ObjectStore` that it is. `creates`: of a PUT that must find no object."""
    fault = classify(response, operation=operation)
    if fault is Fault.EXISTS:
        return ObjectExists(key)
    if fault is Fault.MISSING:
        return MissingObject("the object is not in the store", file=key)
    if fault is Fault.RANGE:
        return CorruptObject("ends before the requested range", file=key)
    if fault is Fault.CHECKSUM:
        return ChecksumRefused(f"{key}: {reason(response)}")
    if fault is Fault.MISCONFIGURED:
        kind = ClockSkewTooLarge if response.code in CLOCK_SKEW_CODES else ConfigurationError
        return kind(f"store {url}: {advice(response, operation=operation, key=key)}")
    if fault is Fault.UNKNOWN and creates:
        return OutcomeUnknownError(f"{key}: the response was lost: {reason(response)}")
    unavailable = StoreUnreachable if response.code == CONNECT_FAILED else StoreUnavailable
    return unavailable(f"{key}: {operation}: {reason(response)}")


def reason(response: ErrorResponse) -> str:
    status = str(response.status or "")
    given = status if response.code == status else f"{status} {response.code}".lstrip()
    detail = f": {response.detail}" if response.detail else ""
    return f"{given}{detail}".replace("\n", " ")


_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


def check_range(content_range: str, size_bytes: int, *, start: int, end: int, key: str) -> None:
    """Raise unless a response with this Content-Range and length is the requested range: some
    servers and proxies return another range, or the whole object.
    """
    given = _CONTENT_RANGE.fullmatch(content_range)
    if given is None:
        if start == 0 and size_bytes == end:
            return
        raise StoreUnavailable(
            f"{key}: requested bytes {start}-{end - 1}, but the response is not a range"
        )
    if given[3] != "*" and int(given[3]) < end:
        raise CorruptObject(f"ends at {given[3]}, before {end}", file=key)
    if (int(given[1]), int(given[2]) + 1, size_bytes) != (start, end, end - start):
        raise StoreUnavailable(
            f"{key}: requested bytes {start}-{end - 1}, received {content_range}"
        )


def reported_crc32c(response: Any) -> int | None:
    """The CRC-32C of the whole object, if the store reports it."""
    crc = response.get("ChecksumCRC32C", "")
    if not crc or "-" in crc or response.get("ChecksumType") == "COMPOSITE":
        return None
    try:
        return int.from_bytes(base64.b64decode(crc, validate=True), "big")
    except binascii.Error:
        return None


def stat_of(key: str, headers: Mapping[str, str]) -> ObjectStat:
    """What the headers of a HEAD's response, names in lower case, say of the object."""
    described = {
        "ChecksumCRC32C": headers.get("x-amz-checksum-crc32c", ""),
        "ChecksumType": headers.get("x-amz-checksum-type"),
    }
    try:
        size_bytes = int(headers["content-length"])
        modified = parsedate_to_datetime(headers["last-modified"])
    except (KeyError, ValueError) as error:
        raise UnsupportedResponse(f"it does not describe the object: {error}") from error
    modified_ms = int(modified.timestamp() * 1000)
    return ObjectStat(key, size_bytes, reported_crc32c(described), modified_ms)


def member_of(response: Any, name: str, *, key: str) -> Any:
    """Raises StoreUnavailable if the store sent a response without the header."""
    try:
        return response[name]
    except KeyError:
        raise StoreUnavailable(f"{key}: the response has no {name}") from None


def response_time_ms(response: Any) -> int:
    """The `Date` of the response; the local clock if it has none."""
    try:
        stated = response["ResponseMetadata"]["HTTPHeaders"]["date"]
        return int(parsedate_to_datetime(stated).timestamp() * 1000)
    except (KeyError, ValueError):
        return wall_clock_ms()
