"""An interrupted multipart upload resumes with the parts that the store lacks."""

import dataclasses
import json
import re
import threading
from collections import Counter
from contextlib import closing

import pytest

import tierlog
from tests.fakes.broker_process import BrokerProcess
from tests.fakes.cuttable_proxy import CuttableProxy
from tierlog.host.retry import RetryPolicy
from tierlog.object_store.s3 import S3Store
from tierlog.object_store.store import Resumable, UploadNotFound
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import StoreUnavailable

pytestmark = pytest.mark.s3

PART = 5 << 20
PARTS = 5
KEY = "topics/t/id/0/segments/00000000000000000000-0-u.log"


class PartCounter:
    """Counts requests by part number; calls `then` when request number `last` is sent."""

    def __init__(self, *, last, then):
        self.numbers, self.last, self.then = Counter(), last, then
        self.lock = threading.Lock()

    def __call__(self, piece):
        found = re.match(rb"PUT \S*[?&]partNumber=(\d+)", piece)
        if found:
            with self.lock:
                self.numbers[int(found[1])] += 1
                if self.numbers.total() == self.last:
                    self.then()


@pytest.fixture
def line(s3):
    with CuttableProxy(s3["ENDPOINT"]) as proxy:
        yield proxy


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "segment.log"
    path.write_bytes(b"".join(bytes([number]) * PART for number in range(PARTS))[:-7])
    return path


class Upload:
    """Repeatable uploads of one file to one key."""

    def __init__(self, store, path):
        self.store, self.path, self.body, self.ids = store, path, path.read_bytes(), []

    def put(self):
        return self.store.put_file(
            KEY,
            self.path,
            size_bytes=len(self.body),
            crc32c=crc32c_of(self.body),
            part_bytes=PART,
            concurrency=1,
            resumable=Resumable(self.ids[-1] if self.ids else "", self.ids.append),
        )


@pytest.fixture
def upload(s3, options, line, prefix, file):
    through = dataclasses.replace(options, endpoint=line.url)
    store = S3Store(s3["BUCKET"], prefix, through, policy=RetryPolicy(attempts=1))
    yield Upload(store, file)
    for incomplete in store.incomplete_uploads("", limit=100):
        store.abort_upload(incomplete)
    store.delete([KEY])
    store.close()


def test_only_missing_parts_are_sent_after_an_outage(upload, line):
    line.see = seen = PartCounter(last=4, then=line.cut)
    with pytest.raises(StoreUnavailable):
        upload.put()
    line.mend()
    stat = upload.put()
    assert seen.numbers == {1: 1, 2: 1, 3: 1, 4: 2, 5: 1}
    assert len(upload.ids) == 1
    assert stat.crc32c == crc32c_of(upload.body)
    assert upload.store.get(KEY, max_bytes=1 << 30) == upload.body
    assert upload.store.incomplete_uploads("", limit=100) == []


def test_a_changed_part_is_sent_again(upload, line, file):
    line.see = seen = PartCounter(last=4, then=line.cut)
    with pytest.raises(StoreUnavailable):
        upload.put()
    line.mend()
    upload.body = upload.body[:PART] + b"x" * PART + upload.body[2 * PART :]
    file.write_bytes(upload.body)
    upload.put()
    assert seen.numbers == {1: 1, 2: 2, 3: 1, 4: 2, 5: 1}
    assert upload.store.get(KEY, max_bytes=1 << 30) == upload.body


def test_an_aborted_upload_is_not_found(upload, line):
    line.see = PartCounter(last=3, then=line.cut)
    with pytest.raises(StoreUnavailable):
        upload.put()
    line.mend()
    (incomplete,) = upload.store.incomplete_uploads(KEY, limit=100)
    assert (incomplete.key, incomplete.upload_id) == (KEY, upload.ids[0])
    upload.store.abort_upload(incomplete)
    upload.store.abort_upload(incomplete)
    with pytest.raises(UploadNotFound):
        upload.put()
    assert upload.store.head(KEY) is None


@pytest.fixture
def broker(s3, line, prefix, tmp_path):
    process = BrokerProcess(
        tmp_path,
        "--s3-endpoint",
        line.url,
        store=f"s3://{s3['BUCKET']}/{prefix}",
        AWS_ACCESS_KEY_ID=s3["ACCESS_KEY"],
        AWS_SECRET_ACCESS_KEY=s3["SECRET_KEY"],
        AWS_DEFAULT_REGION="us-east-1",
        TIERLOG_OFFLOAD_PART_BYTES=str(PART),
    )
    yield process.start()
    process.kill()


def test_a_killed_broker_resumes_its_upload(broker, line, s3, options, prefix):
    """No part that the store had when the broker died is sent again."""
    batch = bytes(encode_batch([b"v" * (1 << 19)], timestamps=[1]))
    config = {"segment.bytes": 64 << 20, "retention.ms": -1}
    # The fifth part is sent once one of the first four is stored; the line is cut just before.
    cut = threading.Event()
    line.see = PartCounter(last=5, then=lambda: (line.cut(), cut.set()))
    with tierlog.Client(broker.url) as client:
        client.create_topic("t", config=config)
        for _ in range(8):
            client.produce_batches("t", batch * 8, partition=0, acks="all")
        client.offload("t", wait_ms=0)
        assert cut.wait(20), (broker.root / "broker.log").read_text()
    broker.kill()
    (checkpoint,) = (broker.root / "data" / "tierlog" / "uploads").iterdir()
    saved = json.loads(checkpoint.read_bytes())
    with closing(S3Store(s3["BUCKET"], prefix, options)) as store:
        target = store._target(saved["log_key"])
        parts = store._client.list_parts(**target, UploadId=saved["upload_id"])["Parts"]
        stored = {part["PartNumber"] for part in parts}
    line.mend()
    line.see = second = PartCounter(last=-1, then=line.cut)
    broker.start()
    with tierlog.Client(broker.url) as client:
        assert client.offload("t", wait_ms=60_000).remaining_segments == 0
        assert client.verify("t", deep=True)["ok"]
        (segment,) = [segment for segment in client.segments("t", 0) if segment.object_key]
    broker.stop()
    assert segment.object_key.endswith(saved["log_key"])
    assert stored
    assert stored.isdisjoint(second.numbers)
    assert not checkpoint.exists()
