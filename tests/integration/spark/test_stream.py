"""Streams: the reader's own calls, then Spark's, over a log that goes on being written."""

import json
import shutil
import threading

import pytest

from broker.repair.restore import RestoreOptions, restore
from cold_tier.open import open_store
from record_format.errors import UnknownTopic
from spark_reader import catalog
from spark_reader.catalog import Catalog
from spark_reader.option_values import InvalidOption
from spark_reader.options import parse_options
from spark_reader.ranges import DataLoss
from tests.fakes.two_tiers import START_MS, two_tiers
from tierlog.client import Client

pytest.importorskip("pyspark.sql.streaming.datasource", reason="streams need pyspark 4.2")

from pyspark.sql.streaming.datasource import ReadAllAvailable

from spark_reader.stream_source import TierlogStreamReader


@pytest.fixture
def own(tmp_path):
    with two_tiers(tmp_path) as tiers:
        tiers.create("t", partitions=2)
        yield tiers


def reader(tiers, **given):
    given = {"store": tiers.store_url, "server": tiers.url, "subscribe": "t", **given}
    given = {name: value for name, value in given.items() if value is not None}
    given.setdefault("startingOffsets", "earliest")
    return TierlogStreamReader(parse_options(given, streaming=True), ("partition", "offset"))


def place(document):
    return {int(p): o for p, o in document["t"]["offsets"].items()}


def rows(stream, start, end):
    splits = stream.partitions(start, end)
    read = [row for split in splits for batch in stream.read(split) for row in batch.to_pylist()]
    return sorted((row["partition"], row["offset"]) for row in read)


def expected(start, end):
    first, last = place(start), place(end)
    return sorted((p, o) for p in last for o in range(first.get(p, 0), last[p]))


def plans(capsys):
    """What the planning said of each micro-batch."""
    lines = capsys.readouterr().err.splitlines()
    start = "tierlog: plan "
    return [json.loads(line.removeprefix(start)) for line in lines if line.startswith(start)]


def test_batches_follow_each_other_from_the_cold_tier_into_the_tail(own, capsys):
    own.produce("t", 1000)
    own.offload("t")
    own.produce("t", 50)  # with the next fifty less than a segment, so that nothing of it moves on
    stream = reader(own, maxOffsetsPerTrigger="700")
    limit = stream.getDefaultReadLimit()
    start, seen = stream.initialOffset(), []
    while (end := stream.latestOffset(start, limit)) != start:
        assert rows(stream, start, end) == expected(start, end)
        seen += rows(stream, start, end)
        start = end
        if len(seen) == 1400:
            own.produce("t", 50)
    assert sorted(seen) == [(p, o) for p in (0, 1) for o in range(1100)]
    told = plans(capsys)[::2]  # each batch was planned twice
    assert [(one["offsets"], one["offsetsBehind"]) for one in told] == [
        *((700, 1400), (700, 700), (700, 100), (100, 0)),
    ]
    first, last = told[0], told[-1]
    assert (first["coldBytes"] > 60_000, first["hotBytes"]) == (True, 0)
    assert (last["coldBytes"], last["hotBytes"] > 10_000) == (0, True)
    assert place(stream.reportLatestOffset()) == {0: 1100, 1: 1100}


def test_a_batch_fetches_little_of_what_lies_behind_it(own, monkeypatch):
    own.create(
        "large", partitions=1, **{"segment.bytes": 64 << 20, "compression.type": "uncompressed"}
    )
    own.produce("large", 10_000)
    fetch, sizes = Client.fetch_batches, []

    def weighed(*place, **limits):
        found = fetch(*place, **limits)
        sizes.append(len(found.batches))
        return found

    monkeypatch.setattr(Client, "fetch_batches", weighed)
    stream = reader(own, subscribe="large", store=None, maxOffsetsPerTrigger="1000")
    start, limit = stream.initialOffset(), stream.getDefaultReadLimit()
    seen = []
    while (end := stream.latestOffset(start, limit)) != start:
        seen += rows(stream, start, end)
        start = end
    assert seen == [(0, o) for o in range(10_000)]
    assert 1_000_000 < sum(sizes) < 2_500_000, "of a log of some 1.3 MB"


def test_a_stream_of_the_bucket_alone_follows_what_is_offloaded(own):
    stream, start = reader(own, server=None, tier="cold"), None
    for offloaded in (150, 300):
        own.produce("t", 150)
        own.offload("t")
        start = start or stream.initialOffset()
        end = stream.latestOffset(start, ReadAllAvailable())
        assert place(end) == {0: offloaded, 1: offloaded}
        assert rows(stream, start, end) == expected(start, end)
        start = end


