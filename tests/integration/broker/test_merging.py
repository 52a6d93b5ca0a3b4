"""Small segments in the bucket become one, whatever happens meanwhile, and read as before."""

import threading

import pytest
from msgspec.structs import replace

from tests.fakes.broker_harness import run_janitor
from tests.fakes.compacted_topics import cold_records, last_of, put
from tests.fakes.faulty_object_store import FailsAfter, WrongBytes
from tierlog.broker.background import merger as merger_module
from tierlog.broker.partition.segment_listing import iter_segments
from tierlog.broker.partition.upkeep import PartitionUpkeep
from tierlog.cold_tier.index_bundle import SectionKind, parse_bundle, parse_directory
from tierlog.cold_tier.merged_segment import merge_objects
from tierlog.cold_tier.segment_lookup import load_bundle
from tierlog.hot_tier.log_config import LogConfig
from tierlog.hot_tier.log_writer import Acks
from tierlog.manifest.garbage import GarbagePolicy
from tierlog.object_store.folder import FolderStore
from tierlog.record_format.checkpoint_files import parse_snapshot
from tierlog.record_format.decode import EndMarker
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import (
    CorruptDataError,
    InvalidRequest,
    OutcomeUnknownError,
    StoreUnavailable,
    UnknownSegment,
)
from tierlog.record_format.produced import ProduceLimits, build_marker, check_produced
from tierlog.record_format.segment_entry import SegmentEntry
from tierlog.repair.verify import verify_topic
from tierlog.spark_reader.arrow_dataset import dataset

NO_GRACE = GarbagePolicy(grace_ms=0, keep_ms=0, keep_min=1)
CONFIG = {"segment.bytes": 1 << 20, "retention.ms": -1, "index.interval.bytes": 200}


class Killed(BaseException):
    pass


def small_segments(harness, count, *, config=CONFIG):
    """One of ten records each, only in the bucket."""
    harness.broker.create_topic("t", config=config)
    partition = harness.broker.partition("t", 0)
    for _ in range(count):
        harness.fill(10)
        partition.upkeep.roll()
    return cold_only(harness)


def cold_only(harness):
    harness.offload()
    harness.stop_copying()
    partition = harness.broker.partition("t", 0)
    partition.upkeep.delete_local(partition.cold_end_offset)
    return partition


def merge(harness, **wait):
    return harness.broker.merge_segments("t", **{"wait_ms": 60_000, **wait})


def merge_elsewhere(harness):
    """As a job does, which reads and writes the bucket and has the broker commit."""
    plan = harness.broker.plan_merges("t", 0)
    for run in plan.runs:
        merged = merge_objects(harness.store, run, plan, scratch=harness.root / "elsewhere")
        harness.broker.commit_merged("t", 0, merged)
        assert not (harness.root / "elsewhere").exists()


@pytest.fixture(params=[merge, merge_elsewhere])
def merge_all(request):
    return request.param


def entries(harness):
    return list(harness.broker.partition("t", 0).cold_entries(0))


def spans(harness):
    return [(one.base_offset, one.last_offset) for one in entries(harness)]


def facts(harness):
    return [(one.offset, one.value, one.timestamp) for one in harness.records("t")]


def bodies(harness):
    return b"".join(
        harness.store.get(one.log_key, max_bytes=one.size_bytes) for one in entries(harness)
    )


def objects(harness):
    folder = entries(harness)[0].log_key.rpartition("/")[0]
    return sorted(stat.key for stat in harness.store.list(f"{folder}/", limit=1000))


def test_merged_segments_have_the_same_bytes_and_indexes_of_their_own(harness):
    partition = small_segments(harness, 6)
    before, body = facts(harness), bodies(harness)
    done = merge(harness)
    assert (done.merged_segments, done.new_segments, done.remaining_segments) == (6, 1, 0)
    assert done.merged_bytes == len(body)
    assert spans(harness) == [(0, 59)]
    assert bodies(harness) == body
    assert facts(harness) == before
    assert verify_topic(harness.broker, "t", deep=True).ok
    assert partition.offset_for_timestamp(41) == (41, 41)
    (merged,) = entries(harness)
    assert len(load_bundle(harness.store, merged).offset_index) >= 4 * 8
    assert merge(harness).new_segments == 0


