"""A commit whose response was lost may have moved the bucket's end: compaction in between must be
correct either way.
"""

import pytest

from tests.fakes.compacted_topics import (
    COMPACT,
    cold_records,
    compacted,
    fill,
    last_of,
    offload,
    put,
)
from tests.fakes.faulty_object_store import FailsAfter
from tierlog.hot_tier.log_config import LogConfig
from tierlog.manifest.store import UNRECORDED_COMMITS_MAX
from tierlog.record_format.errors import OutcomeUnknownError
from tierlog.repair.verify import verify_topic


@pytest.fixture
def uncertain(harness):
    """The bucket has one more segment than the broker knows, and the store is down. All earlier
    segments are compacted and mirrored.
    """
    harness.broker.create_topic("t", config=COMPACT)
    last = fill(harness, "t", 300)
    partition = harness.broker.partition("t", 0)
    resize(partition, 1 << 20)  # so that compaction merges segments
    compacted(harness, "t")
    offload(harness, "t")
    known = partition.cold_end_offset
    harness.stop_copying()
    resize(partition, 4096)
    for number in range(20):
        pairs = [(b"other-%d" % (number % 3 + i), b"%d" % number * 40) for i in range(10)]
        result = put(harness, "t", pairs)
        last |= {key: (result.base_offset + i, value) for i, (key, value) in enumerate(pairs)}
    partition.upkeep.roll()
    resize(partition, 1 << 20)
    (first, *_) = [view for view in partition.local_segments() if view.base_offset >= known]
    harness.store.fail("put", FailsAfter(), when=lambda key: "/manifest/" in key)
    with pytest.raises(OutcomeUnknownError):
        losing_responses(harness, lambda: partition._cold.offload(files_of(partition, first)))
    assert partition.cold_end_offset == known
    harness.last = last
    return harness


def resize(partition, segment_bytes):
    config = {**partition.config.overrides, "segment.bytes": segment_bytes}
    partition._log.update_config(LogConfig.parse(config))


def losing_responses(harness, call):
    """Run `call` with a store that is down from the first lost response on."""
    real = harness.store.put

    def put(key, body, **options):
        try:
            return real(key, body, **options)
        except OutcomeUnknownError:
            harness.set_down(True)
            raise

    harness.store.put = put
    try:
        call()
    finally:
        del harness.store.put


def files_of(partition, view):
    return partition._log.sealed.prepare_upload(view.base_offset)


@pytest.mark.parametrize("restarted", [False, True])
def test_compaction_after_a_commit_of_unknown_outcome_is_mirrored(uncertain, restarted):
    log = uncertain.broker.partition("t", 0)._log
    before = log.size_bytes
    uncertain.broker.background.compactor.run_round()
    assert log.size_bytes < before
    if restarted:
        uncertain.restart()
    else:
        uncertain.set_down(False)
    uncertain.upload_sealed()
    assert (
        last_of(uncertain.records("t")) == last_of(cold_records(uncertain, "t")) == uncertain.last
    )
    assert not verify_topic(uncertain.broker, "t", deep=True).problems


def test_repeated_commits_of_unknown_outcome_do_not_look_like_an_older_copy(harness):
    harness.broker.create_topic("t", config={"segment.bytes": 4096, "retention.ms": -1})
    harness.wait_for(lambda: harness.broker.partition("t", 0).is_claimed)
    harness.stop_copying()
    for _ in range(20):
        harness.produce("t", [b"x" * 100] * 10)
    partition = harness.broker.partition("t", 0)
    for view in partition.local_segments()[: UNRECORDED_COMMITS_MAX + 1]:
        harness.store.fail("put", FailsAfter(), when=lambda key: "/manifest/" in key)
        with pytest.raises(OutcomeUnknownError):
            losing_responses(
                harness, lambda v=view: partition._cold.offload(files_of(partition, v))
            )
        harness.set_down(False)
    harness.restart()
    harness.broker.partition("t", 0).claim()


def test_a_claim_of_unknown_outcome_is_repeated(harness):
    harness.restart(down=True, store_start_timeout_ms=1)
    harness.stop_copying()
    harness.broker.create_topic("t")
    harness.set_down(False)
    partition = harness.broker.partition("t", 0)
    harness.store.fail("put", FailsAfter(), when=lambda key: "/manifest/" in key)
    with pytest.raises(OutcomeUnknownError):
        losing_responses(harness, partition.claim)
    harness.set_down(False)
    partition.claim()
    assert partition.is_claimed
