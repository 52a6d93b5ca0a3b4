"""A repair that is only planned changes nothing: no byte, no name, no time of a file, in either
tier; and says what a repair that is applied then does.
"""

import shutil
from unittest.mock import Mock

import pytest

from broker.broker import Broker
from broker.repair.offline_plan import plan_repair
from broker.settings import BrokerSettings
from cold_tier.open import open_store
from record_format.errors import ConfigurationError, FencedError
from tests.fakes.damage import flip
from tests.fakes.house import House

CONFIG = {"segment.bytes": 1024, "retention.ms": -1}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    house = House(tmp_path_factory.mktemp("made"))
    house.broker.create_topic("t", config=CONFIG)
    house.broker.create_topic("other")
    for number in range(4):
        if number == 2:
            house.offload()
            house.stop_copying()
        house.produce("t", [b"%d" % number * 60] * 10)
    house.broker.close()
    return house.root


@pytest.fixture
def root(made, tmp_path):
    """Topic `t`, two segments in the bucket and two that are not, stopped cleanly; a copy."""
    shutil.copytree(made, tmp_path / "root")
    return tmp_path / "root"


def snapshot(root):
    """Every file's bytes and times, and the folders."""
    return {
        str(path.relative_to(root)): (
            path.read_bytes() if path.is_file() else None,
            path.stat().st_mtime_ns,
        )
        for path in sorted(root.rglob("*"))
    }


def planned(root):
    settings = BrokerSettings(data_dir=root / "data", cache_bytes=1 << 20, disk_reserve_bytes=0)
    store = open_store(f"file://{root / 'bucket'}", must_exist=True)
    close = store.close = Mock(wraps=store.close)
    (root / "data" / ".lock").touch()  # of a folder that was copied or restored
    before = snapshot(root)
    try:
        return plan_repair(settings, store, "t", deep=True)
    finally:
        close.assert_called()
        assert snapshot(root) == before, "a plan changes nothing"


def told(steps):
    return [(step.action, step.base_offset, step.detail) for step in steps]


def applied(root):
    house = House(root)
    steps = house.broker.repair("t", deep=True, apply=True)
    house.broker.close()
    return told(steps)


def test_a_whole_topic_needs_nothing(root):
    assert planned(root) == []


def test_a_lost_object_of_a_folder_that_had_crashed(root):
    log = root / "data" / "t-0"
    (root / "data" / ".kafka_cleanshutdown").unlink()
    with max(log.glob("*.log")).open("ab") as file:
        file.write(b"torn")
    (log / "leader-epoch-checkpoint").unlink()
    (log / f"{99:020d}.log.deleted").write_bytes(b"")
    min((root / "bucket").glob("topics/t/*/0/segments/*.log")).unlink()
    plan = planned(root)
    assert [step.action for step in plan] == ["upload-again"]
    assert told(plan) == applied(root)


def test_a_damaged_log(root):
    (root / "data" / ".kafka_cleanshutdown").unlink()
    (root / "data" / "recovery-point-offset-checkpoint").write_text("0\n1\nt 0 40\n")
    flip(root / "data" / "t-0" / f"{30:020d}.log", 100)
    plan = planned(root)
    assert [step.action for step in plan] == ["cut"]
    assert told(plan) == applied(root)


def test_a_damaged_file_is_told_by_its_own_path(root):
    bad = root / "data" / "t-0" / "partition.metadata"
    bad.write_text("rotten")
    (step,) = planned(root)
    assert (step.action, str(bad) in step.detail) == ("none", True), step


def test_a_partition_of_another_owner_is_refused_as_it_would_be(root, tmp_path):
    shutil.copytree(root / "data", tmp_path / "older")
    house = House(root)
    house.wait_for(lambda: house.broker.partition("t", 0).cold.ownership.claimed)
    house.broker.close()
    shutil.rmtree(root / "data")
    shutil.copytree(tmp_path / "older", root / "data")
    with pytest.raises(FencedError, match="never recorded it"):
        planned(root)


def test_what_a_start_would_write_first_is_left_to_a_start(root):
    (root / "data" / "tierlog" / "take-over.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="being taken over"):
        planned(root)
    (root / "data" / "tierlog" / "take-over.json").unlink()
    shutil.rmtree(root / "bucket")
    (root / "bucket").mkdir()
    (root / "data" / "tierlog" / "store.json").unlink()
    with pytest.raises(ConfigurationError, match="start the broker once"):
        planned(root)


def test_a_running_broker_that_plans_claims_nothing(root):
    store = open_store(f"file://{root / 'bucket'}")
    settings = BrokerSettings(data_dir=root / "data", cache_bytes=1 << 20, disk_reserve_bytes=0)
    broker = Broker.open_idle(settings, store=store)
    before = snapshot(root / "bucket")
    assert broker.repair("t", deep=True) == []
    assert broker.collect_garbage("t").keys() == {0}
    assert not broker.partition("t", 0).cold.ownership.claimed
    assert snapshot(root / "bucket") == before
    with pytest.raises(ConfigurationError, match="in use by another broker"):
        plan_repair(settings, store, "t", deep=False)
    broker.close()
