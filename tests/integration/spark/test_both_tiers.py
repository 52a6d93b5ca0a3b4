"""Both tiers in one read, without Spark: the plan and its tasks against a real broker."""

import json
import threading

import pytest

from tests.fakes.bucket import FIXTURES
from tests.fakes.kafka_folder import KafkaFolder
from tests.fakes.two_tiers import START_MS, two_tiers
from tests.unit.record_format import golden
from tierlog.api.http.settings import HttpSettings
from tierlog.api.serving.grants import Scope
from tierlog.api.serving.tokens import create_token
from tierlog.broker.partition.damaged_partition import DamagedPartition
from tierlog.client.client import Client
from tierlog.cold_tier import segment_lookup
from tierlog.manifest.keys import base_offset_of
from tierlog.manifest.store import ManifestStore
from tierlog.record_format.arrow_schema import COLUMNS
from tierlog.record_format.errors import CorruptDataError, InvalidOption, UnknownTopic
from tierlog.spark_reader import access
from tierlog.spark_reader.catalog import Catalog
from tierlog.spark_reader.options import parse_options
from tierlog.spark_reader.planner import Planner
from tierlog.spark_reader.split_reader import SplitReader
from tierlog.spark_reader.splits import DataLoss
from tierlog.spark_reader.topics import Topics


class Run:
    def __init__(self, tiers, **given):
        given = {"server": tiers.url, "store": tiers.store_url, "splitBytes": "32k", **given}
        given = {name: value for name, value in given.items() if value is not None}
        self.options = parse_options(given, streaming=False)
        self.lost = []
        planner = Planner(self.options, report=self.lost.append, warn=self.lost.append)
        self.splits = planner.batch()
        self.logged = list(self.lost)
        self.lost.clear()

    def rows(self):
        reader = SplitReader(self.options, COLUMNS, warn=self.lost.append)
        found = {}
        for split in self.splits:
            for batch in reader.read_split(split):
                for row in batch.to_pylist():
                    at = round(row["timestamp"].timestamp() * 1000)
                    record = (row["offset"], at, row["key"], row["value"])
                    found.setdefault((row["topic"], row["partition"]), []).append(record)
        return found


def test_hot_and_cold_join_without_a_gap(tiers):
    assert 0 < tiers.cold_end("flights", 0) < 1600
    run = Run(tiers, subscribe="flights")
    assert {split.is_cold for split in run.splits} == {True, False}
    assert run.rows() == {k: v for k, v in tiers.written.items() if k[0] == "flights"}


def test_without_a_store_option_the_broker_serves_both_tiers(tiers):
    run = Run(tiers, subscribe="flights", store=None)
    assert not any(split.is_cold for split in run.splits)
    assert len(run.splits) > 6
    assert run.rows() == {k: v for k, v in tiers.written.items() if k[0] == "flights"}


def test_a_task_does_not_describe_its_topic(tiers, monkeypatch):
    """A description lists all partitions; one per task would be quadratic in their number."""
    run = Run(tiers, subscribe="flights", store=None)
    monkeypatch.setattr(Client, "describe_topic", None)
    assert run.rows() == {k: v for k, v in tiers.written.items() if k[0] == "flights"}


def test_a_cold_only_read_ends_at_the_buckets_end(tiers):
    run = Run(tiers, subscribe="flights", server=None, tier="cold")
    rows = run.rows()
    for (topic, partition), written in tiers.written.items():
        if topic == "flights":
            assert rows[topic, partition] == written[: tiers.cold_end(topic, partition)]