def test_a_stream_starts_at_the_latest_and_takes_new_partitions_from_their_beginning(own):
    own.produce("t", 50)
    stream = reader(own, startingOffsets="latest")
    start = stream.initialOffset()
    assert place(start) == {0: 50, 1: 50}
    own.broker.alter_topic("t", partitions=3)
    own.written["t", 2] = []
    own.produce("t", 50)
    end = stream.latestOffset(start, ReadAllAvailable())
    assert place(end) == {0: 100, 1: 100, 2: 50}
    assert rows(stream, start, end) == expected({"t": {"offsets": {"0": 50, "1": 50}}}, end)


def test_topics_that_a_pattern_finds_during_a_stream_and_that_go_again(own):
    def by_pattern(**given):
        return reader(own, subscribe=None, subscribePattern="t.*", **given)

    with pytest.raises(InvalidOption, match="topic 't-new' is not among those read"):
        by_pattern(startingOffsets='{"t-new": {"0": 5}}').initialOffset()

    own.produce("t", 50)
    stream = by_pattern(startingOffsets="latest")
    start = stream.initialOffset()
    own.create("t-new", partitions=1)
    own.create("other", partitions=1)
    own.produce("t-new", 100)
    end = stream.latestOffset(start, ReadAllAvailable())
    assert rows(stream, start, end) == [(0, offset) for offset in range(100)]
    # Planned once more, as after a restart, it is the same rows or none.
    own.broker.trim("t-new", 0, 50)
    with pytest.raises(DataLoss, match="t-new-0: offsets 0 to 50 are gone"):
        by_pattern().partitions(start, end)
    own.broker.delete_topic("t-new")
    with pytest.raises(DataLoss, match="the stream has read t-new-0: deleted, or"):
        by_pattern().latestOffset(end, ReadAllAvailable())
    # Options say where a stream begins; under way it may lose what they name.
    named = {"startingOffsets": '{"t-new": {"0": 5}}'}
    lenient = by_pattern(failOnDataLoss="false", **named)
    after = lenient.latestOffset(end, ReadAllAvailable())
    assert set(after) == {"t"}
    assert rows(lenient, start, end) == rows(lenient, end, after) == []


def test_a_topic_by_name_that_goes_during_a_stream_goes_by_the_option_and_a_wrong_name_does_not(
    own, capsys
):
    own.produce("t", 50)
    own.create("other", partitions=1)
    own.produce("other", 50)

    def both(**given):
        return reader(own, **{"subscribe": "t,other", **given})

    stream = both()
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadAllAvailable())
    own.broker.delete_topic("other")
    with pytest.raises(DataLoss, match="the stream has read other-0: deleted, or"):
        stream.latestOffset(end, ReadAllAvailable())
    lenient = both(failOnDataLoss="false")
    lenient.prepareForTriggerAvailableNow()
    own.produce("t", 50)
    after = lenient.latestOffset(end, ReadAllAvailable())
    assert lenient.latestOffset(after, ReadAllAvailable()) == after  # it stays away
    restarted = both(failOnDataLoss="false")
    start_of_more, after = after, restarted.latestOffset(after, ReadAllAvailable())
    more = [(p, o) for p in (0, 1) for o in range(50, 100)]
    assert rows(restarted, start_of_more, after) == more
    assert rows(both(failOnDataLoss="false"), start, end) == [
        (p, o) for p in (0, 1) for o in range(50)
    ]
    with pytest.raises(UnknownTopic):
        reader(own, subscribe="t,oter", failOnDataLoss="false").latestOffset(
            end, ReadAllAvailable()
        )
    own.create("other", partitions=1)
    own.produce("other", 50)
    stream = both(failOnDataLoss="false")
    anew = stream.latestOffset(after, ReadAllAvailable())
    assert rows(stream, after, anew) == [(0, o) for o in range(50)]
    assert (
        "was deleted and re-created" not in capsys.readouterr().err
    )  # that it was gone is told already


def test_a_stream_that_waits_asks_nothing_of_the_bucket(own, monkeypatch):
    own.produce("t", 500)
    own.offload("t")
    stream = reader(own, maxOffsetsPerTrigger="5000")
    limit = stream.getDefaultReadLimit()
    end = stream.latestOffset(stream.initialOffset(), limit)
    with monkeypatch.context() as patch:
        patch.setattr(catalog, "ManifestStore", None)
        patch.setattr(Client, "offsets", None)  # what describes the topic has its ends
        assert stream.latestOffset(end, limit) == end
        assert stream.reportLatestOffset() == end
    own.produce("t", 50)
    after = stream.latestOffset(end, limit)
    assert rows(stream, end, after) == [(p, o) for p in (0, 1) for o in range(500, 550)]


