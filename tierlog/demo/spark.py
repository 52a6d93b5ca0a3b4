"""Spark's side of the demo: what a user of `format("tierlog")` writes, and nothing else of ours.

Sums and counts come back rather than means, so that the comparison with the source is exact.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from spark_reader.java import ensure_java
from tierlog.demo.flights import CarrierDelays

_FLIGHT = "carrier string, dep_time int, dep_delay double"


@contextmanager
def spark_session(log: Path) -> Iterator[Any]:
    """A local session on two cores; the JVM's own words go to `log`."""
    ensure_java()
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    with _stderr_to(log):
        session = (
            SparkSession.builder.master("local[2]")
            .appName("tierlog demo")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.session.timeZone", "UTC")
            .getOrCreate()
        )
    try:
        yield session
    finally:
        session.stop()


def delays_by_carrier(session: Any, options: dict[str, str]) -> dict[str, CarrierDelays]:
    """Flights, cancelled flights and the sum of departure delays, by carrier."""
    from pyspark.sql import functions as f

    records = session.read.format("tierlog").options(**options).load()
    flight = f.from_json(f.col("value").cast("string"), _FLIGHT)
    by_carrier = (
        records.select(flight.alias("flight"))
        .groupBy("flight.carrier")
        .agg(
            f.count("*").alias("flights"),
            f.sum(f.col("flight.dep_time").isNull().cast("int")).alias("cancelled"),
            f.sum("flight.dep_delay").alias("delay_sum"),
        )
    )
    return {
        row["carrier"]: CarrierDelays(row["flights"], row["cancelled"], int(row["delay_sum"]))
        for row in by_carrier.collect()
    }


@contextmanager
def _stderr_to(log: Path) -> Iterator[None]:
    """The file descriptor, because it is the JVM that speaks and inherits it."""
    sys.stderr.flush()
    kept = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
