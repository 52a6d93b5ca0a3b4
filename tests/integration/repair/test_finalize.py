"""`storage finalize` with a level that only these tests have: it is raised whole or completed by
the same command, and a version that does not read it changes nothing.
"""

import shutil

import pytest

from tests.fakes.broker_harness import BrokerHarness
from tests.fakes.damage import flip
from tests.fakes.faulty_object_store import FailsAfter, FailsBefore, FaultyObjectStore
from tests.fakes.snapshot import snapshot
from tierlog.broker.broker import Broker
from tierlog.broker.data_folder.data_folder import DataFolder, FolderInUse, read_level
from tierlog.broker.settings import BrokerSettings
from tierlog.manifest.bucket_level import BucketLevel
from tierlog.object_store.open import open_store
from tierlog.record_format import format_level
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptManifest,
    FencedError,
    StoreUnavailable,
)
from tierlog.repair import finalize as finalizing
from tierlog.repair.finalize import finalize
from tierlog.repair.restore import RestoreOptions, restore

VALUES = [b"%d" % number * 60 for number in range(20)]


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    harness = BrokerHarness(tmp_path_factory.mktemp("template"))
    harness.broker.create_topic("t", config={"segment.bytes": 1024, "retention.ms": -1})
    harness.produce("t", VALUES[:10])
    harness.offload()
    harness.produce("t", VALUES[10:])
    harness.broker.close()
    return harness.root


@pytest.fixture
def root(template, tmp_path):
    """A folder that took part in nothing but the first level, and its bucket."""
    shutil.copytree(template, tmp_path / "root")
    BrokerHarness(tmp_path / "root").broker.close()  # a copy has another inode, and claims
    return tmp_path / "root"


@pytest.fixture
def upgraded(root, monkeypatch):
    """The version is one that has a second level, until `downgrade`."""
    monkeypatch.setitem(format_level.LEVELS, 2, "0.2.0")
    return root


def downgrade():
    del format_level.LEVELS[2]


def store_of(root):
    return FaultyObjectStore(open_store(f"file://{root / 'bucket'}", must_exist=True))


def run(root, *, store=None, dry_run=False):
    settings = BrokerSettings(data_dir=root / "data", cache_bytes=1 << 20, disk_reserve_bytes=0)
    return finalize(settings, store or store_of(root), dry_run=dry_run)


def levels(root):
    return read_level(root / "data"), BucketLevel(store_of(root)).read_level()


def contents(files):
    """The mark of a clean stop was taken away and put back."""
    return {path: content for path, (content, _) in files.items()}


def values_of(root):
    harness = BrokerHarness(root)
    try:
        assert harness.broker.readiness() == ([], [])
        return [record.value for record in harness.records("t")]
    finally:
        harness.broker.close()


def test_a_level_is_raised_in_folder_and_bucket_and_all_is_read(upgraded):
    assert values_of(upgraded) == VALUES
    assert levels(upgraded) == (1, 1), "an upgrade alone raises nothing"
    report = run(upgraded)
    assert (report.from_level, report.to_level, report.finalized) == (1, 2, True)
    assert (report.read_since, report.partitions) == ("0.2.0", 1)
    assert levels(upgraded) == (2, 2)
    assert values_of(upgraded) == VALUES


def test_a_second_run_and_a_run_without_a_newer_level_change_nothing(root, monkeypatch):
    before = snapshot(root)
    assert run(root).finalized
    assert snapshot(root) == before
    monkeypatch.setitem(format_level.LEVELS, 2, "0.2.0")
    run(root)
    before = snapshot(root)
    assert (run(root).from_level, run(root).finalized) == (2, True)
    assert snapshot(root) == before


def test_a_dry_run_checks_and_changes_nothing(upgraded):
    before = snapshot(upgraded)
    report = run(upgraded, dry_run=True)
    assert (report.from_level, report.to_level, report.finalized) == (1, 2, False)
    assert report.partitions == 1
    assert snapshot(upgraded) == before


@pytest.mark.parametrize("start", ["serve", "finalize", "restore", "restore of its tail"])
def test_a_version_without_the_level_refuses_it_and_changes_nothing(upgraded, tmp_path, start):
    run(upgraded)
    if start == "restore of its tail":
        shutil.rmtree(upgraded / "bucket" / "format")
    downgrade()
    before = snapshot(upgraded)
    new, tail = tmp_path / "new", upgraded / "data" if start == "restore of its tail" else None
    where = "bucket/format/0{19}1" if start == "restore" else "data/tierlog/format"
    expected = rf"{where}\.json: format level 2, which tierlog 0\.2\.0 and newer read"
    options = RestoreOptions(data_dir=new, gap=9, clock=lambda: 0, tail=tail)
    begin = {"serve": BrokerHarness, "finalize": run}.get(
        start, lambda root: restore(store_of(root), options)
    )
    with pytest.raises(ConfigurationError, match=expected):
        begin(upgraded)
    assert snapshot(upgraded) == before
    assert not new.exists()


def test_a_restored_folder_has_the_level_of_its_bucket(upgraded, tmp_path):
    run(upgraded)
    shutil.rmtree(upgraded / "data")
    restore(store_of(upgraded), RestoreOptions(data_dir=upgraded / "data", gap=9, clock=lambda: 0))
    assert levels(upgraded) == (2, 2)
    assert values_of(upgraded)[:10] == VALUES[:10]


