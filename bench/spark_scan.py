"""Claim: Spark scans a topic in the bucket about as fast as a Parquet file of the same rows.

* Measured: wall time, and CPU of the whole session (JVM, driver and workers), of queries over a
  topic of which nothing is hot, the broker stopped, straight from a `file://` bucket: a count of
  all columns, by partitions (`schema("partition int")`), by offsets and of half of the time, the
  summed length of the values, all columns to the noop sink, and all columns rewritten as Parquet.
* Peer: Parquet (zstd) of the same rows, written from the topic itself by the same session.
* One Spark session, local[2], the queries in turn.

Four partitions, 4 million records of 16-byte keys and values of about 130 bytes, lz4 batches.

`python -m bench spark_scan`; takes about four minutes, and pyspark with a Java.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from bench.children import ROOT, MissingPeer
from bench.records import START_MS
from bench.report import Report, Target
from bench.rounds import cpu_seconds_of_tree, interleave, wall_seconds
from tierlog.broker.broker import Broker
from tierlog.broker.settings import BrokerSettings
from tierlog.hot_tier.log_writer import Acks
from tierlog.object_store.open import open_store
from tierlog.record_format import codecs
from tierlog.record_format.produced import build_produced
from tierlog.spark_reader.environment import ensure_java

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

ROUNDS: Final = 5
PARTITIONS: Final = 4
RECORDS: Final = 4_000_000
RECORDS_PER_REQUEST: Final = 10_000
STEP_MS: Final = 10
# Targets: wall time relative to Parquet, and million rows per CPU second.
TARGETS: Final[dict[str, tuple[float | None, float | None]]] = {
    "count": (None, None),
    "count by partition": (3.0, None),
    "count by offsets": (3.0, 2.2),
    "count of half of the time": (3.0, None),
    "sum of length(value)": (1.8, 1.4),
    "all columns": (2.0, 0.65),
    "rewrite as Parquet": (1.3, None),
}


class Spent(NamedTuple):
    wall_s: float
    cpu_s: float


def measure(folder: Path, *, rounds: int) -> Report:
    if importlib.util.find_spec("pyspark") is None:
        raise MissingPeer("pyspark is not installed: the extra `spark` has it")
    report = Report(
        name="spark_scan", title="Spark scan, 4 million records, cold", peer="Parquet zstd"
    )
    fill(folder, {"t": PARTITIONS})
    with session(folder) as spark:
        topic, parquet = cold(spark, folder), folder / "rows.parquet"
        topic.write.option("compression", "zstd").parquet(str(parquet))
        runs = _runs(spark, folder, parquet)
        seen = interleave(runs, rounds=rounds)
    for query, (ratio, a_core) in TARGETS.items():
        ours, peer = seen[query], seen[f"{query}, Parquet"]
        report.add(
            query,
            "s",
            [one.wall_s for one in ours],
            [one.wall_s for one in peer],
            target=Target(value=ratio, at_most=True) if ratio else None,
        )
        report.add(
            f"{query}, a CPU second",
            "M rows",
            [RECORDS / 1e6 / one.cpu_s for one in ours],
            [RECORDS / 1e6 / one.cpu_s for one in peer],
            target=Target(value=a_core, of_ratio=False) if a_core else None,
        )
    return report


class Request(NamedTuple):
    values: list[bytes]
    keys: list[bytes] | None
    timestamps: list[int]


def _requests(records: int, seed: int) -> Iterator[Request]:
    rng = random.Random(seed)
    for first in range(0, records, RECORDS_PER_REQUEST):
        offsets = range(first, first + RECORDS_PER_REQUEST)
        values = [
            b'{"id":%d,"user":"u%06d","amount":%d.%02d,"city":"%s","note":"%x","ok":true}'
            % (
                offset,
                rng.randrange(500_000),
                rng.randrange(10_000),
                rng.randrange(100),
                rng.choice(_CITIES),
                rng.getrandbits(200),
            )
            for offset in offsets
        ]
        keys = [b"%016d" % rng.randrange(1_000_000) for _ in offsets]
        yield Request(values, keys, [START_MS + offset * STEP_MS for offset in offsets])


def fill(
    folder: Path,
    topics: Mapping[str, int],
    requests: Callable[[int, int], Iterator[Request]] = _requests,
    *,
    records: int = RECORDS,
) -> None:
    """Create topics with these numbers of partitions and `records` each, all only in the bucket.

    `requests`: those for a number of records, from a seed.
    """
    settings = BrokerSettings(data_dir=folder / "data", disk_reserve_bytes=0)
    broker = Broker.open(settings, store=open_store(f"file://{folder / 'bucket'}"))
    try:
        config = {"segment.bytes": 64 << 20, "retention.ms": -1, "local.retention.bytes": 0}
        for topic, partitions in topics.items():
            broker.create_topic(topic, partitions=partitions, config=config)
            for partition in range(partitions):
                log = broker.partition(topic, partition)
                for request in requests(records // partitions, partition):
                    columns = request._asdict()
                    batches = build_produced(**columns, codec=codecs.LZ4, max_message_bytes=1 << 20)
                    log.append(batches, acks=Acks.LEADER).result(60)
            offloaded = broker.offload(topic, wait_ms=120_000)
            assert not offloaded.remaining_segments, offloaded
    finally:
        broker.close()


_MIDDLE: Final = tuple(START_MS + RECORDS // PARTITIONS * STEP_MS * n // 4 for n in (1, 3))
_CITIES: Final = (b"Aarhus", b"Bergen", b"Coimbra", b"Dresden", b"Evora", b"Fukuoka", b"Ghent")


@contextmanager
def session(
    folder: Path, *, cores: int = 2, class_path: Sequence[Path] = ()
) -> Iterator[SparkSession]:
    """A session in its own JVM, which ends with it."""
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))
    )
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    ensure_java()
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master(f"local[{cores}]")
        .appName("bench")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(folder / "warehouse"))
        .config("spark.log.level", "ERROR")
        .config("spark.driver.extraClassPath", os.pathsep.join(map(str, class_path)))
        .getOrCreate()
    )
    try:
        yield session
    finally:
        session.stop()
        _end_jvm(SparkContext)


def _end_jvm(context: type[SparkContext]) -> None:
    """Otherwise PySpark reuses it for the next session, with the first's cores and class path."""
    gateway = context._gateway  # noqa: SLF001
    context._gateway = context._jvm = None  # noqa: SLF001
    assert gateway is not None
    gateway.shutdown()
    gateway.proc.stdin.close()  # the JVM exits then
    gateway.proc.wait(60)


