"""A commit whose response was lost may have moved the bucket's end: compaction in between must be
correct either way.
"""

import pytest

from hot_tier.log_config import LogConfig
from manifest.store import UNRECORDED_COMMITS_MAX
from record_format.errors import OutcomeUnknownError, StoreUnavailable
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


@pytest.fixture
def uncertain(house):
    """The bucket has one more segment than the broker knows, and the store is down. All earlier
    segments are compacted and mirrored.
    """
    house.broker.create_topic("t", config=COMPACT)
    last = fill(house, "t", 300)
    partition = house.broker.partition("t", 0)
    resize(partition, 1 << 20)  # so that compaction merges segments
    compacted(house, "t")
    offload(house, "t")
    known = partition.cold.end_offset
    house.stop_copying()
    resize(partition, 4096)
    for number in range(20):
        pairs = [(b"other-%d" % (number % 3 + i), b"%d" % number * 40) for i in range(10)]
        result = put(house, "t", pairs)
        last |= {key: (result.base_offset + i, value) for i, (key, value) in enumerate(pairs)}
    partition.log.roll()
    resize(partition, 1 << 20)
    (first, *_) = [view for view in partition.log.segments() if view.base_offset >= known]
    house.store.fail("put", FailsAfter(), when=lambda key: "/manifest/" in key)
    with pytest.raises(StoreUnavailable):
        losing_responses(house, lambda: partition.cold.offload(files_of(partition, first)))
    assert partition.cold.end_offset == known
    house.last = last
    return house


def resize(partition, segment_bytes):
    config = {**partition.log.config.overrides, "segment.bytes": segment_bytes}
    partition.log.update_config(LogConfig.parse(config))


def losing_responses(house, call):
    """Run `call` with a store that is down from the first lost response on."""
    real = house.store.put

    def put(key, body, **options):
        try:
            return real(key, body, **options)
        except OutcomeUnknownError:
            house.set_down(True)
            raise

    house.store.put = put
    try:
        call()
    finally:
        del house.store.put


def files_of(partition, view):
    return partition.log.sealed.files(view.base_offset)


@pytest.mark.parametrize("restarted", [False, True])
def test_compaction_after_a_commit_of_unknown_outcome_is_mirrored(uncertain, restarted):
    log = uncertain.broker.partition("t", 0).log
    before = log.size_bytes
    uncertain.broker.background.compactor.run_round()
    assert log.size_bytes < before
    if restarted:
        uncertain.restart()
    else:
        uncertain.set_down(False)
    uncertain.broker.background.copier.run_round()
    assert uncertain.broker.background.copier.wait_until_done(
        uncertain.broker.partitions(), timeout_s=20
    )
    assert (
        last_of(uncertain.records("t")) == last_of(cold_records(uncertain, "t")) == uncertain.last
    )
    assert not uncertain.broker.verify("t", deep=True).problems


def test_repeated_commits_of_unknown_outcome_do_not_look_like_an_older_copy(house):
    house.broker.create_topic("t", config={"segment.bytes": 4096, "retention.ms": -1})
    house.wait_for(lambda: house.broker.partition("t", 0).cold.ownership.claimed)
    house.stop_copying()
    for _ in range(20):
        house.produce("t", [b"x" * 100] * 10)
    partition = house.broker.partition("t", 0)
    for view in partition.log.segments()[: UNRECORDED_COMMITS_MAX + 1]:
        house.store.fail("put", FailsAfter(), when=lambda key: "/manifest/" in key)
        with pytest.raises(StoreUnavailable):
            losing_responses(house, lambda v=view: partition.cold.offload(files_of(partition, v)))
        house.set_down(False)
    house.restart()
    house.broker.background.copier.claim(house.broker.partition("t", 0))


def test_a_claim_of_unknown_outcome_is_repeated(house):
    house.restart(down=True, store_start_timeout_ms=1)
    house.stop_copying()
    house.broker.create_topic("t")
    house.set_down(False)
    partition = house.broker.partition("t", 0)
    house.store.fail("put", FailsAfter(), when=lambda key: "/manifest/" in key)
    with pytest.raises(StoreUnavailable):
        losing_responses(house, lambda: house.broker.background.copier.claim(partition))
    house.set_down(False)
    house.broker.background.copier.claim(partition)
    assert partition.cold.ownership.claimed
