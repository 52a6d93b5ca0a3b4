"""An unusable store is one clear line at start, by the responses of a real server.

The server is a versitygw with two accounts: one without permissions, and one that may only read. No
server here responds to expired session credentials or a wrong region as AWS does; see
`tests/integration/broker/test_unusable_stores.py`.
"""

import datetime
import json
import os
import socket
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import boto3
import botocore.auth
import pytest
from botocore.config import Config

from tests.fakes.broker_process import free_port
from tierlog.broker.broker import Broker
from tierlog.broker.settings import BrokerSettings
from tierlog.host.clock import wall_clock_ms
from tierlog.host.retry import RetryPolicy
from tierlog.hot_tier.log_writer import Acks
from tierlog.manifest.topic_objects import load_cluster
from tierlog.object_store.probe import probe
from tierlog.object_store.s3 import S3Store
from tierlog.object_store.s3_connection import S3Options
from tierlog.record_format.errors import ConfigurationError
from tierlog.record_format.produced import build_produced

pytestmark = pytest.mark.s3

ROOT = Path(__file__).parents[3]
BUCKET = "bucket"
SECRETS = {"root": "root-secret", "nobody": "nobody-secret", "reader": "reader-secret"}
READ_ONLY = {
    "Effect": "Allow",
    "Principal": ["reader"],
    "Action": ["s3:GetObject", "s3:ListBucket"],
    "Resource": [f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{BUCKET}/*"],
}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory):
    built = sorted((ROOT / ".cache" / "s3").glob("versitygw-*/versitygw"))
    if not built:
        pytest.skip("versitygw is not built: localstack/s3_server.py builds it")
    folder = tmp_path_factory.mktemp("versitygw")
    (folder / "iam").mkdir()
    (folder / "data").mkdir()
    accounts = {
        name: {"access": name, "secret": SECRETS[name], "role": "user"}
        for name in ("nobody", "reader")
    }
    (folder / "iam" / "users.json").write_text(json.dumps({"accessAccounts": accounts}))
    port = free_port()
    command = [str(built[-1]), "--port", f"127.0.0.1:{port}", "--quiet"]
    command += ["--iam-dir", str(folder / "iam"), "posix", str(folder / "data")]
    keys = {"ROOT_ACCESS_KEY": "root", "ROOT_SECRET_KEY": SECRETS["root"]}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, env=os.environ | keys, stdout=log, stderr=log)
    try:
        _wait_for(port, server)
        _make_bucket(f"http://127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(20)


def _wait_for(port, server):
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and server.poll() is None:
        with socket.socket() as probing:
            if probing.connect_ex(("127.0.0.1", port)) == 0:
                return
    raise AssertionError("versitygw does not accept connections")


def _make_bucket(endpoint):
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id="root",
        aws_secret_access_key=SECRETS["root"],
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}),
    )
    client.create_bucket(Bucket=BUCKET)
    policy = {"Version": "2012-10-17", "Statement": [READ_ONLY]}
    client.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps(policy))
    client.close()


def check(endpoint, *, bucket=BUCKET, account="root", secret=None):
    """Check the store as a starting broker does."""
    options = S3Options(
        endpoint=endpoint,
        region="us-east-1",
        access_key_id=account,
        secret_access_key=secret or SECRETS[account],
    )
    store = S3Store(bucket, "p", options, policy=RetryPolicy(attempts=1))
    try:
        load_cluster(store)
        probe(store, allow_single_writer=True)
    finally:
        store.close()


def refusal(endpoint, **options):
    with pytest.raises(ConfigurationError) as caught:
        check(endpoint, **options)
    line = str(caught.value)
    assert "\n" not in line
    return line


def test_a_usable_store_passes(endpoint):
    check(endpoint)


def test_a_missing_bucket_is_explained(endpoint):
    assert refusal(endpoint, bucket="nowhere") == (
        "store s3://nowhere/p: there is no such bucket; create it, or correct the URL or the "
        "endpoint [NoSuchBucket]"
    )


def test_a_wrong_secret_key_is_explained(endpoint):
    line = refusal(endpoint, secret="guessed")
    assert line.startswith("store s3://bucket/p: the secret key is wrong")
    assert "guessed" not in line


def test_an_unknown_access_key_is_explained(endpoint):
    assert "does not know the access key" in refusal(endpoint, account="who", secret="x")


def test_a_missing_read_permission_is_explained(endpoint):
    line = refusal(endpoint, account="nobody")
    assert "no permission to get cluster.json; grant s3:GetObject and s3:ListBucket to" in line


def test_a_missing_write_permission_is_explained(endpoint):
    assert "no permission to put probe/" in refusal(endpoint, account="reader")


def set_clock(monkeypatch, *, ahead):
    real_clock = botocore.auth.get_current_datetime

    def shifted(*args, **kwargs):
        return real_clock(*args, **kwargs) + ahead

    monkeypatch.setattr(botocore.auth, "get_current_datetime", shifted)


@pytest.mark.parametrize("hours", [-2, 2])
def test_a_wrong_clock_is_explained(endpoint, hours, monkeypatch):
    set_clock(monkeypatch, ahead=datetime.timedelta(hours=hours))
    assert "this machine's clock differs too much from the store's; correct it" in refusal(endpoint)


def test_a_clock_that_jumps_years_ahead_deletes_no_records(endpoint, tmp_path, monkeypatch):
    options = S3Options(
        endpoint=endpoint,
        region="us-east-1",
        access_key_id="root",
        secret_access_key=SECRETS["root"],
    )
    ahead, real_clock = datetime.timedelta(), wall_clock_ms

    def clock():
        return real_clock() + int(ahead.total_seconds() * 1000)

    store = S3Store(BUCKET, "jumps", options, policy=RetryPolicy(attempts=1))
    settings = BrokerSettings(data_dir=tmp_path, disk_reserve_bytes=0)
    with closing(Broker.open(settings, store=store, clock=clock)) as broker:
        broker.create_topic("t")
        partition = broker.partition("t", 0)
        batches = build_produced([b"v"], timestamps=[clock()], max_message_bytes=1 << 20)
        partition.append(batches, acks=Acks.ALL).result(20)
        ahead = datetime.timedelta(days=3650)
        set_clock(monkeypatch, ahead=ahead)
        broker.background.janitor.bucket_round()
        broker.background.janitor.disk_round()
        assert partition.log_start_offset == 0
        assert "clock" in broker.readiness().degraded[0]


def test_a_broker_prints_one_line_and_does_not_start(endpoint, tmp_path):
    command = [sys.executable, "-m", "tierlog.cli.main", "serve", "--listen", "127.0.0.1:0"]
    command += ["--data-dir", str(tmp_path), "--store", f"s3://{BUCKET}/p"]
    keys = {"AWS_ACCESS_KEY_ID": "reader", "AWS_SECRET_ACCESS_KEY": SECRETS["reader"]}
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TIERLOG_")} | keys
    result = subprocess.run(
        [*command, "--s3-endpoint", endpoint, "--s3-region", "us-east-1"],
        capture_output=True,
        env=environment,
        cwd=ROOT,
        check=False,
        timeout=60,
    )
    assert result.returncode == 1
    assert result.stderr.count(b"\n") == 1
    assert b"no permission to put probe/" in result.stderr
