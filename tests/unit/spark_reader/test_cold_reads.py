"""From options to rows without Spark: plans and their tasks on a bucket with Kafka's segments."""

import json
import pickle
import shutil

import pytest

from tests.fakes.bucket import (
    FIXTURES,
    NOW_MS,
    manifests_of,
    put_partition,
    put_topic,
    segment_files,
)
from tests.fakes.damage import flip
from tests.fakes.manifests import entry
from tests.unit.record_format import golden
from tierlog.manifest.pins import Pins
from tierlog.manifest.transitions import record_gap, trim
from tierlog.object_store.folder import FolderStore
from tierlog.object_store.open import open_store
from tierlog.record_format.arrow_schema import COLUMNS
from tierlog.record_format.errors import (
    CorruptManifest,
    InvalidOption,
    MissingObject,
    UnknownManifestVersion,
    UnknownTopic,
)
from tierlog.record_format.record_walk import RowFilter
from tierlog.spark_reader import access
from tierlog.spark_reader.cold_index import may_match
from tierlog.spark_reader.jobs.replay_plan import split_into_steps, step_options
from tierlog.spark_reader.options import parse_options
from tierlog.spark_reader.planner import Planner
from tierlog.spark_reader.split_reader import SplitReader
from tierlog.spark_reader.splits import NO_FILTERS, DataLoss


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    url = f"file://{tmp_path_factory.mktemp('bucket')}"
    store = open_store(url)
    put_topic(store, "many", {0: "many-segments-0", 1: "codec-lz4-0", 2: "mixed-time-0"})
    put_topic(store, "txn", {0: "txn-0", 1: "compacted-txn-0"})
    put_topic(store, "compacted", {0: "compacted-codec-0", 1: "deleted-records-0"})
    return url


class Read:
    """A batch read: its splits, rows, reports and warnings."""

    def __init__(self, url, *, columns=COLUMNS, filters=NO_FILTERS, **given):
        given = {"store": url, "tier": "cold", "splitBytes": "16k", **given}
        options = parse_options(given, streaming=False)
        self.reports, self.warnings = [], []
        planner = Planner(options, report=self.reports.append, warn=self.warnings.append)
        self.splits = pickle.loads(pickle.dumps(planner.batch(filters)))
        reader = SplitReader(
            pickle.loads(pickle.dumps(options)),
            columns,
            row_filter=filters.row_filter,
            warn=self.warnings.append,
        )
        batches = [batch for split in self.splits for batch in reader.read_split(split)]
        self.rows = [row for batch in batches for row in batch.to_pylist()]

    def offsets(self, partition=0):
        return [row["offset"] for row in self.rows if row["partition"] == partition]


def offsets(fixture, low=0, high=10**9):
    return [
        record["offset"]
        for record in golden.expected_records(FIXTURES / fixture)
        if low <= record["offset"] < high
    ]


def test_reads_a_whole_topic_in_many_splits(url):
    read = Read(url, subscribe="many")
    assert len(read.splits) > 5
    assert read.offsets(0) == offsets("many-segments-0")
    assert read.offsets(1) == offsets("codec-lz4-0")
    assert read.offsets(2) == offsets("mixed-time-0")
    assert '"manifestVersion":{"many":{"0":11' in read.reports[0]


def test_subscribes_by_list_pattern_and_assignment(url):
    topics = [{"subscribe": "many,txn"}, {"subscribePattern": "m.*|tx."}]
    for choice in topics:
        assert {row["topic"] for row in Read(url, **choice).rows} == {"many", "txn"}
    some = Read(url, assign='{"many": [2], "txn": [0]}')
    assert {(row["topic"], row["partition"]) for row in some.rows} == {("many", 2), ("txn", 0)}
    assert Read(url, subscribePattern="nothing.*").splits == []
    with pytest.raises(UnknownTopic):
        Read(url, subscribe="nothing")
    with pytest.raises(InvalidOption, match="there is no many-7; the topic has 3"):
        Read(url, assign='{"many": [7]}')
    with pytest.raises(InvalidOption, match="topic 'txn' is not among those read"):
        Read(url, subscribe="many", startingOffsets='{"txn": {"0": 1}}')


def test_a_pattern_does_not_read_topics_that_it_does_not_match(tmp_path):
    store = open_store(url := f"file://{tmp_path}")
    for topic in ("a", "b"):
        put_topic(store, topic, {0: "codec-lz4-0"})
    (damaged,) = (tmp_path / "topics/b").rglob("topic/*.json")
    flip(damaged, 50)
    assert Read(url, subscribePattern="a").offsets() == offsets("codec-lz4-0")
    with pytest.raises(CorruptManifest):
        Read(url, subscribePattern="a|b")
    damaged.unlink()  # which does not make it a deleted topic
    with pytest.raises(CorruptManifest, match=r"the topic object, .* is missing"):
        Read(url, subscribePattern="a|b")


