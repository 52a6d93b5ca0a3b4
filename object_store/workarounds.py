"""Faults of libraries that S3 is reached with: each with its issue, and the version that lifts it.

Everything here uses what the libraries document. Nothing else in this room may work around one.
"""

from __future__ import annotations

from typing import Any, NoReturn

from botocore.exceptions import ClientError


def keep_from_following_redirects(client: Any) -> None:
    """boto/boto3#2148: after a redirect, botocore asks HeadBucket for the bucket's region, and
    follows that one's redirect in the same way: with an endpoint that redirects every request (to
    HTTPS) it recurses until the stack overflows.

    S3 itself names the region in its redirect, so HeadBucket is not asked: the redirect becomes the
    error that the caller sees. Closed upstream as no fault of the SDK; no version lifts it so far.
    """
    client.meta.events.register("before-call.s3.HeadBucket", _refuse)


def _refuse(**_: Any) -> NoReturn:
    response: Any = {"Error": {}, "ResponseMetadata": {"HTTPHeaders": {}}}
    raise ClientError(response, "HeadBucket")
