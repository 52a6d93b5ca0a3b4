"""Reads topics without Spark: as an Arrow dataset, which pyarrow, pandas, DuckDB and Polars query,
and as a stream of record batches.

* Options, planning and reading are those of the Spark source; this module only reads the splits in
  order. It does not import pyspark.
* A dataset is of the offsets that exist when it is made, so each scan of it sees the same rows.
  What a scan reads is planned from its columns and its filter.
* It streams, a few splits at once: memory is that of as many Spark tasks, and of the rows that are
  read ahead, however large the topic is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from functools import partial
from itertools import chain
from operator import index
from os import PathLike
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from tierlog.record_format.arrow_schema import COLUMNS, schema_of
from tierlog.record_format.errors import InvalidOption
from tierlog.record_format.record_walk import RowFilter
from tierlog.spark_reader.filter_bounds import (
    bounds_of,
    columns_of,
    keys_of,
    may_match,
    must_match,
)
from tierlog.spark_reader.options import (
    NAMES,
    ReadOptions,
    is_kafka_option,
    parse_options,
    wants_headers,
)
from tierlog.spark_reader.planner import Planner
from tierlog.spark_reader.split_reader import SplitReader, read_in_order
from tierlog.spark_reader.splits import (
    Filters,
    OffsetRange,
    Split,
    SplitLimits,
    Warn,
    log_to_stderr,
)

QUERIED: Final = (
    *("partition", "offset", "timestamp", "key", "value"),
    *("topic", "timestampType", "headers"),
)
"""Columns in order. DuckDB reads the first for `count(*)`: it has to be one that costs nothing."""
SPLIT_BYTES: Final = 16 << 20
"""Of a scan, unless an option says otherwise: whole ones should fit what is read ahead."""
READAHEAD_BYTES: Final = 128 << 20
THREADS_MAX: Final = 4  # by default

Option = str | int | float | bool | datetime | PathLike[str] | Mapping[str, object]
ColumnChoice = Sequence[str] | Mapping[str, pc.Expression] | None


def dataset(
    topics: str | Sequence[str],
    *,
    store: str | PathLike[str] | None = None,
    server: str | None = None,
    key_schema: str | int | None = None,
    value_schema: str | int | None = None,
    on_data_loss: Callable[[str], None] | None = None,
    threads: int | None = None,
    readahead_bytes: int = READAHEAD_BYTES,
    **options: Option | None,
) -> TopicDataset:
    """Topics as a `pyarrow.dataset.Dataset` over both tiers, to be scanned any number of times.

    It has the offsets that exist now. A scan reads and decodes only what its columns and its filter
    ask for: filters on `topic`, `partition`, `offset`, `timestamp` and equal `key`s choose
    partitions, segments and chunks; Arrow applies them, and all others, to the rows.

    `store` is the bucket's URL, or a `Path` if it is a folder. `server` is the broker's URL; that
    of a cluster's is found in the bucket. `tier="cold"` reads from the bucket alone. `options` are
    those of the Spark source under the same names (`startingTimestamp=`, `pin=`,
    `endingOffsets={"flights": {"0": 500}}`); times may be datetimes with a UTC offset, files may be
    paths, and None means not given. With `failOnDataLoss=False`, `on_data_loss` is called with a
    description of what is missing (default: print to standard error).

    `value_schema` makes columns of what is in values, `key_schema` of what is in keys: `latest`,
    `registry` or the id of a schema (docs/guides/schemas.md). The schemas are looked up now.

    A scan reads splits of about 16 MiB in `threads` (default: the machine's cores, at most 4), and
    its rows come in order: by partition, then by offset. While they do, about `readahead_bytes` of
    the rows that follow are in memory.

    Raises InvalidOption, UnknownTopic and others now; DataLoss and CorruptDataError while reading.
    """
    options |= {"keySchema": key_schema, "valueSchema": value_schema}
    parsed, schema = _parse(topics, store, server, options)
    if threads is None:
        threads = min(THREADS_MAX, os.cpu_count() or 1)
    ahead = Ahead(threads, readahead_bytes)
    if min(ahead) < 1:
        given = f"threads {threads}, readahead_bytes {readahead_bytes}"
        raise InvalidOption(f"threads and readahead_bytes are at least 1: {given}")
    warn = on_data_loss or log_to_stderr
    ranges = Planner(parsed, report=lambda _: None, warn=warn).ranges()
    return TopicDataset(parsed, schema, ranges, ahead=ahead, warn=warn)


def read_arrow(
    topics: str | Sequence[str],
    *,
    store: str | PathLike[str] | None = None,
    server: str | None = None,
    key_schema: str | int | None = None,
    value_schema: str | int | None = None,
    columns: str | Sequence[str] | None = None,
    on_data_loss: Callable[[str], None] | None = None,
    **options: Option | None,
) -> pa.RecordBatchReader:
    """Read topics once, as a stream of record batches, partition by partition in offset order.

    `columns` selects columns of the dataset's schema, by default all, with `headers` if
    `includeHeaders` is set. All else is as for `dataset`; the read is planned now, and rows are
    read as the reader is consumed.
    """
    options |= {"keySchema": key_schema, "valueSchema": value_schema}
    parsed, schema = _parse(topics, store, server, options)
    wanted = tuple(schema.names if columns is None else _each(columns))
    _check_columns(wanted)
    warn = on_data_loss or log_to_stderr
    splits = Planner(parsed, report=lambda _: None, warn=warn).batch()
    reader = SplitReader(parsed, wanted, warn=warn)
    batches = (batch for split in splits for batch in reader.read_split(split))
    return pa.RecordBatchReader.from_batches(_schema(wanted, parsed), batches)


class Ahead(NamedTuple):
    """How far a scan reads ahead of its consumer."""

    threads: int
    readahead_bytes: int


class TopicDataset(ds.InMemoryDataset):  # type: ignore[misc]
    """A dataset that this module's `dataset` has planned. It may be pickled; scans are independent,
    also in threads.

    To Arrow's own C++ it is an empty dataset, so all that does not end in `scanner` is refused.
    """

    def __init__(
        self,
        options: ReadOptions,
        schema: pa.Schema,
        ranges: Sequence[OffsetRange],
        *,
        ahead: Ahead,
        where: pc.Expression | None = None,
        warn: Warn = log_to_stderr,
    ) -> None:
        super().__init__([], schema)
        self._options, self._ranges, self._ahead = options, ranges, ahead
        self._where, self._warn = where, warn

    def __reduce__(self) -> tuple[object, ...]:
        make = partial(TopicDataset, ahead=self._ahead, where=self._where, warn=self._warn)
        return make, (self._options, self.schema, self._ranges)

    def scanner(
        self,
        columns: ColumnChoice = None,
        filter: pc.Expression | None = None,  # noqa: A002  Arrow's name
        *,
        use_threads: bool = True,
        **_: object,
    ) -> TopicScanner:
        """Plan a scan, whose rows are read as it is consumed, once. Arrow's other options, of batch
        sizes and how far to read ahead, change nothing: those of the dataset hold.
        """
        scan, splits = self._plan(columns, filter)
        return self._scanner(scan, splits, use_threads=use_threads)

    def _scanner(self, scan: _Scan, splits: Sequence[Split], *, use_threads: bool) -> TopicScanner:
        reader = scan.reader()
        size_bytes = sum(map(reader.wanted.fetched_bytes, splits))
        if size_bytes == 0:  # all is counted, and nothing fetched
            return scan.scanner(chain.from_iterable(map(reader.read_split, splits)), size_bytes)
        ahead = self._ahead if use_threads else self._ahead._replace(threads=1)
        return scan.scanner(read_in_order(reader, splits, **ahead._asdict()), size_bytes)

    def parts(
        self,
        columns: ColumnChoice = None,
        filter: pc.Expression | None = None,  # noqa: A002
    ) -> list[TopicPart]:
        """The splits of a scan, in order, to be read in other processes."""
        scan, splits = self._plan(columns, filter)
        return [TopicPart(scan, split) for split in splits]

    def count_rows(
        self,
        filter: pc.Expression | None = None,  # noqa: A002
        *,
        use_threads: bool = True,
        **_: object,
    ) -> int:
        """Count rows. Of a filter that is a range of offsets or times, of any topics and
        partitions, only chunks at its ends and those with transactions are read.
        """
        counted: list[int] = []
        scan, splits = self._plan([], filter, counted)
        if splits:
            counted.append(self._scanner(scan, splits, use_threads=use_threads).count_rows())
        return sum(counted)

    def filter(self, expression: pc.Expression) -> TopicDataset:
        """The same dataset, of which a scan sees the rows alone of which `expression` is true."""
        return TopicDataset(
            self._options,
            self.schema,
            self._ranges,
            ahead=self._ahead,
            where=self._with(expression),
            warn=self._warn,
        )

    def _with(self, expression: pc.Expression | None) -> pc.Expression | None:
        if expression is None or self._where is None:
            return self._where if expression is None else expression
        return self._where & expression

    def _plan(
        self,
        columns: ColumnChoice,
        expression: pc.Expression | None,
        counted: list[int] | None = None,
    ) -> tuple[_Scan, list[Split]]:
        """With `counted`, as for `Planner.splits`, if no row's own values are needed."""
        where, ranges, bounds = self._narrow(self._with(expression))
        limits = self._options.limits
        if limits == SplitLimits():
            limits = SplitLimits(split_bytes=SPLIT_BYTES)
        options = replace(self._options, limits=limits)
        planner = Planner(options, report=lambda _: None, warn=self._warn)
        wanted = self._columns_to_read(columns, where)
        chosen = self.schema.names if columns is None else columns
        scan = _Scan(options, wanted, bounds, where, chosen, self._warn)
        keys = None
        if where is not None and "key" not in options.readings:
            keys = keys_of(where, _schema(COLUMNS, options))
        known = counted if where is None else None
        return scan, planner.splits(ranges, Filters(bounds, keys=keys), counted=known)

    def _narrow(
        self, where: pc.Expression | None
    ) -> tuple[pc.Expression | None, Sequence[OffsetRange], RowFilter]:
        """What is left to filter by, the ranges to read, and the bounds of a row in them."""
        if where is None:
            return None, self._ranges, RowFilter()
        schema = _schema(COLUMNS, self._options)
        ranges = [one for one in self._ranges if may_match(where, one, schema)]
        bounds = bounds_of(where, schema)
        is_exact = all(must_match(where, one, bounds, schema) for one in ranges)
        return None if is_exact else where, ranges, bounds

    def _columns_to_read(
        self, columns: ColumnChoice, where: pc.Expression | None
    ) -> tuple[str, ...]:
        """Those that are asked for and those that the filter needs."""
        schema = _schema(COLUMNS, self._options)
        used = set() if where is None else set(columns_of(where, schema))
        if isinstance(columns, Mapping):
            used.update(*(columns_of(one, schema) for one in columns.values()))
        else:
            used.update(self.schema.names if columns is None else columns)
        _check_columns(used)
        return tuple(name for name in QUERIED if name in used)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(
            "a topic's dataset has no fragments that are files, and Arrow cannot join or sort it "
            "where it is: use scanner(), to_batches() or to_table(), and go on with their result"
        )

    get_fragments = join = join_asof = sort_by = replace_schema = _refuse


class _Scan(NamedTuple):
    """Which rows and columns of its splits a scan reads, and what it then selects."""

    options: ReadOptions
    wanted: tuple[str, ...]
    bounds: RowFilter
    where: pc.Expression | None
    columns: Sequence[str] | Mapping[str, pc.Expression]
    warn: Warn

    def reader(self) -> SplitReader:
        return SplitReader(self.options, self.wanted, row_filter=self.bounds, warn=self.warn)

    def scanner(self, rows: Iterator[pa.RecordBatch], planned_bytes: int) -> TopicScanner:
        return TopicScanner(
            _schema(self.wanted, self.options),
            rows,
            columns=self.columns,
            where=self.where,
            planned_bytes=planned_bytes,
        )


class TopicPart(NamedTuple):
    """A part of a scan, of about 16 MiB of the log. It may be pickled."""

    scan: _Scan
    split: Split

    def to_table(self) -> pa.Table:
        """Its rows. Raises DataLoss, CorruptDataError and others."""
        return self._scanner(self.scan).to_table()

    def to_batches(self, warn: Warn) -> Iterator[pa.RecordBatch]:
        """As `to_table`, but streamed, and `warn` is told of what is missing."""
        return self._scanner(self.scan._replace(warn=warn)).to_batches()

    def _scanner(self, scan: _Scan) -> TopicScanner:
        return scan.scanner(scan.reader().read_split(self.split), self.split.size_bytes)


class TopicScanner:
    """One scan, with the methods of a `pyarrow.dataset.Scanner`, of which only one may be called.
    It fetches about `planned_bytes` of the log.

    Arrow's own reads ahead in its threads, which at the end of the process may still be in ours.
    """

    def __init__(
        self,
        schema: pa.Schema,
        batches: Iterator[pa.RecordBatch],
        *,
        columns: Sequence[str] | Mapping[str, pc.Expression],
        where: pc.Expression | None,
        planned_bytes: int,
    ) -> None:
        self.planned_bytes = planned_bytes
        self.dataset_schema, self._columns, self._where = schema, columns, where
        self.projected_schema = self._select(schema.empty_table()).schema
        self._batches = batches

    def to_reader(self) -> pa.RecordBatchReader:
        return pa.RecordBatchReader.from_batches(self.projected_schema, self.to_batches())

    def to_batches(self) -> Generator[pa.RecordBatch, None, None]:
        if self._where is None and self._columns == self.dataset_schema.names:
            yield from self._batches
        else:
            for batch in self._batches:
                yield from self._select(batch).to_batches()

    def to_table(self) -> pa.Table:
        return self.to_reader().read_all()

    def head(self, num_rows: int) -> pa.Table:
        found: list[pa.RecordBatch] = []
        with closing(self.to_batches()) as batches:
            while num_rows > 0 and (batch := next(batches, None)) is not None:
                found.append(batch.slice(0, num_rows))
                num_rows -= batch.num_rows
        return pa.Table.from_batches(found, self.projected_schema)

    def take(self, indices: object) -> pa.Table:
        return self.to_table().take(indices)

    def count_rows(self) -> int:
        return sum(batch.num_rows for batch in self.to_batches())

    def _select(self, rows: pa.RecordBatch | pa.Table) -> pa.Table:
        source = ds.InMemoryDataset(rows)
        return source.scanner(
            columns=self._columns, filter=self._where, use_threads=False
        ).to_table()


def _schema(columns: Iterable[str], options: ReadOptions) -> pa.Schema:
    return schema_of(columns, {name: one.type for name, one in options.readings.items()})


def _parse(
    topics: str | Sequence[str],
    store: str | PathLike[str] | None,
    server: str | None,
    options: Mapping[str, Option | None],
) -> tuple[ReadOptions, pa.Schema]:
    """The parsed options, and the schema that they ask for. Raises InvalidOption, and what the
    registry raises.
    """
    given = _texts(topics, store, server, options)
    parsed = parse_options(given, streaming=False)
    for name in options:
        if name.lower() not in NAMES and not is_kafka_option(name):  # Spark may have others
            raise InvalidOption(f"there is no option {name!r}")
    if parsed.wanted:
        from tierlog.spark_reader.values import find_readings  # few reads need it

        parsed = find_readings(parsed)
    return parsed, _schema(QUERIED if wants_headers(given) else QUERIED[:-1], parsed)


def _check_columns(wanted: Sequence[str] | set[str]) -> None:
    unknown = [name for name in wanted if name not in COLUMNS]
    if unknown:
        raise InvalidOption(
            f"unknown columns {', '.join(unknown)}; the columns are {', '.join(COLUMNS)}"
        )
    if len(set(wanted)) < len(wanted):
        raise InvalidOption(f"a column is requested twice: {', '.join(wanted)}")


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
