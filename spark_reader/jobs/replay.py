"""Replays a range of a topic to Parquet or JSON files by date and hour, or to another topic.

The target folder while it is being written (readers ignore names that begin with `_`):

| path                                  |                                                  |
|---------------------------------------|--------------------------------------------------|
| `date=2013-07-04/hour=12/00003-part…` | rows of a finished step, after its number        |
| `_tierlog_replay/plan.json`           | what every step reads (`replay_plan`)            |
| `_tierlog_replay/step-00003/`         | rows of an unfinished step                       |
| `_tierlog_replay/done-00003`          | a finished step: its number of records           |

* Files are exactly-once: a step is staged, and moved when Spark has completed it. An interrupted
  replay resumes where it stopped; repeating a move changes nothing.
* Topics are at-least-once, like the sink: an interrupted step is written again.
* In a target topic, the rows of a partition keep their order, keys, headers and timestamps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from tierlog.record_format.errors import InvalidRequest
from tierlog.spark_reader.access import Connections
from tierlog.spark_reader.jobs.hadoop_files import HadoopFolder
from tierlog.spark_reader.jobs.replay_plan import (
    ReplayPlan,
    Step,
    from_json,
    split_into_steps,
    step_options,
)
from tierlog.spark_reader.jobs.session import Progress, progress_reported
from tierlog.spark_reader.options import NAMES, ReadOptions, parse_options
from tierlog.spark_reader.planner import Planner
from tierlog.spark_reader.s3a import S3ASettings, settings_of
from tierlog.spark_reader.splits import MAX_SPLIT_BYTES, DataLoss
from tierlog.spark_reader.topics import Topics

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STEP_BYTES: Final = 4 * 1024**3

_NOTES: Final = "_tierlog_replay"
_PLAN: Final = f"{_NOTES}/plan.json"
# Of the source's options, those that affect which rows are read, or how. No secret is among them;
# options that are not the source's, such as those of Kafka, may be secrets.
_COMPARED: Final = NAMES - frozenset(
    (
        *("token", "accesskeyid", "secretaccesskey", "sessiontoken"),
        *("tokenfile", "cafile", "endpoint", "region", "pathstyle"),
        *("splitbytes", "minpartitions", "maxrecordsperpartition"),
    )
)
_DAY_MS: Final = 86_400_000
_HOUR_MS: Final = 3_600_000

Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ToFiles:
    """`folder` is any URL that Spark can write to. JSON has keys and values as text or base64."""

    folder: str
    kind: Literal["parquet", "json"] = "parquet"
    base64: bool = False

    @property
    def notes(self) -> str:
        return self.folder


@dataclass(frozen=True, kw_only=True)
class ToTopic:
    """`options` are the sink's (`server`, `topic`, …); `notes` is a folder for the replay's state.

    With `keep_partitions` records keep their partition, else they are partitioned by key, for a
    topic with another number of partitions.
    """

    options: Mapping[str, str] = field(repr=False)
    notes: str
    keep_partitions: bool = True


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """`resumed` is the number of steps that were finished before this run."""

    target: str
    steps: int
    resumed: int
    records: int


def replay(
    session: SparkSession,
    source: Mapping[str, str],
    target: ToFiles | ToTopic,
    *,
    step_bytes: int = STEP_BYTES,
    progress: Progress | None = None,
    log: Log = print,
) -> ReplayReport:
    """Read with `source` (options of the Spark source) and write to `target`.

    Raises InvalidRequest if the folder belongs to another replay; DataLoss, also if a topic was
    re-created since the plan was made; and Spark's errors.
    """
    notes = HadoopFolder(session, target.notes)
    s3a = settings_of(session)
    plan = _plan(notes, source, target, s3a=s3a, step_bytes=step_bytes, log=log)
    there = set(notes.names(_NOTES))  # with what a crash left of a file that was being written
    done = {number for number in range(len(plan.steps)) if _done(number) in there}
    for number, step in enumerate(plan.steps):
        if number in done:
            continue
        log(f"step {number + 1} of {len(plan.steps)}")
        _check_topics(plan, parse_options(step_options(step, source), streaming=False, s3a=s3a))
        with progress_reported(session, progress):
            _Step(session, source, target, notes, number, step).run_step()
    records = sum(
        int(json.loads(notes.read_text(f"{_NOTES}/{_done(number)}"))["records"])
        for number in range(len(plan.steps))
    )
    return ReplayReport(
        target=target.notes, steps=len(plan.steps), resumed=len(done), records=records
    )


def _done(number: int) -> str:
    return f"done-{number:05d}"


def _plan(
    notes: HadoopFolder,
    source: Mapping[str, str],
    target: ToFiles | ToTopic,
    *,
    s3a: S3ASettings,
    step_bytes: int,
    log: Log,
) -> ReplayPlan:
    asked = _request(source, target)
    if notes.exists(_PLAN):
        plan = from_json(notes.read_text(_PLAN), file=notes.url(_PLAN))
        if plan.asked != asked:
            changed = sorted(k for k in {*plan.asked, *asked} if plan.asked.get(k) != asked.get(k))
            raise InvalidRequest(
                f"{notes.url()} belongs to another replay: {', '.join(changed)} differ; "
                "use another folder, or the same options"
            )
        log(f"resuming the plan in {notes.url(_PLAN)}")
        return plan
    if others := [name for name in notes.names() if not name.startswith(("_", "."))]:
        raise InvalidRequest(
            f"{notes.url()} is not empty and not a replay's folder: it contains {others[0]}"
        )
    options = parse_options(source, streaming=False, s3a=s3a)
    split_bytes = options.limits.split_bytes or MAX_SPLIT_BYTES
    options = replace(options, limits=options.limits._replace(split_bytes=split_bytes))
    reported: list[str] = []
    planner = Planner(options, report=reported.append, warn=log)
    ranges = planner.ranges()
    steps = split_into_steps(
        ranges, planner.splits(ranges), split_bytes=split_bytes, step_bytes=step_bytes
    )
    if len(steps) > 1:  # for a single step Spark's source reports the same
        for line in reported:
            log(line)
    ids = {one.facts.topic: one.facts.topic_id for one in ranges}
    plan = ReplayPlan(asked=asked, topic_ids=ids, steps=steps)
    notes.write_text(_PLAN, plan.to_json())
    return plan


def _check_topics(plan: ReplayPlan, options: ReadOptions) -> None:
    """Raise DataLoss if a topic was re-created: its offsets are not the planned ones."""
    for topic, _ in Topics(options, Connections(options.access)).chosen():
        planned = plan.topic_ids.get(topic.name, topic.topic_id)
        if topic.topic_id != planned:
            raise DataLoss(
                f"topic {topic.name!r} was deleted and re-created (its id is {topic.topic_id}, the "
                f"replay started with {planned}); replay the new topic to another folder"
            )


def _request(source: Mapping[str, str], target: ToFiles | ToTopic) -> dict[str, str]:
    """The options that identify a replay: which rows, and in which form."""
    asked = {k: v for k, v in source.items() if k.lower() in _COMPARED}
    if isinstance(target, ToFiles):
        return asked | {"kind": target.kind, "base64": json.dumps(target.base64)}
    return asked | {
        "to topic": target.options["topic"],
        "at": target.options["server"],
        "keep partitions": json.dumps(target.keep_partitions),
    }


@dataclass(frozen=True, repr=False)
class _Step:
    """One step of one replay."""

    session: SparkSession
    source: Mapping[str, str]
    target: ToFiles | ToTopic
    notes: HadoopFolder
    number: int
    reads: Step

    def run_step(self) -> None:
        staging = f"{_NOTES}/step-{self.number:05d}"
        if isinstance(self.target, ToTopic):
            records = self._to_topic(self.target)
        else:
            records = self._to_files(self.target, staging)
        self.notes.write_text(f"{_NOTES}/{_done(self.number)}", json.dumps({"records": records}))
        self.notes.delete(staging)

    def _to_files(self, target: ToFiles, staging: str) -> int:
        """Stage, then move. A complete step whose move was interrupted is not written again."""
        count = f"{staging}/_records"
        if not self.notes.exists(count):
            frame, counted = _counted(_by_hour(self._rows()))
            if target.kind == "json" and not target.base64:
                frame = _as_text(frame)
            writer = frame.write.partitionBy("date", "hour").mode("overwrite")
            if target.kind == "parquet":
                writer = writer.option("compression", "zstd")
            writer.format(target.kind).save(self.notes.url(staging))
            self.notes.write_text(count, str(counted()))
        records = int(self.notes.read_text(count))
        for path in self.notes.walk(staging):
            folder, _, name = path.rpartition("/")
            if folder:
                self.notes.move(f"{staging}/{path}", f"{folder}/{self.number:05d}-{name}")
        return records

    def _to_topic(self, target: ToTopic) -> int:
        rows = self._rows(includeHeaders="true")
        partitions = sum(len(of) for of in self.reads.values())
        frame = rows.repartition(partitions, "topic", "partition").sortWithinPartitions(
            "topic", "partition", "offset"
        )
        columns = ["key", "value", "headers", "timestamp"]
        columns += ["partition"] if target.keep_partitions else []
        frame, counted = _counted(frame.select(*columns))
        frame.write.format("tierlog").mode("append").options(**target.options).save()
        return counted()

    def _rows(self, **more: str) -> DataFrame:
        options = {**step_options(self.reads, self.source), **more}
        return self.session.read.format("tierlog").options(**options).load()


def _by_hour(rows: DataFrame) -> DataFrame:
    """Add `date` and `hour` of each record's timestamp in UTC, whatever the session's time zone."""
    from pyspark.sql import functions as f

    millis = f.unix_millis("timestamp")
    date = f.date_add(f.lit("1970-01-01").cast("date"), f.floor(millis / _DAY_MS).cast("int"))
    hour = f.floor(f.pmod(millis, f.lit(_DAY_MS)) / _HOUR_MS).cast("int")
    return rows.withColumns({"date": date, "hour": f.lpad(hour.cast("string"), 2, "0")})


def _as_text(rows: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    return rows.withColumns({name: f.col(name).cast("string") for name in ("key", "value")})


def _counted(frame: DataFrame) -> tuple[DataFrame, Callable[[], int]]:
    """The same frame, and a function that returns the rows counted by the action that follows."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as f

    seen: Any = Observation()
    return frame.observe(seen, f.count(f.lit(1)).alias("records")), lambda: int(seen.get["records"])
