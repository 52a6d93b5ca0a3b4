"""Garbage collection while an upload is being committed, or its commit has an unknown outcome."""

import pytest

from tests.fakes.faulty_object_store import FailsAfter
from tests.integration.broker.test_lost_responses import losing_responses
from tierlog.manifest.garbage import GarbagePolicy
from tierlog.record_format.errors import OutcomeUnknownError
from tierlog.repair.repair import repair_topic

NO_GRACE = GarbagePolicy(grace_ms=0)


@pytest.fixture
def rolled(harness):
    """50 records in the bucket, 50 in a sealed segment; the copier is stopped."""
    harness.broker.create_topic("t", config={"segment.bytes": 1 << 20, "retention.ms": -1})
    produce(harness)
    harness.offload()
    harness.stop_copying()
    produce(harness)
    harness.broker.partition("t", 0).upkeep.roll()
    return harness


def produce(harness):
    harness.produce("t", [b"%d" % number for number in range(50)])


def offload_next(harness):
    partition = harness.broker.partition("t", 0)
    partition._cold.offload(partition._log.sealed.prepare_upload(partition.cold_end_offset))


def replace_first(harness):
    partition = harness.broker.partition("t", 0)
    partition._cold.replace_compacted(
        list(partition.cold_entries(0)), partition._log.sealed.prepare_upload(0)
    )


def repair_first(harness):
    (first,) = harness.broker.partition("t", 0).cold_entries(0)
    (harness.root / "bucket" / first.log_key).unlink()
    assert [step.done for step in repair_topic(harness.broker, "t", apply=True)] == [True]


def bucket_is_complete(harness):
    partition = harness.broker.partition("t", 0)
    partition._cold.resolve_failed_commit()
    assert partition.upkeep.delete_local(partition.cold_end_offset) == [0, 50]
    partition.upkeep.reap(at_once=True)
    return [record.offset for record in harness.records("t")] == list(range(100))


def test_objects_of_a_commit_with_unknown_outcome_are_not_garbage(rolled):
    """The response is lost, the outage outlasts the grace period, and collection runs first."""
    partition = rolled.broker.partition("t", 0)
    rolled.store.fail("put", FailsAfter(), when=lambda key: "/manifest/" in key)
    with pytest.raises(OutcomeUnknownError):
        losing_responses(rolled, lambda: offload_next(rolled))
    assert partition.cold_end_offset == 50
    rolled.set_down(False)
    partition.upkeep.collect_garbage(NO_GRACE)
    assert bucket_is_complete(rolled)


def collecting_after(harness, monkeypatch, is_put):
    """Collect garbage, without a grace period, after each put of a matching key."""
    partition, put = harness.broker.partition("t", 0), harness.store.put

    def put_and_collect(key, body, **options):
        stat = put(key, body, **options)
        if is_put(key):
            partition.upkeep.collect_garbage(NO_GRACE)
        return stat

    monkeypatch.setattr(harness.store, "put", put_and_collect, raising=False)


@pytest.mark.parametrize(
    "uploads",
    [[offload_next], [replace_first, offload_next], [repair_first, offload_next]],
)
def test_an_upload_in_progress_is_not_garbage(rolled, monkeypatch, uploads):
    collecting_after(rolled, monkeypatch, lambda key: key.endswith(".indexes"))
    for upload in uploads:
        upload(rolled)
    assert bucket_is_complete(rolled)


def test_a_merged_page_is_not_garbage_before_its_commit(harness, monkeypatch):
    for name, small in {"INLINE_MAX": 2, "SMALL_PAGE": 1, "PAGE_ENTRIES": 4}.items():
        monkeypatch.setattr(f"tierlog.manifest.codec.{name}", small)
    harness.broker.create_topic("t", config={"segment.bytes": 1 << 20, "retention.ms": -1})
    for _ in range(6):
        produce(harness)
        harness.offload()
    harness.stop_copying()
    cold = harness.broker.partition("t", 0)._cold
    assert len(cold.manifest.pages) == 4
    collecting_after(harness, monkeypatch, lambda key: "/pages/" in key)
    monkeypatch.setattr("tierlog.manifest.codec.RUN_MAX", 4)
    cold.merge_pages()
    assert len(cold.manifest.pages) == 1
    harness.restart()
    assert len(list(harness.broker.partition("t", 0).cold_entries(0))) == 6
