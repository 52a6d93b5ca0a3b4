"""A real S3 server named by the environment; `localstack/s3_server.py --exec` sets it."""

import os

import pytest

NAMES = ("ENDPOINT", "ACCESS_KEY", "SECRET_KEY", "BUCKET")


def named_s3() -> dict[str, str]:
    """The server's settings in the environment, by `NAMES`; skips without them."""
    found = {name: os.environ.get(f"TIERLOG_TEST_S3_{name}", "") for name in NAMES}
    if not all(found.values()):
        pytest.skip("TIERLOG_TEST_S3_ENDPOINT names no server")
    return found
