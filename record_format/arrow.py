"""Decodes record batches into Arrow record batches, for Spark and other readers of Arrow.

Rules that keep it honest:

* Column names and types are those of Spark's Kafka source.
* A batch's checksum is verified before its content is trusted. Batches without a wanted row are
  skipped unverified.
* Memory is bounded by the request: about `batch_bytes` of decompressed records at a time (at least
  one batch), and `batch_rows` rows per Arrow batch, however large a record batch is.
* Arrow's 32-bit offsets cannot overflow: the records of one Arrow batch come either from a single
  record batch (below 2 GiB by its length field, or `max_expanded_bytes` if compressed) or from at
  most `batch_bytes`.
* Control batches are skipped. Timestamps outside the range of microseconds are clamped.

If only offsets are wanted, a batch without gaps is not even decompressed: its header suffices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, NoReturn, TypeVar

import numpy as np
import pyarrow as pa

from tierlog.record_format import arrow_columns as kernel
from tierlog.record_format.arrow_columns import (
    BUILDERS,
    Array,
    Columns,
    wanted_parts,
)
from tierlog.record_format.arrow_schema import COLUMNS, SCHEMA, batch_of, constant_columns
from tierlog.record_format.batch import (
    CODEC_MASK,
    CONTROL_BIT,
    CRC_START,
    HEADER_SIZE,
    LOG_APPEND_TIME_BIT,
    MIN_RECORD_SIZE,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Buffer,
    check_crc,
    check_whole,
    parse_header,
)
from tierlog.record_format.codecs import MAX_EXPANDED_BYTES, decompress
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.decode import walk_batch
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.index_layouts import AbortedTxn
from tierlog.record_format.record_walk import I64_MAX, I64_MIN, RowFilter

BATCH_ROWS: Final = 16 * 1024
BATCH_BYTES: Final = 16 * 1024 * 1024
ALONE_BYTES: Final = 512 * 1024
"""Batches that decompress to at least this size are decoded alone, not copied into a group."""

_FROM_HEADERS: Final = {"topic", "partition", "offset", "timestampType"}
_SCAN_ROWS: Final = 1024
FIRST_HEADERS: Final = 1024

T = TypeVar("T")


class DecodeRequest(NamedTuple):
    """What to decode. `aborted`: transactions whose records are skipped; empty for
    read_uncommitted.
    """

    topic: str
    partition: int
    columns: tuple[str, ...] = COLUMNS
    row_filter: RowFilter = RowFilter()
    aborted: Sequence[AbortedTxn] = ()
    batch_rows: int = BATCH_ROWS
    batch_bytes: int = BATCH_BYTES
    max_expanded_bytes: int = MAX_EXPANDED_BYTES


class _Group(NamedTuple):
    """Batches that are decoded together: their rows in the header table, and their records."""

    table: Array
    source: Array


class ArrowDecoder:
    """Decodes successive buffers of one partition. Not thread-safe."""

    def __init__(self, request: DecodeRequest) -> None:
        unknown = set(request.columns) - set(COLUMNS)
        assert not unknown, unknown
        assert request.batch_rows > 0
        self.schema = pa.schema([SCHEMA.field(name) for name in request.columns])
        self._request = request
        self._want = wanted_parts(request.columns)
        self._bounds = np.array(request.row_filter, np.int64)
        self._aborted = _by_producer(request.aborted)
        self._constant = constant_columns(
            request.columns,
            topic=request.topic,
            partition=request.partition,
            rows=request.batch_rows,
        )
        self._header_room = FIRST_HEADERS
        timeless = request.row_filter[2:] == (I64_MIN, I64_MAX)
        self._by_header = timeless and _FROM_HEADERS.issuperset(request.columns)
        self.reached_offset = 0
        """After the last batch that begins below the end of the filter."""

    def decode(self, buf: Buffer, *, file: str = "", position: int = 0) -> Iterator[pa.RecordBatch]:
        """The wanted rows of `buf`, which consists of whole batches.

        Raises CorruptBatch, with a position in `file`, where the buffer begins at `position`.
        """
        return self._of_tables(buf, self._decode_table, file=file, position=position)

    def count_rows(self, buf: Buffer, *, file: str = "", position: int = 0) -> Iterator[int]:
        """How many rows `decode` would find, in parts: by the headers of batches that the filter
        wants whole, which are not decompressed. Raises CorruptBatch.
        """
        return self._of_tables(buf, self._count_table, file=file, position=position)

    def _of_tables(
        self,
        buf: Buffer,
        work: Callable[[memoryview, Array, Array], Iterator[T]],
        *,
        file: str,
        position: int,
    ) -> Iterator[T]:
        view = memoryview(buf)
        data = _read_only(view)
        try:
            for table in _tables(view, data):
                self._note_reached(table)
                yield from work(view, data, table)
        except CorruptBatch as error:
            where = None if error.position is None else position + error.position
            raise CorruptBatch(
                error.detail, file=file, position=where, offset=error.offset
            ) from error

    def _note_reached(self, table: Array) -> None:
        bases = table[:, kernel.BASE_OFFSET]
        if count := int(np.searchsorted(bases, self._request.row_filter.end_offset)):
            self.reached_offset = int(bases[count - 1] + table[count - 1, kernel.LAST_DELTA]) + 1

    def _decode_table(
        self, view: memoryview, data: Array, table: Array
    ) -> Iterator[pa.RecordBatch]:
        wanted = table[self._wanted(table)]
        _check_crcs(view, wanted)
        dense = np.zeros(len(wanted), bool)
        if self._by_header:
            dense = wanted[:, kernel.COUNT] == wanted[:, kernel.LAST_DELTA] + 1
        for start, end, by_header in _runs(dense):
            run = wanted[start:end]
            if by_header:
                _check_counts(view, run, self._request.max_expanded_bytes)
                yield from self._offsets(run)
            else:
                yield from self._records(view, data, run)

    def _count_table(self, view: memoryview, data: Array, table: Array) -> Iterator[int]:
        wanted = table[self._wanted(table)]
        _check_crcs(view, wanted)
        whole = self._is_whole(wanted)
        _check_counts(view, wanted[whole], self._request.max_expanded_bytes)
        yield int(wanted[whole, kernel.COUNT].sum())
        for batch in self._records(view, data, wanted[~whole]):
            yield batch.num_rows

    def _is_whole(self, wanted: Array) -> Array:
        """A mask of the wanted batches of which the filter wants every record. A header has the
        latest timestamp; the earliest is the same if the log gave it.
        """
        row_filter, by_log = (
            self._request.row_filter,
            wanted[:, kernel.ATTRIBUTES] & LOG_APPEND_TIME_BIT,
        )
        last_offset = wanted[:, kernel.BASE_OFFSET] + wanted[:, kernel.LAST_DELTA]
        whole: Array = (
            (wanted[:, kernel.BASE_OFFSET] >= row_filter.start_offset)
            & (last_offset < row_filter.end_offset)
            & (wanted[:, kernel.MAX_TIME] <= row_filter.last_timestamp)
            & ((row_filter.start_timestamp == I64_MIN) | (by_log != 0))
        )
        return whole

    def _wanted(self, table: Array) -> Array:
        """A mask of the batches that may have wanted rows."""
        row_filter = self._request.row_filter
        last_offset = table[:, kernel.BASE_OFFSET] + table[:, kernel.LAST_DELTA]
        wanted: Array = (
            (table[:, kernel.ATTRIBUTES] & CONTROL_BIT == 0)
            # Compaction keeps empty batches as bare headers. One with bytes after its header has a
            # corrupt count, and is decoded to report it.
            & ((table[:, kernel.COUNT] > 0) | (table[:, kernel.SIZE] > HEADER_SIZE))
            & (table[:, kernel.BASE_OFFSET] < row_filter.end_offset)
            & (last_offset >= row_filter.start_offset)
            & (table[:, kernel.MAX_TIME] >= row_filter.start_timestamp)
        )
        if self._aborted:
            transactional = wanted & (table[:, kernel.ATTRIBUTES] & TRANSACTIONAL_BIT != 0)
            for index in np.flatnonzero(transactional):
                wanted[index] = not self._is_aborted(table[index])
        return wanted

    def _is_aborted(self, row: Array) -> bool:
        """A producer has one transaction at a time: all its batches in the range belong to it."""
        base_offset = int(row[kernel.BASE_OFFSET])
        transactions = self._aborted.get(int(row[kernel.PRODUCER]), ())
        return any(txn.first_offset <= base_offset <= txn.last_offset for txn in transactions)

    def _offsets(self, table: Array) -> Iterator[pa.RecordBatch]:
        state = np.zeros(kernel.STATE_SIZE, np.int64)
        outcome = kernel.ROWS_FULL
        while outcome == kernel.ROWS_FULL:
            columns = Columns(self._request.batch_rows)
            outcome = kernel.fill_offsets(
                table, len(table), self._bounds, state, columns.offsets, columns.kinds
            )
            if state[kernel.ROWS]:
                yield self._batch(columns, state)

    def _records(self, view: memoryview, data: Array, table: Array) -> Iterator[pa.RecordBatch]:
        for group in self._groups(view, data, table):
            yield from self._decode_group(group, view)

    def _groups(self, view: memoryview, data: Array, table: Array) -> Iterator[_Group]:
        """Split the batches into groups of about `batch_bytes` of decompressed records, or
        `batch_rows`.
        """
        request = self._request
        parts: list[Buffer] = []
        start = size = rows = 0
        is_large = False
        for index, row in enumerate(table):
            part = self._expand_batch(view, row)
            was_large, is_large = is_large, bool(row[kernel.ATTRIBUTES] & CODEC_MASK)
            is_large &= len(part) >= ALONE_BYTES
            if parts and (
                was_large
                or is_large
                or size + len(part) > request.batch_bytes
                or rows + row[kernel.COUNT] > request.batch_rows
            ):
                yield _group(table[start:index], parts, data)
                parts, start, size, rows = [], index, 0, 0
            row[kernel.START] = size
            size += len(part)
            row[kernel.END] = size
            rows += int(row[kernel.COUNT])
            parts.append(part)
        if parts:
            yield _group(table[start:], parts, data)

    def _expand_batch(self, view: memoryview, row: Array) -> Buffer:
        position, size = int(row[kernel.POSITION]), int(row[kernel.SIZE])
        body = view[position + HEADER_SIZE : position + size]
        codec = int(row[kernel.ATTRIBUTES]) & CODEC_MASK
        if codec:
            try:
                body = decompress(codec, body, max_bytes=self._request.max_expanded_bytes)  # type: ignore[assignment]
            except CorruptBatch as error:
                raise _located(view, row, error.detail) from error
        if int(row[kernel.COUNT]) * MIN_RECORD_SIZE > len(body):
            raise _located(
                view, row, f"{row[kernel.COUNT]} records cannot fit in {len(body)} bytes"
            )
        return body

    def _decode_group(self, group: _Group, view: memoryview) -> Iterator[pa.RecordBatch]:
        state = np.zeros(kernel.STATE_SIZE, np.int64)
        outcome = kernel.ROWS_FULL
        while outcome == kernel.ROWS_FULL:
            columns = Columns(self._request.batch_rows)
            columns.allocate(self._want, _remaining_bytes(group, state), self._header_room)
            state[kernel.ROWS : kernel.STATE_SIZE] = 0
            outcome = self._call_kernel(group, columns, state)
            while outcome == kernel.HEADERS_FULL:
                self._header_room = columns.grow_headers()
                outcome = self._call_kernel(group, columns, state)
            if outcome == kernel.BROKEN:
                _raise_problem(view, group, group.table[state[kernel.BATCH]])
            if state[kernel.ROWS]:
                yield self._batch(columns, state)

    def _call_kernel(self, group: _Group, columns: Columns, state: Array) -> int:
        outcome: int = kernel.decode_records(
            group.source,
            group.table,
            len(group.table),
            self._bounds,
            self._want,
            state,
            *columns.all,
        )
        return outcome

    def _batch(self, columns: Columns, state: Array) -> pa.RecordBatch:
        rows = int(state[kernel.ROWS])
        arrays = [
            self._constant[name].slice(0, rows)
            if name in self._constant
            else BUILDERS[name](columns, state)
            for name in self._request.columns
        ]
        return batch_of(arrays, self.schema, rows=rows)


def warm() -> None:
    """Compile the kernel, or load it from numba's cache, before a caller waits for rows.

    Takes seconds on the first call after an installation, and a third of a second after that.
    """
    smallest = encode_batch([b""], timestamps=[0])
    for columns in (COLUMNS, ("offset",)):
        list(ArrowDecoder(DecodeRequest("", 0, columns=columns)).decode(smallest))


def _raise_problem(view: memoryview, group: _Group, row: Array) -> NoReturn:
    records = group.source[row[kernel.START] : row[kernel.END]]
    walk_batch(records.data, parse_header(view, int(row[kernel.POSITION])))
    raise AssertionError("the kernel refused records that the walk takes")


def _group(table: Array, parts: Sequence[Buffer], data: Array) -> _Group:
    """Without compressed batches the source is `data` itself."""
    if not (table[:, kernel.ATTRIBUTES] & CODEC_MASK).any():
        table[:, kernel.START] = table[:, kernel.POSITION] + HEADER_SIZE
        table[:, kernel.END] = table[:, kernel.POSITION] + table[:, kernel.SIZE]
        return _Group(table, data)
    return _Group(table, _read_only(parts[0] if len(parts) == 1 else b"".join(parts)))


def _remaining_bytes(group: _Group, state: Array) -> int:
    """The size of the records that are left, which no column's data can exceed."""
    batches = group.table[state[kernel.BATCH] :]
    left = int((batches[:, kernel.END] - batches[:, kernel.START]).sum())
    if state[kernel.RECORD]:
        left -= int(state[kernel.AT] - batches[0, kernel.START])
    return left