def test_a_partition_whose_manifest_is_lost_is_not_an_empty_one(tmp_path):
    store = open_store(url := f"file://{tmp_path}")
    put_topic(store, "t", {0: "codec-lz4-0", 1: "empty-0"})
    assert Read(url, subscribe="t").offsets(1) == []
    shutil.rmtree(tmp_path / manifests_of(store, "t", 0).keys.versions)
    with pytest.raises(MissingObject, match="manifest"):
        Read(url, subscribe="t")


def test_offsets_may_be_given_for_some_partitions_only(url):
    read = Read(
        url,
        subscribe="many",
        startingOffsets='{"many": {"0": 20, "1": -2}}',
        endingOffsets='{"many": {"0": 150, "1": -1}}',
    )
    assert read.offsets(0) == offsets("many-segments-0", 20, 150)
    assert read.offsets(1) == offsets("codec-lz4-0")
    assert read.offsets(2) == offsets("mixed-time-0")


@pytest.mark.parametrize(
    ("topic", "partition", "fixture"),
    [
        ("many", 0, "many-segments-0"),
        ("many", 1, "codec-lz4-0"),
        ("many", 2, "mixed-time-0"),
        ("txn", 0, "txn-0"),  # where Kafka returns a marker's offset
        ("txn", 1, "compacted-txn-0"),
    ],
)
def test_timestamps_resolve_to_the_offsets_that_kafka_returns(url, topic, partition, fixture):
    facts = golden.offsets(FIXTURES / fixture)
    only = json.dumps({topic: [partition]})
    bounds = {"assign": only, "startingOffsetsByTimestampStrategy": "latest"}
    for timestamp, offset, *_ in facts["offset_for_timestamp"]:
        by_time = json.dumps({topic: {str(partition): timestamp}})
        start = Read(url, startingOffsetsByTimestamp=by_time, **bounds).offsets(partition)
        end = Read(url, endingOffsetsByTimestamp=by_time, **bounds).offsets(partition)
        assert start == (offsets(fixture, offset) if offset >= 0 else [])
        assert end == (offsets(fixture, 0, offset) if offset >= 0 else offsets(fixture))
    with pytest.raises(InvalidOption, match="startingOffsetsByTimestampStrategy"):
        Read(url, subscribe="many", startingTimestamp=str(2**50))


def test_read_committed_sees_what_kafkas_consumer_saw(url):
    read = Read(url, subscribe="txn", isolationLevel="read_committed")
    for partition, fixture in enumerate(("txn-0", "compacted-txn-0")):
        assert read.offsets(partition) == golden.committed(FIXTURES / fixture)


def test_compaction_gaps_are_not_reported_as_loss(url):
    read = Read(url, subscribe="compacted")
    assert read.offsets(0) == offsets("compacted-codec-0")
    assert read.warnings == []


def test_splits_respect_their_minimum_and_record_limit(url):
    read = Read(url, subscribe="many", minPartitions="40", maxRecordsPerPartition="10")
    assert len(read.splits) >= 40
    assert max(split.end_offset - split.start_offset for split in read.splits) <= 10
    assert read.offsets(0) == offsets("many-segments-0")


def test_a_time_filter_skips_chunks_and_then_rows(url):
    wanted = golden.expected_records(FIXTURES / "many-segments-0")
    times = sorted(record["timestamp"] for record in wanted)
    low, high = times[50], times[60]
    filters = NO_FILTERS._replace(
        row_filter=NO_FILTERS.row_filter._replace(start_timestamp=low, last_timestamp=high),
        partitions=frozenset((0,)),
    )
    everything = Read(url, subscribe="many")
    read = Read(url, subscribe="many", filters=filters)
    assert read.offsets() == [
        record["offset"] for record in wanted if low <= record["timestamp"] <= high
    ]
    chunks = [sum(len(split.chunks) for split in run.splits) for run in (read, everything)]
    assert chunks[0] < chunks[1] / 3


def test_a_pinned_version_returns_the_same_rows_after_more_uploads(tmp_path):
    url = f"file://{tmp_path}"
    store = open_store(url)
    put_topic(store, "t", {0: "empty-0"})
    files = segment_files(FIXTURES / "many-segments-0")
    manifest = put_partition(store, "t", 0, files[:3])
    first = Read(url, subscribe="t")
    manifests = manifests_of(store, "t", 0)
    Pins(manifests, clock=lambda: NOW_MS).create_pin("nightly", manifest.version)
    put_partition(store, "t", 0, files[3:])
    version = json.dumps({"t": {"0": manifest.version}})
    assert Read(url, subscribe="t", manifestVersion=version).rows == first.rows
    assert Read(url, subscribe="t", pin="nightly").rows == first.rows
    assert len(Read(url, subscribe="t").rows) > len(first.rows)
    with pytest.raises(InvalidOption, match="option pin: t-0 has no pin 'weekly'"):
        Read(url, subscribe="t", pin="weekly")
    with pytest.raises(UnknownManifestVersion):
        Read(url, subscribe="t", manifestVersion='{"t": {"0": 99}}')


