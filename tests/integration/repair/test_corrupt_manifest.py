"""Every command reports a corrupt manifest in the bucket alike, whether decoding detects it or the
store's own checksum.
"""

import pytest

from tests.fakes.damage import flip
from tests.fakes.faulty_object_store import FailsBefore, fails_its_checksum
from tierlog.manifest.topic_objects import load_cluster
from tierlog.record_format.errors import CorruptManifest
from tierlog.repair.repair import repair_topic
from tierlog.repair.restore import RestoreOptions, restore
from tierlog.repair.verify import verify_topic

CONFIG = {"segment.bytes": 4096, "retention.ms": -1}


def corrupt_the_file(harness, key):
    path = harness.root / "bucket" / key
    flip(path, path.stat().st_size // 2)


def fail_the_checksum(harness, key):
    fault = FailsBefore(fails_its_checksum)
    harness.store.fail("get", fault, times=10**9, when=lambda requested: requested == key)


@pytest.fixture(params=[corrupt_the_file, fail_the_checksum])
def damage(request):
    return request.param


@pytest.fixture
def corrupt(harness, damage):
    """The key of the newest manifest of t-0."""
    harness.broker.create_topic("t", config=CONFIG)
    harness.fill(200)
    harness.offload()
    harness.stop_copying()
    cold = harness.broker.partition("t", 0)._cold
    key = cold._manifests.versions.key(cold.manifest.version)
    damage(harness, key)
    return key


def test_verify_and_repair_name_the_manifest(harness, corrupt):
    (problem,) = verify_topic(harness.broker, "t").problems
    assert (problem.kind, problem.object_key) == (
        "manifest-corrupt",
        harness.store.full_key(corrupt),
    )
    (step,) = repair_topic(harness.broker, "t")
    assert step.action == "none"
    assert "manifest-corrupt" in step.detail


def test_reading_that_version_raises_corrupt_manifest(harness, corrupt):
    cold = harness.broker.partition("t", 0)._cold
    with pytest.raises(CorruptManifest, match=corrupt):
        cold.reads.manifest_version(cold.manifest.version)


def test_readiness_reports_that_the_partition_is_not_offloaded(harness, corrupt):
    manifests = harness.broker.partition("t", 0)._cold._manifests
    manifests._newest = (-1, "", (0, 0))  # the next commit reloads, as a start does
    harness.fill(100)
    harness.copy_sealed()
    (degraded,) = harness.broker.readiness().degraded
    assert "t-0 is not offloaded any more" in degraded
    assert corrupt in degraded


def test_a_restore_skips_the_topic_and_reports_why(harness, corrupt, tmp_path):
    options = RestoreOptions(data_dir=tmp_path / "restored", gap=0, clock=lambda: 0)
    report = restore(harness.store, options)
    assert [corrupt in topic.unreadable for topic in report.others] == [True]


def test_a_corrupt_cluster_object_is_not_an_unavailable_store(harness, damage):
    """A running broker continues."""
    damage(harness, "cluster.json")
    with pytest.raises(CorruptManifest, match=r"cluster\.json"):
        load_cluster(harness.store)
    harness.broker.bucket.store_status._ping()
    assert harness.broker.bucket.store_status.unavailable is None
