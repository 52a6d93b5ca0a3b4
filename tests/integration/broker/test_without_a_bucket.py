"""Without a bucket the cold tier is empty, and no local segment counts as uploaded."""

import pytest

from tests.fakes.broker_harness import BrokerHarness, run_janitor
from tierlog.broker.broker import Broker
from tierlog.broker.bucket.cold_log import EmptyColdTier
from tierlog.broker.settings import BrokerSettings
from tierlog.record_format.errors import UnknownManifestVersion

LIMITS = {"segment.bytes": 4096, "retention.ms": -1, "local.retention.bytes": 4096}


@pytest.fixture
def alone(tmp_path, harness):
    """A broker without a bucket, whose topic `t` has segments beyond `local.retention.bytes`."""
    harness.broker.close()
    settings = BrokerSettings(data_dir=tmp_path / "alone", disk_reserve_bytes=0)
    harness.broker = Broker.open_idle(settings, store=None)
    harness.broker.create_topic("t", config=LIMITS)
    harness.fill(300)
    return harness


def kept(alone: BrokerHarness) -> int:
    """The records that are left after everything that may delete a segment."""
    run_janitor(alone.broker)
    alone.broker.background.janitor.relieve_disk(1 << 40)
    return len(alone.records("t", offset=alone.broker.partition("t", 0).first_local_offset))


def test_a_segment_goes_by_the_topics_retention_alone(alone):
    assert kept(alone) == 300
    alone.broker.alter_topic("t", config={"retention.bytes": 8192})
    assert 0 < kept(alone) < 300


def test_planted_an_empty_tier_that_counts_as_uploaded_loses_records(alone, monkeypatch):
    monkeypatch.setattr(EmptyColdTier, "end_offset", 1 << 62)
    assert kept(alone) < 300


def test_there_is_nothing_to_claim_to_fence_or_to_list(alone):
    partition = alone.broker.partition("t", 0)
    partition.claim()
    partition.look_for_owner()
    assert partition.is_claimed
    assert not partition.has_bucket
    assert not partition.offloads
    assert (partition.manifest, partition.gaps, partition.cold_end_offset) == (None, (), 0)
    assert list(partition.cold_entries(0)) == []
    with pytest.raises(UnknownManifestVersion, match="on local disk alone"):
        partition.manifest_version(None)
    assert alone.broker.trim("t", 0, 150) == 150
