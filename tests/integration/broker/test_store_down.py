"""The store being down stops offload and cold reads, nothing else: docs/architecture.md, 8."""

import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from tests.fakes.bad_sectors import cannot_read
from tests.fakes.broker_harness import run_janitor
from tests.fakes.broker_process import BrokerProcess
from tests.fakes.damage import flip
from tests.fakes.faulty_object_store import FailsBefore, FaultyObjectStore, WrongBytes
from tierlog.broker.broker import Broker
from tierlog.broker.bucket import store_status
from tierlog.broker.bucket.cold_log import ColdLog
from tierlog.broker.partition.segment_listing import tier_sizes
from tierlog.broker.settings import BrokerSettings
from tierlog.host.clock import wall_clock_ms
from tierlog.manifest.state import Reason
from tierlog.manifest.topic_objects import Cluster, create_cluster
from tierlog.object_store.memory import MemoryStore
from tierlog.object_store.open import open_store
from tierlog.record_format.errors import (
    ClockSkewTooLarge,
    ConfigurationError,
    InvalidConfig,
    OffsetTrimmed,
    StoreUnavailable,
)
from tierlog.repair.verify import verify_topic

YEAR_MS = 365 * 86_400_000
SMALL = {"segment.bytes": 4096, "retention.ms": -1, "local.retention.bytes": 8192}


def test_with_the_store_down_at_first_start_hot_operations_work_and_offload_catches_up(harness):
    harness.restart(down=True, store_start_timeout_ms=500)
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(200)
    assert len(harness.records("t")) == 200
    assert harness.broker.readiness().degraded
    assert harness.broker.partition("t", 0).offsets().local_log_start_offset == 0
    harness.set_down(False)
    harness.offload()
    assert not harness.broker.readiness().degraded
    assert harness.broker.partition("t", 0).offsets().local_log_start_offset > 0


def test_a_store_that_hangs_at_start_is_reported(tmp_path):
    released = threading.Event()

    class HangingStore(MemoryStore):
        def get(self, key, *, max_bytes):
            released.wait(20)
            return super().get(key, max_bytes=max_bytes)

    settings = BrokerSettings(data_dir=tmp_path, disk_reserve_bytes=0, store_start_timeout_ms=10)
    with closing(Broker.open(settings, store=HangingStore())) as broker:
        degraded = broker.readiness().degraded
        released.set()
    assert degraded == ["store unavailable: no result within 0.01 s"]


def test_a_first_start_waits_for_a_silent_store_only_once(tmp_path):
    """The credentials are checked before a data folder is created, and the store is verified after
    that: one timeout is for both.
    """
    keys = {"AWS_ACCESS_KEY_ID": "ak", "AWS_SECRET_ACCESS_KEY": "sk"}
    with ExitStack() as stack:
        silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        silent.settimeout(60)
        flags = ["--s3-endpoint", f"http://127.0.0.1:{silent.getsockname()[1]}"]
        flags += ["--s3-region", "us-east-1", "--store-start-timeout-ms", "300"]
        broker = BrokerProcess(tmp_path, *flags, store="s3://bucket/p", **keys)
        stack.callback(broker.kill)
        broker.start()
        for _ in ("the check", "the verification"):
            connection = stack.enter_context(silent.accept()[0])
            assert connection.recv(1 << 16).startswith(b"GET /bucket/p/cluster.json ")
    log = (tmp_path / "broker.log").read_text()
    assert "no result within 0.001 s" in log, "the check took all the time there was"


def test_waiting_for_a_store_check_fails_with_that_check(tmp_path):
    released, requested = threading.Event(), []

    class HangingStore(MemoryStore):
        def get(self, key, *, max_bytes):
            requested.append(key)
            released.wait(20)
            raise StoreUnavailable(key)

    settings = BrokerSettings(data_dir=tmp_path, disk_reserve_bytes=0, store_start_timeout_ms=10)
    with (
        closing(Broker.open_idle(settings, store=HangingStore())) as broker,
        ThreadPoolExecutor() as pool,
    ):
        status, acquiring = broker.bucket.store_status, threading.Event()
        status._verifying = ObservedLock(status._verifying, acquiring)
        waiting = pool.submit(status.require_store)
        assert acquiring.wait(20)
        released.set()
        assert isinstance(waiting.exception(20), StoreUnavailable)
        assert requested == ["cluster.json"]


