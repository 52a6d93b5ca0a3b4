"""A data folder that cannot be opened is refused with one line that names the file."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.fakes.small_disk import no_room, small_disk
from tests.fakes.waiting import PATIENCE_S
from tierlog.broker.background.background_tasks import BackgroundTasks
from tierlog.broker.broker import Broker
from tierlog.broker.data_folder.data_folder import CLEAN_SHUTDOWN, FolderInUse
from tierlog.broker.opening.log_opener import LogOpener
from tierlog.broker.partition.checkpoints import Truncations
from tierlog.broker.partition.damaged_partition import REMEDIES, with_remedy
from tierlog.broker.settings import BrokerSettings
from tierlog.host.durable_file import REAL_DISK
from tierlog.hot_tier.log_writer import Acks, LogWriter
from tierlog.manifest.topic_objects import Cluster, TopicObjects, create_cluster
from tierlog.object_store.memory import MemoryStore
from tierlog.object_store.open import open_store
from tierlog.record_format import sealed_json
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptDataError,
    DiskFull,
    UnknownFormatVersion,
)
from tierlog.record_format.produced import build_produced

OPEN = """
import sys
from pathlib import Path
from tierlog.broker.broker import Broker
from tierlog.broker.settings import BrokerSettings
from tierlog.record_format.errors import ConfigurationError
import os
os.setuid(int(sys.argv[2]))
try:
    Broker.open(BrokerSettings(data_dir=Path(sys.argv[1])), store=None).close()
except ConfigurationError as error:
    print("refused:", error)
else:
    print("opened")
