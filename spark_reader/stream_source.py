"""Streaming reads of `format("tierlog")`: where a stream starts, and how far each batch goes.

* Spark's checkpoint is the only record of progress; nothing is committed elsewhere. The state of
  the log that is kept between calls serves the planning of one batch only.
* A batch is a range of offsets, so a repeated batch has the same rows. Spark asks for the start of
  the first one each time; so its end says where it began (see `stream_offsets`).
* A topic that was re-created under the same name, or missing offsets, are data loss.

Needs Spark 4.2 or newer: earlier versions have no limits for Python sources.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from tierlog.host.clock import boottime_ms
from tierlog.record_format.record_walk import I64_MAX
from tierlog.spark_reader.access import Connections, parallel_map
from tierlog.spark_reader.batch_source import SplitPartition
from tierlog.spark_reader.options import NO_LIMITS, ReadOptions, TriggerLimits
from tierlog.spark_reader.planner import Planner
from tierlog.spark_reader.splits import (
    OffsetRange,
    PartitionFacts,
    log_to_stderr,
    pack_tasks,
    skip_gap,
)
from tierlog.spark_reader.stream_offsets import (
    Backlog,
    PartitionName,
    StreamOffsets,
    end_within_bytes,
    from_document,
    limit_offsets,
)
from tierlog.spark_reader.workarounds import QuickAckOnUnpickle, in_brief

if TYPE_CHECKING:
    import pyarrow as pa

Facts = dict[PartitionName, PartitionFacts]
NO_TOPICS: Final = MappingProxyType[str, str]({})


class TierlogStreamReader(
    QuickAckOnUnpickle,
    DataSourceStreamReader,  # type: ignore[misc]
    SupportsTriggerAvailableNow,  # type: ignore[misc]
):
    def __init__(self, options: ReadOptions, columns: tuple[str, ...]) -> None:
        self._options, self._columns = options, columns
        self._facts: Facts = {}
        self._looked_from: StreamOffsets | None = None
        self._target: dict[PartitionName, int] | None = None
        self._last_batch_ms: int | None = None  # None: the first batch does not wait
        self._initial: dict[str, Any] | None = None

    # --- the first offset -------------------------------------------------------------------------

    @in_brief
    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  Spark's name
        """Spark asks for it more than once."""
        if self._initial is None:
            self._initial = self._resolve_starts()
        return self._initial

    def _resolve_starts(self) -> dict[str, Any]:
        planner = self._planner()
        facts = planner.catalog.partitions()

        def begin(one: PartitionFacts) -> int:
            return planner.existing(one, planner.start_of(one), one.end_offset).start_offset

        by_name = _by_name(facts)
        starts = dict(zip(by_name, parallel_map(begin, facts), strict=True))
        return _offsets(by_name, starts).to_document()

    # --- the end of a batch -----------------------------------------------------------------------

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Spark passes it to `latestOffset`, or ReadAllAvailable if limits do not apply."""
        trigger = self._options.trigger
        if trigger.max_offsets or trigger.min_offsets or trigger.max_bytes:
            return ReadMaxRows(trigger.max_offsets or I64_MAX)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        _, facts = self._look(None)
        self._target = {name: one.end_offset for name, one in facts.items()}

    @in_brief
    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        begun = from_document(start)
        is_limited = not isinstance(limit, ReadAllAvailable)
        may_wait = is_limited and self._may_wait()
        if may_wait:
            described = self._planner().catalog.described_partitions_of_stream(begun)
            if described is not None and self._should_wait(_by_name(described), begun):
                # For the stream's progress. No batch can be planned from it.
                self._facts, self._looked_from = _by_name(described), None
                return start
        planner, facts = self._look(begun)
        if may_wait and self._should_wait(facts, begun):
            return start
        for one in _losses(begun, facts):
            planner.loss.report(one)
        backlogs = self._backlogs(facts, begun)
        ends = self._ends(backlogs, self._options.trigger if is_limited else NO_LIMITS, planner)
        self._last_batch_ms = boottime_ms()
        reached = _offsets(facts, ends, named=self._named(begun))
        if reached.is_at(begun):
            return start
        if start == self._initial:
            reached = reached.ending_the_first_batch(begun)
        return reached.to_document()

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        facts = self._facts or self._look(None)[1]
        ends = {name: one.end_offset for name, one in facts.items()}
        return _offsets(facts, ends).to_document()

    def _named(self, begun: StreamOffsets) -> dict[str, str]:
        """The ids of topics that options name, which are kept if the topic is gone."""
        ids = begun.topic_ids
        return {name: ids[name] for name in self._options.choice.named if name in ids}

    def _backlogs(self, facts: Facts, begun: StreamOffsets) -> list[Backlog]:
        return [
            self._backlog(one, begun)
            for name, one in facts.items()
            # With availableNow, partitions that were created meanwhile are left to the next run.
            if self._target is None or name in self._target or name in begun.offsets
        ]

    def _backlog(self, facts: PartitionFacts, begun: StreamOffsets) -> Backlog:
        """The unread offsets of a partition. One that is new to the stream starts at its first
        record.

        One whose log was truncated continues at its end, since what follows is new. Offsets that
        are gone do not count towards limits; they are reported when the batch is planned.
        """
        name = (facts.topic, facts.partition)
        start = facts.log_start_offset
        if (next_offset := begun.next_offset(facts.topic_id, name)) is not None:
            start = max(start, min(next_offset, facts.end_offset))
        end = facts.end_offset
        if self._target is not None:
            end = min(end, self._target.get(name, 0))
        # Not past the target of availableNow: inside a gap, the batch ends in what was lost.
        start = min(skip_gap(start, facts.gaps), max(start, end))
        return Backlog(name, start, end, facts.gaps)

    def _may_wait(self) -> bool:
        """Whether to wait if there are fewer offsets than `minOffsetsPerTrigger`; never with
        availableNow.
        """
        trigger = self._options.trigger
        if trigger.min_offsets is None or self._target is not None or self._last_batch_ms is None:
            return False
        return boottime_ms() - self._last_batch_ms < trigger.max_delay_ms

    def _should_wait(self, facts: Facts, begun: StreamOffsets) -> bool:
        """Whether there are fewer offsets than `minOffsetsPerTrigger`, and no loss to report.

        A stream that waits polls as often as an idle one. So the topic descriptions are asked
        first: without the gaps there can only be fewer.
        """
        found = sum(one.offsets for one in self._backlogs(facts, begun))
        return found < (self._options.trigger.min_offsets or 0) and not _losses(begun, facts)

    def _ends(
        self, backlogs: list[Backlog], limits: TriggerLimits, planner: Planner
    ) -> dict[PartitionName, int]:
        ends = limit_offsets(backlogs, limits.max_offsets or I64_MAX)
        max_bytes = limits.max_bytes
        if max_bytes is None:
            return ends
        total = sum(one.offsets for one in backlogs)
        waiting = [one for one in backlogs if one.offsets]

        def end_of(one: Backlog) -> int:
            budget = max_bytes * one.offsets // total
            short = one._replace(end_offset=ends[one.name])
            return end_within_bytes(short, self._sizes(short, planner), budget)

        shorter = parallel_map(end_of, waiting)
        return ends | {one.name: end for one, end in zip(waiting, shorter, strict=True)}

    def _sizes(self, backlog: Backlog, planner: Planner) -> Iterator[tuple[int, int, int]]:
        facts = self._facts[backlog.name]
        start, end = backlog.start_offset, backlog.end_offset
        cold_end = min(end, facts.cold_end_offset)
        for entry in planner.catalog.cold_entries(facts, start=start, end=cold_end):
            yield entry.base_offset, entry.next_offset, entry.size_bytes
        if end > facts.cold_end_offset:
            start = max(start, facts.cold_end_offset)
            yield from planner.catalog.tail_sizes(facts, start=start, end=end)

    # --- the batch --------------------------------------------------------------------------------

    @in_brief
    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[SplitPartition]:
        ends = from_document(end)
        begun = ends.start_of_batch(from_document(start))
        planner = self._planner()
        facts = self._facts
        if begun != self._looked_from or any(
            name not in facts or facts[name].end_offset < o for name, o in ends.offsets.items()
        ):
            planner, facts = self._look(None)
        for loss in _replaced(ends, facts):
            planner.loss.report(loss)
        ranges: list[OffsetRange] = []
        for name, end_offset in ends.offsets.items():
            if (one := facts.get(name)) is None:
                planner.loss.report(f"{name[0]}-{name[1]} no longer exists")
                continue
            if ends.topic_ids[one.topic] != one.topic_id:
                continue  # reported above; the next batch reads the new topic from its start
            # A partition that is new to the stream is read from offset 0, as with Kafka's source.
            first = begun.next_offset(one.topic_id, name) or 0
            if first < end_offset:
                ranges.append(planner.existing(one, first, end_offset))
        tasks = pack_tasks(planner.splits(ranges), self._options.limits)
        return [SplitPartition(task) for task in tasks]

    def read(self, partition: SplitPartition) -> Iterator[pa.RecordBatch]:
        from tierlog.spark_reader.split_reader import read_partition

        return read_partition(partition, self._options, self._columns)

    # --- the state of the log ---------------------------------------------------------------------

    def _planner(self) -> Planner:
        return Planner(self._options, report=log_to_stderr, warn=log_to_stderr)

    def _look(self, begun: StreamOffsets | None) -> tuple[Planner, Facts]:
        planner = self._planner()
        self._facts = _by_name(planner.catalog.partitions_of_stream(begun))
        self._looked_from = begun
        if self._options.tier == "all":
            Connections(self._options.access).broker_over_restarts()
        return planner, self._facts