class ObservedLock:
    """A lock that sets an event when it is being acquired."""

    def __init__(self, lock, acquiring: threading.Event) -> None:
        self._lock, self._acquiring = lock, acquiring

    def __enter__(self) -> None:
        self._acquiring.set()
        self._lock.acquire()

    def __exit__(self, *_) -> None:
        self._lock.release()


def test_during_an_outage_nothing_local_is_deleted_and_cold_offsets_are_unavailable(harness):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(200)
    harness.offload()
    partition = harness.broker.partition("t", 0)
    covered = partition.cold_end_offset
    harness.set_down(True)
    harness.fill(200)
    run_janitor(harness.broker)
    assert partition.offsets().local_log_start_offset <= covered
    assert len(harness.records("t", offset=covered)) == 400 - covered
    with pytest.raises(StoreUnavailable):
        partition.read(0, max_bytes=1)


def test_a_hanging_store_does_not_block_local_retention(harness, monkeypatch):
    hanging, released = threading.Event(), threading.Event()

    def hang(self, log_start_offset):
        hanging.set()
        assert released.wait(20)

    monkeypatch.setattr(ColdLog, "follow_log_start", hang)
    harness.restart(retention_check_interval_ms=20)
    harness.broker.create_topic("t", config=SMALL)
    harness.broker.create_topic("here", config={"remote.storage.enable": False})
    try:
        assert hanging.wait(20)
        harness.produce("here", [b"long ago"], at=1)
        harness.wait_for(lambda: harness.broker.partition("here", 0).log_start_offset == 1)
    finally:
        released.set()


def test_local_retention_works_while_manifest_pages_are_unreachable(harness, monkeypatch):
    """Total retention reads the manifest's pages; local retention does not."""
    for name, small in {"INLINE_MAX": 2, "SMALL_PAGE": 1}.items():
        monkeypatch.setattr(f"tierlog.manifest.codec.{name}", small)
    harness.broker.create_topic("t", config={**SMALL, "retention.bytes": 1 << 30})
    harness.fill(200)
    harness.broker.partition("t", 0).upkeep.roll()
    harness.upload_sealed()
    harness.restart(down=True, store_start_timeout_ms=200)
    partition = harness.broker.partition("t", 0)
    assert partition.manifest.pages
    assert partition.offsets().local_log_start_offset == 0
    run_janitor(harness.broker)
    assert partition.offsets().local_log_start_offset > 0


def test_a_compacted_topic_can_be_altered_before_its_trim_reaches_the_bucket(harness):
    harness.broker.create_topic("t", config={**SMALL, "cleanup.policy": "compact"})
    harness.fill(200)
    harness.offload()
    harness.set_down(True)
    harness.broker.trim("t", 0, 190)
    partition = harness.broker.partition("t", 0)
    assert partition.manifest.log_start_offset == 0 < partition.first_local_offset
    harness.broker.alter_topic("t", config={"flush.ms": 5})


def test_a_topic_can_be_altered_while_manifest_pages_are_unreachable(harness, monkeypatch):
    for name, small in {"INLINE_MAX": 2, "SMALL_PAGE": 1}.items():
        monkeypatch.setattr(f"tierlog.manifest.codec.{name}", small)
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(200)
    harness.offload()
    harness.restart(down=True, store_start_timeout_ms=200)
    assert harness.broker.partition("t", 0).manifest.pages
    harness.broker.alter_topic("t", config={"retention.ms": 1 << 40})
    for refused in ({"cleanup.policy": "compact"}, {"remote.storage.enable": "false"}):
        with pytest.raises(InvalidConfig, match="in the bucket"):
            harness.broker.alter_topic("t", config=refused)


def test_local_files_of_a_deleted_topic_are_removed_during_an_outage(harness):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(200)
    harness.restart(down=True, store_start_timeout_ms=200)
    harness.broker.delete_topic("t")
    harness.wait_for(lambda: not list((harness.root / "data").glob("t-0*")))
    assert harness.broker.registry.deleted()
    harness.set_down(False)
    harness.wait_for(lambda: not harness.broker.registry.deleted())