@pytest.mark.parametrize("key_filter", [True, False])
def test_a_segment_that_is_merged_elsewhere_is_as_one_that_the_broker_merges(harness, key_filter):
    """With its chunks, and with filters of keys or without."""
    harness.restart(cache_chunk_bytes=1000)
    small_segments(harness, 6, config={**CONFIG, "key.filter": key_filter})
    plan = harness.broker.plan_merges("t", 0)
    merged = merge_objects(harness.store, plan.runs[0], plan, scratch=harness.root / "elsewhere")
    merge(harness)
    (here,) = entries(harness)
    unlike = ("log_key", "indexes_key")
    assert {name: getattr(merged, name) for name in SegmentEntry.__struct_fields__} == {
        name: getattr(merged if name in unlike else here, name)
        for name in SegmentEntry.__struct_fields__
    }
    bodies = [harness.store.get(one.indexes_key, max_bytes=1 << 20) for one in (merged, here)]
    assert bodies[0] == bodies[1]
    assert len(parse_bundle(bodies[0], file="f").table.chunks) > 3
    kinds = parse_directory(bodies[0], file="f").sections
    assert (SectionKind.KEY_FILTERS in kinds) == key_filter
    harness.broker.commit_merged("t", 0, merged)  # its bytes are there: it changes nothing
    assert entries(harness) == [here]


def test_only_what_has_the_bytes_of_its_segments_is_committed(harness):
    small_segments(harness, 4)
    plan = harness.broker.plan_merges("t", 0)
    (run,) = plan.runs
    short = merge_objects(harness.store, run[:3], plan, scratch=harness.root / "elsewhere")
    whole = merge_objects(harness.store, run, plan, scratch=harness.root / "elsewhere")
    before = entries(harness)
    for wrong, error in (
        (replace(short, last_offset=39), CorruptDataError),
        (replace(whole, last_offset=45), UnknownSegment),
        (replace(whole, record_count=41), CorruptDataError),
        (replace(whole, log_key=run[0].log_key), InvalidRequest),
        (replace(whole, log_key="topics/other/x.log", indexes_key="y"), InvalidRequest),
        (replace(whole, log_crc32c=1), CorruptDataError),
        (replace(whole, indexes_crc32c=1), CorruptDataError),
        (replace(whole, base_offset=10, last_offset=19), InvalidRequest),
    ):
        with pytest.raises(error):
            harness.broker.commit_merged("t", 0, wrong)
    assert entries(harness) == before
    partition = harness.broker.partition("t", 0)
    harness.store.delete([whole.log_key])
    with pytest.raises(CorruptDataError):
        harness.broker.commit_merged("t", 0, whole)
    harness.broker.trim("t", 0, 15)
    with pytest.raises(UnknownSegment, match="they have changed"):
        harness.broker.commit_merged("t", 0, whole)
    harness.broker.commit_merged("t", 0, merge_objects_of(harness))
    assert spans(harness) == [(10, 39)]
    assert partition.epochs()


def merge_objects_of(harness):
    plan = harness.broker.plan_merges("t", 0)
    return merge_objects(harness.store, plan.runs[0], plan, scratch=harness.root / "elsewhere")


def test_what_is_on_local_disk_is_not_merged(harness):
    partition = small_segments(harness, 3)
    for _ in range(3):
        harness.fill(10)
        partition.upkeep.roll()
    harness.upload_sealed()
    merge(harness)
    assert spans(harness) == [(0, 29), (30, 39), (40, 49), (50, 59)]
    assert [view.base_offset for view in partition.local_segments()] == [30, 40, 50, 60]


def test_a_leader_may_have_parts_of_a_merged_segment_on_its_disk(harness, monkeypatch):
    """As a replica that had not deleted yet what the leader before had, and merged."""
    harness.broker.create_topic("t", config=CONFIG)
    partition = harness.broker.partition("t", 0)
    for _ in range(5):
        harness.fill(10)
        partition.upkeep.roll()
    harness.offload()
    harness.stop_copying()
    monkeypatch.setattr(
        PartitionUpkeep,
        "mergeable_entries",
        lambda _, start: (one for one in partition.cold_entries(start) if one.base_offset < 30),
    )
    merge(harness)
    assert spans(harness) == [(0, 29), (30, 39), (40, 49)]
    before, listed = facts(harness), list(iter_segments(partition))
    assert [one.base_offset for one in listed] == [0, 10, 20, 30, 40]
    assert verify_topic(harness.broker, "t", deep=True).ok
    partition.upkeep.delete_local(10)
    assert facts(harness) == before
    partition.update_config(LogConfig.parse({**CONFIG, "retention.ms": 1000}))
    run_janitor(harness.broker)
    assert (partition.log_start_offset, spans(harness)) == (50, [])


