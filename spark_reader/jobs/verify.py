"""Deep verification on a cluster: every byte of every object of a topic, one segment per task.

* The checks and the report are the broker's own (`cold_tier.segment_check`,
  `manifest.partition_check`).
* The driver reads manifests, pages and pins; executors read segments directly from the bucket.
* It writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from tierlog.cold_tier.segment_check import check_segment
from tierlog.manifest.keys import PartitionKeys
from tierlog.manifest.partition_check import ManifestCheck
from tierlog.record_format.findings import Findings, VerifyReport
from tierlog.record_format.segment_entry import SegmentEntry
from tierlog.record_format.workarounds import decode_json
from tierlog.spark_reader.access import Access, Connections
from tierlog.spark_reader.jobs.session import Progress, progress_reported
from tierlog.spark_reader.options import parse_options
from tierlog.spark_reader.s3a import settings_of
from tierlog.spark_reader.topics import Topics

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MAX_TASKS: Final = 10_000


def verify(
    session: SparkSession,
    source: Mapping[str, str],
    *,
    clock: Callable[[], int],
    progress: Progress | None = None,
) -> VerifyReport:
    """Verify the objects in the bucket of the topics that `source` (options of the source) names.

    Raises UnknownTopic, InvalidOption, and Spark's errors; what is corrupt is in the report.
    """
    options = parse_options({**source, "tier": "cold"}, streaming=False, s3a=settings_of(session))
    connections = Connections(options.access)
    store = connections.store
    found = Findings(-1)
    work: list[tuple[int, SegmentEntry]] = []
    for topic, number in Topics(options, connections).chosen():
        check = ManifestCheck(store, PartitionKeys(topic.name, topic.topic_id, number), clock=clock)
        manifest = check.manifest()
        if manifest is not None:
            work += [(number, one) for one in check.checked_entries(manifest)]
            check.pins()
        found.merge(check.findings)
    with progress_reported(session, progress):
        for one in _on_executors(session, options.access, work):
            found.merge(one)
    return found.report()


def _on_executors(
    session: SparkSession, access: Access, work: list[tuple[int, SegmentEntry]]
) -> Iterator[Findings]:
    """The findings of each segment, by partition and base offset.

    Sorted here: to sort, Spark samples its input first, and so would read every segment twice.
    """
    from pyspark.sql.functions import udf

    if not work:
        return
    given = session.createDataFrame(
        [(number, one.base_offset, bytearray(msgspec.json.encode(one))) for number, one in work],
        "partition int, base_offset bigint, entry binary",
    ).repartition(min(len(work), MAX_TASKS))
    check = udf(_check_with(access), "binary", useArrow=False)  # Arrow's functions need pandas
    checked = given.select("partition", "base_offset", check("partition", "entry").alias("found"))
    for row in sorted(checked.collect(), key=lambda row: (row["partition"], row["base_offset"])):
        yield decode_json(bytes(row["found"]), Findings)


def _check_with(access: Access) -> Callable[[int, bytes], bytes]:
    """The function that a task calls for each segment; it carries `access`."""

    def check(partition: int, entry: bytes) -> bytes:
        segment = decode_json(bytes(entry), SegmentEntry)
        store = Connections(access).store
        return msgspec.json.encode(check_segment(store, segment, partition=partition, deep=True))

    return check