def test_the_log_bounds_are_known_after_a_restart_during_an_outage(harness):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(200)
    harness.offload()
    harness.broker.trim("t", 0, 15)
    before = harness.broker.partition("t", 0).offsets()
    harness.restart(down=True, store_start_timeout_ms=500)
    partition = harness.broker.partition("t", 0)
    now = partition.offsets()
    assert now.log_start_offset == 15
    assert now.local_log_start_offset == before.local_log_start_offset
    with pytest.raises(OffsetTrimmed):
        partition.read(14, max_bytes=1)
    with pytest.raises(StoreUnavailable):
        partition.read(15, max_bytes=1)
    harness.set_down(False)
    assert partition.read(15, max_bytes=1).tier == "cold"


def test_an_outage_is_reported_as_degraded_until_it_ends(harness):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(200)
    harness.offload()
    assert harness.broker.readiness().degraded == []
    harness.set_down(True)
    with pytest.raises(StoreUnavailable):
        harness.broker.partition("t", 0).read(0, max_bytes=1)
    assert "store unavailable" in harness.broker.readiness().degraded[0]
    assert harness.broker.readiness().reasons == []
    harness.set_down(False)
    harness.wait_for(lambda: harness.broker.readiness().degraded == [])


def test_an_unexpectedly_empty_bucket_is_unavailable_not_initialized(harness):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(200)
    harness.offload()
    harness.broker.close()
    (harness.root / "bucket").rename(harness.root / "elsewhere")
    harness.broker = harness.open()
    assert "is it mounted" in harness.broker.readiness().degraded[0]
    with pytest.raises(StoreUnavailable):
        harness.broker.partition("t", 0).read(0, max_bytes=1)
    assert not (harness.root / "bucket" / "cluster.json").exists()
    shutil.rmtree(harness.root / "bucket", ignore_errors=True)
    (harness.root / "elsewhere").rename(harness.root / "bucket")
    harness.wait_for(lambda: harness.broker.readiness().degraded == [])
    assert harness.broker.partition("t", 0).read(0, max_bytes=1).tier == "cold"


@pytest.mark.parametrize("damage", ["cut", "bad sector"])
def test_with_an_unreadable_manifest_copy_cold_offsets_are_unavailable_until_the_claim(
    harness, monkeypatch, damage
):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(200)
    harness.offload()
    harness.broker.close()
    manifest_copy = next((harness.root / "data" / "tierlog" / "manifests").glob("*-0.json"))
    if damage == "cut":
        manifest_copy.write_bytes(manifest_copy.read_bytes()[:-20])
    else:
        cannot_read(monkeypatch, manifest_copy, kept=harness.root / "bad sector")
    harness.broker = harness.open(down=True, store_start_timeout_ms=500)
    partition = harness.broker.partition("t", 0)
    assert partition.offsets().log_start_offset == 0
    with pytest.raises(StoreUnavailable):
        partition.read(0, max_bytes=1)
    harness.set_down(False)
    harness.wait_for(lambda: partition.is_claimed)
    assert partition.read(0, max_bytes=1).tier == "cold"


@pytest.mark.parametrize("before_offset", [55, 200], ids=["within a segment", "of everything"])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_trim_while_the_store_is_down_reaches_the_bucket_later(harness, restarted, before_offset):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(200)
    harness.offload()
    harness.set_down(True)
    assert harness.broker.trim("t", 0, before_offset) == before_offset
    if restarted:
        harness.restart(down=True, store_start_timeout_ms=1)
    partition = harness.broker.partition("t", 0)
    cold, log = partition._cold, partition._log
    assert cold.manifest.log_start_offset == 0
    assert (log.log_start_offset, log.first_local_offset > 55) == (before_offset, True)
    harness.set_down(False)
    harness.broker.bucket.store_status.require_store()
    harness.claim()
    run_janitor(harness.broker)
    assert cold.manifest.log_start_offset == before_offset
    assert {one.reason for one in cold.manifest.removed} == {Reason.TRIM}, "no pin keeps them"