def test_what_was_merged_and_is_on_disk_too_does_not_keep_compaction_from_working(
    harness, monkeypatch
):
    harness.broker.create_topic("t", config=CONFIG)
    partition = harness.broker.partition("t", 0)
    for number in range(5):
        put(harness, "t", [(b"key-%d" % (key % 7), b"%d" % number * 60) for key in range(10)])
        partition.upkeep.roll()
    harness.offload()
    harness.stop_copying()
    monkeypatch.setattr(
        PartitionUpkeep,
        "mergeable_entries",
        lambda _, start: (one for one in partition.cold_entries(start) if one.base_offset < 30),
    )
    merge(harness)
    compacts = {**CONFIG, "cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0}
    compacts["segment.bytes"] = 1024  # so that no two become one
    changed = LogConfig.parse(compacts)
    partition.check_change(partition.config, changed)
    partition.update_config(changed)
    partition.compaction.give_up_merged()  # as of any partition that leads others
    harness.broker.background.compactor.run_round()
    harness.copy_sealed()
    assert partition.is_mirrored
    assert last_of(harness.records("t")) == last_of(cold_records(harness, "t"))
    assert {key: value for key, (_, value) in last_of(harness.records("t")).items()} == {
        b"key-%d" % key: b"4" * 60 for key in range(7)
    }
    assert verify_topic(harness.broker, "t", deep=True).ok


def test_compacted_topics_are_refused(harness):
    harness.broker.create_topic("t", config={"cleanup.policy": "compact"})
    with pytest.raises(InvalidRequest, match="compaction merges"):
        merge(harness)


def test_pins_and_the_grace_period_keep_what_was_merged(harness):
    partition = small_segments(harness, 3)
    pinned, old = partition.manifest.version, set(objects(harness))
    partition.pins.create_pin("p", pinned)
    merge(harness)
    partition.upkeep.collect_garbage(GarbagePolicy())
    assert old < set(objects(harness))
    partition.upkeep.collect_garbage(NO_GRACE)
    assert old < set(objects(harness))
    partition.pins.delete_pin("p")
    partition.upkeep.collect_garbage(NO_GRACE)
    assert len(objects(harness)) == 2
    assert not old & set(objects(harness))


def merging_thread():
    """Not the background's, whose requests come at any time."""
    name = threading.current_thread().name
    return name == threading.main_thread().name or name.startswith("merge")


def failing_at(harness, number, error, *, calls):
    """Call `error` before this call of the merge's own, and each that follows; whether any was."""
    seen = []

    def before(call, key):
        if call in calls and merging_thread():
            seen.append(key)
            if len(seen) >= number:
                error(call, key)

    harness.store.before_call = before
    return lambda: len(seen) >= number


ANY_CALL = ("put", "put_file", "get", "get_range", "head", "list")


def unavailable(_call, key):
    raise StoreUnavailable(f"{key}: down")


def killed(_call, key):
    raise Killed(key)


@pytest.mark.parametrize("error", [unavailable, killed])
def test_a_merge_that_ends_at_any_request_loses_nothing(harness, error, merge_all):
    small_segments(harness, 3)
    before, number, merged = facts(harness), 0, False
    while not merged:
        number += 1
        is_reached = failing_at(harness, number, error, calls=ANY_CALL)
        try:
            merge_all(harness)
        except (StoreUnavailable, OutcomeUnknownError):
            pass
        except Killed:
            harness.restart()
            harness.stop_copying()
        merged = not is_reached()
        harness.store.before_call = lambda call, key: None
        harness.broker.partition("t", 0).claim()
        harness.broker.partition("t", 0)._cold.resolve_failed_commit()
        assert spans(harness) in ([(0, 29)], [(0, 9), (10, 19), (20, 29)])
    assert number > 12, "a merge of three has so many requests"
    assert spans(harness) == [(0, 29)]
    assert facts(harness) == before
    assert verify_topic(harness.broker, "t", deep=True).ok
    harness.broker.partition("t", 0).upkeep.collect_garbage(NO_GRACE)
    assert len(objects(harness)) == 2


def test_a_write_whose_answer_was_lost_is_looked_at(harness):
    small_segments(harness, 3)
    before, number, is_reached = facts(harness), 0, lambda: True
    while is_reached():
        number += 1
        is_reached = failing_at(
            harness,
            number,
            lambda call, _: harness.store.fail(call, FailsAfter()),
            calls=("put", "put_file"),
        )
        try:
            merge(harness)
        except OutcomeUnknownError:
            assert spans(harness) == [(0, 9), (10, 19), (20, 29)]
        else:
            assert spans(harness) == [(0, 29)]
            small = harness.broker.partition("t", 0)
            if is_reached():  # of the commit: its own nonce was found
                assert number == 3
                break
        assert facts(harness) == before
    assert number == 3
    assert small.manifest == small._cold.load_newest()
    assert facts(harness) == before


@pytest.mark.parametrize("suffix", [".log", ".indexes"])
def test_what_is_stored_wrongly_is_not_committed(harness, suffix):
    small_segments(harness, 3)
    before = spans(harness)
    call = "put_file" if suffix == ".log" else "put"
    harness.store.fail(call, WrongBytes(40), when=lambda key: key.endswith(suffix))
    with pytest.raises((CorruptDataError, StoreUnavailable)):
        merge(harness)
    assert spans(harness) == before
    merge(harness)
    assert spans(harness) == [(0, 29)]


def test_a_segment_that_is_damaged_in_the_bucket_is_not_merged(harness):
    small_segments(harness, 3)
    path = harness.root / "bucket" / entries(harness)[1].log_key
    body = bytearray(path.read_bytes())
    body[15] ^= 1  # the partition leader epoch, which no batch's CRC covers
    path.write_bytes(body)
    before = spans(harness)
    with pytest.raises(CorruptDataError, match="CRC-32C"):
        merge(harness)
    assert spans(harness) == before


def test_what_is_trimmed_meanwhile_is_not_merged(harness):
    partition = small_segments(harness, 3)
    is_reached = failing_at(
        harness, 1, lambda *_: harness.broker.trim("t", 0, 15), calls=("put_file",)
    )
    merge(harness)
    assert is_reached()
    assert spans(harness) == [(10, 19), (20, 29)]
    assert partition.log_start_offset == 15
    harness.store.before_call = lambda call, key: None
    merge(harness)
    assert spans(harness) == [(10, 29)]
    assert [one.offset for one in harness.records("t", offset=15)] == list(range(15, 30))


@pytest.mark.parametrize(
    "days", [1, pytest.param(30, marks=pytest.mark.soak, id="a month: a twelfth of a year's")]
)
def test_a_replay_of_ten_minute_uploads_takes_a_twentieth_of_the_requests(
    harness, monkeypatch, days
):
    """A merged segment has up to a week of them, so of more than a week it is a few hundredths."""
    uploads = days * 144
    harness.broker.create_topic("t", config={"retention.ms": -1})
    partition = harness.broker.partition("t", 0)
    for number in range(uploads):
        harness.produce("t", [b"x" * 100] * 3, at=number * 600_000)
        partition.upkeep.roll()
    while harness.broker.offload("t", wait_ms=20_000).remaining_segments:
        pass  # a month takes longer
    cold_only(harness)
    requests = []
    for call in ("get", "get_range", "head", "list"):
        monkeypatch.setattr(FolderStore, call, counted(getattr(FolderStore, call), requests))

    def replay():
        requests.clear()
        store = harness.root / "bucket"
        rows = dataset("t", store=store, tier="cold", threads=1).to_table()
        return rows["offset"].to_pylist(), len(requests)

    before, small = replay()
    merge(harness)
    after, merged = replay()
    assert before == after == list(range(3 * uploads))
    print(f"a replay of {days} days: {small} requests, and {merged} once merged")
    assert merged <= small / (20 if days == 1 else 200)


def counted(call, requests):
    def count(*given, **named):
        if not merging_thread() or threading.current_thread() is threading.main_thread():
            requests.append(call.__name__)
        return call(*given, **named)

    return count


def append(partition, produced, **more):
    partition.append(produced, acks=Acks.ALL, **more).result(10)


def in_transaction(partition, producer, *, sequence):
    batch = encode_batch(
        [b"%d" % producer],
        timestamps=[1],
        producer_id=producer,
        producer_epoch=0,
        base_sequence=sequence,
        transactional=True,
    )
    limits = ProduceLimits(max_message_bytes=1 << 20, now_ms=1, allow_transactions=True)
    append(partition, check_produced(batch, limits), verify=lambda _: None)
    partition.upkeep.roll()


def ended(partition, producer, *, committed):
    marker = EndMarker(committed, 0)
    built = build_marker(marker, producer_id=producer, producer_epoch=0, timestamp=1)
    partition.append_marker(built, marker).result(10)
    partition.upkeep.roll()


def test_transactions_and_producers_of_merged_segments_are_those_of_all(harness, merge_all):
    """One is aborted within, one above, one is committed, and one is open at the end."""
    harness.broker.create_topic("t", config=CONFIG)
    partition = harness.broker.partition("t", 0)
    for producer in (11, 12, 13):
        in_transaction(partition, producer, sequence=0)
    ended(partition, 12, committed=False)
    ended(partition, 13, committed=True)
    in_transaction(partition, 14, sequence=0)
    cold_only(harness)
    in_transaction(partition, 12, sequence=1)
    ended(partition, 11, committed=False)
    harness.upload_sealed()
    end = partition.high_watermark
    last = entries(harness)[-1]
    snapshot = parse_snapshot(load_bundle(harness.store, last).producer_snapshot)
    partition.upkeep.delete_local(end)

    def aborted():
        reads = partition._cold.reads
        return [reads.aborted_transactions(*span) for span in ((0, end), (0, 2), (1, 3), (5, 6))]

    before = aborted()
    assert [txn.producer_id for txn in before[0]] == [12, 11]
    merge_all(harness)
    assert spans(harness) == [(0, end - 1)]
    assert aborted() == before
    (merged,) = entries(harness)
    assert parse_snapshot(load_bundle(harness.store, merged).producer_snapshot) == snapshot
    assert {one.producer_id for one in snapshot} == {11, 12, 13, 14}
    assert verify_topic(harness.broker, "t", deep=True).ok


def test_the_background_merges_once_there_is_enough(harness):
    config = {**CONFIG, "cold.merge.min.bytes": 2500}
    partition = small_segments(harness, 7, config=config)
    sizes = [one.size_bytes for one in entries(harness)]
    assert 2 * max(sizes) < 2500 <= 3 * min(sizes)
    merger = harness.broker.background.merger
    merger.run_round()
    assert spans(harness)[:2] == [(0, 29), (30, 39)], "one merge a partition and round"
    for _ in range(3):
        merger.run_round()
    assert spans(harness) == [(0, 29), (30, 59), (60, 69)]
    calls = len(harness.store.calls)
    merger.run_round()
    assert [key for call, key in harness.store.calls[calls:] if "/segments/" in key] == []
    assert partition.manifest.compacted_before == 0


def test_a_round_of_the_background_has_a_bound_and_goes_on_with_the_others(harness, monkeypatch):
    monkeypatch.setattr(merger_module, "ROUND_BYTES", 1)
    config = {**CONFIG, "cold.merge.min.bytes": 2000}
    harness.broker.create_topic("t", partitions=2, config=config)
    for number in range(2):
        for _ in range(2):
            harness.fill(10, partition=number)
            harness.broker.partition("t", number).upkeep.roll()
    harness.offload()
    harness.stop_copying()
    for number in range(2):
        partition = harness.broker.partition("t", number)
        partition.upkeep.delete_local(partition.cold_end_offset)

    def counts():
        return sorted(
            len(list(harness.broker.partition("t", number).cold_entries(0))) for number in range(2)
        )

    harness.broker.background.merger.run_round()
    assert counts() == [1, 2]
    harness.broker.background.merger.run_round()
    assert counts() == [1, 1]


def test_retention_deletes_merged_segments_whole(harness):
    partition = small_segments(harness, 4)
    merge(harness)
    partition.update_config(LogConfig.parse({**CONFIG, "retention.ms": 1000}))
    run_janitor(harness.broker)
    assert partition.log_start_offset == 40
    assert spans(harness) == []


def test_a_broker_that_stops_ends_the_merge(harness):
    small_segments(harness, 3)
    failing_at(
        harness, 2, lambda *_: harness.broker.background.merger.stop(), calls=("get", "get_range")
    )
    with pytest.raises(Exception, match="shutting down"):
        merge(harness)
    harness.store.before_call = lambda call, key: None
    harness.restart()
    harness.stop_copying()
    harness.broker.partition("t", 0).claim()
    merge(harness)
    assert spans(harness) == [(0, 29)]
