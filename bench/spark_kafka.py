"""Claim: a job that moves from Spark's Kafka source reads the same records several times as fast.

* Four million records of 16-byte keys and values of about 130 bytes in lz4 batches of 1 MiB, in
  four partitions and in one. Ours are in a `file://` bucket and are read without a broker; the
  peer's are the same rows, written by Spark's own Kafka sink to Apache Kafka 4.3.1 on loopback.
* Measured: a count, the summed length of the values, all columns to the noop sink; one session,
  local[2], in turn: rows per second, and rows per CPU second of session and Kafka broker together.
  Each source has its defaults and the schema from its guide: ours prunes columns (`offset bigint`,
  `value binary`), Kafka's cannot. "count, all columns" does not prune.
* Kafka's source is Spark's newest in Maven Central. Its companion for delegation tokens is not
  there: three classes in `spark_kafka_tokens/` replace it and pass settings on.

`python -m bench spark_kafka`; takes about six minutes, pyspark, a JDK and Maven.
"""

from __future__ import annotations

import importlib.util
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from bench.children import ROOT, MissingPeer, program
from bench.kafka import Kafka, kafka
from bench.maven import fetch
from bench.report import Report, Target
from bench.rounds import interleave
from bench.spark_scan import (
    RECORDS,
    Spent,
    all_columns,
    cold,
    count,
    fill,
    session,
    sum_lengths,
    timed,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROUNDS: Final = 3
VERSION: Final = "4.2.0"
_JARS: Final = (
    f"org.apache.spark:spark-sql-kafka-0-10_2.13:{VERSION}",
    "org.apache.kafka:kafka-clients:3.9.2",
    "org.apache.commons:commons-pool2:2.13.1",
)
_CACHE: Final = ROOT / ".cache" / f"spark-kafka-{VERSION}"
_TOKENS: Final = ROOT / "bench" / "spark_kafka_tokens"
_SINK: Final = {
    "kafka.compression.type": "lz4",
    "kafka.batch.size": 1 << 20,
    "kafka.linger.ms": 200,
    "kafka.max.request.size": 4 << 20,
}


class Topic(NamedTuple):
    """Its partitions, and the targets: how many times as fast as Kafka's source a query should be
    of some columns (a count, a sum), and of all.
    """

    name: str
    partitions: int
    some_columns: float
    all_columns: float


TOPICS: Final = (Topic("four", 4, 3, 2), Topic("one", 1, 4, 4))


def measure(folder: Path, *, rounds: int) -> Report:
    if importlib.util.find_spec("pyspark") is None:
        raise MissingPeer("pyspark is not installed: the extra `spark` has it")
    report = Report(
        name="spark_kafka",
        title="4 million records through Spark, 2 cores",
        peer=f"Kafka source {VERSION}",
    )
    class_path = _connector()
    fill(folder, {topic.name: topic.partitions for topic in TOPICS})
    with kafka(folder) as peer, session(folder, class_path=class_path) as spark:
        for topic in TOPICS:
            _copy(spark, folder, peer, topic)
            seen = interleave(_runs(spark, folder, peer, topic.name), rounds=rounds)
            _add_rows(report, topic, seen)
    return report


def _add_rows(report: Report, topic: Topic, seen: Mapping[str, Sequence[Spent]]) -> None:
    targets = {
        "count": topic.some_columns,
        "count, all columns": None,
        "sum of length(value)": topic.some_columns,
        "all columns": topic.all_columns,
    }
    for query, times in targets.items():
        ours, theirs = seen[query], seen[f"{query.partition(', ')[0]}, Kafka"]
        name = f"{topic.name} partition{'s' if topic.partitions > 1 else ''}: {query}"
        target = Target(value=times) if times else None
        walls = [[_rate(one.wall_s) for one in each] for each in (ours, theirs)]
        report.add(name, "M rows/s", *walls, target=target)
        spent = [[_rate(one.cpu_s) for one in each] for each in (ours, theirs)]
        report.add(f"{name}, a CPU second", "M rows", *spent)


def _connector() -> list[Path]:
    """Spark's Kafka source, and the replacement of its companion. Raises MissingPeer."""
    import pyspark

    javac, classes = program("javac"), _CACHE / "classes"
    jars = [fetch(jar, into=_CACHE) for jar in _JARS]
    sources = sorted(map(str, _TOKENS.glob("*.java")))
    path = f"{Path(pyspark.__file__).parent / 'jars'}/*"
    subprocess.run([javac, "-nowarn", "-cp", path, "-d", classes, *sources], check=True)
    return [*jars, classes]


def _copy(spark: SparkSession, folder: Path, peer: Kafka, topic: Topic) -> None:
    """Copy our rows, partition by partition, to a topic of the same name in Kafka."""
    name, partitions = topic.name, str(topic.partitions)
    peer.tool("TopicCommand", "--create", "--topic", name, "--partitions", partitions)
    rows = cold(spark, folder, "key binary, value binary, partition int", topic=name)
    sink = {"kafka.bootstrap.servers": peer.server, "topic": name, **_SINK}
    rows.write.format("kafka").options(**sink).save()


def _runs(
    spark: SparkSession, folder: Path, peer: Kafka, topic: str
) -> dict[str, Callable[[], Spent]]:
    """Each query over both sources."""

    def ours(schema: str = "") -> DataFrame:
        return cold(spark, folder, schema, topic=topic)

    def theirs() -> DataFrame:
        options = {"kafka.bootstrap.servers": peer.server, "subscribe": topic}
        return spark.read.format("kafka").options(**options).load()

    return {
        "count": timed(count, partial(ours, "offset bigint")),
        "count, all columns": timed(count, ours),
        "count, Kafka": timed(count, theirs),
        "sum of length(value)": timed(sum_lengths, partial(ours, "value binary")),
        "sum of length(value), Kafka": timed(sum_lengths, theirs),
        "all columns": timed(all_columns, ours),
        "all columns, Kafka": timed(all_columns, theirs),
    }


def _rate(seconds: float) -> float:
    return RECORDS / 1e6 / seconds
