"""Each kind of object store behind one fixture; S3 over HTTP on loopback."""

import os
import secrets
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from tests.fakes.named_s3 import named_s3
from tierlog.object_store.open import open_store
from tierlog.object_store.s3_connection import S3Options

BUCKET = "contract"


@pytest.fixture(scope="session")
def moto_endpoint():
    """moto in its own process: it implements the calls, though not their atomicity."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    endpoint = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(endpoint, server)
        _make_bucket(endpoint)
        yield endpoint
    finally:
        server.terminate()
        server.wait(10)


def _wait_until_ready(endpoint: str, server: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert server.poll() is None, "moto_server ended"
        try:
            urllib.request.urlopen(endpoint, timeout=2).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise AssertionError("moto_server does not respond")


def _make_bucket(endpoint: str) -> None:
    request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
    request.add_header("Authorization", "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4")
    urllib.request.urlopen(request, timeout=10).close()


def real_s3() -> tuple[str, S3Options]:
    """Bucket and options of the server named by the environment; skips without one."""
    s3 = named_s3()
    return s3["BUCKET"], S3Options(
        endpoint=s3["ENDPOINT"],
        region=os.environ.get("TIERLOG_TEST_S3_REGION", "us-east-1"),
        access_key_id=s3["ACCESS_KEY"],
        secret_access_key=s3["SECRET_KEY"],
    )


def moto_options(endpoint: str) -> S3Options:
    return S3Options(
        endpoint=endpoint, region="us-east-1", access_key_id="ak", secret_access_key="sk"
    )


@pytest.fixture(
    params=["memory", "folder", "moto", pytest.param("s3", marks=pytest.mark.s3)],
)
def store_kind(request):
    return request.param


@pytest.fixture
def store(store_kind, request, tmp_path: Path):
    prefix = f"run-{secrets.token_hex(6)}"
    if store_kind == "memory":
        opened = open_store(f"memory://{prefix}")
    elif store_kind == "folder":
        opened = open_store((tmp_path / "bucket").as_uri())
    elif store_kind == "moto":
        endpoint = request.getfixturevalue("moto_endpoint")
        opened = open_store(f"s3://{BUCKET}/{prefix}", moto_options(endpoint))
    else:
        bucket, options = real_s3()
        opened = open_store(f"s3://{bucket}/{prefix}", options)
    yield opened
    opened.delete([stat.key for stat in opened.list("", limit=10_000)])
    opened.close()
