"""Streams over a log that is being written: the reader called directly, then by Spark."""

import json
import shutil
import threading
from dataclasses import replace

import pytest

from tests.fakes.kafka_folder import KafkaFolder
from tests.fakes.two_tiers import START_MS, two_tiers
from tierlog.client.client import Client
from tierlog.hot_tier.log_writer import Acks
from tierlog.object_store.open import open_store
from tierlog.record_format.errors import InvalidOption, UnknownTopic
from tierlog.record_format.produced import build_produced
from tierlog.record_format.record_walk import RowFilter
from tierlog.repair.restore import RestoreOptions, restore
from tierlog.spark_reader import catalog
from tierlog.spark_reader.batch_source import TierlogReader
from tierlog.spark_reader.catalog import Catalog
from tierlog.spark_reader.options import parse_options
from tierlog.spark_reader.splits import DataLoss, Filters, PartitionFacts
from tierlog.spark_reader.stream_offsets import StreamOffsets

pytest.importorskip("pyspark.sql.streaming.datasource", reason="streams need pyspark 4.2")

from pyspark.sql.streaming.datasource import ReadAllAvailable

from tierlog.spark_reader.stream_source import TierlogStreamReader


@pytest.fixture
def tiers(tmp_path):
    with two_tiers(tmp_path) as tiers:
        tiers.create("t", partitions=2)
        yield tiers


def reader(tiers, **extra):
    given = {"store": tiers.store_url, "server": tiers.url, "subscribe": "t", **extra}
    given = {name: value for name, value in given.items() if value is not None}
    given.setdefault("startingOffsets", "earliest")
    return TierlogStreamReader(parse_options(given, streaming=True), ("partition", "offset"))


def offsets_of(document):
    return {int(p): o for p, o in document["t"]["offsets"].items()}


def rows(stream, start, end):
    splits = stream.partitions(start, end)
    read = [row for split in splits for batch in stream.read(split) for row in batch.to_pylist()]
    return sorted((row["partition"], row["offset"]) for row in read)


def expected(start, end):
    first, last = offsets_of(start), offsets_of(end)
    return sorted((p, o) for p in last for o in range(first.get(p, 0), last[p]))


def plans(capsys):
    """The plans logged for the micro-batches."""
    lines = capsys.readouterr().err.splitlines()
    start = "tierlog: plan "
    return [json.loads(line.removeprefix(start)) for line in lines if line.startswith(start)]


def test_batches_continue_from_the_cold_tier_into_the_tail(tiers, capsys):
    tiers.produce("t", 1000)
    tiers.offload("t")
    tiers.produce("t", 50)  # with the next fifty less than a segment, so that they stay hot
    stream = reader(tiers, maxOffsetsPerTrigger="700")
    limit = stream.getDefaultReadLimit()
    start, seen = stream.initialOffset(), []
    while (end := stream.latestOffset(start, limit)) != start:
        assert rows(stream, start, end) == expected(start, end)
        seen += rows(stream, start, end)
        start = end
        if len(seen) == 1400:
            tiers.produce("t", 50)
    assert sorted(seen) == [(p, o) for p in (0, 1) for o in range(1100)]
    planned = plans(capsys)[::2]  # each batch was planned twice
    assert [(one["offsets"], one["offsetsBehind"]) for one in planned] == [
        *((700, 1400), (700, 700), (700, 100), (100, 0)),
    ]
    first, last = planned[0], planned[-1]
    assert (first["coldBytes"] > 60_000, first["hotBytes"]) == (True, 0)
    assert (last["coldBytes"], last["hotBytes"] > 10_000) == (0, True)
    assert offsets_of(stream.reportLatestOffset()) == {0: 1100, 1: 1100}


def test_a_batch_fetches_little_beyond_its_end(tiers, monkeypatch):
    tiers.create(
        "large", partitions=1, **{"segment.bytes": 64 << 20, "compression.type": "uncompressed"}
    )
    tiers.produce("large", 10_000)
    fetch, sizes = Client.fetch_batches, []

    def recording(*args, **limits):
        found = fetch(*args, **limits)
        sizes.append(len(found.batches))
        return found

    monkeypatch.setattr(Client, "fetch_batches", recording)
    stream = reader(tiers, subscribe="large", store=None, maxOffsetsPerTrigger="1000")
    start, limit = stream.initialOffset(), stream.getDefaultReadLimit()
    seen = []
    while (end := stream.latestOffset(start, limit)) != start:
        seen += rows(stream, start, end)
        start = end
    assert seen == [(0, o) for o in range(10_000)]
    assert 1_000_000 < sum(sizes) < 2_500_000, "of a log of some 1.3 MB"


