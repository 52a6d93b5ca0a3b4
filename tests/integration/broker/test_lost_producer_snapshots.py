"""A lost or corrupt producer snapshot is read from the bucket."""

import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.fakes.damage import flip
from tierlog.broker.data_folder.data_folder import CLEAN_SHUTDOWN


@pytest.fixture
def stopped(harness):
    """One record of an idempotent producer, only in the bucket; an empty segment on disk."""
    harness.broker.create_topic("t", config={"retention.ms": -1})
    harness.produce("t", [b"before"])
    harness.produce_idempotent(sequence=0)
    harness.offload()
    harness.broker.partition("t", 0).upkeep.delete_local(2)
    harness.broker.close()
    return harness


def snapshot_of(harness):
    """The only file that has the producer's state."""
    (path,) = (harness.root / "data" / "t-0").glob("*.snapshot")
    return path


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: flip(path, 10)])
@pytest.mark.parametrize("crashed", [False, True])
def test_a_damaged_snapshot_is_read_from_the_bucket(stopped, damage, crashed):
    snapshot = snapshot_of(stopped)
    content = snapshot.read_bytes()
    damage(snapshot)
    if crashed:
        (stopped.root / "data" / CLEAN_SHUTDOWN).unlink()
    stopped.broker = stopped.open()
    assert snapshot.read_bytes() == content
    again = stopped.produce_idempotent(sequence=0)
    assert (again.duplicate, again.base_offset) == (True, 1)
    assert stopped.produce_idempotent(sequence=1).base_offset == 2


def test_the_snapshot_of_a_lost_folder_is_read_from_the_bucket(stopped):
    shutil.rmtree(stopped.root / "data" / "t-0")
    stopped.broker = stopped.open()
    again = stopped.produce_idempotent(sequence=0)
    assert (again.duplicate, again.base_offset) == (True, 1)
    assert stopped.produce_idempotent(sequence=1).base_offset == 2


def test_the_broker_starts_without_producer_state_while_the_store_is_down(stopped):
    snapshot_of(stopped).unlink()
    with capture_logs() as logs:
        stopped.broker = stopped.open(down=True)
    (warning,) = [line for line in logs if line["event"] == "producer state is unknown"]
    assert warning["partition"] == "t-0"
    assert stopped.produce("t", [b"more"]).base_offset == 2