def cold(
    spark: SparkSession, folder: Path, schema: str = "", *, topic: str = "t", **options: str
) -> DataFrame:
    reader = spark.read.format("tierlog")
    if schema:
        reader = reader.schema(schema)
    options |= {"store": f"file://{folder / 'bucket'}", "subscribe": topic, "tier": "cold"}
    return reader.options(**options).load()


def _runs(spark: SparkSession, folder: Path, parquet: Path) -> dict[str, Callable[[], Spent]]:
    """Each query over both sources, by name; the frame is created each time, as in a job."""
    whole = lambda: cold(spark, folder)  # noqa: E731
    large = lambda: cold(spark, folder, splitBytes="128m")  # noqa: E731
    values = lambda: cold(spark, folder, "value binary")  # noqa: E731
    rows = lambda: spark.read.parquet(str(parquet))  # noqa: E731
    offsets = lambda: cold(spark, folder, "offset bigint")  # noqa: E731
    partitions = lambda: cold(spark, folder, "partition int")  # noqa: E731
    begin, end = _MIDDLE
    times = {"startingTimestamp": str(begin), "endingTimestamp": str(end)}
    half = lambda: cold(spark, folder, "partition int", **times)  # noqa: E731

    def half_of_rows() -> DataFrame:
        frame: DataFrame = spark.read.parquet(str(parquet))
        return frame.where(
            f"timestamp >= timestamp_millis({begin}) and timestamp < timestamp_millis({end})"
        )

    def rewrite(frame: DataFrame) -> None:
        written = frame.write.option("compression", "zstd").mode("overwrite")
        written.parquet(str(folder / "rewritten.parquet"))

    queries = {
        "count": (count, whole),
        "count by partition": (count_by_partition, partitions),
        "count by offsets": (count, offsets),
        "count of half of the time": (count_half, half),
        "sum of length(value)": (sum_lengths, values),
        "all columns": (all_columns, whole),
        "rewrite as Parquet": (rewrite, large),
    }
    runs: dict[str, Callable[[], Spent]] = {}
    for name, (query, frame) in queries.items():
        runs[name] = timed(query, frame)
        runs[f"{name}, Parquet"] = timed(query, half_of_rows if frame is half else rows)
    return runs


def timed(
    query: Callable[[DataFrame], None], frame: Callable[[], DataFrame]
) -> Callable[[], Spent]:
    def run() -> Spent:
        before = cpu_seconds_of_tree(os.getpid())
        wall_s = wall_seconds(lambda: query(frame()))
        return Spent(wall_s, cpu_seconds_of_tree(os.getpid()) - before)

    return run


def count(frame: DataFrame) -> None:
    found = frame.count()
    assert found == RECORDS, found


def count_by_partition(frame: DataFrame) -> None:
    found = [row[1] for row in frame.groupBy("partition").count().collect()]
    assert sum(found) == RECORDS, found


def count_half(frame: DataFrame) -> None:
    found = frame.count()
    assert found == RECORDS // 2, found


def sum_lengths(frame: DataFrame) -> None:
    (row,) = frame.selectExpr("sum(length(value))").collect()
    assert row[0] > RECORDS, row


def all_columns(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()