def _read_only(buf: Buffer) -> Array:
    """A read-only array: always the same type, so that the kernel is compiled only once."""
    data = np.frombuffer(buf, np.uint8)
    data.setflags(write=False)
    return data


# --- the table of headers -------------------------------------------------------------------------


def _tables(view: memoryview, data: Array) -> Iterator[Array]:
    """Tables of all batch headers. Raises CorruptBatch, also for a truncated last batch, and for
    offsets that are out of order: no checksum covers a base offset.
    """
    position = next_offset = 0
    while position < len(data):
        table = np.zeros((_SCAN_ROWS, kernel.TABLE_WIDTH), np.int64)
        count, position = kernel.scan_headers(data, position, len(data), table)
        if count:
            next_offset = _check_order(view, table[:count], next_offset)
            yield table[:count]
        if position < len(data) and count < _SCAN_ROWS:
            check_whole(view, parse_header(view, position))
            raise AssertionError("the kernel refused a header that parse_header takes")


def _check_order(view: memoryview, table: Array, next_offset: int) -> int:
    """Return the offset after the last batch. Raises CorruptBatch for one that begins below the end
    of the batch before it.
    """
    bases = table[:, kernel.BASE_OFFSET]
    ends = bases + table[:, kernel.LAST_DELTA] + 1
    before = np.concatenate(([next_offset], ends[:-1]))
    wrong = np.flatnonzero(bases < before)
    if len(wrong):
        row = table[wrong[0]]
        expected = before[wrong[0]]
        raise _located(view, row, f"offset {row[kernel.BASE_OFFSET]} follows {expected - 1}")
    return int(ends[-1])