def test_a_store_other_than_the_brokers_is_refused_naming_both(tmp_path, monkeypatch):
    other = f"file://{tmp_path}/other"
    (tmp_path / "other").mkdir()
    with two_tiers(tmp_path) as tiers:
        tiers.create("t", partitions=1)
        tiers.produce("t", 50)
        hot = Run(tiers, subscribe="t", store=other)  # nothing is in the bucket yet: no conflict
        assert hot.rows() == {k: list(v) for k, v in tiers.written.items()}
        tiers.produce("t", 500)
        tiers.offload("t")
        with pytest.raises(InvalidOption, match=f"{other} has no .* t-0; .* {tiers.store_url},"):
            Run(tiers, subscribe="t", store=other)

        def load(store):
            tiers.broker.delete_topic("t")

        monkeypatch.setattr(ManifestStore, "load_manifest", load)
        gone = Run(tiers, subscribe="t", failOnDataLoss="false")
        assert gone.rows() == {}
        assert "t-0: offsets 0 to 550 are gone" in gone.lost[0]


def test_a_wrong_store_is_refused_even_if_the_token_may_not_see_the_brokers(tmp_path):
    http = HttpSettings(tokens_file=tmp_path / "tokens.json")
    token = create_token(http.tokens_file, "t", scopes=(Scope.READ,), topics="t", now_ms=1)
    with two_tiers(tmp_path, http=http) as tiers:
        tiers.create("t", partitions=1)
        tiers.produce("t", 550)
        tiers.offload("t")
        (tmp_path / "other").mkdir()
        with pytest.raises(InvalidOption, match=r"other has no .* t-0; .* store is another,"):
            Run(tiers, subscribe="t", store=f"file://{tmp_path}/other", token=token)


@pytest.mark.parametrize("store", [True, False])
def test_timestamps_are_looked_up_in_both_tiers(tiers, store):
    written = tiers.written["flights", 1]
    low, high = written[100].timestamp, written[1590].timestamp
    first = next(one.offset for one in written if one.timestamp >= low)
    end = next(one.offset for one in written if one.timestamp >= high)
    run = Run(
        tiers,
        assign='{"flights": [1]}',
        startingTimestamp=str(low),
        endingTimestamp=str(high),
        **({} if store else {"store": None}),
    )
    assert run.rows() == {("flights", 1): written[first:end]}


def test_offset_ranges_can_span_both_tiers(tiers):
    cold_end = tiers.cold_end("flights", 2)
    starts, ends = cold_end - 20, cold_end + 20
    run = Run(
        tiers,
        assign='{"flights": [2]}',
        startingOffsets=json.dumps({"flights": {"2": starts}}),
        endingOffsets=json.dumps({"flights": {"2": ends}}),
    )
    assert run.rows() == {("flights", 2): tiers.written["flights", 2][starts:ends]}


def test_an_unknown_topic_is_an_error(tiers):
    with pytest.raises(UnknownTopic):
        Run(tiers, subscribe="nothing")


def test_a_topic_deleted_after_listing_is_skipped(tiers, monkeypatch):
    monkeypatch.setattr(Topics, "_names", lambda _: ["flight-gone", "flights"])
    run = Run(tiers, subscribePattern="flight.*")
    assert {split.topic for split in run.splits} == {"flights"}


@pytest.mark.parametrize("method", ["first_at_time", "cold_entries"])
def test_partitions_are_planned_in_parallel(tiers, monkeypatch, method):
    barrier, real = threading.Barrier(3), getattr(Catalog, method)

    def together(*args, **kwargs):
        barrier.wait(timeout=10)
        return real(*args, **kwargs)

    monkeypatch.setattr(Catalog, method, together)
    run = Run(tiers, subscribe="flights", startingTimestamp=str(START_MS - 60_000))
    assert len({split.partition for split in run.splits}) == 3


