"""Spark's side of the demo: what a user of `format("tierlog")` writes, and no other tierlog code.

* Queries return sums and counts rather than means, so that the comparison with the source is exact.
* A session takes seconds to start, and its first query more (the JVM's classes, Python workers and
  their imports): it starts during the other steps, and a small first query is one of them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tierlog.demo.flights import CarrierDelays
from tierlog.spark_reader.environment import prepare

_FLIGHT = "carrier string, dep_time int, dep_delay double"


# The JVM runs for a minute: the optimizing compiler would cost more than it saves.
_JVM_OPTIONS = "-XX:TieredStopAtLevel=1"


class StartingSession:
    """A session that starts in a background thread; `get` waits for it."""

    def __init__(self, log: Path) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="start-spark")
        self._session: Future[Any] = self._pool.submit(_start, log)

    def get(self) -> Any:
        return self._session.result()

    def stop(self) -> None:
        """Stop the session, after waiting for its start: its JVM must not outlive this process."""
        self._pool.shutdown()
        if self._session.exception() is None:
            self._session.result().stop()


def _start(log: Path) -> Any:
    """A local session on two cores; the JVM's output goes to `log`."""
    for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
        os.environ.pop(name, None)
    prepare()
    from pyspark.sql import SparkSession

    with _stderr_to(log):
        return (
            SparkSession.builder.master("local[2]")
            .appName("tierlog demo")
            .config("spark.driver.extraJavaOptions", _JVM_OPTIONS)
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.sql.shuffle.partitions", "2")
            .config("spark.sql.session.timeZone", "UTC")
            .getOrCreate()
        )


def warm_up(session: Any, options: dict[str, str], partitions: int) -> None:
    """Run the demo's query on one record per partition, to pay for the first query."""
    first_ones = {options["subscribe"]: {str(number): 1 for number in range(partitions)}}
    delays_by_carrier(session, {**options, "endingOffsets": json.dumps(first_ones)})


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
    """Redirect the file descriptor, because the JVM inherits it and writes to it."""
    sys.stderr.flush()
    kept = os.dup(2)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
