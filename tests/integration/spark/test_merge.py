"""Small segments merged on Spark: of several partitions at once, interrupted anywhere."""

import json

import pytest

from tests.fakes.two_tiers import two_tiers
from tierlog.cli.program import run_command
from tierlog.client.client import Client
from tierlog.record_format.errors import InvalidRequest
from tierlog.repair.verify import verify_topic
from tierlog.spark_reader.arrow_dataset import dataset
from tierlog.spark_reader.jobs import merge as merge_module
from tierlog.spark_reader.jobs.merge import MergeReport, merge

pytestmark = pytest.mark.spark

TOPICS = ("clicks", "orders")
PARTITIONS, SEGMENTS = 2, 5
RUNS = len(TOPICS) * PARTITIONS


@pytest.fixture
def tiers(tmp_path):
    """Each partition has small segments in the bucket alone."""
    with two_tiers(tmp_path) as tiers:
        small = {"segment.bytes": 1 << 20, "local.retention.bytes": 0}
        for topic in TOPICS:
            tiers.create(topic, partitions=PARTITIONS, **small)
            for _ in range(SEGMENTS):
                tiers.produce(topic, 50)
                for number in range(PARTITIONS):
                    tiers.broker.partition(topic, number).upkeep.roll()
            tiers.offload(topic)
        yield tiers


def run(spark, tiers, topics=TOPICS):
    options = {"store": tiers.store_url, "server": tiers.url, "subscribe": ",".join(topics)}
    return merge(spark, options)


def counts(tiers):
    """Of segments in the bucket, by partition."""
    partitions = [tiers.broker.partition(*one) for one in tiers.written]
    return [len(list(one.cold_entries(0))) for one in partitions]


def check_records(tiers):
    for topic in TOPICS:
        table = dataset(topic, store=tiers.store_url, tier="cold").to_table(
            columns=["partition", "offset", "key", "value"]
        )
        found = sorted((one["partition"], one["offset"], one["value"]) for one in table.to_pylist())
        assert found == [
            (number, one.offset, one.value)
            for number in range(PARTITIONS)
            for one in tiers.written[topic, number]
        ]
        assert verify_topic(tiers.broker, topic, deep=True).ok


def test_an_interrupted_merge_loses_nothing_and_a_second_run_goes_on(
    spark, tiers, monkeypatch, capsys
):
    assert counts(tiers) == [SEGMENTS] * RUNS
    merge_objects, commit_merged = merge_module.merge_objects, merge_module.commit_merged

    def killed_before_its_upload(store, segments, plan, **more):
        if "clicks" in plan.segments_folder:
            raise OSError("killed before its upload")
        return merge_objects(store, segments, plan, **more)

    def killed_after_its_upload(connections, topic, partition, merged):
        raise OSError("killed after its upload")

    def killed_after_its_commit(connections, topic, partition, merged):
        commit_merged(connections, topic, partition, merged)
        raise OSError("killed after its commit")

    for name, kill, topics in (
        ("merge_objects", killed_before_its_upload, ["clicks"]),
        ("commit_merged", killed_after_its_upload, ["clicks"]),
        ("commit_merged", killed_after_its_commit, ["orders"]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(merge_module, name, kill)
            with pytest.raises(Exception, match=kill.__name__.replace("_", " ")):
                run(spark, tiers, topics)
        check_records(tiers)
    merged = [count for count in counts(tiers) if count == 1]
    assert 1 <= len(merged) <= PARTITIONS  # those whose commit was not heard of
    left = RUNS - len(merged)
    source = ("--store", tiers.store_url, "--server", tiers.url, "--output", "json")
    assert run_command(("storage", "compact", *TOPICS, "--spark", *source)) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["merged_segments"], done["new_segments"]) == (left * SEGMENTS, left)
    assert counts(tiers) == [1] * RUNS
    check_records(tiers)
    assert run(spark, tiers) == MergeReport()


def test_what_was_trimmed_meanwhile_is_left_out_and_compacted_topics_are_refused(
    spark, tiers, monkeypatch
):
    merge_objects, url = merge_module.merge_objects, tiers.url

    def trimmed_meanwhile(store, segments, plan, **more):
        merged = merge_objects(store, segments, plan, **more)
        if "/0/" in plan.segments_folder and merged.base_offset == 0:
            with Client(url) as client:
                client.trim("clicks", 0, before_offset=75)
        return merged

    monkeypatch.setattr(merge_module, "merge_objects", trimmed_meanwhile)
    done = run(spark, tiers, ["clicks"])
    assert (done.merged_segments, done.new_segments) == (SEGMENTS + SEGMENTS - 1, 2)
    assert tiers.broker.partition("clicks", 0).log_start_offset == 75
    assert counts(tiers)[:2] == [1, 1]
    assert verify_topic(tiers.broker, "clicks", deep=True).ok
    tiers.create("compacted", partitions=1, **{"cleanup.policy": "compact"})
    with pytest.raises(InvalidRequest, match="compaction merges its segments"):
        run(spark, tiers, ["compacted"])
