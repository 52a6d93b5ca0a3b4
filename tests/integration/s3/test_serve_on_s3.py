"""`tierlog serve` on a real S3 server: offload, cold reads, kill -9, reads without a broker."""

import secrets

import httpx2
import pytest

import tierlog
from tests.fakes.broker_process import BrokerProcess

pytestmark = pytest.mark.s3

CONFIG = {"segment.bytes": 16384, "local.retention.bytes": 32768, "retention.ms": -1}


@pytest.fixture
def broker(tmp_path, s3):
    process = BrokerProcess(
        tmp_path,
        "--s3-endpoint",
        s3["ENDPOINT"],
        store=f"s3://{s3['BUCKET']}/serve-{secrets.token_hex(4)}",
        AWS_ACCESS_KEY_ID=s3["ACCESS_KEY"],
        AWS_SECRET_ACCESS_KEY=s3["SECRET_KEY"],
        AWS_DEFAULT_REGION="us-east-1",
    )
    yield process.start()
    process.kill()


def test_an_offloaded_log_reads_the_same_from_s3(broker, s3):
    values = [f"{i} " + "x" * 200 for i in range(1000)]
    with httpx2.Client(base_url=broker.url, timeout=60) as http:
        assert http.post("/v1/topics", json={"name": "t", "config": CONFIG}).status_code == 201
        for start in range(0, 1000, 50):
            records = [{"value": value} for value in values[start : start + 50]]
            response = http.post("/v1/topics/t/records", json={"records": records})
            assert response.status_code == 200, response.text
        offloaded = http.post("/v1/topics/t/offload", params={"wait_ms": 60_000}).json()
        assert offloaded["remaining_segments"] == 0
        first = http.get("/v1/topics/t/partitions/0/records", params={"max_bytes": 1024})
        assert first.headers["log-tier"] == "cold"
        report = http.post("/v1/topics/t/verify", params={"deep": 1}).json()
        assert report["ok"], report
    broker.kill()
    broker.start()
    with tierlog.Client(broker.url) as client:
        read = [record.value.decode() for record in client.consume("t")]
    assert read == values
    assert broker.stop() == 0
    table = tierlog.read_arrow(
        "t",
        store=broker.store,
        columns=["value"],
        tier="cold",
        endpoint=s3["ENDPOINT"],
        accessKeyId=s3["ACCESS_KEY"],
        secretAccessKey=s3["SECRET_KEY"],
        region="us-east-1",
    ).read_all()
    assert [value.decode() for value in table["value"].to_pylist()] == values