def test_steps_of_a_replay_read_the_given_manifest_versions(url):
    source = {"subscribe": "many,compacted", "splitBytes": "16k"}
    whole = Read(url, **source)
    used = json.loads(whole.reports[0].removeprefix("read "))
    source["manifestVersion"] = json.dumps(used["manifestVersion"])
    options = parse_options({"store": url, "tier": "cold", **source}, streaming=False)
    planner = Planner(options, report=[].append, warn=[].append)
    ranges = planner.ranges()
    splits = planner.splits(ranges)
    steps = split_into_steps(ranges, splits, split_bytes=16 << 10, step_bytes=100 << 10)
    assert len({frozenset(step) for step in steps}) == 2  # some without one of the topics
    read = [row for step in steps for row in Read(url, **step_options(step, source)).rows]
    offsets_read = [
        [(row["topic"], row["partition"], row["offset"]) for row in rows]
        for rows in (read, whole.rows)
    ]
    assert sorted(offsets_read[0]) == sorted(offsets_read[1])


def test_partitions_that_the_topic_object_does_not_have_yet_are_read(tmp_path):
    """Uploads do not wait for the topic object that has their partition."""
    store = open_store(url := f"file://{tmp_path}")
    put_topic(store, "t", {0: "codec-lz4-0"})
    put_partition(store, "t", 1, segment_files(FIXTURES / "codec-lz4-0"))
    assert {row["partition"] for row in Read(url, subscribe="t").rows} == {0, 1}


def test_a_plan_reads_each_page_of_a_manifest_once(tmp_path, monkeypatch):
    for name, small in {"INLINE_MAX": 2, "SMALL_PAGE": 1}.items():
        monkeypatch.setattr(f"tierlog.manifest.codec.{name}", small)
    put_topic(open_store(url := f"file://{tmp_path}"), "t", {0: "many-segments-0"})
    get, pages = FolderStore.get, []

    def recording(store, key, **limits):
        if "/pages/" in key:
            pages.append(key)
        return get(store, key, **limits)

    monkeypatch.setattr(FolderStore, "get", recording)
    # Walked for the bounds, for the last stable offset, and for the splits.
    read = Read(url, subscribe="t", startingTimestamp="0", isolationLevel="read_committed")
    assert read.offsets() == offsets("many-segments-0")
    assert len(pages) == len(set(pages)) > 1


def test_lost_rows_fail_the_read_unless_allowed(tmp_path, monkeypatch):
    url = f"file://{tmp_path}"
    store = open_store(url)
    put_topic(store, "t", {0: "many-segments-0"})
    manifests = manifests_of(store, "t", 0)
    trimmed = manifests.commit_manifest(
        manifests.load_manifest(), lambda m: trim(m, 30, pages=manifests, now_ms=NOW_MS)
    )
    bounds = {"startingOffsets": '{"t": {"0": 10}}'}
    with pytest.raises(DataLoss, match="t-0: offsets 10 to 30 are gone"):
        Read(url, subscribe="t", **bounds)
    read = Read(url, subscribe="t", failOnDataLoss="false", **bounds)
    assert read.offsets() == offsets("many-segments-0", 30)
    assert read.warnings == ["t-0: offsets 10 to 30 are gone"]
    assert Read(url, subscribe="t").offsets() == offsets("many-segments-0", 30)
    with pytest.raises(DataLoss, match="ends at 177, before offset 500"):
        Read(url, subscribe="t", endingOffsets='{"t": {"0": 500}}')

    store.delete([trimmed.segments[-1].log_key])
    store.delete([trimmed.segments[-2].log_key, trimmed.segments[-2].indexes_key])
    monkeypatch.setattr(access, "_clients", access._Clients())
    last = max(segment.max_timestamp for segment in trimmed.segments[-2:])
    lost = {"startingTimestamp": str(last)}
    for given in ({}, lost):
        with pytest.raises(DataLoss, match=r"t-0: .*\.(indexes|log)"):
            Read(url, subscribe="t", **given)
    lost |= {"failOnDataLoss": "false", "startingOffsetsByTimestampStrategy": "latest"}
    none = Read(url, subscribe="t", **lost)
    assert (none.rows, len(none.warnings)) == ([], 1)
    rest = Read(url, subscribe="t", failOnDataLoss="false")
    assert rest.offsets() == offsets("many-segments-0", 30, trimmed.segments[-2].base_offset)
    assert len(rest.warnings) >= 2