def test_planning_small_partitions_only_describes_their_topic(tiers, monkeypatch):
    """Requests per partition would dominate the planning of many."""
    monkeypatch.setattr(Client, "offsets", None)
    monkeypatch.setattr(Client, "segments", None)
    for store, attribute in ((tiers.store_url, "offload_lag_bytes"), (None, "hot_bytes")):
        run = Run(tiers, subscribe="flights", store=store, splitBytes=None)
        assert run.rows() == {k: v for k, v in tiers.written.items() if k[0] == "flights"}
        with Client(tiers.url) as client:
            described = client.describe_topic("flights").partitions
        ends = [tiers.cold_end("flights", partition) for partition in range(3)]
        assert [one.cold_end_offset for one in described] == ends
        least = sum(getattr(one, attribute) for one in described)
        plan = json.loads(run.logged[1].removeprefix("plan "))
        assert 0 < least - 3 <= plan["hotBytes"] < 3 * 1600 * 200


def test_appends_and_offloads_during_planning_do_not_change_the_plan(tmp_path, monkeypatch):
    with two_tiers(tmp_path) as tiers:
        tiers.create("moving", partitions=1)
        tiers.produce("moving", 500)
        chosen = Topics.chosen

        def produce_and_offload(topics):
            found = chosen(topics)
            tiers.produce("moving", 500)
            tiers.offload("moving")
            return found

        monkeypatch.setattr(Topics, "chosen", produce_and_offload)
        run = Run(tiers, subscribe="moving")
        assert all(split.is_cold for split in run.splits)
        assert run.rows() == {("moving", 0): tiers.written["moving", 0][:500]}


def test_segments_may_be_offloaded_or_trimmed_after_planning(tmp_path):
    with two_tiers(tmp_path) as tiers:
        tiers.create("moving", partitions=1)
        tiers.produce("moving", 1000)
        run = Run(tiers, subscribe="moving")
        by_broker = {"subscribe": "moving", "store": None}
        strict, lenient = (Run(tiers, failOnDataLoss=f, **by_broker) for f in ("true", "false"))
        tiers.offload("moving")
        written = tiers.written["moving", 0]
        assert run.rows() == strict.rows() == {("moving", 0): written}
        tiers.broker.trim("moving", 0, 420)  # within a batch
        with pytest.raises(DataLoss, match="moving-0: offsets 0 to 420 are gone"):
            strict.rows()
        assert lenient.rows() == {("moving", 0): written[420:]}
        assert lenient.lost
        assert Run(tiers, subscribe="moving").rows() == {("moving", 0): written[420:]}

        tiers.broker.delete_topic("moving")
        with pytest.raises(DataLoss, match=r"moving-0: offsets 0 to \d+ are gone: there is no"):
            strict.rows()
        assert lenient.rows() == {}
        tiers.create("moving", partitions=1)
        assert lenient.rows() == {}
        assert any("moving-0: ends at 0 now, before offset" in one for one in lenient.lost)
        tiers.produce("moving", 1000)
        with pytest.raises(DataLoss, match="topic 'moving' was deleted and re-created"):
            strict.rows()
        assert lenient.rows() == {}


@pytest.mark.parametrize("isolation", ["read_uncommitted", "read_committed"])
def test_the_logged_options_of_a_read_return_the_same_rows_again(tmp_path, isolation):
    with two_tiers(tmp_path) as tiers:
        tiers.create("again", partitions=2)
        tiers.produce("again", 500)
        tiers.offload("again")
        tiers.produce("again", 50)
        first = Run(tiers, subscribePattern="ag.*", isolationLevel=isolation)
        assert {split.is_cold for split in first.splits} == {True, False}
        used = json.loads(first.logged[0].removeprefix("read "))
        tiers.produce("again", 500)
        tiers.offload("again")
        tiers.broker.alter_topic("again", partitions=3)
        tiers.written["again", 2] = []
        tiers.produce("again", 50)
        given = {name: json.dumps(value) for name, value in used.items()}
        second = Run(tiers, isolationLevel=isolation, **given)
        written = {("again", p): tiers.written["again", p][:550] for p in (0, 1)}
        assert second.rows() == first.rows() == written
        given["endingOffsets"] = "latest"  # of a manifest version: its end
        cold = Run(tiers, isolationLevel=isolation, **given).rows()
        assert cold == {partition: written[:500] for partition, written in second.rows().items()}


