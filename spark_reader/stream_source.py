"""The streaming side of `format("tierlog")`: where a stream begins, how far each batch goes.

Rules that keep it honest:

* Spark's checkpoint is the only truth about progress; nothing is committed anywhere else. What is
  kept between calls is a look at the log from where a batch begins: it serves that batch alone.
* A batch is a range of offsets, so a repeated batch has the same rows.
* Another topic under the same name, or offsets that are gone, are data loss.

Spark 4.2 or newer: earlier ones have no limits for Python sources.
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

from manifest.versions import boottime_ms
from record_format.record_walk import I64_MAX
from spark_reader.catalog import PartitionFacts
from spark_reader.gaps import past_gap
from spark_reader.options import ReadOptions
from spark_reader.planner import Planner
from spark_reader.prompt_acks import AcknowledgesItsTask
from spark_reader.ranges import OffsetRange, resolve_start, within
from spark_reader.side_by_side import in_parallel
from spark_reader.source_partition import SplitPartition, say
from spark_reader.stream_offsets import (
    Backlog,
    PartitionName,
    StreamOffsets,
    end_within_bytes,
    from_document,
    limit_offsets,
)

if TYPE_CHECKING:
    import pyarrow as pa

Facts = dict[PartitionName, PartitionFacts]
NO_TOPICS: Final = MappingProxyType[str, str]({})


class TierlogStreamReader(
    AcknowledgesItsTask,
    DataSourceStreamReader,  # type: ignore[misc]
    SupportsTriggerAvailableNow,  # type: ignore[misc]
):
    def __init__(self, options: ReadOptions, columns: tuple[str, ...]) -> None:
        self._options, self._columns = options, columns
        self._facts: Facts = {}
        self._looked_from: StreamOffsets | None = None
        self._is_answered = False
        self._target: dict[PartitionName, int] | None = None
        self._last_batch_ms: int | None = None  # the first one waits for nothing

    # --- where to begin ---------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802  Spark's name
        planner = self._planner()
        facts = planner.catalog.partitions()
        look_up = planner.catalog.first_at_time

        def begin(one: PartitionFacts) -> int:
            start = resolve_start(one, self._options.starting, first_at_time=look_up)
            return within(one, start, one.end_offset, loss=planner.loss)[0]

        by_name = _by_name(facts)
        return _document(by_name, dict(zip(by_name, in_parallel(begin, facts), strict=True)))

    # --- how far ----------------------------------------------------------------------------------

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Spark hands it back to `latestOffset`, or ReadAllAvailable if no limit may count."""
        trigger = self._options.trigger
        if trigger.max_offsets or trigger.min_offsets or trigger.max_bytes:
            return ReadMaxRows(trigger.max_offsets or I64_MAX)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        _, facts = self._look(None)
        self._target = {name: one.end_offset for name, one in facts.items()}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        begun = from_document(start)
        planner, facts = self._look(begun)
        losses = [*_replaced(begun, facts), *_gone(begun, facts), *_set_back(begun, facts)]
        for one in losses:
            planner.loss.report(one)
        backlogs = [
            self._backlog(one, begun)
            for name, one in facts.items()
            # What came after a run that ends with what there was is the next run's, from its start.
            if self._target is None or name in self._target or name in begun.offsets
        ]
        if isinstance(limit, ReadAllAvailable):
            ends = {one.name: max(one.start_offset, one.end_offset) for one in backlogs}
        elif not losses and self._is_too_little(backlogs):
            return start
        else:
            ends = self._limited(backlogs, planner)
        self._last_batch_ms = boottime_ms()
        return _document(facts, ends, named=self._named(begun))

    def reportLatestOffset(self) -> dict[str, Any]:  # noqa: N802
        facts = self._facts or self._look(None)[1]
        return _document(facts, {name: one.end_offset for name, one in facts.items()})

    def _named(self, begun: StreamOffsets) -> dict[str, str]:
        """The ids of topics that options name: who is gone may come again, and is no mistake."""
        choice, ids = self._options.choice, begun.topic_ids
        return {name: ids[name] for name in choice.topics or choice.partitions or () if name in ids}

    def _backlog(self, facts: PartitionFacts, begun: StreamOffsets) -> Backlog:
        """A partition that the stream does not know yet begins with its first record.

        One that was set back goes on where it ends: what comes next is new. What is gone counts for
        no limit; that it is gone is found when the batch is planned.
        """
        name = (facts.topic, facts.partition)
        start = facts.log_start_offset
        if (place := begun.place(facts.topic_id, name)) is not None:
            start = max(start, min(place, facts.end_offset))
        end = facts.end_offset
        if self._target is not None:
            end = min(end, self._target.get(name, 0))
        return Backlog(name, past_gap(start, facts.gaps), end, facts.gaps)

    def _is_too_little(self, backlogs: list[Backlog]) -> bool:
        """Whether to wait for more; never for a run that ends with what there is."""
        trigger = self._options.trigger
        if trigger.min_offsets is None or self._target is not None:
            return False
        if self._last_batch_ms is None:
            return False
        waited_ms = boottime_ms() - self._last_batch_ms
        enough = sum(one.offsets for one in backlogs) >= trigger.min_offsets
        return not enough and waited_ms < trigger.max_delay_ms

    def _limited(self, backlogs: list[Backlog], planner: Planner) -> dict[PartitionName, int]:
        max_bytes = self._options.trigger.max_bytes
        ends = limit_offsets(backlogs, self._options.trigger.max_offsets or I64_MAX)
        if max_bytes is None:
            return ends
        total = sum(one.offsets for one in backlogs)
        waiting = [one for one in backlogs if one.offsets]

        def end_of(one: Backlog) -> int:
            budget = max_bytes * one.offsets // total
            short = one._replace(end_offset=ends[one.name])
            return end_within_bytes(short, self._sizes(short, planner), budget)

        shorter = in_parallel(end_of, waiting)
        return ends | {one.name: end for one, end in zip(waiting, shorter, strict=True)}

    def _sizes(self, backlog: Backlog, planner: Planner) -> Iterator[tuple[int, int, int]]:
        facts = self._facts[backlog.name]
        start, end = backlog.start_offset, backlog.end_offset
        cold_end = min(end, facts.cold_end_offset)
        for entry in planner.catalog.entries(facts, start=start, end=cold_end):
            yield entry.base_offset, entry.next_offset, entry.size_bytes
        if end > facts.cold_end_offset:
            start = max(start, facts.cold_end_offset)
            yield from planner.catalog.tail_sizes(facts, start=start, end=end)

    # --- what to read -----------------------------------------------------------------------------

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[SplitPartition]:
        begun, ends = from_document(start), from_document(end)
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
                planner.loss.report(f"{name[0]}-{name[1]} is no longer there")
                continue
            if ends.topic_ids[one.topic] != one.topic_id:
                continue  # as was reported; the topic that came is the next batch's, from its start
            # Of one that the stream did not know yet nothing may be gone, as with Kafka's source.
            first = begun.place(one.topic_id, name) or 0
            if first < end_offset:
                ranges.append(OffsetRange(one, *within(one, first, end_offset, loss=planner.loss)))
        return [SplitPartition(task) for task in planner.tasks(planner.splits(ranges))]

    def read(self, partition: SplitPartition) -> Iterator[pa.RecordBatch]:
        from spark_reader.task import read_partition

        return read_partition(partition, self._options, self._columns)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to do: the log keeps what retention says, whoever has read it."""

    def stop(self) -> None:
        self._facts = {}

    # --- looking ----------------------------------------------------------------------------------

    def _planner(self) -> Planner:
        return Planner(self._options, report=say, warn=say, patient=self._is_answered)

    def _look(self, begun: StreamOffsets | None) -> tuple[Planner, Facts]:
        planner = self._planner()
        self._facts = _by_name(planner.catalog.partitions_of_stream(begun))
        self._looked_from = begun
        self._is_answered = True
        return planner, self._facts


# What is lost to a stream that has read `begun`, in words. It is told once, for the place that the
# next batch ends at has none of it: so no minimum puts that batch off.


def _replaced(begun: StreamOffsets, facts: Facts) -> Iterator[str]:
    ids = {one.topic: one.topic_id for one in facts.values()}
    for topic in {topic: None for topic, _ in begun.offsets}:
        topic_id = begun.topic_ids[topic]
        if ids.get(topic, topic_id) != topic_id:
            yield (
                f"topic {topic!r} is another now (id {ids[topic]}, the stream began with "
                f"{topic_id})"
            )


def _gone(begun: StreamOffsets, facts: Facts) -> Iterator[str]:
    gone = [f"{topic}-{number}" for topic, number in begun.offsets if (topic, number) not in facts]
    if gone:
        yield f"the stream has read {', '.join(gone)}: gone, or no longer what its options choose"


def _set_back(begun: StreamOffsets, facts: Facts) -> Iterator[str]:
    """A log that ends before the stream's place was set back, by a restore without a gap."""
    for name, one in facts.items():
        place = begun.place(one.topic_id, name)
        if place is not None and place > one.end_offset:
            yield f"{one.topic}-{one.partition}: ends at {one.end_offset}, before offset {place}"


def _by_name(facts: Iterable[PartitionFacts]) -> Facts:
    return {(one.topic, one.partition): one for one in facts}


def _document(
    facts: Facts, offsets: dict[PartitionName, int], *, named: Mapping[str, str] = NO_TOPICS
) -> dict[str, Any]:
    ids = {one.topic: one.topic_id for name, one in facts.items() if name in offsets}
    return StreamOffsets({**named, **ids}, offsets).to_document()
