"""Replay: a range of a topic into Parquet or JSON files by date and hour, or into another topic.

What a target folder holds while it is written (names with `_` are passed over by who reads it):

| path                                  |                                                  |
|---------------------------------------|--------------------------------------------------|
| `date=2013-07-04/hour=12/00003-part…` | rows whose step is done: its number goes before  |
| `_tierlog_replay/plan.json`           | what every step reads (`replay_plan`)            |
| `_tierlog_replay/step-00003/`         | rows of a step that is not done                  |
| `_tierlog_replay/done-00003`          | the step is done: how many records it had        |

Rules that keep it honest:

* Files are exactly once: a step is written aside, and moved when Spark has said that it is whole. A
  replay continues where it ended; moving again what was already moved changes nothing.
* A topic is at least once, like the sink: a step that ended halfway is written again.
* Into a topic the rows of a partition go in their order, and keep key, headers and timestamp.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from record_format.errors import InvalidRequest
from spark_reader.access import Connections
from spark_reader.jobs.hadoop_files import HadoopFolder
from spark_reader.jobs.replay_plan import ReplayPlan, Step, cut_steps, from_json, options_of
from spark_reader.jobs.session import Progress, watched
from spark_reader.options import ReadOptions, parse_options
from spark_reader.plan import MAX_SPLIT_BYTES
from spark_reader.planner import Planner
from spark_reader.ranges import DataLoss
from spark_reader.s3a import S3ASettings, settings_of
from spark_reader.topics import Topics

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STEP_BYTES: Final = 4 * 1024**3

_NOTES: Final = "_tierlog_replay"
_PLAN: Final = f"{_NOTES}/plan.json"
# How the rows are reached and cut says nothing of which they are; four of these are secrets.
_NOT_ASKED: Final = frozenset(
    (
        *("token", "accesskeyid", "secretaccesskey", "sessiontoken"),
        *("tokenfile", "cafile", "endpoint", "region", "pathstyle"),
        *("splitbytes", "minpartitions", "maxrecordsperpartition"),
    )
)
_DAY_MS: Final = 86_400_000
_HOUR_MS: Final = 3_600_000

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ToFiles:
    """`folder`: any URL that Spark writes to. JSON has keys and values as text, or as base64."""

    folder: str
    kind: Literal["parquet", "json"] = "parquet"
    base64: bool = False

    @property
    def notes(self) -> str:
        return self.folder


@dataclass(frozen=True, kw_only=True)
class ToTopic:
    """`options`: of the sink (`server`, `topic`, …). `notes`: a folder that says what is done.

    Records keep their partition's number, or go by their keys where the target has another count.
    """

    options: Mapping[str, str] = field(repr=False)
    notes: str
    keep_partitions: bool = True


@dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """`resumed`: how many of the steps were done before this run."""

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
    say: Say = print,
) -> ReplayReport:
    """Read what `source` (the options of the Spark source) asks for and write it to `target`.

    Raises InvalidRequest if the folder belongs to another replay, DataLoss, also where a topic
    is another than the one that was planned, and Spark's errors.
    """
    notes = HadoopFolder(session, target.notes)
    s3a = settings_of(session)
    plan = _plan(notes, source, target, s3a=s3a, step_bytes=step_bytes, say=say)
    done = {name for name in notes.names(_NOTES) if name.startswith("done-")}
    for number, step in enumerate(plan.steps):
        if _done(number) in done:
            continue
        say(f"step {number + 1} of {len(plan.steps)}")
        _check_topics(plan, parse_options(options_of(step, source), streaming=False, s3a=s3a))
        with watched(session, progress):
            _Step(session, source, target, notes, number).run(step)
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
    say: Say,
) -> ReplayPlan:
    asked = _asked(source, target)
    if notes.exists(_PLAN):
        plan = from_json(notes.read_text(_PLAN), file=notes.url(_PLAN))
        if plan.asked != asked:
            changed = sorted(k for k in {*plan.asked, *asked} if plan.asked.get(k) != asked.get(k))
            raise InvalidRequest(
                f"{notes.url()} belongs to another replay: {', '.join(changed)} differ; "
                "give another folder, or the same question"
            )
        say(f"go on with the plan in {notes.url(_PLAN)}")
        return plan
    if others := [name for name in notes.names() if not name.startswith(("_", "."))]:
        raise InvalidRequest(
            f"{notes.url()} is not empty, and is not a replay's: it has {others[0]}"
        )
    options = parse_options(source, streaming=False, s3a=s3a)
    split_bytes = options.split_bytes or MAX_SPLIT_BYTES
    options = replace(options, split_bytes=split_bytes)
    told: list[str] = []
    planner = Planner(options, report=told.append, warn=say)
    ranges = planner.ranges()
    steps = cut_steps(
        ranges, planner.splits(ranges), split_bytes=split_bytes, step_bytes=step_bytes
    )
    if len(steps) > 1:  # of one alone Spark's source tells the same
        for line in told:
            say(line)
    ids = {one.facts.topic: one.facts.topic_id for one in ranges}
    plan = ReplayPlan(asked=asked, topic_ids=ids, steps=steps)
    notes.write_text(_PLAN, plan.to_json())
    return plan


def _check_topics(plan: ReplayPlan, options: ReadOptions) -> None:
    """Offsets of a topic that is gone are others in one that came under its name."""
    for topic, _ in Topics(options, Connections(options.access)).chosen():
        planned = plan.topic_ids.get(topic.name, topic.topic_id)
        if topic.topic_id != planned:
            raise DataLoss(
                f"topic {topic.name!r} is another now (id {topic.topic_id}, the replay began with "
                f"{planned}); what there is now takes another folder"
            )


def _asked(source: Mapping[str, str], target: ToFiles | ToTopic) -> dict[str, str]:
    """What makes a replay the same one: which rows, and in which form."""
    asked = {k: v for k, v in source.items() if k.lower() not in _NOT_ASKED}
    if isinstance(target, ToFiles):
        return asked | {"kind": target.kind, "base64": json.dumps(target.base64)}
    return asked | {
        "to topic": target.options["topic"],
        "at": target.options["server"],
        "keep partitions": json.dumps(target.keep_partitions),
    }


class _Step:
    """One step of one replay."""

    def __init__(
        self,
        session: SparkSession,
        source: Mapping[str, str],
        target: ToFiles | ToTopic,
        notes: HadoopFolder,
        number: int,
    ) -> None:
        self._session, self._source, self._target = session, source, target
        self._notes, self._number = notes, number
        self._aside = f"{_NOTES}/step-{number:05d}"

    def run(self, step: Step) -> None:
        if isinstance(self._target, ToTopic):
            records = self._to_topic(step, self._target)
        else:
            records = self._to_files(step, self._target)
        self._notes.write_text(f"{_NOTES}/{_done(self._number)}", json.dumps({"records": records}))
        self._notes.delete(self._aside)

    def _to_files(self, step: Step, target: ToFiles) -> int:
        """Write aside, then move. A whole step that was moved in part is not written again."""
        count = f"{self._aside}/_records"
        if not self._notes.exists(count):
            frame, counted = _counted(_by_hour(self._rows(step)))
            if target.kind == "json" and not target.base64:
                frame = _as_text(frame)
            writer = frame.write.partitionBy("date", "hour").mode("overwrite")
            if target.kind == "parquet":
                writer = writer.option("compression", "zstd")
            writer.format(target.kind).save(self._notes.url(self._aside))
            self._notes.write_text(count, str(counted()))
        records = int(self._notes.read_text(count))
        for path in self._notes.walk(self._aside):
            folder, _, name = path.rpartition("/")
            if folder:
                self._notes.move(f"{self._aside}/{path}", f"{folder}/{self._number:05d}-{name}")
        return records

    def _to_topic(self, step: Step, target: ToTopic) -> int:
        rows = self._rows(step, includeHeaders="true")
        partitions = sum(len(of) for of in step.values())
        frame = rows.repartition(partitions, "topic", "partition").sortWithinPartitions(
            "topic", "partition", "offset"
        )
        columns = ["key", "value", "headers", "timestamp"]
        columns += ["partition"] if target.keep_partitions else []
        frame, counted = _counted(frame.select(*columns))
        frame.write.format("tierlog").mode("append").options(**target.options).save()
        return counted()

    def _rows(self, step: Step, **more: str) -> DataFrame:
        options = {**options_of(step, self._source), **more}
        return self._session.read.format("tierlog").options(**options).load()


def _by_hour(rows: DataFrame) -> DataFrame:
    """With `date` and `hour` of each record's timestamp in UTC, whatever the session's zone is."""
    from pyspark.sql import functions as f

    millis = f.unix_millis("timestamp")
    date = f.date_add(f.lit("1970-01-01").cast("date"), f.floor(millis / _DAY_MS).cast("int"))
    hour = f.floor(f.pmod(millis, f.lit(_DAY_MS)) / _HOUR_MS).cast("int")
    return rows.withColumns({"date": date, "hour": f.lpad(hour.cast("string"), 2, "0")})


def _as_text(rows: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    return rows.withColumns({name: f.col(name).cast("string") for name in ("key", "value")})


def _counted(frame: DataFrame) -> tuple[DataFrame, Callable[[], int]]:
    """The same frame, and how many rows of it the action that follows went through."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as f

    seen: Any = Observation()
    return frame.observe(seen, f.count(f.lit(1)).alias("records")), lambda: int(seen.get["records"])