def test_a_restore_that_an_interrupted_one_preceded_has_the_level_of_its_own_bucket(upgraded):
    run(upgraded)
    kept = (upgraded / "data" / "tierlog" / "format.json").read_bytes()
    shutil.rmtree(upgraded / "data")
    shutil.rmtree(upgraded / "bucket" / "format")
    (upgraded / "data" / "tierlog").mkdir(parents=True)
    (upgraded / "data" / "tierlog" / "restoring").touch()
    (upgraded / "data" / "tierlog" / "format.json").write_bytes(kept)
    restore(store_of(upgraded), RestoreOptions(data_dir=upgraded / "data", gap=9, clock=lambda: 0))
    assert levels(upgraded) == (1, 1)


def test_a_store_that_fails_leaves_the_way_back_open(upgraded):
    store = store_of(upgraded)
    store.fail("put", FailsBefore())
    with pytest.raises(StoreUnavailable):
        run(upgraded, store=store)
    assert levels(upgraded) == (1, 1)
    downgrade()
    assert values_of(upgraded) == VALUES


def test_an_answer_that_was_lost_is_read_back(upgraded):
    store = store_of(upgraded)
    store.fail("put", FailsAfter())
    assert run(upgraded, store=store).finalized
    assert levels(upgraded) == (2, 2)


def test_a_crash_between_bucket_and_folder_is_served_and_completed(upgraded, monkeypatch):
    def full_disk(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(finalizing, "write_level", full_disk)
        with pytest.raises(OSError, match="No space"):
            run(upgraded)
    assert levels(upgraded) == (1, 2)
    assert values_of(upgraded) == VALUES
    assert levels(upgraded) == (1, 2), "a start raises nothing of its own accord"
    downgrade()
    before = snapshot(upgraded)
    with pytest.raises(ConfigurationError, match=r"bucket/format/0{19}1\.json: format level 2"):
        BrokerHarness(upgraded)
    assert contents(snapshot(upgraded)) == contents(before)
    format_level.LEVELS[2] = "0.2.0"
    assert run(upgraded).finalized
    assert levels(upgraded) == (2, 2)


def test_a_bucket_that_is_new_to_a_finalized_folder_gets_its_level_first(upgraded):
    run(upgraded)
    shutil.rmtree(upgraded / "bucket")
    (upgraded / "data" / "tierlog" / "store.json").unlink()
    harness = BrokerHarness(upgraded)
    calls = [key for name, key in harness.store.calls if name == "put"]
    harness.broker.close()
    ours = [key for key in calls if key.startswith(("format/", "topics/"))]
    assert ours[:1] == ["format/00000000000000000001.json"]
    assert levels(upgraded) == (2, 2)


def test_a_damaged_partition_keeps_the_way_back_open(upgraded):
    flip(next((upgraded / "data" / "t-0").glob("*.log")), 80)
    (upgraded / "data" / ".kafka_cleanshutdown").unlink()
    with pytest.raises(ConfigurationError, match=r"damaged.* t-0"):
        run(upgraded)
    assert levels(upgraded) == (1, 1)


def test_a_folder_that_lost_its_partitions_is_not_finalized(upgraded, tmp_path):
    shutil.copytree(upgraded / "data", tmp_path / "other")
    settings = BrokerSettings(
        data_dir=tmp_path / "other", cache_bytes=1 << 20, disk_reserve_bytes=0, take_over=True
    )
    Broker.open(settings, store=store_of(upgraded)).close()
    with pytest.raises(FencedError):
        run(upgraded)
    assert levels(upgraded) == (1, 1)


def test_a_running_broker_is_not_finalized(upgraded):
    harness = BrokerHarness(upgraded)
    try:
        with pytest.raises(FolderInUse):
            run(upgraded)
    finally:
        harness.broker.close()
    assert levels(upgraded) == (1, 1)


def test_a_record_that_rotted_stops_a_start_with_what_to_do(upgraded):
    run(upgraded)
    flip(upgraded / "data" / "tierlog" / "format.json", 90)
    with pytest.raises(CorruptManifest, match="storage finalize"):
        BrokerHarness(upgraded)
    (upgraded / "data" / "tierlog" / "format.json").unlink()
    assert run(upgraded).finalized
    assert values_of(upgraded) == VALUES


def test_a_new_folder_has_the_level_of_the_last_release(tmp_path, monkeypatch):
    monkeypatch.setitem(format_level.LEVELS, 2, "0.2.0")
    BrokerHarness(tmp_path).broker.close()
    assert levels(tmp_path) == (1, 1)
    assert not (tmp_path / "data" / "tierlog" / "format.json").exists()
    monkeypatch.setitem(format_level.LEVELS, 3, "0.3.0")
    monkeypatch.setattr("tierlog.broker.data_folder.data_folder.NEW_FOLDER_LEVEL", 2)
    BrokerHarness(tmp_path / "next").broker.close()
    assert levels(tmp_path / "next") == (2, 2)


def test_a_folder_that_is_finalized_while_it_waits_for_the_lock_has_the_new_level(
    upgraded, monkeypatch
):
    from tierlog.broker.data_folder import data_folder

    take = data_folder._take_lock

    def take_late(path):
        data_folder.write_level(path.parent, 2)
        return take(path)

    monkeypatch.setattr(data_folder, "_take_lock", take_late)
    folder = DataFolder(upgraded / "data")
    folder.close()
    assert folder.level == 2