def test_retention_makes_no_requests_to_a_store_known_to_be_down(harness, monkeypatch):
    """A hanging store would be waited for at each of possibly thousands of partitions."""
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(200)
    harness.offload()
    harness.broker.alter_topic("t", config={"retention.bytes": 8192})
    harness.set_down(True)
    harness.broker.bucket.store_status.mark_unavailable(StoreUnavailable("hangs"))
    before, partition = len(harness.store.calls), harness.broker.partition("t", 0)
    starts = [0]
    for _ in range(2):
        harness.fill(200)
        run_janitor(harness.broker)
        starts.append(partition.log_start_offset)
    assert starts == sorted(set(starts))
    commits = [key for call, key in harness.store.calls[before:] if call == "put" and "/0/" in key]
    assert commits == []
    monkeypatch.setattr(store_status, "RETRY_S", 0.05)
    harness.set_down(False)
    harness.wait_for(lambda: harness.broker.bucket.store_status.unavailable is None)
    run_janitor(harness.broker)
    assert partition.manifest.log_start_offset == partition.log_start_offset
    assert {one.reason for one in partition.manifest.removed} == {Reason.RETENTION}


@pytest.mark.parametrize("known", [False, True])
def test_nothing_expires_while_the_store_rejects_the_clock(harness, known):
    harness.broker.create_topic("t", config={"retention.ms": 86_400_000})
    now_ms, janitor = wall_clock_ms(), harness.broker.background.janitor
    harness.produce("t", [b"young"], at=now_ms)
    harness.offload()
    refused = FailsBefore(lambda key: ClockSkewTooLarge(f"{key}: this machine's clock"))
    for call in ("get", "head", "put", "list"):
        harness.store.fail(call, refused, times=10**9)
    if known:
        harness.broker.bucket.store_status.mark_unavailable(ClockSkewTooLarge("known"))
    partition, janitor._clock = harness.broker.partition("t", 0), lambda: now_ms + 10 * YEAR_MS
    janitor.bucket_round()
    assert partition.log_start_offset == 0
    harness.set_down(False)
    harness.wait_for(lambda: harness.broker.bucket.store_status.is_reachable)
    janitor.bucket_round()
    assert partition.log_start_offset == 1, "the clock is trusted once the store accepts it"


def test_nothing_expires_while_a_store_that_rejected_the_clock_is_down(harness, monkeypatch):
    """Silence does not make the clock right."""
    monkeypatch.setattr(store_status, "RETRY_S", 0.0)
    harness.stop_copying()
    harness.broker.create_topic("t", config={"retention.ms": 86_400_000})
    now_ms, janitor = wall_clock_ms(), harness.broker.background.janitor
    harness.produce("t", [b"young"], at=now_ms)
    status, error = harness.broker.bucket.store_status, [ClockSkewTooLarge("wrong clock")]
    for call in ("get", "head", "put", "list"):
        harness.store.fail(call, FailsBefore(lambda _: error[0]), times=10**9)
    assert not status.recheck()
    error[0] = StoreUnavailable("no response")
    status.poll()
    assert "no response; it refused the clock: nothing expires by age" in "".join(
        harness.broker.readiness().degraded
    )
    partition, janitor._clock = harness.broker.partition("t", 0), lambda: now_ms + 10 * YEAR_MS
    janitor.bucket_round()
    assert partition.log_start_offset == 0
    harness.set_down(False)
    status.poll()
    janitor.bucket_round()
    assert partition.log_start_offset == 1, "the clock is trusted once the store accepts it"


def test_readiness_tells_of_a_rejected_clock_whatever_the_store_is_refused_for(
    harness, monkeypatch
):
    monkeypatch.setattr(store_status, "RETRY_S", 0.0)
    harness.restart(down=True, store_start_timeout_ms=200)
    harness.stop_copying()
    for refusal in (ClockSkewTooLarge("wrong clock"), ConfigurationError("no access")):
        harness.set_down(False)
        harness.store.fail("get", FailsBefore(lambda _, error=refusal: error), times=10**9)
        assert not harness.broker.bucket.store_status.poll()
    assert "store refused: no access; it refused the clock: nothing expires by age" in (
        harness.broker.readiness().degraded
    )