def test_a_cold_only_stream_follows_offloads(tiers):
    stream, start = reader(tiers, server=None, tier="cold"), None
    for offloaded in (150, 300):
        tiers.produce("t", 150)
        tiers.offload("t")
        start = start or stream.initialOffset()
        end = stream.latestOffset(start, ReadAllAvailable())
        assert offsets_of(end) == {0: offloaded, 1: offloaded}
        assert rows(stream, start, end) == expected(start, end)
        start = end


def test_a_stream_from_latest_reads_new_partitions_from_their_start(tiers):
    tiers.produce("t", 50)
    stream = reader(tiers, startingOffsets="latest")
    start = stream.initialOffset()
    assert offsets_of(start) == {0: 50, 1: 50}
    tiers.broker.alter_topic("t", partitions=3)
    tiers.written["t", 2] = []
    tiers.produce("t", 50)
    end = stream.latestOffset(start, ReadAllAvailable())
    assert offsets_of(end) == {0: 100, 1: 100, 2: 50}
    assert rows(stream, start, end) == expected({"t": {"offsets": {"0": 50, "1": 50}}}, end)


def test_topics_matching_the_pattern_may_appear_and_disappear_during_a_stream(tiers):
    def by_pattern(**extra):
        return reader(tiers, subscribe=None, subscribePattern="t.*", **extra)

    with pytest.raises(InvalidOption, match="topic 't-new' is not among those read"):
        by_pattern(startingOffsets='{"t-new": {"0": 5}}').initialOffset()

    tiers.produce("t", 50)
    stream = by_pattern(startingOffsets="latest")
    start = stream.initialOffset()
    tiers.create("t-new", partitions=1)
    tiers.create("other", partitions=1)
    tiers.produce("t-new", 100)
    end = stream.latestOffset(start, ReadAllAvailable())
    assert rows(stream, start, end) == [(0, offset) for offset in range(100)]
    # Planned again, as after a restart, a batch has the same rows or fails.
    tiers.broker.trim("t-new", 0, 50)
    with pytest.raises(DataLoss, match="t-new-0: offsets 0 to 50 are gone"):
        by_pattern().partitions(start, end)
    tiers.broker.delete_topic("t-new")
    with pytest.raises(DataLoss, match="the stream has read t-new-0: deleted, or"):
        by_pattern().latestOffset(end, ReadAllAvailable())
    # Options apply to the start of a stream; later, the topics they name may be lost.
    named = {"startingOffsets": '{"t-new": {"0": 5}}'}
    lenient = by_pattern(failOnDataLoss="false", **named)
    after = lenient.latestOffset(end, ReadAllAvailable())
    assert set(after) == {"t"}
    assert rows(lenient, start, end) == rows(lenient, end, after) == []


def test_fail_on_data_loss_governs_a_deleted_topic_but_not_a_misspelt_one(tiers, capsys):
    tiers.produce("t", 50)
    tiers.create("other", partitions=1)
    tiers.produce("other", 50)

    def both(**extra):
        return reader(tiers, **{"subscribe": "t,other", **extra})

    stream = both()
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadAllAvailable())
    tiers.broker.delete_topic("other")
    with pytest.raises(DataLoss, match="the stream has read other-0: deleted, or"):
        stream.latestOffset(end, ReadAllAvailable())
    lenient = both(failOnDataLoss="false")
    lenient.prepareForTriggerAvailableNow()
    tiers.produce("t", 50)
    after = lenient.latestOffset(end, ReadAllAvailable())
    assert lenient.latestOffset(after, ReadAllAvailable()) == after  # it stays excluded
    restarted = both(failOnDataLoss="false")
    more_start, after = after, restarted.latestOffset(after, ReadAllAvailable())
    more = [(p, o) for p in (0, 1) for o in range(50, 100)]
    assert rows(restarted, more_start, after) == more
    assert rows(both(failOnDataLoss="false"), start, end) == [
        (p, o) for p in (0, 1) for o in range(50)
    ]
    with pytest.raises(UnknownTopic):
        reader(tiers, subscribe="t,oter", failOnDataLoss="false").latestOffset(
            end, ReadAllAvailable()
        )
    tiers.create("other", partitions=1)
    tiers.produce("other", 50)
    stream = both(failOnDataLoss="false")
    re_created = stream.latestOffset(after, ReadAllAvailable())
    assert rows(stream, after, re_created) == [(0, o) for o in range(50)]
    assert (
        "was deleted and re-created" not in capsys.readouterr().err
    )  # its loss is reported already


