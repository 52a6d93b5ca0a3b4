"""What an S3 answer that is not a success means: one table, no I/O, no boto3.

* A create whose answer was lost is not a failure: `Fault.UNKNOWN` says that it may have landed.
* A fault that a person has to mend is one line that says what and how; codes are S3's own names.
* Answers to HEAD carry no code, nor do those of anything but an S3 server: the status stands in for
  it.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple


class Fault(Enum):
    EXISTS = auto()  # the condition failed: somebody has the key
    CONFLICT = auto()  # S3 could not decide now: nothing was written
    MISSING = auto()
    RANGE = auto()  # the object ends before the range
    CHECKSUM = auto()
    MISCONFIGURED = auto()
    REFUSED = auto()  # nothing was done, and it may work later: throttled, never connected
    UNKNOWN = auto()  # no answer, or one that does not say what was done


class Answer(NamedTuple):
    """What came back; if nothing did, status 0 and S3's or the client's name for the fault."""

    status: int
    code: str
    detail: str = ""
    region: str = ""


NEVER_CONNECTED = "never-connected"

_BY_CODE = {
    "PreconditionFailed": Fault.EXISTS,
    "412": Fault.EXISTS,
    "ConditionalRequestConflict": Fault.CONFLICT,
    "OperationAborted": Fault.CONFLICT,
    "409": Fault.CONFLICT,
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
    "KMS.ThrottlingException": Fault.REFUSED,
    "TemporaryRedirect": Fault.REFUSED,  # a young bucket's name is not known everywhere yet
    "TooManyRequests": Fault.REFUSED,
    "429": Fault.REFUSED,
    "RequestTimeout": Fault.UNKNOWN,
    NEVER_CONNECTED: Fault.REFUSED,
    "broke-off": Fault.UNKNOWN,
}

OF_THE_CLOCK = frozenset(("RequestTimeTooSkewed", "RequestExpired"))
_WRONG_CLOCK = "this machine's clock is too far from the store's; set it right"

_ADVICE = {
    "NoSuchBucket": "there is no such bucket; create it, or correct the URL or the endpoint",
    "InvalidBucketName": "that is not a bucket name; correct the URL",
    "AccessDenied": "no permission to {operation} {key}; grant {actions} to the credentials in use",
    "AllAccessDisabled": "the bucket is disabled for everyone",
    "403": "no permission to {operation} {key}, or credentials that the store does not accept",
    "InvalidAccessKeyId": "the store does not know the access key; correct the credentials",
    # versitygw's word for it, under status 404: no object is missing.
    "XAdminUserNotFound": "the store does not know the access key; correct the credentials",
    "SignatureDoesNotMatch": "the secret key is wrong, or a proxy on the way changes requests",
    "ExpiredToken": "the credentials have expired; renew them",
    "ExpiredTokenException": "the credentials have expired; renew them",
    "TokenRefreshRequired": "the credentials have expired; renew them",
    "InvalidToken": "the session token is not valid; renew the credentials",
    **dict.fromkeys(OF_THE_CLOCK, _WRONG_CLOCK),
    "AuthorizationHeaderMalformed": "the bucket is in another region{region}; set the region",
    "PermanentRedirect": "the bucket is in another region{region}; set the region",
    "IllegalLocationConstraintException": "the bucket is in another region{region}; set the region",
    "301": "the bucket is in another region{region}; set the region",
    "elsewhere": "the endpoint redirects to {detail}; set the endpoint to where the store is",
    "404": "no S3 server answers there, or it has no such bucket; correct the URL or the endpoint",
    "MethodNotAllowed": "the store does not allow to {operation}: it may be read-only",
    "405": "the store does not allow to {operation}: it may be read-only, or no S3 server",
    "NotImplemented": "the store cannot {operation} as tierlog needs it: {detail}",
    "501": "the store cannot {operation}: it may be no S3 server",
    "InvalidStorageClass": "the store has no such storage class",
    "NoCredentials": "no credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "a profile, or a role",
    "bad-setting": "{detail}",
}

# Who may not list a bucket is refused a missing object too.
_READING = "s3:GetObject and s3:ListBucket"
_ACTIONS = {
    "get": _READING,
    "head": _READING,
    "put": "s3:PutObject",
    "list": "s3:ListBucket",
    "delete": "s3:DeleteObject and s3:AbortMultipartUpload",
}


def classify(answer: Answer, *, operation: str = "get") -> Fault:
    if answer.code == "404" and operation != "head":
        return Fault.MISCONFIGURED  # S3 says which of its things is missing: this is another server
    if answer.code in _BY_CODE:
        return _BY_CODE[answer.code]
    if answer.code in _ADVICE or answer.code.startswith("KMS."):
        return Fault.MISCONFIGURED
    if answer.status >= 500 or answer.status == 0:
        return Fault.UNKNOWN
    by_status = _BY_CODE.get(str(answer.status))
    # Any other 3xx and 4xx says that the request as it is will never do.
    return by_status if by_status is not None else Fault.MISCONFIGURED


def advice(answer: Answer, *, operation: str, key: str) -> str:
    """One line for a fault that a person has to mend."""
    region = f" ({answer.region})" if answer.region else ""
    line = _ADVICE.get(answer.code, "refused to {operation} {key}: {detail}")
    if answer.code == "AuthorizationHeaderMalformed" and not region:
        line = "the store does not take the credentials as they are written: {detail}"
    text = line.format(
        operation=operation,
        key=key,
        region=region,
        detail=answer.detail,
        actions=_ACTIONS.get(operation, "it"),
    )
    return f"{text} [{answer.code}]" if answer.status else text


def reason(answer: Answer) -> str:
    status = f"{answer.status} " if answer.code != str(answer.status) and answer.status else ""
    return f"{status}{answer.code}: {answer.detail}".replace("\n", " ")