def test_a_foreign_bucket_is_not_written_to_and_our_own_is_used_again(harness, monkeypatch):
    """Another cluster's bucket is mounted in place of ours for a while."""
    monkeypatch.setattr(store_status, "RETRY_S", 0.05)
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(200)
    harness.broker.create_topic("going")
    harness.produce("going", [b"v"])
    harness.offload("going")
    harness.broker.close()
    ours, elsewhere = harness.root / "bucket", harness.root / "elsewhere"
    ours.rename(elsewhere)
    ours.mkdir()
    create_cluster(open_store(f"file://{ours}"), Cluster(cluster_id="foreign", created_ms=0))
    harness.broker = harness.open(down=True, store_start_timeout_ms=500)
    harness.set_down(False)
    harness.wait_for(lambda: "store refused" in "".join(harness.broker.readiness().degraded))
    harness.fill(200)
    with pytest.raises(ConfigurationError, match="foreign"):
        verify_topic(harness.broker, "t")
    harness.broker.background.deleting.stop(10)
    harness.broker.delete_topic("going")
    with pytest.raises(ConfigurationError, match="foreign"):
        harness.broker.background.deletions.run_round()
    written = [path.name for path in ours.rglob("*") if path.is_file()]
    assert written == ["cluster.json"]
    shutil.rmtree(ours)
    elsewhere.rename(ours)
    harness.wait_for(lambda: harness.broker.readiness().degraded == [])
    harness.broker.background.deletions.run_round()
    assert not any("going" in str(path) for path in ours.rglob("*") if path.is_file())
    harness.offload()
    assert verify_topic(harness.broker, "t").ok


def test_size_retention_is_stable_while_trims_cannot_reach_the_bucket(harness):
    """Then the log start moves only on disk: what lies below it no longer counts."""
    harness.broker.create_topic("t", config={**SMALL, "retention.bytes": 1 << 30})
    harness.fill(200)
    harness.offload()
    harness.stop_copying()
    harness.set_down(True)
    partition, starts = harness.broker.partition("t", 0), []
    sizes = tier_sizes(partition)
    limits = {"local.retention.bytes": 1024, "retention.bytes": sizes.cold_bytes // 2}
    harness.broker.alter_topic("t", config=limits)
    for _ in range(4):
        harness.broker.background.janitor._apply_retention(partition)
        starts.append(partition.log_start_offset)
    assert starts[0] > 0
    assert starts == starts[:1] * 4


def objects_in(harness):
    bucket = harness.root / "bucket"
    return {path: path.read_bytes() for path in bucket.rglob("*") if path.is_file()}


@pytest.mark.parametrize("position", [18, 19, 40, 90, -3])
def test_a_store_whose_cluster_object_cannot_be_read_is_down(harness, position):
    """Hot data is served; nothing is claimed, uploaded or overwritten until it can be read."""
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(100)
    harness.offload()
    harness.broker.close()
    cluster = harness.root / "bucket" / "cluster.json"
    flip(cluster, position)
    before = objects_in(harness)
    harness.broker = harness.open()
    harness.fill(100)
    harness.broker.create_topic("another")
    assert harness.broker.readiness().reasons == []
    assert "cluster.json" in "".join(harness.broker.readiness().degraded)
    with pytest.raises(StoreUnavailable, match=r"cluster\.json"):
        harness.broker.background.copy_round()
    harness.broker.partition("t", 0).upkeep.roll()
    harness.broker.delete_topic("another")
    with pytest.raises(StoreUnavailable, match=r"cluster\.json"):
        harness.broker.background.deletions.run_round()
    assert objects_in(harness) == before
    flip(cluster, position)
    harness.wait_for(lambda: harness.broker.readiness().degraded == [])
    harness.offload()
    assert verify_topic(harness.broker, "t", deep=True).ok


def test_one_bad_answer_at_the_start_is_asked_for_again(harness, monkeypatch):
    harness.broker.create_topic("t", config=SMALL)
    harness.fill(100)
    harness.offload()
    harness.broker.close()
    store = FaultyObjectStore(open_store(f"file://{harness.root / 'bucket'}"))
    store.fail("get", WrongBytes(60))
    harness.broker = Broker.open(harness.broker.settings, store=store)
    harness.wait_for(lambda: harness.broker.readiness().degraded == [])
    harness.fill(100)
    harness.offload()
    assert verify_topic(harness.broker, "t", deep=True).ok
