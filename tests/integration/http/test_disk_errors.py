"""A full disk and a failing disk: which requests are refused, and which are served."""

import errno
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from structlog.testing import capture_logs

from tests.fakes.small_disk import small_disk
from tests.fakes.waiting import until
from tests.integration.http.conftest import BATCHES, Api, api_of, problem
from tierlog.host import page_cache
from tierlog.host.disk import Disk
from tierlog.hot_tier import sealed_segments

OCTETS = {"content-type": "application/octet-stream"}


class FailingDisk(Disk):
    """Writes fail with `errno` while it is not 0."""

    errno = 0

    def write_at(self, fd, buffers, position):
        if self.errno:
            raise OSError(self.errno, os.strerror(self.errno))
        return super().write_at(fd, buffers, position)


def failing_disk(api: Api, topic: str, partition: int = 0) -> FailingDisk:
    """Replace the disk of one partition."""
    state = api.broker.partition(topic, partition)._log._state
    state.disk = state.active.disk = FailingDisk()
    return state.disk


def test_a_full_disk_refuses_writes_until_space_is_free_and_serves_reads(api: Api) -> None:
    topic = api.topic()
    api.values(topic, 1, 2)
    disk = failing_disk(api, topic)
    disk.errno = errno.ENOSPC
    refused = problem(api.produce(topic, {"value": 3}), 507, "disk-full")
    assert "outcome" not in refused
    assert len(api.fetch(topic).json()["records"]) == 2
    disk.errno = 0
    assert api.values(topic, 3)["base_offset"] == 2


def test_below_the_disk_reserve_records_and_offsets_are_refused_and_topics_are_not(
    api: Api,
) -> None:
    topic = api.topic()
    api.values(topic, 1)
    reserve = api.broker.reserve
    reserve._free, free = (lambda _: reserve.reserve_bytes - 1), reserve._free
    reserve.check(())
    response, ready = api.produce(topic, {"value": 2}), api.get("/readyz")
    offsets = [{"topic": topic, "partition": 0, "offset": 1}]
    commit = api.put("/v1/groups/g/offsets", json={"offsets": offsets})
    other = api.topic()
    altered = api.patch(f"/v1/topics/{topic}", json={"config": {"retention.ms": 1}})
    trimmed = api.post(f"/v1/topics/{topic}/partitions/0/trim", json={"before_offset": 1})
    deleted = api.delete(f"/v1/topics/{other}")
    reserve._free = free
    reserve.check(())
    problem(response, 507, "disk-full")
    problem(commit, 507, "disk-full")
    assert (altered.status_code, trimmed.status_code, deleted.status_code) == (200, 200, 204)
    assert ready.json()["ready"], "reads are still served"
    assert "writes are refused: less than disk.reserve.bytes" in ready.json()["degraded"][0]
    assert api.get("/readyz").json()["degraded"] == []
    assert api.values(topic, 2)["base_offset"] == 1


def test_describing_a_topic_while_the_disk_hangs_delays_no_other_request(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = api.topic()
    waiting, released = threading.Event(), threading.Event()

    def hanging(*_: object) -> int:
        waiting.set()
        released.wait(20)
        return 0

    monkeypatch.setattr(sealed_segments, "largest_timestamp", hanging)
    with ThreadPoolExecutor(1) as pool:
        description = pool.submit(api.get, f"/v1/topics/{topic}")
        assert waiting.wait(10)
        assert api.get("/healthz").status_code == 200
        assert not description.done()
        released.set()
        assert description.result().status_code == 200


def test_cold_reads_work_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "data", size_bytes=16 << 20) as disk, api_of(tmp_path) as api:
        topic = api.cold_topic()
        segments = api.get(f"/v1/topics/{topic}/partitions/0/segments").json()["segments"]
        cold = next(segment for segment in segments if segment["tier"] == "cold")
        requests = [
            (f"/records?offset={offset}", accept)
            for offset in (0, 70)
            for accept in ("application/json", BATCHES)
        ]
        requests.append((f"/segments/{cold['base_offset']}", "application/octet-stream"))

        before = [cold_bytes(api, topic, path, accept) for path, accept in requests]
        api.broker.bucket.cache.shrink(1 << 30)
        disk.fill()
        assert [cold_bytes(api, topic, path, accept) for path, accept in requests] == before
        problem(api.produce(topic, {"value": 1}), 507, "disk-full")


def cold_bytes(api: Api, topic: str, path: str, accept: str) -> bytes:
    response = api.get(f"/v1/topics/{topic}/partitions/0{path}", headers={"accept": accept})
    assert (response.status_code, response.headers["log-tier"]) == (200, "cold"), response.text
    return response.content


