"""Planning a repair changes no content, name or modification time of any file in either tier, and
lists the steps that applying it then takes.
"""

import shutil
from unittest.mock import Mock

import pytest

from tests.fakes.broker_harness import BrokerHarness
from tests.fakes.damage import flip
from tests.fakes.snapshot import snapshot
from tierlog.broker.broker import Broker
from tierlog.broker.settings import BrokerSettings
from tierlog.object_store.open import open_store
from tierlog.record_format.errors import ConfigurationError, FencedError
from tierlog.repair.repair import plan_repair, repair_topic

CONFIG = {"segment.bytes": 1024, "retention.ms": -1}


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    harness = BrokerHarness(tmp_path_factory.mktemp("template"))
    harness.broker.create_topic("t", config=CONFIG)
    harness.broker.create_topic("other")
    for number in range(4):
        if number == 2:
            harness.offload()
            harness.stop_copying()
        harness.produce("t", [b"%d" % number * 60] * 10)
    harness.broker.close()
    return harness.root


@pytest.fixture
def root(template, tmp_path):
    """A cleanly stopped broker; topic `t` has two segments in the bucket and two only on disk."""
    shutil.copytree(template, tmp_path / "root")
    return tmp_path / "root"


def plan(root):
    settings = BrokerSettings(data_dir=root / "data", cache_bytes=1 << 20, disk_reserve_bytes=0)
    store = open_store(f"file://{root / 'bucket'}", must_exist=True)
    close = store.close = Mock(wraps=store.close)
    (root / "data" / ".lock").touch()  # as in a copied or restored folder
    before = snapshot(root)
    try:
        return plan_repair(settings, store, "t", deep=True)
    finally:
        close.assert_called()
        assert snapshot(root) == before, "a plan changes nothing"


def summary(steps):
    return [(step.action, step.base_offset, step.detail) for step in steps]


def apply(root):
    harness = BrokerHarness(root)
    steps = repair_topic(harness.broker, "t", deep=True, apply=True)
    harness.broker.close()
    return summary(steps)


def test_an_intact_topic_needs_no_repair(root):
    assert plan(root) == []


def test_a_missing_object_is_planned_to_be_uploaded_again(root):
    log = root / "data" / "t-0"
    (root / "data" / ".kafka_cleanshutdown").unlink()
    with max(log.glob("*.log")).open("ab") as file:
        file.write(b"torn")
    (log / "leader-epoch-checkpoint").unlink()
    (log / f"{99:020d}.log.deleted").write_bytes(b"")
    min((root / "bucket").glob("topics/t/*/0/segments/*.log")).unlink()
    planned = plan(root)
    assert [step.action for step in planned] == ["upload-again"]
    assert summary(planned) == apply(root)


def test_a_damaged_log_is_planned_to_be_truncated(root):
    (root / "data" / ".kafka_cleanshutdown").unlink()
    (root / "data" / "recovery-point-offset-checkpoint").write_text("0\n1\nt 0 40\n")
    flip(root / "data" / "t-0" / f"{30:020d}.log", 100)
    planned = plan(root)
    assert [step.action for step in planned] == ["cut"]
    assert summary(planned) == apply(root)


def test_a_damaged_file_is_named_by_its_path(root):
    bad = root / "data" / "t-0" / "partition.metadata"
    bad.write_text("rotten")
    (step,) = plan(root)
    assert (step.action, str(bad) in step.detail) == ("none", True), step


def test_planning_for_a_partition_of_another_owner_is_fenced(root, tmp_path):
    shutil.copytree(root / "data", tmp_path / "older")
    harness = BrokerHarness(root)
    harness.wait_for(lambda: harness.broker.partition("t", 0).is_claimed)
    harness.broker.close()
    shutil.rmtree(root / "data")
    shutil.copytree(tmp_path / "older", root / "data")
    with pytest.raises(FencedError, match="never recorded it"):
        plan(root)


def test_a_folder_that_a_start_must_complete_first_is_refused(root):
    (root / "data" / "tierlog" / "take-over.json").write_text("{}")
    with pytest.raises(ConfigurationError, match="being taken over"):
        plan(root)
    (root / "data" / "tierlog" / "take-over.json").unlink()
    shutil.rmtree(root / "bucket")
    (root / "bucket").mkdir()
    (root / "data" / "tierlog" / "store.json").unlink()
    with pytest.raises(ConfigurationError, match="start the broker once"):
        plan(root)


def test_planning_in_a_running_broker_claims_nothing(root):
    store = open_store(f"file://{root / 'bucket'}")
    settings = BrokerSettings(data_dir=root / "data", cache_bytes=1 << 20, disk_reserve_bytes=0)
    broker = Broker.open_idle(settings, store=store)
    before = snapshot(root / "bucket")
    assert repair_topic(broker, "t", deep=True) == []
    assert broker.collect_garbage("t").keys() == {0}
    assert not broker.partition("t", 0).is_claimed
    assert snapshot(root / "bucket") == before
    with pytest.raises(ConfigurationError, match="in use by another broker"):
        plan_repair(settings, store, "t", deep=False)
    broker.close()