def test_a_time_past_a_pinned_version_is_looked_up_in_the_tail(tmp_path):
    """As far as a numeric ending offset extends the read past the version."""
    with two_tiers(tmp_path) as tiers:
        tiers.create("again", partitions=1)
        tiers.produce("again", 500)
        tiers.offload("again")
        tiers.produce("again", 50)
        used = json.loads(Run(tiers, subscribe="again").logged[0].removeprefix("read "))
        written = tiers.written["again", 0]
        given = {name: json.dumps(used[name]) for name in ("manifestVersion", "endingOffsets")}
        given |= {"subscribe": "again", "startingOffsetsByTimestampStrategy": "latest"}
        for first in (100, 520):  # in the version, and in the tail
            time = max(one.timestamp for one in written[:first]) + 1
            offset = next(one.offset for one in written if one.timestamp >= time)
            run = Run(tiers, startingTimestamp=str(time), **given)
            assert run.rows() == {("again", 0): written[offset:]}
        given["endingOffsets"] = '{"again": {"0": 500}}'
        assert Run(tiers, startingTimestamp=str(time), **given).rows() == {}


def test_the_logged_options_of_a_broker_only_read_are_valid_options(tiers):
    options = {"store": None, "startingOffsets": '{"flights": {"1": 700}}'}
    first = Run(tiers, assign='{"flights": [1, 2]}', **options)
    used = json.loads(first.logged[0].removeprefix("read "))
    assert used.keys() == {"assign", "startingOffsets", "endingOffsets"}
    given = {name: json.dumps(value) for name, value in used.items()}
    assert Run(tiers, store=None, **given).rows() == first.rows()


def test_options_for_unassigned_partitions_are_refused(tiers):
    for name, value in (
        ("startingOffsets", 5),
        ("endingOffsetsByTimestamp", START_MS),
        ("manifestVersion", 1),
    ):
        given = {name: json.dumps({"flights": {"0": value, "1": value}})}
        with pytest.raises(
            InvalidOption,
            match=f"{name}: flights-1 is not one assigned|{name} or .*: flights-1 is not",
        ):
            Run(tiers, assign='{"flights": [0]}', **given)


def test_read_committed_matches_kafkas_consumer_in_either_tier(tmp_path):
    committed = golden.committed(FIXTURES / "txn-0")
    everything = golden.expected_records(FIXTURES / "txn-0")
    with two_tiers(tmp_path, adopted=[FIXTURES / "txn-0"]) as tiers:
        for offloaded in (False, True):
            if offloaded:
                tiers.offload("txn")
            for store in (tiers.store_url, None):
                run = Run(tiers, subscribe="txn", store=store, isolationLevel="read_committed")
                assert [row[0] for row in run.rows()["txn", 0]] == committed
                run = Run(tiers, subscribe="txn", store=store)
                assert len(run.rows()["txn", 0]) == len(everything)
        ending = {"server": None, "tier": "cold", "isolationLevel": "read_committed"}
        assert [r[0] for r in Run(tiers, subscribe="txn", **ending).rows()["txn", 0]] == committed


def test_a_damaged_partition_fails_the_read(tmp_path):
    with two_tiers(tmp_path) as tiers:
        tiers.create("t", partitions=3)
        tiers.produce("t", 50)
        topic = tiers.broker.topic("t")
        del topic.partitions[1]
        topic.damaged[1] = DamagedPartition("t", 1, CorruptDataError("bad"), None, None)
        for store in (tiers.store_url, None):
            with pytest.raises(CorruptDataError):
                Run(tiers, subscribe="t", store=store, failOnDataLoss="false")
        assert Run(tiers, assign='{"t": [0, 2]}').rows().keys() == {("t", 0), ("t", 2)}
        with Client(tiers.url) as client:
            records = client.consume("t")
            assert [next(records).partition for _ in range(100)] == [0] * 50 + [2] * 50
            with pytest.raises(CorruptDataError):
                next(records)


