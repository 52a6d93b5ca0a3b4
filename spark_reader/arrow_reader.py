"""Reads topics without Spark, as Arrow record batches for pyarrow, pandas, polars or DuckDB.

* Options, planning and reading are those of the Spark source; this module only reads the splits in
  order. It does not import pyspark.
* It streams: memory is that of one Spark task, however large the topic is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from operator import index
from os import PathLike
from pathlib import Path

import pyarrow as pa

from tierlog.record_format.arrow_columns import COLUMNS, SCHEMA
from tierlog.record_format.errors import InvalidOption
from tierlog.spark_reader.options import NAMES, is_kafka_option, parse_options, wants_headers
from tierlog.spark_reader.planner import Planner
from tierlog.spark_reader.split_reader import SplitReader
from tierlog.spark_reader.splits import log_to_stderr

Option = str | int | float | bool | datetime | PathLike[str] | Mapping[str, object]


def read_arrow(
    topics: str | Sequence[str],
    *,
    store: str | PathLike[str] | None = None,
    server: str | None = None,
    columns: str | Sequence[str] | None = None,
    on_data_loss: Callable[[str], None] | None = None,
    **options: Option | None,
) -> pa.RecordBatchReader:
    """Read topics as a stream of Arrow record batches, partition by partition in offset order.

    `store` is the bucket's URL, or a `Path` if it is a folder. `server` is the broker's URL; that
    of a cluster's is found in the bucket. `tier="cold"` reads from the bucket alone. `options` are
    those of the Spark source under the same names (`startingTimestamp=`, `pin=`,
    `endingOffsets={"flights": {"0": 500}}`); times may be datetimes with a UTC offset, files may be
    paths, and None means not given. `columns` selects columns of its schema, by default all, with
    `headers` if `includeHeaders` is set. With `failOnDataLoss=False`, `on_data_loss` is called with
    a description of what is missing (default: print to standard error).

    The read is planned now, over the offsets that exist now; rows are read as the reader is
    consumed. Raises InvalidOption, UnknownTopic and others now; DataLoss and CorruptDataError while
    reading.
    """
    given = _texts(topics, store, server, options)
    parsed = parse_options(given, streaming=False)
    for name in options:
        if name.lower() not in NAMES and not is_kafka_option(name):  # Spark may have others
            raise InvalidOption(f"there is no option {name!r}")
    every = COLUMNS if wants_headers(given) else COLUMNS[:-1]
    wanted = every if columns is None else tuple(_each(columns))
    unknown = [name for name in wanted if name not in COLUMNS]
    if unknown:
        raise InvalidOption(
            f"unknown columns {', '.join(unknown)}; the columns are {', '.join(COLUMNS)}"
        )
    if len(set(wanted)) < len(wanted):
        raise InvalidOption(f"a column is requested twice: {', '.join(wanted)}")
    warn = on_data_loss or log_to_stderr
    splits = Planner(parsed, report=lambda _: None, warn=warn).batch()
    schema = pa.schema([SCHEMA.field(name) for name in wanted])
    reader = SplitReader(parsed, wanted, warn=warn)
    batches = (batch for split in splits for batch in reader.read_split(split))
    return pa.RecordBatchReader.from_batches(schema, batches)


def _texts(
    topics: str | Sequence[str],
    store: str | PathLike[str] | None,
    server: str | None,
    options: Mapping[str, Option | None],
) -> dict[str, str]:
    """The given options as texts, the form in which Spark passes them."""
    given = {name: _text(name, value) for name, value in options.items() if value is not None}
    given["subscribe"] = ",".join(_each(topics))
    if store is not None:
        given["store"] = store if isinstance(store, str) else Path(store).absolute().as_uri()
    if server is not None:
        given["server"] = server
    return given


def _each(names: str | Sequence[str]) -> Sequence[str]:
    """A single name counts as a sequence of one."""
    return [names] if isinstance(names, str) else names


def _text(name: str, value: Option) -> str:
    if isinstance(value, (str, PathLike)):
        return os.fspath(value)
    if isinstance(value, datetime):
        return _time(name, value)
    try:
        return json.dumps(value, default=partial(_member, name))
    except (RecursionError, ValueError) as error:
        raise InvalidOption(f"option {name}: cannot be written as JSON: {error}") from error


def _member(name: str, value: object) -> int | str:
    """What JSON does not have: times, and other integer types, such as numpy's."""
    if isinstance(value, datetime):
        return _time(name, value)
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        kind = type(value).__name__
        raise InvalidOption(
            f"option {name}: {value!r} is a {kind}, which no option takes"
        ) from None


def _time(name: str, value: datetime) -> str:
    if value.utcoffset() is None:
        raise InvalidOption(f"option {name}: {value} needs a UTC offset, as in tzinfo=UTC")
    return value.isoformat()
