"""A real S3 server, named by the environment, which `localstack/s3_server.py --exec` sets."""

import secrets

import pytest

from tests.fakes.named_s3 import named_s3
from tierlog.object_store.s3_connection import S3Options


@pytest.fixture
def s3():
    """The server that the environment names."""
    return named_s3()


@pytest.fixture
def prefix():
    return f"run-{secrets.token_hex(4)}"


@pytest.fixture
def options(s3):
    return S3Options(
        endpoint=s3["ENDPOINT"],
        region="us-east-1",
        access_key_id=s3["ACCESS_KEY"],
        secret_access_key=s3["SECRET_KEY"],
    )