def test_aborted_records_are_excluded_even_if_the_marker_follows_an_open_transaction(
    tmp_path,
):
    folder = KafkaFolder(tmp_path / "txn-0")
    folder.roll()
    folder.put(b"aborted", b"too", producer_id=1, base_sequence=0)
    folder.put(b"open", producer_id=2, base_sequence=0)
    folder.roll()
    folder.put(b"plain")
    folder.end(1, committed=False)
    folder.roll()
    with two_tiers(tmp_path, adopted=[folder.path]) as tiers:
        access_options = (
            {"store": tiers.store_url},
            {"store": None},
            {"server": None, "tier": "cold"},
        )
        read = {"subscribe": "txn", "isolationLevel": "read_committed"}
        tiers.offload("txn")
        for options in access_options:
            assert Run(tiers, **read, **options).rows() == {}
        tiers.broker.trim("txn", 0, 3)  # only the end of the open transaction can still follow
        tiers.offload("txn")
        for options in access_options:
            assert Run(tiers, **read, **options).rows() == {}


def test_aborted_transactions_are_fetched_only_for_segments_that_need_them(tmp_path, monkeypatch):
    folder = KafkaFolder(tmp_path / "txn-0")
    folder.roll()
    folder.put(b"plain")
    folder.put(b"aborted", producer_id=1, base_sequence=0)
    folder.roll()
    folder.put(b"between")
    folder.roll()
    folder.end(1, committed=False)
    for _ in range(3):
        folder.roll()
        folder.put(b"plain")
    with two_tiers(tmp_path, adopted=[folder.path]) as tiers:
        tiers.offload("txn")
        read_range, fetched = segment_lookup.read_range, set()

        def recording(store, key, *args):
            fetched.add(base_offset_of(key))
            return read_range(store, key, *args)

        monkeypatch.setattr(segment_lookup, "read_range", recording)
        monkeypatch.setattr(access, "_clients", access._Clients())
        last = 6  # read for the last stable offset of the bucket
        for start, end, offsets, segments in (
            (0, 2, [0], {0, 2, 3, last}),
            (2, 3, [2], {2, last}),
            (3, 5, [4], {3, 4, last}),
            (0, -1, [0, 2, 4, 5, 6], {0, 2, 3, 4, 5, last}),
        ):
            bounds = {
                "startingOffsets": {"txn": {"0": start}},
                "endingOffsets": {"txn": {"0": end}},
            }
            bounds = {name: json.dumps(bound) for name, bound in bounds.items()}
            run = Run(tiers, subscribe="txn", isolationLevel="read_committed", **bounds)
            assert [row[0] for row in run.rows()["txn", 0]] == offsets
            assert fetched == segments
            fetched.clear()
            access._clients.close()  # drops the caches


def test_the_tail_may_begin_inside_an_open_transaction(tmp_path):
    folder = KafkaFolder(tmp_path / "txn-0")
    folder.roll()
    folder.put(b"plain")
    folder.put(b"aborted", producer_id=1, base_sequence=0)
    folder.put(b"more")
    folder.roll()
    folder.end(1, committed=False)
    folder.put(b"last")
    with two_tiers(tmp_path, adopted=[folder.path]) as tiers:
        partition = tiers.broker.partition("txn", 0)
        assert tiers.broker.background.copier.wait_until_done([partition], timeout_s=20)
        assert tiers.cold_end("txn", 0) == 3
        for isolation, offsets in (
            ("read_committed", [0, 2, 4]),
            ("read_uncommitted", [0, 1, 2, 4]),
        ):
            run = Run(tiers, subscribe="txn", isolationLevel=isolation)
            assert {split.is_cold for split in run.splits} == {True, False}
            assert [row[0] for row in run.rows()["txn", 0]] == offsets