# Messages about what is lost to a stream that has read to `begun`. Each is reported once, since the
# end of the next batch no longer includes it; so `minOffsetsPerTrigger` does not delay that batch.


def _losses(begun: StreamOffsets, facts: Facts) -> list[str]:
    return [*_replaced(begun, facts), *_gone(begun, facts), *_truncated(begun, facts)]


def _replaced(begun: StreamOffsets, facts: Facts) -> Iterator[str]:
    ids = {one.topic: one.topic_id for one in facts.values()}
    for topic in {topic: None for topic, _ in begun.offsets}:
        topic_id = begun.topic_ids[topic]
        if ids.get(topic, topic_id) != topic_id:
            yield (
                f"topic {topic!r} was deleted and re-created (its id is {ids[topic]}, the stream "
                f"started with {topic_id})"
            )


def _gone(begun: StreamOffsets, facts: Facts) -> Iterator[str]:
    gone = [f"{topic}-{number}" for topic, number in begun.offsets if (topic, number) not in facts]
    if gone:
        yield f"the stream has read {', '.join(gone)}: deleted, or no longer chosen by its options"


def _truncated(begun: StreamOffsets, facts: Facts) -> Iterator[str]:
    """Logs that end before the stream's next offset, because of a restore without a gap."""
    for name, one in facts.items():
        next_offset = begun.next_offset(one.topic_id, name)
        if next_offset is not None and next_offset > one.end_offset:
            yield (
                f"{one.topic}-{one.partition}: ends at {one.end_offset}, before offset "
                f"{next_offset}"
            )


def _by_name(facts: Iterable[PartitionFacts]) -> Facts:
    return {(one.topic, one.partition): one for one in facts}


def _offsets(
    facts: Facts, offsets: dict[PartitionName, int], *, named: Mapping[str, str] = NO_TOPICS
) -> StreamOffsets:
    ids = {one.topic: one.topic_id for name, one in facts.items() if name in offsets}
    return StreamOffsets({**named, **ids}, offsets)
