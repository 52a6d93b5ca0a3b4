"""Reads the splits of a task: fetches their bytes, one piece ahead, and decodes them to Arrow.

* Loading the compiled kernels takes a third of a second: who counts records, or asks for no more
  than their offsets, mostly does without.
* Uses the memory of the chunk being decoded, the chunk being fetched, and one group of decompressed
  records. Chunk buffers are reused from task to task: touching fresh memory takes as long as
  reading a chunk into it. Decoded rows do not refer to the buffers.
* Cold chunks are verified against the chunk table on arrival, and every batch against its own
  checksum when it is decoded.
* Missing objects or offsets are data loss, and handled by the run's policy.
* If no column differs within a split, as topic and partition do not, its rows are counted: by the
  chunk table, or by batch headers where a chunk is wanted in part or has transactions. Offsets are
  told by the chunk table too, where a chunk has all from its first to its last.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import cache
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import pyarrow as pa

from tierlog.client.wire import Limits
from tierlog.cold_tier.ranged_reader import read_chunk
from tierlog.record_format.arrow_schema import (
    batch_of,
    constant_columns,
    offset_column,
    schema_of,
)
from tierlog.record_format.errors import (
    ColumnsTooLarge,
    MissingObject,
    OffsetOutOfRange,
    OffsetTrimmed,
    UnknownManifestVersion,
    UnknownTopicOrPartition,
)
from tierlog.record_format.record_walk import RowFilter
from tierlog.spark_reader.access import Connections
from tierlog.spark_reader.options import ReadOptions
from tierlog.spark_reader.splits import (
    COUNTED,
    NO_FILTERS,
    ChunkPiece,
    DataLossPolicy,
    Filters,
    RowsWanted,
    Split,
    Warn,
    join_pieces,
    log_to_stderr,
    report_if_lost,
)

if TYPE_CHECKING:
    from tierlog.record_format.arrow import ArrowDecoder
    from tierlog.spark_reader.batch_source import SplitPartition
    from tierlog.spark_reader.values import ValueDecoder

TAIL_FETCH_BYTES: Final = 8 * 1024 * 1024
TAIL_FETCH_SPARE_BYTES: Final = 64 * 1024
COUNTED_ROWS: Final = 128 * 1024  # at a time, of counted rows
KEPT_BUFFER_BYTES: Final = 16 * 1024 * 1024  # twice the usual size of a chunk
KEPT_BUFFERS: Final = 8  # two of each split that is being read

T = TypeVar("T")


def read_partition(
    partition: SplitPartition,
    options: ReadOptions,
    columns: tuple[str, ...],
    filters: Filters = NO_FILTERS,
) -> Iterator[pa.RecordBatch]:
    """The rows of a task's splits, on an executor, for batches and streams alike."""
    reader = SplitReader(options, columns, row_filter=filters.row_filter)
    for split in partition.splits:
        yield from reader.read_split(split)
        _freeze_once(with_kernels="numba" in sys.modules)


@cache
def _freeze_once(*, with_kernels: bool) -> None:  # noqa: ARG001  once without, and once with them
    """Exclude what the first task has loaded from garbage collection.

    Spark's worker collects after every task; with the kernels loaded, that takes more than 70 ms.
    """
    gc.collect()
    gc.freeze()


class Piece(NamedTuple):
    """Whole batches and their location, in an object or in the broker's log. `start_offset` is the
    log's new start after a trim, which may be inside a batch.
    """

    data: bytes | memoryview
    file: str
    position: int
    start_offset: int = 0