@pytest.mark.parametrize("store", [True, False])
def test_a_batch_that_is_planned_once_more_behind_the_next_look_has_its_rows(own, store):
    """Spark to 4.3 plans each before it looks again; nothing says that it has to."""
    own.produce("t", 500)
    own.offload("t")
    own.produce("t", 50)
    stream = reader(own, **({} if store else {"store": None}))
    start = stream.initialOffset()
    end = stream.latestOffset(start, ReadAllAvailable())
    assert stream.latestOffset(end, ReadAllAvailable()) == end
    assert rows(stream, start, end) == expected(start, end)


def test_a_stream_that_begins_at_a_time_looks_all_partitions_up_together(own, monkeypatch):
    own.produce("t", 50)
    both, look_up = threading.Barrier(2), Catalog.first_at_time

    def together(*given):
        both.wait(timeout=10)
        return look_up(*given)

    monkeypatch.setattr(Catalog, "first_at_time", together)
    stream = reader(own, startingTimestamp=str(START_MS - 60_000))
    assert place(stream.initialOffset()) == {0: 0, 1: 0}


def test_limits_by_bytes_and_a_minimum(own):
    own.produce("t", 1000)
    stream = reader(own, maxBytesPerTrigger="20k")
    start = stream.initialOffset()
    end = stream.latestOffset(start, stream.getDefaultReadLimit())
    assert all(0 < offset < 200 for offset in place(end).values())
    assert place(stream.latestOffset(start, ReadAllAvailable())) == {0: 1000, 1: 1000}

    patient = reader(own, minOffsetsPerTrigger="5000", maxTriggerDelay="1h")
    hasty = reader(own, minOffsetsPerTrigger="5000", maxTriggerDelay="0ms")
    for one in (patient, hasty):  # the delay is one between two batches: the first waits for none
        end = one.latestOffset(start, one.getDefaultReadLimit())
        assert place(end) == {0: 1000, 1: 1000}
    own.produce("t", 50)
    assert patient.latestOffset(end, patient.getDefaultReadLimit()) == end
    assert place(hasty.latestOffset(end, hasty.getDefaultReadLimit())) == {0: 1050, 1: 1050}


def test_a_gap_takes_nothing_of_a_limit_whoever_knows_of_it(tmp_path):
    with two_tiers(tmp_path) as tiers:
        tiers.create("t", partitions=1)
        tiers.produce("t", 500)
        tiers.offload("t")
    shutil.rmtree(tmp_path / "data")
    gap = 10**9
    restore(
        open_store(f"file://{tmp_path}/bucket"),
        RestoreOptions(tmp_path / "data", gap, lambda: START_MS),
    )
    with two_tiers(tmp_path) as tiers:
        by_broker = reader(tiers, store=None, maxRecordsPerPartition="1000")
        start = by_broker.initialOffset()
        end = by_broker.latestOffset(start, ReadAllAvailable())
        # The gap is nothing to be cut: by records it would be a million splits.
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


def test_gaps_are_asked_for_without_the_segments_that_lie_around_them(own, monkeypatch):
    own.produce("t", 500)
    own.offload("t")
    ask, pages = Client.manifest, []

    def noted(*place, **given):
        pages.append(ask(*place, **given))
        return pages[-1]

    monkeypatch.setattr(Client, "manifest", noted)
    stream = reader(own, store=None, maxOffsetsPerTrigger="100")
    stream.latestOffset(stream.initialOffset(), stream.getDefaultReadLimit())
    assert min(one.version for one in pages) > 1, "segments were added"
    assert not any(one.segments for one in pages)


def test_available_now_ends_with_what_there_was(own):
    own.produce("t", 100)
    stream = reader(own)
    stream.prepareForTriggerAvailableNow()
    own.produce("t", 100)
    end = stream.latestOffset(stream.initialOffset(), ReadAllAvailable())
    assert place(end) == {0: 100, 1: 100}


def test_available_now_leaves_a_topic_that_came_to_the_next_run(own):
    own.produce("t", 50)
    stream = reader(own, subscribe=None, subscribePattern="t.*")
    start = stream.initialOffset()
    stream.prepareForTriggerAvailableNow()
    own.create("t-new", partitions=1)
    own.produce("t-new", 100)
    end = stream.latestOffset(start, ReadAllAvailable())
    assert set(end) == {"t"}
    own.broker.trim("t-new", 0, 50)  # nobody has read them
    after = reader(own, subscribe=None, subscribePattern="t.*")
    with pytest.raises(DataLoss, match="t-new-0: offsets 0 to 50 are gone"):
        after.partitions(end, after.latestOffset(end, ReadAllAvailable()))


