"""Divides a read into splits, and says what of it exists. Pure.

* A split belongs to one partition and one tier. Its rows are those of its offset range, so two
  splits may share a chunk, yet no row is read twice.
* Small splits, of several partitions and both tiers, may share a task.
* Splits are made by bytes, at chunk boundaries; inside a chunk only if a limit on records or a
  minimum number of splits requires it. The tail has no chunks: it is split by offsets, as if its
  bytes were spread evenly.
* A requested range of offsets that does not exist is data loss: an error, or a warning if
  `failOnDataLoss` is false. `earliest`, `latest` and timestamps never cause data loss.
* Offsets that a restore skipped (gaps) are neither data loss nor backlog: offsets are counted and
  limited outside of them. Records that the lost disk alone had were among the first of them; only a
  range that ends there shows it, and that is data loss.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from tierlog.cold_tier.index_bundle import Chunk, join_chunks
from tierlog.cold_tier.ranged_reader import ChunkRef
from tierlog.manifest.state import Manifest
from tierlog.record_format.errors import TierlogError
from tierlog.record_format.index_layouts import AbortedTxn
from tierlog.record_format.record_walk import I64_MAX, RowFilter

Warn = Callable[[str], None]

Gaps = tuple[tuple[int, int], ...]
"""Ranges [start, end), in order and disjoint."""


def skip_gap(offset: int, gaps: Gaps) -> int:
    """`offset`, or the end of the gap that contains it."""
    for start, end in gaps:
        if start <= offset < end:
            return end
    return offset


def first_lost(start: int, end: int, gaps: Gaps) -> int | None:
    """Where the records of [start, end) are gone, if it ends inside a gap: the log had reached its
    end, so what the gap has of it was lost. Else None.
    """
    for gap_start, gap_end in gaps:
        if gap_start < end < gap_end and start < end:
            return max(start, gap_start)
    return None


def ranges_outside(start: int, end: int, gaps: Gaps) -> Iterator[tuple[int, int]]:
    """The parts of [start, end) outside the gaps, in order."""
    for gap_start, gap_end in gaps:
        if start < min(gap_start, end):
            yield start, min(gap_start, end)
        start = max(start, gap_end)
    if start < end:
        yield start, end


def count_offsets(start: int, end: int, gaps: Gaps) -> int:
    return sum(last - first for first, last in ranges_outside(start, end, gaps))


@dataclass(frozen=True, kw_only=True)
class PartitionFacts:
    """A partition as seen by this read. Offsets [log_start_offset, end_offset) are readable.

    Those below `cold_end_offset` are in the bucket; the broker serves the rest, the tail.
    `tail_bytes` is its size if the topic description tells it.
    """

    topic: str
    topic_id: str
    partition: int
    log_start_offset: int
    end_offset: int
    cold_end_offset: int
    manifest: Manifest | None
    is_pinned: bool = False
    gaps: Gaps = ()
    tail_bytes: int | None = None


class DataLoss(TierlogError):
    """Requested records are gone and `failOnDataLoss` is true, or other rows would be wrong."""


class OffsetRange(NamedTuple):
    """[start_offset, end_offset) of a partition."""

    facts: PartitionFacts
    start_offset: int
    end_offset: int


def log_to_stderr(text: str) -> None:
    """A `Warn`: Spark collects the standard error of its Python processes."""
    print(f"tierlog: {text}", file=sys.stderr, flush=True)


class DataLossPolicy(NamedTuple):
    """`failOnDataLoss`: whether rows that are gone are an error or a warning."""

    fail: bool
    warn: Warn

    def report(self, what: str) -> None:
        """Raise DataLoss, or warn."""
        if self.fail:
            raise DataLoss(f"{what}; option failOnDataLoss=false reads what remains")
        self.warn(what)


def clamp(facts: PartitionFacts, start: int, end: int, *, loss: DataLossPolicy) -> tuple[int, int]:
    """The part of [start, end) that exists; `loss` decides about the rest."""
    name = f"{facts.topic}-{facts.partition}"
    if skip_gap(start, facts.gaps) < facts.log_start_offset:
        loss.report(f"{name}: offsets {start} to {facts.log_start_offset} are gone")
    if end > facts.end_offset or start > facts.end_offset:
        loss.report(f"{name}: ends at {facts.end_offset}, before offset {max(start, end)}")
        end = min(end, facts.end_offset)
    report_if_lost(name, start, end, facts.gaps, loss=loss)
    start = max(start, facts.log_start_offset)
    return min(start, facts.end_offset), max(end, min(start, facts.end_offset))


def report_if_lost(name: str, start: int, end: int, gaps: Gaps, *, loss: DataLossPolicy) -> None:
    """Report what of [start, end) is gone if it ends inside a gap."""
    if (lost := first_lost(start, end, gaps)) is not None:
        loss.report(f"{name}: offsets {lost} to {end} are gone: they were not restored")


JOINED_BYTES: Final = 8 << 20


class ChunkPiece(NamedTuple):
    """A chunk of a segment object, or spans of one: how to fetch it, and what is in it."""

    ref: ChunkRef
    chunk: Chunk

    def of(self, chunk: Chunk) -> ChunkPiece:
        """The same of another range of the object."""
        ref = self.ref._replace(
            position=chunk.position, size_bytes=chunk.size_bytes, crc32c=chunk.crc32c
        )
        return ChunkPiece(ref, chunk)


def join_pieces(pieces: Iterable[ChunkPiece]) -> Iterator[ChunkPiece]:
    """The same bytes, neighbours as one piece of at most `JOINED_BYTES`: one GET."""
    run: list[ChunkPiece] = []
    for piece in pieces:
        if run and not _continues(run, piece):
            yield run[0].of(join_chunks([one.chunk for one in run]))
            run = []
        run.append(piece)
    if run:
        yield run[0].of(join_chunks([one.chunk for one in run]))


def _continues(run: Sequence[ChunkPiece], piece: ChunkPiece) -> bool:
    first, last = run[0].ref, run[-1].ref
    return (
        piece.ref.log_key == last.log_key
        and piece.ref.position == last.end_position
        and piece.ref.end_position - first.position <= JOINED_BYTES
    )


def chunk_may_match(chunk: Chunk, row_filter: RowFilter) -> bool:
    """Whether rows of a chunk may match."""
    return row_filter.may_match_range(
        chunk.first_offset, chunk.last_offset, chunk.min_timestamp, chunk.max_timestamp
    )


def chunk_matches(chunk: Chunk, row_filter: RowFilter) -> bool:
    """Whether all rows of a chunk match."""
    return row_filter.holds_range(
        chunk.first_offset, chunk.last_offset, chunk.min_timestamp, chunk.max_timestamp
    )


class TailPiece(NamedTuple):
    """Offsets [start_offset, end_offset) to read from the broker; `size_bytes` is an estimate.

    It is 0 if no segment of the broker's covers them. They are still requested, as one piece.
    """

    start_offset: int
    end_offset: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class PartitionWork:
    """One partition's part of the read, offsets [start_offset, end_offset), and where they are.

    Offsets from `cold_end_offset` on belong to the tail, even if a chunk extends past it.
    """

    topic: str
    topic_id: str
    partition: int
    start_offset: int
    end_offset: int
    cold_end_offset: int = I64_MAX
    chunks: Sequence[ChunkPiece] = ()
    tail: Sequence[TailPiece] = ()
    aborted: tuple[AbortedTxn, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Split:
    """A contiguous range of offsets of one partition, read from the broker if it has no chunks."""

    topic: str
    topic_id: str
    partition: int
    start_offset: int
    end_offset: int
    size_bytes: int
    chunks: tuple[ChunkPiece, ...] = ()
    aborted: tuple[AbortedTxn, ...] = ()

    @property
    def is_cold(self) -> bool:
        return bool(self.chunks)


class Filters(NamedTuple):
    """Filters that Spark pushed down. None means all topics, partitions, or keys; rows of other
    keys may be read, too.
    """

    row_filter: RowFilter = RowFilter()
    topics: frozenset[str] | None = None
    partitions: frozenset[int] | None = None
    keys: frozenset[bytes] | None = None

    def admits(self, topic: str, partition: int) -> bool:
        return (self.topics is None or topic in self.topics) and (
            self.partitions is None or partition in self.partitions
        )


NO_FILTERS: Final = Filters()


MAX_SPLIT_BYTES: Final = 64 << 20
MIN_SPLIT_BYTES: Final = 16 << 20
SPLIT_OVERHEAD_BYTES: Final = 2 << 20
"""Requesting a split costs as much as reading this many bytes; a task reads its splits in turn."""
_FEW_SPLITS: Final = 16


class SplitLimits(NamedTuple):
    """If `split_bytes` is None, it depends on the size of the read (`default_split_bytes`)."""

    split_bytes: int | None = None
    min_splits: int | None = None
    max_records: int | None = None


class _Unit(NamedTuple):
    """The smallest part of a split: (part of) a chunk, or a part of the tail."""

    chunk: ChunkPiece | None
    start_offset: int
    end_offset: int
    size_bytes: int


def plan_splits(work: Sequence[PartitionWork], limits: SplitLimits) -> list[Split]:
    """The splits, partition by partition in offset order; empty if there is nothing to read."""
    units = [list(_units(one)) for one in work]
    total = sum(unit.size_bytes for one in units for unit in one)
    target = limits.split_bytes or default_split_bytes(total)
    if limits.min_splits:
        target = min(target, max(1, -(-total // limits.min_splits)))
    splits: list[Split] = []
    for one, its_units in zip(work, units, strict=True):
        fine = list(_subdivide(its_units, target, limits))
        splits += [_split(one, pack) for pack in _pack(fine, target, limits.max_records)]
    return splits


def default_split_bytes(total_bytes: int) -> int:
    """64 MiB, or less for small reads, so that there are enough splits to keep all cores busy.

    The number of cores is unknown at planning time. A task's overhead is milliseconds.
    """
    return max(MIN_SPLIT_BYTES, min(MAX_SPLIT_BYTES, total_bytes // _FEW_SPLITS))


def is_single_split(size_bytes: int, limits: SplitLimits) -> bool:
    """Whether `size_bytes` of a partition are one split, whatever the size of the whole read."""
    return limits == SplitLimits() and size_bytes <= MIN_SPLIT_BYTES


def _units(work: PartitionWork) -> Iterator[_Unit]:
    for piece in work.chunks:
        start = max(work.start_offset, piece.chunk.first_offset)
        end = min(work.end_offset, work.cold_end_offset, piece.chunk.last_offset + 1)
        if start < end:
            yield _Unit(piece, start, end, piece.chunk.size_bytes)
    for tail in work.tail:
        start = max(work.start_offset, tail.start_offset)
        end = min(work.end_offset, tail.end_offset)
        if start < end:
            share = (end - start) / (tail.end_offset - tail.start_offset)
            size = max(1, int(tail.size_bytes * share)) if tail.size_bytes else 0
            yield _Unit(None, start, end, size)


def _subdivide(units: Sequence[_Unit], target: int, limits: SplitLimits) -> Iterator[_Unit]:
    """Divide units that are too large for a split by offsets."""
    for unit in units:
        offsets = unit.end_offset - unit.start_offset
        parts = 1
        if unit.chunk is None or limits.min_splits:
            parts = max(1, -(-unit.size_bytes // target))
        if limits.max_records and unit.size_bytes:
            parts = max(parts, -(-offsets // limits.max_records))
        yield from _parts(unit, min(parts, offsets))


def _parts(unit: _Unit, count: int) -> Iterator[_Unit]:
    offsets = unit.end_offset - unit.start_offset
    for number in range(count):
        start = unit.start_offset + offsets * number // count
        end = unit.start_offset + offsets * (number + 1) // count
        yield _Unit(unit.chunk, start, end, -(-unit.size_bytes // count))


def _pack(
    units: Sequence[_Unit], target: int, max_records: int | None
) -> Iterator[Sequence[_Unit]]:
    """Group units into splits of about equal size, each of one tier and at most `max_records`
    offsets.
    """
    total = max(1, sum(unit.size_bytes for unit in units))
    count = -(-total // target)
    pack: list[_Unit] = []
    done = last_share = 0
    for unit in units:
        # Which of `count` equal shares of the bytes contains the middle of the unit.
        share = (2 * done + unit.size_bytes) * count // (2 * total)
        if pack and (
            share != last_share
            or (pack[0].chunk is None) != (unit.chunk is None)
            or (max_records and unit.end_offset - pack[0].start_offset > max_records)
        ):
            yield pack
            pack = []
        pack.append(unit)
        done, last_share = done + unit.size_bytes, share
    if pack:
        yield pack


def _split(work: PartitionWork, units: Sequence[_Unit]) -> Split:
    chunks = dict.fromkeys(unit.chunk for unit in units if unit.chunk is not None)
    start, end = units[0].start_offset, units[-1].end_offset
    return Split(
        topic=work.topic,
        topic_id=work.topic_id,
        partition=work.partition,
        start_offset=start,
        end_offset=end,
        size_bytes=sum(unit.size_bytes for unit in units),
        chunks=tuple(chunks),
        aborted=tuple(t for t in work.aborted if t.last_offset >= start and t.first_offset < end),
    )


COUNTED: Final = frozenset(("topic", "partition"))
"""Columns that do not differ within a split: its rows are counted."""
TOLD: Final = COUNTED | {"offset"}
"""Columns that chunk tables mostly tell."""
TOLD_ROW_BYTES: Final = 16
"""A row that needs no reading costs Spark as much as reading this many bytes."""


class RowsWanted(NamedTuple):
    """Which columns of which rows a read wants; None are all."""

    columns: Collection[str] | None = None
    row_filter: RowFilter = RowFilter()

    @property
    def are_told(self) -> bool:
        """Whether chunk tables mostly tell the rows."""
        return self.columns is not None and TOLD.issuperset(self.columns)

    def chunks_to_read(self, split: Split) -> Sequence[ChunkPiece]:
        """Those of a cold split of which the chunk table does not tell how many rows are wanted, or
        which offsets they have.
        """
        if not self.are_told:
            return split.chunks
        row_filter = self.row_filter.within(split.start_offset, split.end_offset)
        with_offsets = "offset" in (self.columns or ())
        return [
            piece
            for piece in split.chunks
            # or control batches
            if piece.chunk.has_transactions
            or not chunk_matches(piece.chunk, row_filter)
            or (with_offsets and not _is_dense(piece.chunk))
        ]

    def fetched_bytes(self, split: Split) -> int:
        """What reading a split fetches; an estimate for the tail."""
        if not split.is_cold or not self.are_told:
            return split.size_bytes
        return sum(piece.ref.size_bytes for piece in self.chunks_to_read(split))


def _is_dense(chunk: Chunk) -> bool:
    """Whether it has every offset from its first to its last."""
    return chunk.record_count == chunk.last_offset + 1 - chunk.first_offset


ALL: Final = RowsWanted()


def pack_tasks(
    splits: Sequence[Split], limits: SplitLimits, wanted: RowsWanted = ALL
) -> list[tuple[Split, ...]]:
    """Assign splits to tasks. With any limit set, each split is a task of its own.

    Otherwise small splits share a task, since its overhead exceeds the cost of reading the few
    bytes of a small partition. Some parallelism is kept for what is done with the rows, but for
    those that chunk tables tell: little can be.
    """
    if limits != SplitLimits():
        return [(split,) for split in splits]
    costs = [_cost(split, wanted) for split in splits]
    full = MIN_SPLIT_BYTES if wanted.are_told else min(MIN_SPLIT_BYTES, sum(costs) // _FEW_SPLITS)
    tasks: list[list[Split]] = []
    room = 0
    for split, cost in zip(splits, costs, strict=True):
        if not tasks or cost > room:
            tasks.append([])
            room = full
        tasks[-1].append(split)
        room -= cost
    return [tuple(task) for task in tasks]


def _cost(split: Split, wanted: RowsWanted) -> int:
    if fetched_bytes := wanted.fetched_bytes(split):
        return SPLIT_OVERHEAD_BYTES + fetched_bytes
    return TOLD_ROW_BYTES * sum(piece.chunk.record_count for piece in split.chunks)
