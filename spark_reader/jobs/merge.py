"""Merging small segments on a cluster: of many topics and partitions at once, one merge per task.

* The broker says what may be merged, and alone commits: executors read and write the bucket
  directly, and tell it what they made.
* Each merge is committed as soon as it was made, by one transition of the manifest. Whatever is
  interrupted, or run twice, leaves at most an orphan; a second run goes on with what is left.
* A run of segments that was trimmed or merged meanwhile is left out.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec.structs import replace

from tierlog.cold_tier.merged_segment import merge_objects
from tierlog.record_format.errors import UnknownSegment
from tierlog.record_format.segment_entry import MergePlan, SegmentEntry
from tierlog.record_format.workarounds import decode_json
from tierlog.spark_reader.access import Access, Connections, parallel_map
from tierlog.spark_reader.jobs.session import Progress, progress_reported
from tierlog.spark_reader.options import parse_options
from tierlog.spark_reader.s3a import settings_of
from tierlog.spark_reader.topics import Topics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MAX_TASKS: Final = 10_000


class MergeReport(NamedTuple):
    merged_segments: int = 0
    new_segments: int = 0
    merged_bytes: int = 0


class _Merge(NamedTuple):
    """A plan of one run."""

    topic: str
    partition: int
    plan: MergePlan


def merge(
    session: SparkSession, source: Mapping[str, str], *, progress: Progress | None = None
) -> MergeReport:
    """Merge the small segments in the bucket of the topics that `source` (options of the source,
    with `store` and `server`) names.

    Raises InvalidRequest for a compacted topic, UnknownTopic, InvalidOption, and Spark's errors.
    """
    options = parse_options(source, streaming=False, s3a=settings_of(session))
    connections = Connections(options.access)
    chosen = [(topic.name, number) for topic, number in Topics(options, connections).chosen()]
    report = MergeReport()
    with progress_reported(session, progress):
        while work := _planned(connections, chosen):
            done = list(_on_executors(session, options.access, work))
            report = MergeReport(*map(sum, zip(report, *done, strict=True)))
            if not done:
                break
            chosen = sorted({(one.topic, one.partition) for one in work})
    return report


def _planned(connections: Connections, chosen: Iterable[tuple[str, int]]) -> list[_Merge]:
    plans = parallel_map(lambda one: connections.broker.merge_plan(*one), chosen)
    return [
        _Merge(topic, partition, replace(plan, runs=[run]))
        for (topic, partition), plan in zip(chosen, plans, strict=True)
        for run in plan.runs
    ]


def _on_executors(
    session: SparkSession, access: Access, work: list[_Merge]
) -> Iterator[MergeReport]:
    """What became of each merge that was made."""
    from pyspark.sql.functions import udf

    given = session.createDataFrame(
        [(one.topic, one.partition, bytearray(msgspec.json.encode(one.plan))) for one in work],
        "topic string, partition int, plan binary",
    ).repartition(min(len(work), MAX_TASKS))
    make = udf(_merge_with(access), "boolean", useArrow=False)  # Arrow's functions need pandas
    done = given.select("plan", make("topic", "partition", "plan").alias("done"))
    for row in done.collect():
        if row["done"]:
            (run,) = decode_json(bytes(row["plan"]), MergePlan).runs
            yield MergeReport(len(run), 1, sum(one.size_bytes for one in run))


def _merge_with(access: Access) -> Callable[[str, int, bytes], bool]:
    """The function that a task calls for each merge; it carries `access`."""

    def make(topic: str, partition: int, given: bytes) -> bool:
        plan = decode_json(bytes(given), MergePlan)
        connections = Connections(access)
        with tempfile.TemporaryDirectory(prefix="tierlog-merge-") as folder:
            merged = merge_objects(
                connections.store, plan.runs[0], plan, scratch=Path(folder) / "merged"
            )
        return commit_merged(connections, topic, partition, merged)

    return make


def commit_merged(
    connections: Connections, topic: str, partition: int, merged: SegmentEntry
) -> bool:
    """False if the segments have changed meanwhile."""
    try:
        connections.broker.commit_merged(topic, partition, merged)
    except UnknownSegment:
        return False
    return True