def test_trimmed_offsets_and_another_topic_are_data_loss(own):
    own.produce("t", 500)
    stream = reader(own)
    start = stream.initialOffset()
    own.broker.trim("t", 0, 300)
    end = stream.latestOffset(start, ReadAllAvailable())
    with pytest.raises(DataLoss, match="t-0: offsets 0 to 300 are gone"):
        stream.partitions(start, end)
    limited = reader(own, maxOffsetsPerTrigger="70", failOnDataLoss="false")
    first = limited.latestOffset(start, limited.getDefaultReadLimit())
    assert rows(limited, start, first) == [(0, o) for o in range(300, 320)] + [
        (1, o) for o in range(50)
    ]
    own.broker.delete_topic("t")
    own.create("t", partitions=2)
    own.produce("t", 50)
    with pytest.raises(DataLoss, match="topic 't' was deleted and re-created"):
        stream.latestOffset(end, ReadAllAvailable())
    lenient = reader(own, failOnDataLoss="false")
    # A batch that was under way over the topic that is gone has no row of the one that came.
    assert rows(reader(own, failOnDataLoss="false"), start, end) == []
    again = lenient.latestOffset(end, ReadAllAvailable())
    assert rows(lenient, end, again) == [(p, o) for p in (0, 1) for o in range(50)]


@pytest.mark.parametrize("anew", [False, True])
def test_a_topic_that_goes_before_its_batch_is_planned_is_found_gone_by_its_tasks(own, anew):
    own.produce("t", 100)
    given = {"store": None, "splitBytes": "4k"}
    lenient, strict = (reader(own, failOnDataLoss=one, **given) for one in ("false", "true"))
    start = lenient.initialOffset()
    ends = [one.latestOffset(start, ReadAllAvailable()) for one in (lenient, strict)]
    own.broker.delete_topic("t")
    if anew:
        own.written.clear()
        own.create("t", partitions=1)
        own.produce("t", 50)
    assert rows(lenient, start, ends[0]) == []
    with pytest.raises(DataLoss, match=r"t-0: offsets 0 to \d+ are gone"):
        rows(strict, start, ends[1])


def test_a_log_that_was_set_back_is_data_loss_and_goes_on_with_what_comes(own):
    own.produce("t", 50)
    stream = reader(own)
    place_before = stream.latestOffset(stream.initialOffset(), ReadAllAvailable())
    place_before["t"]["offsets"]["0"] = 500
    with pytest.raises(DataLoss, match="t-0: ends at 50, before offset 500"):
        stream.latestOffset(place_before, ReadAllAvailable())
    lenient = reader(own, failOnDataLoss="false")
    end = lenient.latestOffset(place_before, ReadAllAvailable())
    assert rows(lenient, place_before, end) == []
    own.produce("t", 50)
    again = lenient.latestOffset(end, ReadAllAvailable())
    assert rows(lenient, end, again) == [(p, o) for p in (0, 1) for o in range(50, 100)]


def test_what_is_lost_is_told_once_also_where_a_batch_waits_for_a_minimum(own, capsys):
    own.produce("t", 50)
    own.create("t-gone", partitions=1)
    given = {"subscribe": None, "subscribePattern": "t.*", "failOnDataLoss": "false"}
    stream = reader(own, **given, minOffsetsPerTrigger="5000", maxTriggerDelay="1h")
    limit = stream.getDefaultReadLimit()
    end = stream.latestOffset(stream.initialOffset(), limit)
    own.broker.delete_topic("t-gone")
    end["t"]["offsets"]["0"] = 80  # it was set back
    after = stream.latestOffset(end, limit)
    assert set(after) == {"t"}
    assert place(after) == {0: 50, 1: 50}
    own.produce("t", 50)
    assert stream.latestOffset(after, limit) == after, "what comes waits as always"
    assert rows(stream, after, stream.latestOffset(after, ReadAllAvailable())) == [
        (p, o) for p in (0, 1) for o in range(50, 100)
    ]
    said = capsys.readouterr().err
    assert said.count("has read t-gone-0") == said.count("t-0: ends at 50") == 1


@pytest.mark.spark
def test_spark_restarts_from_its_checkpoint_without_loss_or_repeat(spark, own, tmp_path):
    own.produce("t", 300)
    own.offload("t")

    def run():
        options = {"store": own.store_url, "server": own.url, "subscribe": "t"}
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
    own.produce("t", 100)
    shown = [progress.json for progress in (*query.recentProgress, *run().recentProgress)]
    kept = [one.read_bytes() for one in (tmp_path / "checkpoint").rglob("*") if one.is_file()]
    assert b"hunter2" not in b"".join([*map(str.encode, shown), *kept])
    read = spark.read.schema("partition int, offset bigint").json(str(tmp_path / "out")).collect()
    assert sorted((row.partition, row.offset) for row in read) == [
        (p, o) for p in (0, 1) for o in range(400)
    ]