class SplitReader:
    """Reads the splits of a run: their rows in these columns that pass the filter."""

    def __init__(
        self,
        options: ReadOptions,
        columns: tuple[str, ...],
        *,
        row_filter: RowFilter = NO_FILTERS.row_filter,
        warn: Warn = log_to_stderr,
    ) -> None:
        self._connections, self._isolation = Connections(options.access), options.isolation
        self._columns, self._row_filter = columns, row_filter
        self.wanted = RowsWanted(columns, row_filter)
        self._decoded = columns  # before keys and values become columns
        types = {name: one.type for name, one in options.readings.items() if name in columns}
        if types:
            self._options = options
            self._schema = schema_of(columns, types)
            self._decoded = tuple(dict.fromkeys((*columns, "offset")))  # which errors name
        self._only_counts = COUNTED.issuperset(columns)
        self._loss = DataLossPolicy(options.fail_on_data_loss, warn)

    def read_split(self, split: Split) -> Iterator[pa.RecordBatch]:
        """The rows of a split. Raises DataLoss, CorruptDataError, StoreUnavailable and the client's
        errors.
        """
        if self._only_counts:
            yield from _counted(split, self._columns, self._count_rows(split))
        elif self.wanted.are_told and split.is_cold:
            yield from self._told(split)
        else:
            found = self._read_chunks(split, split.chunks, _rows_of)
            yield from (
                found if self._decoded is self._columns else self._with_readings(split, found)
            )

    def _with_readings(
        self, split: Split, batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        from tierlog.spark_reader.values import ValueDecoder  # few reads need it

        where = f"{split.topic}-{split.partition}"
        decoders = {
            name: ValueDecoder(self._options, name, where)
            for name in self._options.readings
            if name in self._columns
        }
        for batch in batches:
            yield from self._as_columns(batch, decoders)

    def _as_columns(
        self, batch: pa.RecordBatch, decoders: Mapping[str, ValueDecoder]
    ) -> Iterator[pa.RecordBatch]:
        """By halves, until each takes no more memory than it may."""
        found = {name: batch.column(name) for name in self._decoded}
        half = 0
        try:
            for name, decoder in decoders.items():
                found[name] = decoder.decode(found[name], found["offset"])
        except ColumnsTooLarge:
            half = len(batch) // 2
        if half:
            yield from self._as_columns(batch.slice(0, half), decoders)
            yield from self._as_columns(batch.slice(half), decoders)
        else:
            yield batch_of([found[name] for name in self._columns], self._schema, rows=len(batch))

    def _told(self, split: Split) -> Iterator[pa.RecordBatch]:
        """The rows of a split, of which at most offsets are wanted."""
        untold = set(self.wanted.chunks_to_read(split))
        for is_untold, pieces in groupby(split.chunks, untold.__contains__):
            if is_untold:
                yield from self._read_chunks(split, list(pieces), _rows_of)
            else:
                for piece in pieces:
                    yield from _consecutive(split, self._columns, piece)

    def _count_rows(self, split: Split) -> int:
        uncounted = self.wanted.chunks_to_read(split)
        rows = sum(one.chunk.record_count for one in split.chunks)
        rows -= sum(one.chunk.record_count for one in uncounted)
        if uncounted or not split.is_cold:
            rows += sum(self._read_chunks(split, uncounted, _counts_of))
        return rows

    def _read_chunks(
        self,
        split: Split,
        chunks: Sequence[ChunkPiece],
        work: Callable[[ArrowDecoder], Callable[..., Iterator[T]]],
    ) -> Iterator[T]:
        """What `work` of the decoder finds in these chunks of the split, or its tail."""
        start_offset = max(self._row_filter.start_offset, split.start_offset)
        decoder, reached = self._decoder(split, start_offset), split.start_offset
        chunks = list(join_pieces(chunks))
        largest = max((piece.ref.size_bytes for piece in chunks), default=0)
        # Returned after decoding, not after fetching: the last piece is still being decoded then.
        with _buffer_pool.pair(largest) as buffers:
            source = self._cold(split, chunks, buffers) if chunks else self._tail(split)
            with closing(one_ahead(source)) as pieces:
                for piece in pieces:
                    if piece.start_offset > start_offset:
                        start_offset = piece.start_offset
                        decoder = self._decoder(split, start_offset)
                    yield from work(decoder)(piece.data, file=piece.file, position=piece.position)
                    reached = max(reached, decoder.reached_offset)
        if not split.is_cold:
            self._check_end(split, reached)

    def _decoder(self, split: Split, start_offset: int) -> ArrowDecoder:
        from tierlog.record_format.arrow import ArrowDecoder, DecodeRequest  # loads the kernels

        return ArrowDecoder(
            DecodeRequest(
                split.topic,
                split.partition,
                columns=self._decoded,
                row_filter=self._row_filter.within(start_offset, split.end_offset),
                aborted=split.aborted,
            )
        )

    def _cold(
        self, split: Split, chunks: Sequence[ChunkPiece], buffers: list[memoryview]
    ) -> Iterator[Piece]:
        """One of the two buffers is decoded while the other is filled."""
        store = self._connections.store
        for chunk, _ in chunks:
            try:
                data = read_chunk(store, chunk, buffer=buffers[0])
            except MissingObject as error:
                self._loss.report(f"{split.topic}-{split.partition}: {error}")
                continue
            yield Piece(data, store.full_key(chunk.log_key), chunk.position)
            buffers.reverse()

    def _tail(self, split: Split) -> Iterator[Piece]:
        broker = self._connections.broker_over_restarts()  # it answered to the plan
        name = f"{split.topic}-{split.partition}"
        offset, left_bytes, log_start_offset = split.start_offset, split.size_bytes, 0
        while offset < split.end_offset:
            max_bytes = tail_bytes(split, offset, left_bytes=left_bytes)
            limits = Limits(max_bytes=max_bytes, isolation=self._isolation)
            try:
                found = broker.fetch_batches(
                    split.topic, split.partition, offset=offset, limits=limits
                )
            except OffsetTrimmed as error:
                self._loss.report(f"{name}: offsets {offset} to {error.log_start_offset} are gone")
                offset = log_start_offset = error.log_start_offset
                continue
            except OffsetOutOfRange as error:
                end = error.high_watermark
                self._loss.report(f"{name}: ends at {end} now, before offset {split.end_offset}")
                return
            except UnknownTopicOrPartition as error:
                self._loss.report(
                    f"{name}: offsets {offset} to {split.end_offset} are gone: {error}"
                )
                return
            if found.topic_id != split.topic_id:
                self._loss.report(
                    f"{name}: offsets {offset} to {split.end_offset} are gone: "
                    f"topic {split.topic!r} was deleted and re-created"
                )
                return
            if found.next_offset <= offset:
                self._loss.report(f"{name}: ends at {offset} now, before offset {split.end_offset}")
                return
            if found.batches:
                where = f"{name} at the broker, from offset {offset}"
                yield Piece(found.batches, where, 0, log_start_offset)
            offset, left_bytes = found.next_offset, left_bytes - len(found.batches)

    def _check_end(self, split: Split, reached: int) -> None:
        """Report loss if the split ends inside a gap: there was a restore since the plan, or after
        the manifest version that the plan was made from. `reached`: after the split's last batch.
        """
        is_filtered = split.end_offset == self._row_filter.end_offset  # the log may never end there
        if reached >= split.end_offset or is_filtered:
            return
        broker = self._connections.broker_over_restarts()
        with suppress(UnknownManifestVersion, UnknownTopicOrPartition):
            gaps = broker.manifest(split.topic, split.partition, from_offset=split.end_offset).gaps
            report_if_lost(
                f"{split.topic}-{split.partition}", reached, split.end_offset, gaps, loss=self._loss
            )


def _rows_of(decoder: ArrowDecoder) -> Callable[..., Iterator[pa.RecordBatch]]:
    return decoder.decode


def _counts_of(decoder: ArrowDecoder) -> Callable[..., Iterator[int]]:
    return decoder.count_rows


def _counted(split: Split, columns: tuple[str, ...], rows: int) -> Iterator[pa.RecordBatch]:
    """`rows` rows of columns that have one value throughout the split."""
    at_once = min(rows, COUNTED_ROWS)
    arrays = constant_columns(columns, topic=split.topic, partition=split.partition, rows=at_once)
    whole = batch_of([arrays[name] for name in columns], schema_of(columns), rows=at_once)
    for start in range(0, rows, COUNTED_ROWS):
        yield whole.slice(0, rows - start)


def _consecutive(
    split: Split, columns: tuple[str, ...], piece: ChunkPiece
) -> Iterator[pa.RecordBatch]:
    """A row for each offset of a chunk."""
    end = piece.chunk.last_offset + 1
    for start in range(piece.chunk.first_offset, end, COUNTED_ROWS):
        rows = min(COUNTED_ROWS, end - start)
        arrays = constant_columns(columns, topic=split.topic, partition=split.partition, rows=rows)
        arrays["offset"] = offset_column(start, rows)
        yield batch_of([arrays[name] for name in columns], schema_of(columns), rows=rows)


def read_in_order(
    reader: SplitReader, splits: Iterable[Split], *, threads: int, readahead_bytes: int
) -> Generator[pa.RecordBatch, None, None]:
    """The rows of the splits, in their order, while threads read the splits that follow.

    About `readahead_bytes` of rows wait to be asked for, and one record batch of each thread's.
    """
    at_most = readahead_bytes // threads
    following = (_Ahead(reader.read_split(split), at_most) for split in splits)
    with ThreadPoolExecutor(threads, thread_name_prefix="tierlog-split") as pool:
        begun = deque((one, pool.submit(one.take)) for one in islice(following, threads))
        try:
            while begun:
                first, pending = begun[0]
                first.at_most = 0
                while taken := pending.result():
                    pending = pool.submit(first.take)
                    yield from taken
                begun.popleft()
                if (one := next(following, None)) is not None:
                    begun.append((one, pool.submit(one.take)))
        finally:
            for one, _ in begun:
                one.at_most = 0
            pool.shutdown(wait=False, cancel_futures=True)


class _Ahead:
    """A split that is read ahead of its consumer, by a call at a time. No call waits for the
    consumer, who may be gone: it ends with `at_most` bytes taken, which may become less meanwhile.
    """

    def __init__(self, rows: Iterator[pa.RecordBatch], at_most: int) -> None:
        self._rows, self.at_most = rows, at_most

    def take(self) -> list[pa.RecordBatch]:
        """The next record batches, at least one; empty at the split's end."""
        taken: list[pa.RecordBatch] = []
        size_bytes = 0
        for batch in self._rows:
            taken.append(batch)
            size_bytes += batch.nbytes
            if size_bytes > self.at_most:
                break
        return taken


def one_ahead(items: Iterator[T]) -> Generator[T, None, None]:
    """The same items, while a thread produces the next one."""
    with ThreadPoolExecutor(1, thread_name_prefix="tierlog-fetch") as pool:
        pending = pool.submit(next, items, _END)
        while (item := pending.result()) is not _END:
            pending = pool.submit(next, items, _END)
            yield item


_END: Any = object()


class _BufferPool:
    """Keeps chunk buffers for the next readers of this process. Thread-safe, as lists are."""

    def __init__(self) -> None:
        self._kept: list[memoryview] = []

    @contextmanager
    def pair(self, size_bytes: int) -> Iterator[list[memoryview]]:
        buffers = [self._take(size_bytes), self._take(size_bytes)]
        yield buffers
        # Not after an error or an abandoned read: the fetching thread may still use them.
        for buffer in buffers:
            if len(buffer) <= KEPT_BUFFER_BYTES and len(self._kept) < KEPT_BUFFERS:
                self._kept.append(buffer)

    def _take(self, size_bytes: int) -> memoryview:
        try:
            buffer = self._kept.pop()
        except IndexError:
            buffer = memoryview(b"")
        return buffer if len(buffer) >= size_bytes else memoryview(bytearray(size_bytes))


_buffer_pool: Final = _BufferPool()


def tail_bytes(split: Split, offset: int, *, left_bytes: int) -> int:
    """How much to fetch at `offset`: the estimated rest of the split and little more, since what
    lies past it is not needed.

    The split's bytes are an estimate and not spread evenly over its offsets. Of two estimates of
    the rest, the larger takes a few fetches, while the smaller may take hundreds.
    """
    offsets, left = split.end_offset - split.start_offset, split.end_offset - offset
    estimate = max(left_bytes, split.size_bytes * left // offsets)
    return min(estimate + TAIL_FETCH_SPARE_BYTES, TAIL_FETCH_BYTES)