def test_a_disk_error_takes_only_its_partition_offline(api: Api) -> None:
    topic = api.topic(partitions=2)
    for partition in (0, 1):
        api.values(topic, "before", partition=partition)
    disk = failing_disk(api, topic)
    disk.errno = errno.EIO
    body = {"records": [{"value": "x"}]}
    path = f"/v1/topics/{topic}/partitions/0/records"
    assert problem(api.post(path, json=body), 503, "log-offline")["outcome"] == "unknown"
    disk.errno = 0  # the partition stays offline
    again = api.post(path, json=body)
    problem(again, 503, "log-offline")
    assert int(again.headers["retry-after"]) > 0
    problem(api.post(path, json=body, params={"acks": "0"}), 503, "log-offline")
    assert len(api.fetch(topic).json()["records"]) == 1
    assert api.values(topic, "after", partition=1)["base_offset"] == 1
    for _ in range(4):  # as Kafka's partitioner, not to one that is known to refuse
        assert api.produce(topic, {"value": "no key"}).json()["results"][0]["partition"] == 1
    assert api.delete(f"/v1/topics/{topic}").status_code == 204
    assert api.get("/readyz").json()["ready"]


def test_a_partition_with_an_unknown_outcome_is_reported_before_one_that_refused(api: Api) -> None:
    topic = api.topic(partitions=2)
    failing_disk(api, topic, 0).errno = errno.ENOSPC
    failing_disk(api, topic, 1).errno = errno.EIO
    records = [{"value": "x", "partition": partition} for partition in (0, 1)]
    failed = api.produce(topic, *records)
    assert problem(failed, 503, "log-offline")["outcome"] == "unknown"
    assert api.delete(f"/v1/topics/{topic}").status_code == 204


def test_a_request_without_a_file_descriptor_left_can_be_retried(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = api.topic(segment_bytes=1024, remote_storage_enable=False)
    for value in range(4):
        api.values(topic, str(value) * 900)
    files = api.broker.partition(topic, 0)._log._state.files
    files.invalidate_folder(api.broker.partition(topic, 0)._log._state.folder)

    def raise_emfile(path, wait):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(files, "open", raise_emfile)
    disk = failing_disk(api, topic)
    disk.errno = errno.EMFILE
    many = {"partitions": [{"topic": topic, "partition": 0, "offset": 0}]}
    with capture_logs() as logs:
        refused = [api.get(f"/v1/topics/{topic}/partitions/0/records?offset=0") for _ in range(3)]
        refused.append(api.post("/v1/fetch", json=many))
        refused.append(api.produce(topic, {"value": 5}))
    for response in refused:
        problem(response, 429, "throttled")
        assert int(response.headers["retry-after"]) > 0
    events = [line["event"] for line in logs if line["log_level"] in {"warning", "error"}]
    assert events == ["no descriptor left"]
    monkeypatch.undo()
    disk.errno = 0
    assert api.values(topic, 5)["base_offset"] == 4
    assert len(api.fetch(topic).json()["records"]) == 5


def failures(logs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The codes of failed requests, among lines of the broker's background work."""
    return [line["code"] for line in logs if line["event"] == "request failed"]


def test_a_truncated_response_is_logged_once(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    topic = api.topic(max_message_bytes=2 << 20, retention_ms=-1)
    for _ in range(32):
        api.post(f"/v1/topics/{topic}/records", content=bytes(1 << 20), headers=OCTETS)
    (log,) = (api.broker.folder.path / f"{topic}-0").glob("*.log")
    path = f"/v1/topics/{topic}/partitions/0/segments/0"
    with capture_logs() as logs, api.stream("GET", path) as response:
        os.truncate(log, 4096)
        with pytest.raises(httpx2.RemoteProtocolError):
            response.read()
    until(lambda: failures(logs))
    assert failures(logs) == ["cut-short"]
    assert [line for line in caplog.records if line.name == "uvicorn.error"] == []


@pytest.mark.parametrize("query", ["", "?offset=0"], ids=["by a task", "immediately"])
def test_a_disk_error_while_a_file_is_sent_is_logged_once(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, query: str
) -> None:
    topic = api.topic()
    api.values(topic, "x")

    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if query:
        monkeypatch.setattr(os, "sendfile", failing)
    else:
        monkeypatch.setattr(page_cache, "is_resident", lambda *_: False)
        monkeypatch.setattr(page_cache, "prefetch", failing)
    with capture_logs() as logs:
        with pytest.raises(httpx2.RemoteProtocolError):
            api.get(f"/v1/topics/{topic}/partitions/0/records{query}", headers={"accept": BATCHES})
        until(lambda: failures(logs))
    assert failures(logs) == ["cut-short"]
    assert [line for line in caplog.records if line.name == "uvicorn.error"] == []


def test_batches_are_sent_without_a_file_descriptor_left_for_the_connection(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dup(_: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    topic = api.topic()
    api.values(topic, "x")
    sent = api.fetch(topic, accept=BATCHES).content
    monkeypatch.setattr(os, "dup", dup)
    with httpx2.Client(base_url=api.base_url, headers={"accept": BATCHES}) as new:
        assert new.get(f"/v1/topics/{topic}/partitions/0/records?offset=0").content == sent