def _check_crcs(view: memoryview, table: Array) -> None:
    cells = table[:, (kernel.POSITION, kernel.SIZE, kernel.CRC)]
    for position, size, crc in cells.tolist():
        if crc32c_of(view[position + CRC_START : position + size]) != crc:
            check_crc(view, parse_header(view, position))


def _check_counts(view: memoryview, table: Array, max_expanded_bytes: int) -> None:
    """Refuse record counts that cannot be true, since these batches are not decompressed."""
    too_many = np.flatnonzero(table[:, kernel.COUNT] * MIN_RECORD_SIZE > max_expanded_bytes)
    if len(too_many):
        row = table[too_many[0]]
        raise _located(
            view, row, f"{row[kernel.COUNT]} records cannot fit in {max_expanded_bytes} bytes"
        )


def _located(view: memoryview, row: Array, detail: str) -> CorruptBatch:
    header: BatchHeader = parse_header(view, int(row[kernel.POSITION]))
    return CorruptBatch(detail, position=header.position, offset=header.base_offset)


def _runs(flags: Array) -> Iterator[tuple[int, int, bool]]:
    """(start, end, flag) of each run of equal flags."""
    edges = [0, *(np.flatnonzero(flags[1:] != flags[:-1]) + 1).tolist(), len(flags)]
    for start, end in pairwise(edges):
        if start < end:
            yield start, end, bool(flags[start])


def _by_producer(aborted: Sequence[AbortedTxn]) -> dict[int, list[AbortedTxn]]:
    by_producer: dict[int, list[AbortedTxn]] = {}
    for txn in aborted:
        by_producer.setdefault(txn.producer_id, []).append(txn)
    return by_producer
