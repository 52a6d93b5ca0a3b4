"""Statistics of a topic's records, bytes, keys and sizes, by hour and partition.

* Hours are those of the records' timestamps, in UTC.
* Bytes are those of keys and values before compression; their size in the log differs.
* Distinct keys and percentiles are Spark's estimates (within 5% and 1%), and named so; all else is
  exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from tierlog.spark_reader.jobs.session import Progress, progress_reported

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

HOUR_MS: Final = 3_600_000

_COLUMNS: Final = "key binary, value binary, partition int, timestamp timestamp_ltz"
_SIZE_ACCURACY: Final = 100


class HourStats(NamedTuple):
    """One hour of one partition. `value_p50` and `value_p99` exclude tombstones."""

    hour_ms: int
    partition: int
    records: int
    key_bytes: int
    value_bytes: int
    tombstones: int
    without_key: int
    distinct_keys_estimate: int
    value_p50: int | None
    value_p99: int | None
    value_max: int | None

    @property
    def size_bytes(self) -> int:
        return self.key_bytes + self.value_bytes


def stats(
    session: SparkSession, source: Mapping[str, str], *, progress: Progress | None = None
) -> list[HourStats]:
    """Statistics ordered by hour and partition. `source` are options of the Spark source, for one
    topic.
    """
    from pyspark.sql import functions as f

    rows = session.read.format("tierlog").schema(_COLUMNS).options(**source).load()
    hour = f.floor(f.unix_millis("timestamp") / HOUR_MS) * HOUR_MS
    value_size = f.length("value")
    grouped = rows.groupBy(hour.alias("hour_ms"), "partition").agg(
        f.count(f.lit(1)).alias("records"),
        f.coalesce(f.sum(f.length("key")), f.lit(0)).alias("key_bytes"),
        f.coalesce(f.sum(value_size), f.lit(0)).alias("value_bytes"),
        f.count_if(f.col("value").isNull()).alias("tombstones"),
        f.count_if(f.col("key").isNull()).alias("without_key"),
        f.approx_count_distinct("key").alias("distinct_keys_estimate"),
        f.percentile_approx(value_size, 0.5, _SIZE_ACCURACY).alias("value_p50"),
        f.percentile_approx(value_size, 0.99, _SIZE_ACCURACY).alias("value_p99"),
        f.max(value_size).alias("value_max"),
    )
    with progress_reported(session, progress):
        found = [HourStats(**row.asDict()) for row in grouped.collect()]
    return sorted(found)