@pytest.mark.parametrize("isolation", ["read_uncommitted", "read_committed"])
def test_a_stream_makes_no_requests_to_the_bucket_for_what_is_not_in_it(
    tiers, monkeypatch, isolation
):
    tiers.produce("t", 500)
    tiers.offload("t")
    stream = reader(tiers, maxOffsetsPerTrigger="5000", isolationLevel=isolation)
    limit = stream.getDefaultReadLimit()
    end = stream.latestOffset(stream.initialOffset(), limit)
    with monkeypatch.context() as patch:
        patch.setattr(catalog, "ManifestStore", None)
        with monkeypatch.context() as none_new:
            none_new.setattr(Client, "offsets", None)  # the topic's description is enough
            assert stream.latestOffset(end, limit) == end
            assert offsets_of(stream.reportLatestOffset()) == offsets_of(end)
        if isolation == "read_uncommitted":
            patch.setattr(Client, "offsets", None)
        tiers.produce("t", 50)  # which the bucket does not have
        after = stream.latestOffset(end, limit)
        assert rows(stream, end, after) == [(p, o) for p in (0, 1) for o in range(500, 550)]
    tiers.offload("t")
    assert stream.latestOffset(end, limit) == after
    splits = [split for task in stream.partitions(end, after) for split in task.splits]
    assert [split.is_cold for split in splits] == [True, True]
    stream = reader(tiers, minOffsetsPerTrigger="200", maxTriggerDelay="1h")
    after = stream.latestOffset(end, limit)
    tiers.produce("t", 50)
    with monkeypatch.context() as patch:  # nor does one that waits for more
        patch.setattr(catalog, "ManifestStore", None)
        assert stream.latestOffset(after, limit) == after
        assert offsets_of(stream.reportLatestOffset()) == {0: 600, 1: 600}
    tiers.produce("t", 50)
    assert offsets_of(stream.latestOffset(after, limit)) == {0: 650, 1: 650}


def test_a_committed_stream_in_the_tail_ends_where_a_transaction_is_open(tmp_path):
    folder = KafkaFolder(tmp_path / "txn-0")
    folder.roll()
    folder.put(b"plain")
    folder.roll()
    folder.put(b"plain")
    folder.put(b"open", producer_id=1, base_sequence=0)
    with two_tiers(tmp_path, adopted=[folder.path]) as tiers:
        partition = tiers.broker.partition("txn", 0)
        assert tiers.broker.background.copier.wait_until_done([partition], timeout_s=20)
        stream = reader(tiers, subscribe="txn", isolationLevel="read_committed")
        read = stream.initialOffset()
        read["txn"]["offsets"]["0"] = tiers.cold_end("txn", 0)
        end = stream.latestOffset(read, ReadAllAvailable())
        assert end["txn"]["offsets"] == {"0": 2}
        assert rows(stream, read, end) == [(0, 1)]


@pytest.mark.parametrize("store", [True, False])
def test_a_batch_planned_again_after_a_later_latest_offset_has_the_same_rows(tiers, store):
    """Spark up to 4.3 plans each batch before the next latestOffset, but need not."""
    tiers.produce("t", 500)
    tiers.offload("t")
    tiers.produce("t", 50)
    stream = reader(tiers, **({} if store else {"store": None}))
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadAllAvailable())
    assert stream.latestOffset(end, ReadAllAvailable()) == end
    assert rows(stream, start, end) == expected(start, end)


