"""The sink with a `transactionalId`: each row once, whatever fails and is run again."""

import json

import pytest
from pyspark.sql.datasource import WriterCommitMessage

from tests.fakes.spark_process import run_python
from tests.fakes.two_tiers import two_tiers
from tierlog.client.client import Client
from tierlog.client.sender import Within
from tierlog.client.wire import Limits
from tierlog.host.clock import wall_clock_ms
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import ProducerFenced
from tierlog.spark_reader.sink_batches import TopicPartition
from tierlog.spark_reader.sink_transactions import Transactional, Written, commit_epoch

pytestmark = pytest.mark.spark
COMMITTED = Limits(isolation="read_committed")


@pytest.fixture
def tiers(tmp_path):
    with two_tiers(tmp_path) as tiers:
        tiers.create("in", partitions=2)
        tiers.create("out", partitions=3)
        yield tiers


def values(tiers, limits=COMMITTED):
    with Client(tiers.url) as client:
        return sorted(one.value for one in client.consume("out", limits=limits))


def of_in(tiers):
    with Client(tiers.url) as client:
        return sorted(one.value for one in client.consume("in"))


def test_an_epoch_that_is_committed_and_not_in_the_checkpoint_is_not_written_again(
    spark, tiers, tmp_path
):
    """As after a kill of the query between the two."""
    pytest.importorskip("pyspark.sql.streaming.datasource", reason="streams need pyspark 4.2")
    tiers.produce("in", 100)

    def run():
        source = {"store": tiers.store_url, "server": tiers.url, "startingOffsets": "earliest"}
        frame = spark.readStream.format("tierlog").options(subscribe="in", **source)
        query = (
            frame.option("maxOffsetsPerTrigger", "120")
            .load()
            .select("key", "value")
            .writeStream.format("tierlog")
            .options(server=tiers.url, topic="out", transactionalId="copy")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(240)

    run()
    assert values(tiers) == of_in(tiers)
    commits = tmp_path / "checkpoint" / "commits"
    last = max(
        (file for file in commits.iterdir() if file.name.isdigit()), key=lambda f: int(f.name)
    )
    assert int(last.name) > 0, "several epochs"
    last.unlink()
    last.with_name(f".{last.name}.crc").unlink(missing_ok=True)
    run()
    assert last.exists(), "the epoch was run again"
    assert values(tiers) == of_in(tiers)
    assert len(values(tiers, Limits())) > len(of_in(tiers)), (
        "and its rows were written, and aborted"
    )
    tiers.produce("in", 50)
    run()
    assert values(tiers) == of_in(tiers)


def test_an_epoch_is_committed_once_for_each_query(tiers):
    """Without Spark: what its driver does with the messages of an epoch's tasks."""
    options = Transactional("copy", 60_000)
    with Client(tiers.url) as client:

        def attempt(value, query_id, task=0):
            name = f"copy/{task}/0"
            within = Within(name, client.begin_transactions(name))
            batch = encode_batch(
                [value],
                timestamps=[wall_clock_ms()],
                producer_id=within.identity.producer_id,
                producer_epoch=within.identity.producer_epoch,
                base_sequence=0,
                transactional=True,
            )
            client.produce_batches("out", bytes(batch), partition=0, transactional_id=name)
            return Written(within, TopicPartition("out", 0), query_id)

        def run(epoch, value, query_id):
            messages = [attempt(value, query_id), None, attempt(value, query_id, 1)]
            commit_epoch(client, options, [*messages, WriterCommitMessage()], epoch)

        for _ in range(2):
            run(0, b"first", "one")
        run(1, b"second", "one")
        run(0, b"first again", "one")  # of a driver that was away
        assert values(tiers) == [b"first"] * 2 + [b"second"] * 2
        run(0, b"of another", "two")
        run(2, b"third", "two")
        assert values(tiers)[2:] == [b"of another"] * 2 + [b"second"] * 2 + [b"third"] * 2
        late = [attempt(b"late", "two")]
        attempt(b"its next attempt", "two")
        with pytest.raises(ProducerFenced):
            commit_epoch(client, options, late, 3)
        assert len(values(tiers)) == 8


CHILD = '''
import json, sys
import pyarrow as pa
from pyspark import TaskContext
from tierlog.spark_reader.jobs.session import job_session

def with_partitions(batches):
    """The first attempt's last row is for one that is not there: it fails, having sent rows."""
    task = TaskContext.get()
    wrong = "x999" if (task.partitionId(), task.attemptNumber()) == (0, 0) else "none"
    for batch in batches:
        values = batch["value"].to_pylist()
        partitions = [99 if value.endswith(wrong) else 0 for value in values]
        yield pa.RecordBatch.from_pydict(
            {"value": values, "partition": pa.array(partitions, pa.int32())}
        )

options = json.loads(sys.argv[1])
few = {"spark.sql.execution.arrow.maxRecordsPerBatch": "100"}
# A task may fail twice.
with job_session("retries", master="local[2,3]", config=few) as session:
    frame = session.range(2000, numPartitions=2).selectExpr("concat(repeat('x', 2000), id) value")
    frame = frame.mapInArrow(with_partitions, "value string, partition int")
    frame.write.format("tierlog").mode("append").options(**options).save()
'''


def test_the_rows_of_an_attempt_that_failed_are_not_committed(tiers, tmp_path):
    options = {"server": tiers.url, "topic": "out", "transactionalId": "job"}
    run_python(CHILD, json.dumps(options), cwd=tmp_path)
    assert values(tiers) == sorted(b"x" * 2000 + b"%d" % number for number in range(2000))
    assert len(values(tiers, Limits())) > 2000, "the attempt that failed had sent rows"


def test_exactly_once_needs_an_id(spark, tiers):
    frame = spark.range(3).selectExpr("cast(id as string) value")
    write = frame.write.format("tierlog").mode("append").options(server=tiers.url, topic="out")
    with pytest.raises(Exception, match="exactlyOnce: needs a transactionalId"):
        write.option("exactlyOnce", "true").save()