"""


def open_as_nobody(folder: Path) -> str:
    result = subprocess.run(
        [sys.executable, "-c", OPEN, str(folder), "65534"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[3],
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()[-1]


@pytest.fixture
def folder():
    """A data folder with a topic that the user nobody owns and can reach.

    Not in `tmp_path`: each pytest session that starts makes the folder around it private again.
    """
    with tempfile.TemporaryDirectory() as parent:
        data = Path(parent) / "data"
        data.parent.chmod(0o755)
        if not all(path.stat().st_mode & 0o001 for path in data.parents):
            pytest.skip("another user cannot reach the temporary folder")
        broker = Broker.open(BrokerSettings(data_dir=data), store=None)
        broker.create_topic("t")
        broker.close()
        for path in (data, *data.rglob("*")):
            os.chown(path, 65534, 65534)
        yield data


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to change the user id")


@needs_root
@pytest.mark.parametrize(
    "root_owned", ["", "meta.properties", "tierlog", "t-0", "t-0/00000000000000000000.log"]
)
def test_missing_permissions_are_named_in_one_line(folder, root_owned):
    assert open_as_nobody(folder) == "opened"
    path = folder / root_owned
    os.chown(path, 0, 0)
    path.chmod(0o755 if path.is_dir() else 0o600)
    output = open_as_nobody(folder)
    assert output.startswith("refused: ")
    assert str(folder) in output
    assert any(word in output for word in ("denied", "permitted", "may not be written"))


@needs_root
def test_a_data_folder_below_a_private_folder_is_refused(folder):
    folder.parent.chmod(0o700)
    output = open_as_nobody(folder)
    assert output.startswith(f"refused: data folder {folder}: ")
    assert "denied" in output


def test_a_data_folder_whose_name_is_too_long_is_refused(tmp_path):
    data = tmp_path / ("d" * 300)
    with pytest.raises(ConfigurationError, match=r"data folder .*: File name too long"):
        Broker.open(BrokerSettings(data_dir=data), store=None)


def crashed_folder(harness) -> Path:
    """A data folder that has every kind of file: a trimmed and compacted topic after a crash."""
    config = {"segment.bytes": 1024, "cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0}
    harness.broker.create_topic("t", config=config)
    for number in range(20):
        append_keyed(harness, b"%d" % number * 100)
    harness.broker.trim("t", 0, 3)
    harness.broker.background.compactor.run_round()
    harness.broker.close()
    (harness.root / "data" / CLEAN_SHUTDOWN).unlink()
    return harness.root / "data"


def append_keyed(harness, value: bytes) -> None:
    fields = {"timestamps": [1], "keys": [b"key"], "max_message_bytes": 1 << 20}
    append = harness.broker.partition("t", 0).append(
        build_produced([value], **fields), acks=Acks.ALL
    )
    append.result(10)


def test_a_corrupt_file_is_refused_with_a_remedy_that_works(harness):
    data = crashed_folder(harness)
    for name in sorted(REMEDIES.keys() - {"take-over.json", "cuts.json", "format.json"}):
        path = data / "t-0" / name if (data / "t-0" / name).exists() else next(data.rglob(name))
        good = path.read_bytes()
        # A log's epoch file is rebuilt if it is garbage, but not if its version is unknown.
        path.write_bytes(b"1\n0\n" if name == "leader-epoch-checkpoint" else b"garbage\n")
        message = refusal(harness)
        assert f"{name}: " in message
        assert REMEDIES[name] in message
        if "`rm`" in REMEDIES[name]:
            path.unlink()
        elif "`cp " in REMEDIES[name]:
            subprocess.run(REMEDIES[name].split("`")[1].split(), cwd=data, check=True)
        else:
            path.write_bytes(good)
        assert refusal(harness) == "", name
        assert [record.value for record in harness.records("t", offset=3)][-1] == b"19" * 100, name
        harness.broker.close()


def test_a_valid_file_with_another_schema_is_refused_with_a_remedy(harness):
    """As another version of tierlog might write it."""
    folder = crashed_folder(harness) / "tierlog"
    kinds = {"topics": "topics", "epochs": "epochs", "cuts": "cuts", "take-over": "take-over"}
    for name, kind in {**kinds, "format": "format", "store": "store-probe"}.items():
        path = folder / f"{name}.json"
        good = path.read_bytes() if path.exists() else None
        path.write_bytes(sealed_json.encode({"x": "other"}, kind=kind))
        message = refusal(harness)
        assert f"{name}.json: " in message
        assert REMEDIES[path.name] in message
        path.write_bytes(good) if good is not None else path.unlink()


def test_a_missing_registry_is_refused_and_no_topic_loses_its_configuration(harness):
    harness.broker.create_topic("t", config={"cleanup.policy": "compact"})
    harness.claim()
    harness.broker.close()
    registry = harness.root / "data" / "tierlog" / "topics.json"
    kept = registry.read_bytes()
    registry.unlink()
    message = refusal(harness)
    assert "topics.json: the file is missing" in message
    assert REMEDIES[registry.name] in message
    assert TopicObjects(harness.store).find_topic("t").config == {"cleanup.policy": "compact"}
    registry.write_bytes(kept)
    harness.broker = harness.open()
    assert harness.broker.topic("t").config.compacts


def refusal(harness) -> str:
    """Why the folder or its partition is not opened, or ""."""
    try:
        harness.broker = harness.open()
    except CorruptDataError as error:
        return str(error)
    reasons = harness.broker.readiness().reasons
    if reasons:
        harness.broker.close()
    return " ".join(reasons)


def test_a_folder_with_a_corrupt_owner_file_continues_under_a_new_id(harness):
    harness.broker.create_topic("t", config={"retention.ms": -1})
    harness.produce("t", [b"one"])
    harness.offload()
    harness.broker.close()
    owner = harness.root / "data" / "tierlog" / "owner"
    owner.write_bytes(b"\xff" + owner.read_bytes()[1:])
    harness.broker = harness.open()
    harness.produce("t", [b"two"])
    harness.offload()
    assert [record.value for record in harness.records("t")] == [b"one", b"two"]


def test_a_file_of_a_newer_version_gets_no_remedy():
    newer = UnknownFormatVersion("format version 9", file="data/tierlog/topics.json")
    assert with_remedy(newer) is newer


def test_a_full_disk_loses_nothing_and_is_not_reported_as_a_bug(harness, monkeypatch):
    harness.broker.create_topic("t", config={"segment.bytes": 1024, "retention.ms": -1})
    for number in range(20):
        harness.produce("t", [b"%d" % number * 50])
    harness.restart(recovery_checkpoint_ms=10)
    with monkeypatch.context() as full, capture_logs() as logs:
        full.setattr(REAL_DISK, "write_at", no_room, raising=False)
        with pytest.raises(DiskFull):
            harness.produce("t", [b"refused"])
        assert len(harness.records("t")) == 20
        harness.broker.partition("t", 0)._log.trim(1)  # so that there is something to save
        harness.wait_for(lambda: any(log.get("task") == "checkpoints" for log in logs))
        harness.broker.close()
        harness.broker = harness.open()  # no read needs room
        assert len(harness.records("t")) == 20
        with pytest.raises(DiskFull, match="no room to record the epoch"):
            harness.produce("t", [b"refused"])
        before = harness.broker.partition("t", 0).offsets()
        with pytest.raises(DiskFull):
            harness.broker.partition("t", 0).claim()
    assert {log["event"] for log in logs if log["log_level"] in ("warning", "error")} >= {
        "background task failed, will retry",
        "log not closed cleanly",
        "clean shutdown not recorded",
        "no room to record epochs: writes are refused",
    }

    def is_accepted():
        with suppress(DiskFull):
            return harness.produce("t", [b"accepted"]).base_offset == 20

    harness.wait_for(is_accepted)
    assert harness.broker.partition("t", 0).offsets().leader_epoch > before.leader_epoch
    harness.offload()
    harness.restart()
    assert len(harness.records("t")) == 21


def test_a_disk_without_a_free_byte_stops_no_start_after_a_crash(harness, tmp_path):
    harness.broker.create_topic("t", config={"segment.bytes": 1 << 16, "retention.ms": -1})
    values = harness.fill(2000)
    with small_disk(tmp_path / "disk", size_bytes=40 << 20) as disk:
        crashed = shutil.copytree(harness.root / "data", disk.path / "data")
        owner = crashed / "tierlog" / "owner"  # not a copy, but the folder of the owner
        stat = crashed.stat()
        owner.write_text(f"{owner.read_text().split()[0]} {stat.st_dev}:{stat.st_ino}")
        disk.fill()
        settings = replace(harness.broker.settings, data_dir=crashed)
        harness.broker.close()
        store = open_store(f"file://{harness.root / 'bucket'}")
        harness.broker = Broker.open(settings, store=store)
        assert [record.value for record in harness.records("t")] == values
        harness.broker.close()


def test_a_stop_succeeds_even_if_it_cannot_be_recorded(tmp_path):
    settings = BrokerSettings(data_dir=tmp_path / "data")
    broker = Broker.open(settings, store=None)
    broker.create_topic("t")
    (tmp_path / "data" / ".kafka_cleanshutdown.tmp").mkdir()  # makes this write fail
    with capture_logs() as logs:
        broker.close()
    assert [log["event"] for log in logs if log["log_level"] == "error"] == [
        "clean shutdown not recorded"
    ]
    again = Broker.open(settings, store=None)
    assert not again.folder.was_clean
    (tmp_path / "data" / ".kafka_cleanshutdown.tmp").rmdir()
    again.close()


def test_an_interrupted_start_opens_no_more_logs_and_keeps_the_folder(tmp_path, monkeypatch):
    settings = BrokerSettings(data_dir=tmp_path / "data")
    with closing(Broker.open(settings, store=None)) as broker:
        broker.create_topic("t", partitions=100)
    opened, first = [], threading.Lock()
    signals, interrupted = [], threading.Event()
    open_log = LogOpener._open

    def opening_until_interrupted(*args, **kwargs):
        opened.append(args)
        if first.acquire(blocking=False):
            # Python handles a signal that comes just before a blocking call only after it.
            while not interrupted.wait(0.01):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        assert interrupted.wait(PATIENCE_S)
        return open_log(*args, **kwargs)

    def interrupt(*_):
        signals.append(1)
        if len(signals) == 1:
            interrupted.set()
            raise KeyboardInterrupt

    monkeypatch.setattr(LogOpener, "_open", opening_until_interrupted)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            Broker.open(settings, store=None)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(opened) < 100
    with pytest.raises(FolderInUse):
        Broker.open(settings, store=None)


def test_a_start_that_fails_at_the_end_is_a_clean_stop(tmp_path, monkeypatch):
    def fails(_):
        raise RuntimeError("can't start new thread")

    settings = BrokerSettings(data_dir=tmp_path / "data")
    with monkeypatch.context() as failing:
        failing.setattr(BackgroundTasks, "start", fails)
        with pytest.raises(RuntimeError, match="new thread"):
            Broker.open(settings, store=None)
    with closing(Broker.open(settings, store=None)) as broker:
        assert broker.folder.was_clean


def test_a_folder_in_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "data" / "meta.properties").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=r"meta\.properties"):
        Broker.open(BrokerSettings(data_dir=tmp_path / "data"), store=None)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("data/t-0", "give the folder that contains it"),
        (".", "contains the data folder .*/data; give that, or"),
    ],
)
def test_a_parent_or_partition_of_a_data_folder_is_refused(harness, where, message):
    harness.broker.create_topic("t")
    harness.broker.close()
    folder = harness.root / where
    before = sorted(folder.iterdir())
    with pytest.raises(ConfigurationError, match=message):
        Broker.open(BrokerSettings(data_dir=folder), store=None)
    assert sorted(folder.iterdir()) == before
    harness.broker = harness.open()


def test_a_folder_that_has_a_bucket_is_not_served_without_it(harness):
    """Records only in the bucket would be reported as lost."""
    harness.broker.create_topic("t")
    harness.produce("t", [b"v"])
    harness.offload("t")
    harness.broker.close()
    settings = BrokerSettings(data_dir=harness.root / "data")
    bucket = (harness.root / "bucket").as_uri()
    with pytest.raises(ConfigurationError, match=f"data has the bucket {bucket}: name it with"):
        Broker.open_idle(settings, store=None)
    assert (harness.root / "data" / CLEAN_SHUTDOWN).exists(), (
        "the refusal keeps the clean shutdown marker"
    )
    harness.broker = harness.open()
    harness.broker.delete_topic("t")
    harness.wait_for(lambda: not harness.broker.registry.deleted())
    harness.broker.close()
    Broker.open_idle(settings, store=None).close()
    harness.broker = harness.open()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_failed_start_releases_everything(harness, monkeypatch):
    """An embedding process may try again."""
    harness.broker.create_topic("t", partitions=3)
    harness.broker.close()
    before, flushed = open_resources(harness), []
    with monkeypatch.context() as patched:
        patched.setattr(Truncations, "reconcile_at_start", no_room)
        patched.setattr(LogWriter, "flush", flushed.append)
        with pytest.raises(ConfigurationError, match="No space left"):
            harness.open()
    assert open_resources(harness) == before
    assert not flushed, "with thousands of logs, the reason would be known minutes later"
    harness.broker = harness.open()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", ["epochs.json", "topics.json", "cuts.json"])
def test_a_start_refused_for_a_corrupt_file_releases_everything(harness, name):
    harness.broker.create_topic("t")
    harness.broker.close()
    before, path = open_resources(harness), harness.root / "data" / "tierlog" / name
    good = path.read_bytes() if path.exists() else None
    path.write_bytes(b"garbage")
    with pytest.raises(CorruptDataError, match=name):
        harness.open()
    assert open_resources(harness) == before
    path.unlink() if good is None else path.write_bytes(good)
    harness.broker = harness.open()


def test_a_store_that_is_refused_at_the_start_is_closed(tmp_path):
    class Store(MemoryStore):
        is_closed = False

        def close(self) -> None:
            self.is_closed = True

    store = Store()
    create_cluster(store, Cluster(cluster_id="another", created_ms=0))
    with pytest.raises(ConfigurationError, match="another"):
        Broker.open(BrokerSettings(data_dir=tmp_path / "data"), store=store)
    assert store.is_closed


def open_resources(harness) -> tuple[set[str], list[str]]:
    files = {str(fd.readlink()) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()}
    threads = [thread.name for thread in threading.enumerate()]
    return {name for name in files if str(harness.root) in name}, threads


def test_a_second_broker_is_refused_until_the_first_is_closed(tmp_path):
    settings = BrokerSettings(data_dir=tmp_path / "data")
    first = Broker.open(settings, store=None)
    with pytest.raises(ConfigurationError, match="in use by another broker"):
        Broker.open(settings, store=None)
    first.close()
    Broker.open(settings, store=None).close()


def test_a_start_without_file_descriptors_explains_the_limit(harness, monkeypatch):
    harness.broker.create_topic("t")
    harness.broker.close()

    def raise_emfile(*_):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with monkeypatch.context() as limit:
        limit.setattr(REAL_DISK, "open", raise_emfile, raising=False)
        with pytest.raises(ConfigurationError, match=r"t-0: Too many open files: .*LimitNOFILE"):
            harness.open()
    harness.broker = harness.open()


def test_a_broker_that_starts_below_its_disk_reserve_refuses_writes(tmp_path):
    settings = BrokerSettings(data_dir=tmp_path / "data", disk_reserve_bytes=0)
    before = Broker.open(settings, store=None)
    before.create_topic("t")
    before.close()
    broker = Broker.open(replace(settings, disk_reserve_bytes=1 << 60), store=None)
    batches = build_produced([b"x"], timestamps=[1], max_message_bytes=1 << 20)
    with pytest.raises(DiskFull, match=r"disk\.reserve\.bytes"):
        broker.partition("t", 0).append(batches, acks=Acks.ALL).result(10)
    broker.close()