def test_a_first_batch_planned_again_after_a_restart_has_the_same_rows_or_fails(tiers):
    """Spark keeps only its end, and asks the restarted stream for its start again."""
    tiers.produce("t", 50)

    def begun(**options):
        stream = reader(tiers, **options)
        return stream, stream.initialOffset()

    stream, start = begun(startingOffsets="latest")
    tiers.produce("t", 50)
    end = stream.latestOffset(start, ReadAllAvailable())
    assert stream.initialOffset() == start, "Spark asks twice in every run"
    assert stream.latestOffset(end, ReadAllAvailable()) == end
    new = [(p, o) for p in (0, 1) for o in range(50, 100)]
    assert rows(stream, start, end) == new
    tiers.produce("t", 50)
    again, later_start = begun(startingOffsets="latest")
    assert offsets_of(later_start) == {0: 150, 1: 150}
    assert rows(again, later_start, end) == new
    after = again.latestOffset(end, ReadAllAvailable())
    assert rows(again, end, after) == [(p, o) for p in (0, 1) for o in range(100, 150)]

    stream, start = begun()
    end = stream.latestOffset(start, ReadAllAvailable())
    tiers.broker.trim("t", 0, 30)
    again, later_start = begun()
    with pytest.raises(DataLoss, match="t-0: offsets 0 to 30 are gone"):
        again.partitions(later_start, end)


def test_starting_timestamps_are_looked_up_in_parallel(tiers, monkeypatch):
    tiers.produce("t", 50)
    both, look_up = threading.Barrier(2), Catalog.first_at_time

    def together(*args, **kwargs):
        both.wait(timeout=10)
        return look_up(*args, **kwargs)

    monkeypatch.setattr(Catalog, "first_at_time", together)
    stream = reader(tiers, startingTimestamp=str(START_MS - 60_000))
    assert offsets_of(stream.initialOffset()) == {0: 0, 1: 0}


def test_max_bytes_and_min_offsets_per_trigger_limit_batches(tiers):
    tiers.produce("t", 1000)
    stream = reader(tiers, maxBytesPerTrigger="20k")
    start = stream.initialOffset()
    end = stream.latestOffset(start, stream.getDefaultReadLimit())
    assert all(0 < offset < 200 for offset in offsets_of(end).values())
    assert offsets_of(stream.latestOffset(start, ReadAllAvailable())) == {0: 1000, 1: 1000}

    waiting = reader(tiers, minOffsetsPerTrigger="5000", maxTriggerDelay="1h")
    immediate = reader(tiers, minOffsetsPerTrigger="5000", maxTriggerDelay="0ms")
    for one in (waiting, immediate):  # the delay is between batches: the first has none
        end = one.latestOffset(start, one.getDefaultReadLimit())
        assert offsets_of(end) == {0: 1000, 1: 1000}
    tiers.produce("t", 50)
    assert waiting.latestOffset(end, waiting.getDefaultReadLimit()) == end
    assert offsets_of(immediate.latestOffset(end, immediate.getDefaultReadLimit())) == {
        0: 1050,
        1: 1050,
    }


def lose_disk(root, *, gap):
    shutil.rmtree(root / "data")
    restore(
        open_store(f"file://{root}/bucket"), RestoreOptions(root / "data", gap, lambda: START_MS)
    )


def test_an_offset_gap_does_not_count_against_limits(tmp_path, capsys):
    with two_tiers(tmp_path) as tiers:
        tiers.create("t", partitions=1)
        tiers.produce("t", 500)
        tiers.offload("t")
    gap = 10**9
    lose_disk(tmp_path, gap=gap)
    with two_tiers(tmp_path) as tiers:
        by_broker = reader(tiers, store=None, maxRecordsPerPartition="1000")
        start = by_broker.initialOffset()
        end = by_broker.latestOffset(start, ReadAllAvailable())
        # The gap is not split: by records it would be a million splits.
        assert [one.splits[0].start_offset for one in by_broker.partitions(start, end)] == [0, 500]
        tiers.written["t", 0] = []
        tiers.produce("t", 100)
        for store in (tiers.store_url, None):
            stream = reader(tiers, store=store, maxOffsetsPerTrigger="300")
            limit, start, found = stream.getDefaultReadLimit(), stream.initialOffset(), []
            for _ in range(2):
                end = stream.latestOffset(start, limit)
                found += rows(stream, start, end)
                start = end
            assert [offset for _, offset in found] == [*range(500), *range(gap + 500, gap + 600)]
        first, second = plans(capsys)[-2:]  # through the broker, which is asked for so many bytes
        assert min(first["hotBytes"], second["hotBytes"]) > 25_000


