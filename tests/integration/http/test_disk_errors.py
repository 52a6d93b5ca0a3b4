"""A full disk and a failing disk: which requests are refused, and which are served."""

import errno
import os
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from hot_tier.disk import Disk
from tests.fakes.small_disk import small_disk
from tests.fakes.waiting import until
from tests.integration.http.conftest import BATCHES, Api, api_of, problem

OCTETS = {"content-type": "application/octet-stream"}


class TroubledDisk(Disk):
    """Writes fail with `number` while there is one."""

    number = 0

    def write_at(self, fd, buffers, position):
        if self.number:
            raise OSError(self.number, os.strerror(self.number))
        return super().write_at(fd, buffers, position)


def disk_of(api: Api, topic: str, partition: int = 0) -> TroubledDisk:
    """Put under one partition alone, in place of the real one."""
    state = api.broker.partition(topic, partition).log._state
    state.disk = state.active.disk = TroubledDisk()
    return state.disk


def test_a_full_disk_refuses_writes_until_space_is_free_and_serves_reads(api: Api) -> None:
    topic = api.topic()
    api.values(topic, 1, 2)
    disk = disk_of(api, topic)
    disk.number = errno.ENOSPC
    refused = problem(api.produce(topic, {"value": 3}), 507, "disk-full")
    assert "outcome" not in refused
    assert len(api.fetch(topic).json()["records"]) == 2
    disk.number = 0
    assert api.values(topic, 3)["base_offset"] == 2


def test_below_the_disk_reserve_writes_are_refused(api: Api) -> None:
    topic = api.topic()
    api.values(topic, 1)
    reserve = api.broker.background.reserve
    reserve._free, free = (lambda _: reserve.reserve_bytes - 1), reserve._free
    reserve.check()
    answer, ready = api.produce(topic, {"value": 2}), api.get("/readyz")
    reserve._free = free
    reserve.check()
    problem(answer, 507, "disk-full")
    assert ready.json()["ready"], "reads go on"
    assert "writes are refused: less than disk.reserve.bytes" in ready.json()["degraded"][0]
    assert api.get("/readyz").json()["degraded"] == []
    assert api.values(topic, 2)["base_offset"] == 1


def test_cold_reads_work_on_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "data", size_bytes=16 << 20) as disk, api_of(tmp_path) as api:
        topic = api.cold_topic()
        segments = api.get(f"/v1/topics/{topic}/partitions/0/segments").json()["segments"]
        cold = next(segment for segment in segments if segment["tier"] == "cold")
        asked = [
            (f"/records?offset={offset}", accept)
            for offset in (0, 70)
            for accept in ("application/json", BATCHES)
        ]
        asked.append((f"/segments/{cold['base_offset']}", "application/octet-stream"))

        before = [cold_bytes(api, topic, path, accept) for path, accept in asked]
        api.broker.bucket.cache.shrink(1 << 30)
        disk.fill()
        assert [cold_bytes(api, topic, path, accept) for path, accept in asked] == before
        problem(api.produce(topic, {"value": 1}), 507, "disk-full")


def cold_bytes(api: Api, topic: str, path: str, accept: str) -> bytes:
    answer = api.get(f"/v1/topics/{topic}/partitions/0{path}", headers={"accept": accept})
    assert (answer.status_code, answer.headers["log-tier"]) == (200, "cold"), answer.text
    return answer.content


def test_a_disk_error_takes_only_its_partition_offline(api: Api) -> None:
    topic = api.topic(partitions=2)
    for partition in (0, 1):
        api.values(topic, "before", partition=partition)
    disk = disk_of(api, topic)
    disk.number = errno.EIO
    body = {"records": [{"value": "x"}]}
    path = f"/v1/topics/{topic}/partitions/0/records"
    assert problem(api.post(path, json=body), 503, "log-offline")["outcome"] == "unknown"
    disk.number = 0  # it is not asked again
    again = api.post(path, json=body)
    problem(again, 503, "log-offline")
    assert int(again.headers["retry-after"]) > 0
    problem(api.post(path, json=body, params={"acks": "0"}), 503, "log-offline")
    assert len(api.fetch(topic).json()["records"]) == 1
    assert api.values(topic, "after", partition=1)["base_offset"] == 1
    assert api.delete(f"/v1/topics/{topic}").status_code == 204
    assert api.get("/readyz").json()["ready"]


def test_a_request_without_a_file_descriptor_left_can_be_retried(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = api.topic(segment_bytes=1024, remote_storage_enable=False)
    for value in range(4):
        api.values(topic, str(value) * 900)
    files = api.broker.partition(topic, 0).log._state.files
    files.invalidate_folder(api.broker.partition(topic, 0).log._state.folder)

    def none_left(path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr(files, "open", none_left)
    disk = disk_of(api, topic)
    disk.number = errno.EMFILE
    many = {"partitions": [{"topic": topic, "partition": 0, "offset": 0}]}
    with capture_logs() as logs:
        refused = [api.get(f"/v1/topics/{topic}/partitions/0/records?offset=0") for _ in range(3)]
        refused.append(api.post("/v1/fetch", json=many))
        refused.append(api.produce(topic, {"value": 5}))
    for answer in refused:
        problem(answer, 429, "throttled")
        assert int(answer.headers["retry-after"]) > 0
    told = [line["event"] for line in logs if line["log_level"] in {"warning", "error"}]
    assert told == ["no descriptor left"]
    monkeypatch.undo()
    disk.number = 0
    assert api.values(topic, 5)["base_offset"] == 4
    assert len(api.fetch(topic).json()["records"]) == 5


def test_a_truncated_response_is_logged_once(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    topic = api.topic(max_message_bytes=2 << 20, retention_ms=-1)
    for _ in range(32):
        api.post(f"/v1/topics/{topic}/records", content=bytes(1 << 20), headers=OCTETS)
    (log,) = (api.broker.folder.path / f"{topic}-0").glob("*.log")
    path = f"/v1/topics/{topic}/partitions/0/segments/0"
    with capture_logs() as told, api.stream("GET", path) as answer:
        os.truncate(log, 4096)
        with pytest.raises(httpx.RemoteProtocolError):
            answer.read()
    until(lambda: told)
    assert [(one["event"], one["code"]) for one in told] == [("request failed", "cut-short")]
    assert [one for one in caplog.records if one.name == "uvicorn.error"] == []