def test_read_committed_fails_without_the_aborted_transactions(tmp_path, monkeypatch):
    url = f"file://{tmp_path}"
    store = open_store(url)
    put_topic(store, "t", {0: "compacted-txn-0"})
    first, second, third, _ = manifests_of(store, "t", 0).load_manifest().segments
    given = {"subscribe": "t", "failOnDataLoss": "false", "isolationLevel": "read_committed"}
    early = {"endingOffsets": f'{{"t": {{"0": {third.base_offset}}}}}'}
    committed = Read(url, **given).offsets()
    marks = tmp_path / third.indexes_key
    marks.rename(tmp_path / "away")
    monkeypatch.setattr(access, "_clients", access._Clients())
    with pytest.raises(DataLoss, match=r"t-0: .*\.indexes.*=read_uncommitted"):
        Read(url, **given)
    # No transaction is open at the end of the second, so that nothing after it is needed.
    before = [offset for offset in committed if offset < third.base_offset]
    assert Read(url, **given, **early).offsets() == before
    # No row of the first is read, so that none of its transactions matters.
    (tmp_path / "away").rename(marks)
    store.delete([first.indexes_key])
    monkeypatch.setattr(access, "_clients", access._Clients())
    rest = Read(url, **given)
    assert rest.offsets() == [offset for offset in committed if offset >= second.base_offset]
    assert len(rest.warnings) == 1


def test_a_corrupt_object_is_never_decoded(tmp_path):
    url = f"file://{tmp_path}"
    store = open_store(url)
    put_topic(store, "t", {0: "many-segments-0"})
    entry = manifests_of(store, "t", 0).load_manifest().segments[0]
    path = tmp_path / entry.log_key
    flip(path, 200)
    with pytest.raises(Exception, match=entry.log_key):
        Read(url, subscribe="t")
    # The rest is readable.
    later = Read(url, subscribe="t", startingOffsets=f'{{"t": {{"0": {entry.next_offset}}}}}')
    assert later.offsets() == offsets("many-segments-0", entry.next_offset)


def test_only_the_requested_columns_are_returned(url):
    read = Read(url, subscribe="many", columns=("offset", "partition"))
    assert set(read.rows[0]) == {"offset", "partition"}
    assert read.offsets(0) == offsets("many-segments-0")


def test_a_segment_is_skipped_by_time_only_if_its_timestamps_are_known():
    def may_match_range(low, high, first, last):
        segment = entry(0, min_timestamp=low, max_timestamp=high)
        return may_match(segment, RowFilter(start_timestamp=first, last_timestamp=last))

    assert may_match_range(10, 20, 20, 30)
    assert may_match_range(10, 20, 0, 10)
    assert not may_match_range(10, 20, 21, 30)
    assert not may_match_range(10, 20, 0, 9)
    assert may_match_range(None, 20, 0, 9)
    assert may_match_range(None, -1, 21, 30)
    assert not may_match_range(-1, -1, 21, 30), "no record has a timestamp"


def test_a_restore_gap_is_not_data_loss(tmp_path):
    url = f"file://{tmp_path}"
    store = open_store(url)
    put_topic(store, "t", {0: "many-segments-0"})
    manifests = manifests_of(store, "t", 0)
    end = manifests.load_manifest().end_offset
    manifests.commit_manifest(
        manifests.load_manifest(), lambda m: record_gap(m, end_offset=end + 10**9)
    )
    read = Read(url, subscribe="t", startingOffsets=f'{{"t": {{"0": {end - 5}}}}}')
    assert read.offsets() == offsets("many-segments-0", end - 5)
    assert Read(url, subscribe="t", startingOffsets=f'{{"t": {{"0": {end + 77}}}}}').rows == []


def test_a_chunk_is_not_overwritten_while_it_is_decoded(tmp_path):
    """Buffers alternate, even if a chunk is missing."""
    url = f"file://{tmp_path}"
    put_topic(open_store(url), "many", {0: "many-segments-0"})
    given = {"store": url, "tier": "cold", "subscribe": "many", "failOnDataLoss": "false"}
    options = parse_options(given, streaming=False)
    (split,) = Planner(options, report=[].append, warn=[].append).batch()
    keys = [piece.ref.log_key for piece in split.chunks]
    gone = next(key for key in keys if key != keys[0] and keys.count(key) % 2)
    (tmp_path / gone).unlink()
    lost = []
    reader = SplitReader(options, COLUMNS, warn=lost.append)
    buffers = [memoryview(bytearray(1 << 20)) for _ in range(2)]
    pieces = reader._cold(split, split.chunks, buffers)
    before = b""
    for number in range(keys.index(gone)):
        decoded = next(pieces)
        assert number == 0 or bytes(decoded.data) != before
        before = bytes(decoded.data)
    next(pieces)
    assert len(lost) == keys.count(gone)
    assert bytes(decoded.data) == before
    pieces.close()
