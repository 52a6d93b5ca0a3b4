"""Classifies S3 error responses: one table, no I/O, no boto3.

* A create whose response was lost has not failed: `Fault.UNKNOWN` means that it may have succeeded.
* An error that an operator must fix is reported in one line that says what is wrong and how to fix
  it; codes are S3's own.
* Responses to HEAD carry no error code, nor do those of servers other than S3: the HTTP status
  takes its place.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


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


def reason(response: ErrorResponse) -> str:
    status = str(response.status or "")
    given = status if response.code == status else f"{status} {response.code}".lstrip()
    detail = f": {response.detail}" if response.detail else ""
    return f"{given}{detail}".replace("\n", " ")
