"""A manifest that rotted in the bucket is told alike by every command, whether it is decoding that
finds out or a store that keeps checksums.
"""

import pytest

from broker.repair.restore import RestoreOptions, restore
from manifest.topic_objects import load_cluster
from record_format.errors import CorruptManifest
from tests.fakes.damage import flip
from tests.fakes.faulty_object_store import FailsBefore, fails_its_checksum

CONFIG = {"segment.bytes": 4096, "retention.ms": -1}


def rot_in_a_folder(house, key):
    path = house.root / "bucket" / key
    flip(path, path.stat().st_size // 2)


def rot_under_a_checksum(house, key):
    fault = FailsBefore(fails_its_checksum)
    house.store.fail("get", fault, times=10**9, when=lambda asked: asked == key)


@pytest.fixture(params=[rot_in_a_folder, rot_under_a_checksum])
def rot(request):
    return request.param


@pytest.fixture
def rotten(house, rot):
    """The key of the newest manifest of t-0."""
    house.broker.create_topic("t", config=CONFIG)
    house.fill(200)
    house.offload()
    house.stop_copying()
    cold = house.broker.partition("t", 0).cold
    key = cold._manifests.versions.key(cold.manifest.version)
    rot(house, key)
    return key


def test_verify_and_repair_name_it(house, rotten):
    (problem,) = house.broker.verify("t").problems
    assert (problem.kind, problem.object_key) == ("manifest-corrupt", house.store.full_key(rotten))
    (step,) = house.broker.repair("t")
    assert step.action == "none"
    assert "manifest-corrupt" in step.detail


def test_who_asks_for_that_version_hears_that_it_is_corrupt(house, rotten):
    cold = house.broker.partition("t", 0).cold
    with pytest.raises(CorruptManifest, match=rotten):
        cold.version(cold.manifest.version)


def test_readiness_says_that_nothing_is_offloaded_any_more(house, rotten):
    manifests = house.broker.partition("t", 0).cold._manifests
    manifests._newest = (-1, "", (0, 0))  # a commit looks again, as a start does
    house.fill(100)
    house.copy_sealed()
    (degraded,) = house.broker.readiness().degraded
    assert "t-0 is not offloaded any more" in degraded
    assert rotten in degraded


def test_a_restore_leaves_the_topic_out_and_says_why(house, rotten, tmp_path):
    options = RestoreOptions(data_dir=tmp_path / "restored", gap=0, clock=lambda: 0)
    report = restore(house.store, options)
    assert [rotten in one.unreadable for one in report.others] == [True]


def test_a_cluster_object_that_rotted_is_no_store_that_does_not_answer(house, rot):
    """Whoever starts is refused; a broker that runs goes on."""
    rot(house, "cluster.json")
    with pytest.raises(CorruptManifest, match=r"cluster\.json"):
        load_cluster(house.store)
    house.broker.bucket.store_status._ping()
    assert house.broker.bucket.store_status.unavailable is None
