"""A real S3 server named by the environment; `localstack/s3_server.py --exec` sets it."""

import os
import secrets
from collections.abc import Callable

import pytest

from tierlog.object_store.open import open_store
from tierlog.object_store.s3_connection import S3Options
from tierlog.object_store.store import ObjectStore

NAMES = ("ENDPOINT", "ACCESS_KEY", "SECRET_KEY", "BUCKET")


def named_s3() -> dict[str, str]:
    """The server's settings in the environment, by `NAMES`; skips without them."""
    found = {name: os.environ.get(f"TIERLOG_TEST_S3_{name}", "") for name in NAMES}
    if not all(found.values()):
        pytest.skip("TIERLOG_TEST_S3_ENDPOINT names no server")
    return found


def open_named_s3() -> Callable[[], ObjectStore]:
    """Opens a new prefix of that server's bucket, again and again the same; skips without it."""
    s3, prefix = named_s3(), secrets.token_hex(4)
    options = S3Options(
        endpoint=s3["ENDPOINT"],
        region="us-east-1",
        access_key_id=s3["ACCESS_KEY"],
        secret_access_key=s3["SECRET_KEY"],
    )
    return lambda: open_store(f"s3://{s3['BUCKET']}/run-{prefix}", options)
