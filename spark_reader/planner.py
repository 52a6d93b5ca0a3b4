"""Plans a read from its options: fetches facts from the catalog for the pure functions of `splits`,
which make all decisions.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Final

from tierlog.record_format.errors import InvalidOption, MissingObject
from tierlog.record_format.index_layouts import AbortedTxn
from tierlog.record_format.record_walk import RowFilter
from tierlog.record_format.segment_entry import SegmentEntry
from tierlog.spark_reader.access import parallel_map
from tierlog.spark_reader.catalog import Catalog
from tierlog.spark_reader.cold_index import may_match
from tierlog.spark_reader.option_values import EARLIEST, LATEST, AtTime, NoMatch, OffsetSpec
from tierlog.spark_reader.options import ReadOptions
from tierlog.spark_reader.splits import (
    NO_FILTERS,
    ChunkPiece,
    DataLoss,
    DataLossPolicy,
    Filters,
    OffsetRange,
    PartitionFacts,
    PartitionWork,
    Split,
    TailPiece,
    Warn,
    clamp,
    count_offsets,
    is_single_split,
    plan_splits,
)

NOT_BEGUN: Final[Mapping[str, Mapping[int, int]]] = MappingProxyType({})


class Planner:
    """Plans one read. `report` is called with the decisions, `warn` with what is missing."""

    def __init__(self, options: ReadOptions, *, report: Warn, warn: Warn) -> None:
        self.catalog = Catalog(options)
        self.loss = DataLossPolicy(options.fail_on_data_loss, warn)
        self._options, self._report = options, report

    def batch(self, filters: Filters = NO_FILTERS) -> list[Split]:
        """The splits of a batch read; empty if there is nothing to read."""
        return self.splits(self.ranges(), filters)

    def ranges(self, begun: Mapping[str, Mapping[int, int]] = NOT_BEGUN) -> list[OffsetRange]:
        """The offset ranges that the options specify; partitions in `begun` start there instead.
        Reports them.
        """

        def resolved(facts: PartitionFacts) -> OffsetRange:
            start = begun.get(facts.topic, {}).get(facts.partition)
            start = self.start_of(facts) if start is None else start
            end = self._offset(facts, self._options.ending.spec_for(facts.topic, facts.partition))
            return self.existing(facts, start, facts.end_offset if end is None else end)

        partitions, options = self.catalog.partitions(), self._options
        # Only times take requests, for which threads are worth while.
        each = parallel_map if options.starting.has_times or options.ending.has_times else map
        ranges = list(each(resolved, partitions))
        self._report(describe(ranges))
        return ranges

    def existing(self, facts: PartitionFacts, start: int, end: int) -> OffsetRange:
        """The part of [start, end) that exists. Raises DataLoss."""
        if start < facts.log_start_offset:
            facts = self.catalog.with_gaps(facts)
        return OffsetRange(facts, *clamp(facts, start, end, loss=self.loss))

    def start_of(self, facts: PartitionFacts) -> int:
        """The offset that the starting options specify, which may not exist in the log. Raises
        InvalidOption.
        """
        starting = self._options.starting
        spec = starting.spec_for(facts.topic, facts.partition)
        start = self._offset(facts, spec)
        if start is not None:
            return start
        if starting.no_match is NoMatch.ERROR:
            assert isinstance(spec, AtTime)
            raise InvalidOption(
                f"{facts.topic}-{facts.partition} has no record at or after {spec.timestamp}; "
                "option startingOffsetsByTimestampStrategy=latest starts at the end instead"
            )
        return facts.end_offset

    def _offset(self, facts: PartitionFacts, spec: OffsetSpec) -> int | None:
        """None if no record is at or after a time."""
        if isinstance(spec, AtTime):
            missing = partial(self._missing, facts)
            return self.catalog.first_at_time(facts, spec.timestamp, missing=missing)
        return {EARLIEST: facts.log_start_offset, LATEST: facts.end_offset}.get(spec, spec)

    def splits(
        self,
        ranges: Sequence[OffsetRange],
        filters: Filters = NO_FILTERS,
        *,
        counted: list[int] | None = None,
    ) -> list[Split]:
        """The splits that read the ranges. Reports the plan. Who only counts rows finds in
        `counted` how many there are in segments that have not to be read, and are left out.
        """
        wanted = [
            one
            for one in ranges
            if one.start_offset < one.end_offset
            and filters.admits(one.facts.topic, one.facts.partition)
        ]
        in_memory = all(
            self.catalog.needs_no_request(
                one.facts, filters.row_filter.within(one.start_offset, one.end_offset)
            )
            for one in wanted
        )
        plan = partial(self._work, filters=filters, counted=counted)
        work = [plan(one) for one in wanted] if in_memory else parallel_map(plan, wanted)
        splits = plan_splits(work, self._options.limits)
        self._report(describe_plan(ranges, work, splits))
        return splits

    def _work(
        self, wanted: OffsetRange, filters: Filters, counted: list[int] | None
    ) -> PartitionWork:
        facts = wanted.facts
        row_filter = filters.row_filter.within(wanted.start_offset, wanted.end_offset)
        start, end = row_filter.start_offset, row_filter.end_offset
        cold_end = min(end, facts.cold_end_offset)
        # What is in a key is no key: what says where keys are knows nothing of it.
        keys = None if "key" in self._options.readings else filters.keys
        chunks, aborted = self._cold(facts, row_filter._replace(end_offset=cold_end), keys, counted)
        return PartitionWork(
            topic=facts.topic,
            topic_id=facts.topic_id,
            partition=facts.partition,
            start_offset=start,
            end_offset=end,
            cold_end_offset=cold_end,
            chunks=chunks,
            tail=list(self._tail(facts, start=max(start, facts.cold_end_offset), end=end)),
            aborted=tuple(aborted),
        )

    def _cold(
        self,
        facts: PartitionFacts,
        row_filter: RowFilter,
        keys: frozenset[bytes] | None,
        counted: list[int] | None,
    ) -> tuple[list[ChunkPiece], list[AbortedTxn]]:
        """The chunks that may have matching rows, and the aborted transactions in them."""
        start, end = row_filter.start_offset, row_filter.end_offset
        if start >= end:
            return [], []
        entries = self.catalog.cold_entries(facts, start=start, end=end)
        held = (one for one in entries if may_match(one, row_filter))
        if counted is not None:
            held = (one for one in held if not self._count(one, row_filter, counted))
        missing = partial(self._missing, facts)
        chunks = self.catalog.chunks(held, row_filter, keys=keys, missing=missing)
        in_transactions = [piece.chunk for piece in chunks if piece.chunk.has_transactions]
        if self._options.isolation == "read_uncommitted" or not in_transactions:
            return chunks, []
        first, last = in_transactions[0], in_transactions[-1]
        try:
            return chunks, self.catalog.aborted(
                facts, start_offset=first.first_offset, end_offset=min(end, last.last_offset + 1)
            )
        except MissingObject as error:
            # Whatever `failOnDataLoss` is, since rows would not be missing but wrong.
            raise DataLoss(
                f"{facts.topic}-{facts.partition}: {error}; without it, aborted records cannot be "
                "distinguished from committed ones; option isolationLevel=read_uncommitted reads "
                "both"
            ) from error

    def _count(self, entry: SegmentEntry, row_filter: RowFilter, counted: list[int]) -> bool:
        """Whether the rows of a segment were counted."""
        if (rows := self.catalog.count_rows(entry, row_filter)) is None:
            return False
        counted.append(rows)
        return True

    def _missing(self, facts: PartitionFacts, error: MissingObject) -> None:
        self.loss.report(f"{facts.topic}-{facts.partition}: {error}")

    def _tail(self, facts: PartitionFacts, *, start: int, end: int) -> Iterator[TailPiece]:
        if start >= end:
            return
        if facts.tail_bytes is not None and is_single_split(facts.tail_bytes, self._options.limits):
            tail = count_offsets(facts.cold_end_offset, facts.end_offset, facts.gaps)
            share = count_offsets(start, end, facts.gaps) / max(1, tail)
            yield TailPiece(start, end, max(1, int(facts.tail_bytes * share)))
            return
        reached = start
        for base, next_offset, size in self.catalog.tail_sizes(facts, start=start, end=end):
            piece_start, piece_end = max(base, reached), min(next_offset, end)
            if piece_start < piece_end:
                share = (piece_end - piece_start) / max(1, next_offset - base)
                yield TailPiece(piece_start, piece_end, max(1, int(size * share)))
                reached = piece_end
        if reached < end:  # a gap that no manifest has, or the log was truncated meanwhile
            yield TailPiece(reached, end, 0)


def describe(ranges: Sequence[OffsetRange]) -> str:
    """The offsets and manifest versions of a read, as options with which it can be repeated."""
    starts: dict[str, dict[str, int]] = {}
    ends: dict[str, dict[str, int]] = {}
    versions: dict[str, dict[str, int]] = {}
    for one in ranges:
        topic, partition = one.facts.topic, str(one.facts.partition)
        starts.setdefault(topic, {})[partition] = one.start_offset
        ends.setdefault(topic, {})[partition] = one.end_offset
        if one.facts.manifest is not None:
            versions.setdefault(topic, {})[partition] = one.facts.manifest.version
    assign = {topic: sorted(int(number) for number in of) for topic, of in starts.items()}
    used = {"assign": assign, "startingOffsets": starts, "endingOffsets": ends}
    if versions:
        used["manifestVersion"] = versions
    return "read " + json.dumps(used, separators=(",", ":"))


def describe_plan(
    ranges: Sequence[OffsetRange], work: Sequence[PartitionWork], splits: Sequence[Split]
) -> str:
    """The size of a read, the offsets that the log has past it, and the bytes from each tier."""
    counted = {
        "offsets": sum(
            count_offsets(one.start_offset, one.end_offset, one.facts.gaps) for one in ranges
        ),
        "offsetsBehind": sum(
            count_offsets(one.end_offset, one.facts.end_offset, one.facts.gaps) for one in ranges
        ),
        "coldBytes": sum(piece.ref.size_bytes for one in splits for piece in one.chunks),
        "hotBytes": sum(piece.size_bytes for one in work for piece in one.tail),
        "splits": len(splits),
    }
    return "plan " + json.dumps(counted, separators=(",", ":"))
