"""A data folder written by a real Kafka, adopted as it is."""

import shutil

import pytest
from structlog.testing import capture_logs

from tests.fakes.broker_harness import BrokerHarness
from tests.fakes.damage import flip
from tests.unit.record_format import golden
from tierlog.broker.data_folder.data_folder import LOG_STARTS
from tierlog.cli.dump_checks import find_problems
from tierlog.hot_tier import closed_log
from tierlog.manifest.topic_objects import Cluster, create_cluster
from tierlog.object_store.open import open_store
from tierlog.record_format.errors import ConfigurationError, CorruptBatch, CorruptSnapshot
from tierlog.repair.repair import repair_topic
from tierlog.repair.verify import verify_topic

KAFKA = golden.ROOT


def copy_of_kafka(tmp_path, *names, clean):
    data = tmp_path / "kafka" / "data"
    data.mkdir(parents=True)
    for name in names:
        shutil.copytree(KAFKA / name, data / name)
    for file in (KAFKA / "_broker").iterdir():
        if clean or file.name != ".kafka_cleanshutdown":
            shutil.copy(file, data / file.name)
    if clean:
        (data / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":1}')
    return tmp_path / "kafka"


def test_a_complete_data_folder_is_served_and_recovers_from_a_crash(tmp_path):
    names = sorted(path.parent.name for path in KAFKA.glob("*/partition.metadata"))
    root = copy_of_kafka(tmp_path, *names, clean=True)
    harness = BrokerHarness(root)
    try:
        for name in names:
            assert_as_kafka_served(harness, name)
            topic, _, number = name.rpartition("-")
            harness.produce(topic, [b"ours"], partition=int(number))
        harness.broker.close()
        (root / "data" / ".kafka_cleanshutdown").unlink()
        harness.broker = harness.open()
        for name in names:
            *_, last = assert_as_kafka_served(harness, name)
            assert last.value == b"ours"
    finally:
        harness.broker.close()
    for name in names:
        for file in (root / "data" / name).iterdir():
            assert list(find_problems(file)) == [], file


def assert_as_kafka_served(harness, name):
    """Compare with what Kafka's consumer read; return all records, including later ones."""
    topic, _, number = name.rpartition("-")
    start = harness.broker.partition(topic, int(number)).offsets().log_start_offset
    expected = [
        (record["offset"], record["timestamp"]) for record in golden.expected_records(KAFKA / name)
    ]
    records = harness.records(topic, partition=int(number), offset=start)
    assert [(r.offset, r.timestamp) for r in records][: len(expected)] == expected, name
    return records


def test_a_clean_folder_with_compacted_topics_is_served(tmp_path):
    root = copy_of_kafka(tmp_path, "compacted-keep-0", "keyed-0", clean=True)
    # Kafka ignores an offset above the log's end, which it may have kept of an earlier topic.
    (root / "data" / "cleaner-offset-checkpoint").write_text("0\n1\nkeyed 0 1000\n")
    harness = BrokerHarness(root)
    try:
        assert [topic.name for topic in harness.broker.list_topics()] == ["compacted-keep", "keyed"]
        assert len(harness.records("keyed")) == 51
        assert harness.broker.topic("keyed").config.retention_ms == -1
    finally:
        harness.broker.close()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_unclean_compacted_log_is_left_as_it_is_until_kafka_was_shut_down_cleanly(tmp_path):
    root = copy_of_kafka(tmp_path, "compacted-keep-0", "keyed-0", clean=False)
    folder = root / "data" / "compacted-keep-0"
    before = contents(folder)
    harness = BrokerHarness(root)
    for _ in range(2):
        assert len(harness.records("keyed")) == 51
        with pytest.raises(CorruptBatch, match="not shut down cleanly"):
            harness.broker.partition("compacted-keep", 0)
        (reason,) = harness.broker.readiness().reasons
        assert reason.startswith("compacted-keep-0: ")
        (step,) = repair_topic(harness.broker, "compacted-keep", apply=True, accept_loss=True)
        assert (step.action, step.done) == ("none", False)
        harness.restart()
    harness.broker.close()
    assert contents(folder) == before
    (root / "data" / ".kafka_cleanshutdown").write_text('{"version":0,"brokerEpoch":1}')
    for _ in range(2):
        harness.broker = harness.open()
        assert_as_kafka_served(harness, folder.name)
        harness.broker.close()


def test_a_log_whose_older_segments_are_in_kafkas_remote_storage_starts_at_its_first(tmp_path):
    root = copy_of_kafka(tmp_path, "many-segments-0", clean=True)
    folder, starts = root / "data" / "many-segments-0", root / "data" / LOG_STARTS
    first, second, *_ = closed_log.base_offsets(folder)
    for path in folder.glob(f"{first:020d}*"):
        path.unlink()
    starts.write_text("0\n1\nmany-segments 0 0\n")  # Kafka has a row for every such log
    with capture_logs() as lines:
        harness = BrokerHarness(root)
    try:
        assert (second, 0) in [
            (line["log_start_offset"], line["kafkas_log_start"])
            for line in lines
            if "kafkas_log_start" in line
        ]
        assert harness.records("many-segments", offset=second)[0].offset == second
        harness.offload("many-segments")
        assert verify_topic(harness.broker, "many-segments", deep=True).ok
        harness.restart()
        assert harness.broker.partition("many-segments", 0).offsets().log_start_offset == second
    finally:
        harness.broker.close()


@pytest.mark.parametrize("refused_for", ["a folder", "the bucket"])
def test_a_refused_start_keeps_the_mark_of_a_clean_stop(tmp_path, refused_for):
    root = copy_of_kafka(tmp_path, "compacted-keep-0", clean=True)
    in_the_way = root / "data" / "backup-20261122"
    if refused_for == "a folder":
        in_the_way.mkdir()
    else:
        bucket = open_store(f"file://{root / 'bucket'}")
        create_cluster(bucket, Cluster(cluster_id="another", created_ms=0))
    with pytest.raises(ConfigurationError, match=r"20261122|another"):
        BrokerHarness(root)
    if refused_for == "a folder":
        in_the_way.rmdir()
    else:
        shutil.rmtree(root / "bucket")
    harness = BrokerHarness(root)
    harness.broker.close()
    assert [topic.name for topic in harness.broker.list_topics()] == ["compacted-keep"]


def test_a_folder_with_unexplained_offset_gaps_is_refused(tmp_path):
    folder = tmp_path / "kafka" / "data" / "compacted-codec-0"
    shutil.copytree(KAFKA / folder.name, folder)
    before = contents(folder)
    harness = BrokerHarness(tmp_path / "kafka")
    for _ in range(3):
        with pytest.raises(CorruptBatch, match="copy all that Kafka has there"):
            harness.broker.partition("compacted-codec", 0)
        harness.restart()
    harness.broker.close()
    assert contents(folder) == before


def test_a_single_partition_folder_is_recovered_and_truncation_is_logged(tmp_path):
    folder = tmp_path / "kafka" / "data" / "keyed-0"
    shutil.copytree(KAFKA / folder.name, folder)
    last = max(folder.glob("*.log"))
    with last.open("r+b") as file:
        file.truncate(last.stat().st_size - 1)
    with capture_logs() as lines:
        harness = BrokerHarness(tmp_path / "kafka")
    harness.broker.close()
    [warning] = [line for line in lines if line["event"] == "log was cut"]
    assert (warning["log_level"], warning["partition"], warning["file"]) == (
        "warning",
        "keyed-0",
        str(last),
    )
    assert warning["cut_bytes"] > 0
    assert "batch has" in warning["reason"]


def test_an_unclean_folder_without_compacted_topics_is_recovered(tmp_path):
    harness = BrokerHarness(copy_of_kafka(tmp_path, "keyed-0", clean=False))
    try:
        assert len(harness.records("keyed")) == 51
    finally:
        harness.broker.close()


def test_a_folder_named_like_partition_20261122_is_refused(harness):
    harness.broker.close()
    (harness.root / "data" / "backup-20261122").mkdir()
    with pytest.raises(ConfigurationError, match="partition 20261122 of topic 'backup'"):
        harness.open()
    (harness.root / "data" / "backup-20261122").rename(harness.root / "backup")
    harness.broker = harness.open()


def test_a_copy_of_a_partition_folder_does_not_take_its_topics_place(harness):
    harness.broker.create_topic("t", config={"max.message.bytes": 12345})
    harness.produce("t", [b"v"])
    harness.broker.close()
    data = harness.root / "data"
    shutil.copytree(data / "t-0", data / "backup-0")
    with pytest.raises(ConfigurationError, match="backup: its folders have the id of topic 't'"):
        harness.open()
    shutil.rmtree(data / "backup-0")
    harness.broker = harness.open()
    assert [topic.name for topic in harness.broker.list_topics()] == ["t"]
    assert harness.broker.topic("t").config.max_message_bytes == 12345
    assert [record.value for record in harness.records("t")] == [b"v"]


def test_an_adopted_topic_has_the_id_that_most_of_its_folders_have(tmp_path):
    data = tmp_path / "kafka" / "data"
    for number in range(3):
        shutil.copytree(KAFKA / "keyed-0", data / f"keyed-{number}")
    flip(data / "keyed-0" / "partition.metadata", 25)
    harness = BrokerHarness(tmp_path / "kafka")
    assert len(harness.records("keyed", partition=1)) == 51
    with pytest.raises(CorruptSnapshot):
        harness.broker.partition("keyed", 0)
    harness.broker.close()