def test_a_batch_that_ends_in_records_that_were_not_restored_is_data_loss(tmp_path):
    """It was planned before the disk was lost, and is repeated after the restore."""
    with two_tiers(tmp_path) as tiers:
        tiers.create("t", partitions=1)
        tiers.produce("t", 500)
        tiers.offload("t")
        tiers.produce("t", 100)
        stream = reader(tiers)
        start = stream.initialOffset()
        end = stream.latestOffset(start, ReadAllAvailable())
    lose_disk(tmp_path, gap=10**9)
    with two_tiers(tmp_path) as tiers:
        tiers.written["t", 0] = []
        for store, produced in ((tiers.store_url, 0), (None, 0), (None, 50)):
            tiers.produce("t", produced)
            with pytest.raises(DataLoss, match="t-0: offsets 500 to 600 are gone"):
                rows(reader(tiers, store=store), start, end)
            tolerant = reader(tiers, store=store, failOnDataLoss="false")
            assert len(rows(tolerant, start, end)) == 500
            following = tolerant.latestOffset(end, ReadAllAvailable())
            assert offsets_of(following) == {0: 10**9 + 500 + produced}
            assert len(rows(tolerant, end, following)) == produced


def test_a_stream_at_the_start_of_a_gap_loses_nothing_by_a_trim_to_its_end(tmp_path):
    with two_tiers(tmp_path) as tiers:
        tiers.create("t", partitions=1)
        tiers.produce("t", 500)
        tiers.offload("t")
        stream = reader(tiers)
        read = stream.latestOffset(stream.initialOffset(), ReadAllAvailable())
    lose_disk(tmp_path, gap=10**9)
    with two_tiers(tmp_path) as tiers:
        tiers.written["t", 0] = []
        tiers.produce("t", 50)
        for before_offset in (700, 10**9 + 500):
            tiers.broker.trim("t", 0, before_offset)
            for store in (tiers.store_url, None):
                stream = reader(tiers, store=store)
                assert len(rows(stream, read, stream.latestOffset(read, ReadAllAvailable()))) == 50
        tiers.broker.trim("t", 0, 10**9 + 501)
        with pytest.raises(DataLoss):
            stream.partitions(read, stream.latestOffset(read, ReadAllAvailable()))


def test_available_now_reports_what_a_restore_lost_below_its_target(monkeypatch):
    before = PartitionFacts(
        topic="t",
        topic_id="id",
        partition=0,
        log_start_offset=0,
        end_offset=600,
        cold_end_offset=500,
        manifest=None,
    )
    restored = replace(before, end_offset=10**9 + 500, gaps=((500, 10**9 + 500),))
    given = {"server": "http://127.0.0.1:1", "subscribe": "t", "maxOffsetsPerTrigger": "500"}
    stream = TierlogStreamReader(parse_options(given, streaming=True), ("offset",))
    monkeypatch.setattr(Catalog, "partitions_of_stream", lambda *_: [before])
    stream.prepareForTriggerAvailableNow()
    monkeypatch.setattr(Catalog, "partitions_of_stream", lambda *_: [restored])
    start = StreamOffsets({"t": "id"}, {("t", 0): 500}).to_document()
    end = stream.latestOffset(start, stream.getDefaultReadLimit())
    with pytest.raises(DataLoss, match="t-0: offsets 500 to 600 are gone"):
        stream.partitions(start, end)


def test_a_filter_that_ends_in_a_gap_loses_nothing(tmp_path):
    with two_tiers(tmp_path) as tiers:
        tiers.create("t", partitions=1)
        tiers.produce("t", 500)
        tiers.offload("t")
    lose_disk(tmp_path, gap=10**9)
    with two_tiers(tmp_path) as tiers:
        options = parse_options({"server": tiers.url, "subscribe": "t"}, streaming=False)
        batch = TierlogReader(options, ("offset",))
        batch.filters = Filters(RowFilter(end_offset=600))
        read = [rows for split in batch.partitions() for rows in batch.read(split)]
        assert sum(rows.num_rows for rows in read) == 500


def test_a_compacted_topic_that_came_back_to_disk_is_read_across_its_gap(tmp_path):
    """On disk the segment before a gap ends where the gap does. No split or batch ends in it."""
    gap = 100_000

    def append(tiers, first, count):
        batches = build_produced(
            [b"x" * 100] * count,
            keys=[b"%d" % number for number in range(first, first + count)],
            timestamps=[START_MS] * count,
            max_message_bytes=1 << 20,
        )
        tiers.broker.partition("t", 0).append(batches, acks=Acks.ALL).result(10)

    with two_tiers(tmp_path) as tiers:
        tiers.create("t", partitions=1, **{"cleanup.policy": "compact"})
        append(tiers, 0, 300)
        tiers.offload("t")
    lose_disk(tmp_path, gap=gap)
    with two_tiers(tmp_path) as tiers:
        tiers.broker.background.compactor.run_round()
        assert tiers.broker.partition("t", 0).first_local_offset == 0
        append(tiers, 300, 50)
        everything = [*range(300), *range(gap + 300, gap + 350)]
        given = {"server": tiers.url, "subscribe": "t", "maxRecordsPerPartition": "40"}
        batch = TierlogReader(parse_options(given, streaming=False), ("offset",))
        read = [found for split in batch.partitions() for found in batch.read(split)]
        assert [row["offset"] for found in read for row in found.to_pylist()] == everything
        stream = reader(tiers, store=None, maxBytesPerTrigger="7k")
        start, seen = stream.initialOffset(), []
        while (end := stream.latestOffset(start, stream.getDefaultReadLimit())) != start:
            seen += [offset for _, offset in rows(stream, start, end)]
            start = end
        assert seen == everything


def test_gaps_are_fetched_without_segments(tiers, monkeypatch):
    tiers.produce("t", 500)
    tiers.offload("t")
    manifest, pages = Client.manifest, []

    def recording(*args, **extra):
        pages.append(manifest(*args, **extra))
        return pages[-1]

    monkeypatch.setattr(Client, "manifest", recording)
    stream = reader(tiers, store=None, maxOffsetsPerTrigger="100")
    stream.latestOffset(stream.initialOffset(), stream.getDefaultReadLimit())
    assert min(one.version for one in pages) > 1, "segments were added"
    assert not any(one.segments for one in pages)


def test_available_now_ends_at_the_offsets_of_its_start(tiers):
    tiers.produce("t", 100)
    stream = reader(tiers)
    stream.prepareForTriggerAvailableNow()
    tiers.produce("t", 100)
    end = stream.latestOffset(stream.initialOffset(), ReadAllAvailable())
    assert offsets_of(end) == {0: 100, 1: 100}


def test_available_now_leaves_a_new_topic_to_the_next_run(tiers):
    tiers.produce("t", 50)
    stream = reader(tiers, subscribe=None, subscribePattern="t.*")
    start = stream.initialOffset()
    stream.prepareForTriggerAvailableNow()
    tiers.create("t-new", partitions=1)
    tiers.produce("t-new", 100)
    end = stream.latestOffset(start, ReadAllAvailable())
    assert set(end) == {"t"}
    tiers.broker.trim("t-new", 0, 50)  # they were never read
    after = reader(tiers, subscribe=None, subscribePattern="t.*")
    with pytest.raises(DataLoss, match="t-new-0: offsets 0 to 50 are gone"):
        after.partitions(end, after.latestOffset(end, ReadAllAvailable()))


def test_trimmed_offsets_and_a_re_created_topic_are_data_loss(tiers):
    tiers.produce("t", 500)
    stream = reader(tiers)
    start = stream.initialOffset()
    tiers.broker.trim("t", 0, 300)
    end = stream.latestOffset(start, ReadAllAvailable())
    with pytest.raises(DataLoss, match="t-0: offsets 0 to 300 are gone"):
        stream.partitions(start, end)
    limited = reader(tiers, maxOffsetsPerTrigger="70", failOnDataLoss="false")
    first = limited.latestOffset(start, limited.getDefaultReadLimit())
    assert rows(limited, start, first) == [(0, o) for o in range(300, 320)] + [
        (1, o) for o in range(50)
    ]
    tiers.broker.delete_topic("t")
    tiers.create("t", partitions=2)
    tiers.produce("t", 50)
    with pytest.raises(DataLoss, match="topic 't' was deleted and re-created"):
        stream.latestOffset(end, ReadAllAvailable())
    lenient = reader(tiers, failOnDataLoss="false")
    # A batch of the deleted topic has no rows of the new one.
    assert rows(reader(tiers, failOnDataLoss="false"), start, end) == []
    again = lenient.latestOffset(end, ReadAllAvailable())
    assert rows(lenient, end, again) == [(p, o) for p in (0, 1) for o in range(50)]


@pytest.mark.parametrize("re_created", [False, True])
def test_tasks_detect_a_topic_deleted_before_its_batch_is_planned(tiers, re_created):
    tiers.produce("t", 100)
    extra = {"store": None, "splitBytes": "4k"}
    lenient, strict = (reader(tiers, failOnDataLoss=one, **extra) for one in ("false", "true"))
    start = lenient.initialOffset()
    ends = [one.latestOffset(start, ReadAllAvailable()) for one in (lenient, strict)]
    tiers.broker.delete_topic("t")
    if re_created:
        tiers.written.clear()
        tiers.create("t", partitions=1)
        tiers.produce("t", 50)
    assert rows(lenient, start, ends[0]) == []
    with pytest.raises(DataLoss, match=r"t-0: offsets 0 to \d+ are gone"):
        rows(strict, start, ends[1])


def test_a_truncated_log_is_data_loss_and_continues_with_new_records(tiers):
    tiers.produce("t", 50)
    stream = reader(tiers)
    before = stream.latestOffset(stream.initialOffset(), ReadAllAvailable())
    before["t"]["offsets"]["0"] = 500
    with pytest.raises(DataLoss, match="t-0: ends at 50, before offset 500"):
        stream.latestOffset(before, ReadAllAvailable())
    lenient = reader(tiers, failOnDataLoss="false")
    end = lenient.latestOffset(before, ReadAllAvailable())
    assert rows(lenient, before, end) == []
    tiers.produce("t", 50)
    again = lenient.latestOffset(end, ReadAllAvailable())
    assert rows(lenient, end, again) == [(p, o) for p in (0, 1) for o in range(50, 100)]


def test_data_loss_is_reported_once_even_if_a_batch_waits_for_its_minimum(tiers, capsys):
    tiers.produce("t", 50)
    tiers.create("t-gone", partitions=1)
    extra = {"subscribe": None, "subscribePattern": "t.*", "failOnDataLoss": "false"}
    stream = reader(tiers, **extra, minOffsetsPerTrigger="5000", maxTriggerDelay="1h")
    limit = stream.getDefaultReadLimit()
    end = stream.latestOffset(stream.initialOffset(), limit)
    tiers.broker.delete_topic("t-gone")
    end["t"]["offsets"]["0"] = 80  # beyond the end, as after a truncation
    after = stream.latestOffset(end, limit)
    assert set(after) == {"t"}
    assert offsets_of(after) == {0: 50, 1: 50}
    tiers.produce("t", 50)
    assert stream.latestOffset(after, limit) == after, "new records wait for the minimum as usual"
    assert rows(stream, after, stream.latestOffset(after, ReadAllAvailable())) == [
        (p, o) for p in (0, 1) for o in range(50, 100)
    ]
    stderr = capsys.readouterr().err
    assert stderr.count("has read t-gone-0") == stderr.count("t-0: ends at 50") == 1


@pytest.mark.spark
def test_spark_restarts_from_its_checkpoint_without_loss_or_repeat(spark, tiers, tmp_path):
    tiers.produce("t", 300)
    tiers.offload("t")

    def run():
        options = {"store": tiers.store_url, "server": tiers.url, "subscribe": "t"}
        options |= {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "250"}
        options |= dict.fromkeys(("token", "accessKeyId", "secretAccessKey"), "hunter2")
        frame = spark.readStream.format("tierlog").schema("partition int, offset bigint")
        query = (
            frame.options(**options)
            .load()
            .writeStream.format("json")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "out"))
        )
        assert query.awaitTermination(120)
        return query

    query = run()
    assert len(query.recentProgress) >= 3
    sources = [json.loads(progress.json)["sources"][0] for progress in query.recentProgress]
    assert sources[0]["endOffset"]["t"]["id"] == sources[0]["latestOffset"]["t"]["id"]
    tiers.produce("t", 100)
    shown = [progress.json for progress in (*query.recentProgress, *run().recentProgress)]
    files = [one.read_bytes() for one in (tmp_path / "checkpoint").rglob("*") if one.is_file()]
    assert b"hunter2" not in b"".join([*map(str.encode, shown), *files])
    read = spark.read.schema("partition int, offset bigint").json(str(tmp_path / "out")).collect()
    assert sorted((row.partition, row.offset) for row in read) == [
        (p, o) for p in (0, 1) for o in range(400)
    ]
