"""Replays a range of a topic to Parquet or JSON files by date, or to another topic. Run again, it
goes on where it was.

The target folder while it is being written (readers ignore names that begin with `_`):

| path                                  |                                                    |
|---------------------------------------|----------------------------------------------------|
| `date=2013-07-04/00003-part…`         | rows of a step, after its number                   |
| `_tierlog_replay/position-00004.json` | what was read by the first four steps, and the     |
|                                       | files of the last of them (`replay_plan`)          |
| `_tierlog_replay/step-00004/`         | rows of a step that is written, or moved           |
| `_tierlog_replay/.lock`               | held by the run that writes to the folder          |

* Files are exactly-once: Spark writes a step aside, one write publishes its files with the position
  after them, and they are moved into place. What was not published is deleted by the next run;
  moves that were interrupted are repeated, which changes nothing.
* Topics are at-least-once, like the sink: an interrupted step is written again.
* In a target topic, the rows of a partition keep their order, keys, headers and timestamps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from tierlog.record_format.errors import InvalidRequest
from tierlog.spark_reader.access import Connections
from tierlog.spark_reader.jobs.hadoop_files import HadoopFolder
from tierlog.spark_reader.jobs.replay_plan import (
    Position,
    Step,
    from_json,
    split_into_steps,
    step_options,
)
from tierlog.spark_reader.jobs.session import Progress, progress_reported
from tierlog.spark_reader.options import NAMES, ReadOptions, parse_options
from tierlog.spark_reader.planner import Planner
from tierlog.spark_reader.s3a import settings_of
from tierlog.spark_reader.splits import MAX_SPLIT_BYTES, DataLoss
from tierlog.spark_reader.topics import Topics

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STEP_BYTES: Final = 4 * 1024**3

_NOTES: Final = "_tierlog_replay"
_LOCK: Final = ".lock"
_POSITION: Final = re.compile(r"position-[0-9]+\.json")
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
    """`steps` and `records` are this run's, `total_records` those of all runs."""

    target: str
    steps: int
    records: int
    total_records: int


def replay(
    session: SparkSession,
    source: Mapping[str, str],
    target: ToFiles | ToTopic,
    *,
    step_bytes: int = STEP_BYTES,
    progress: Progress | None = None,
    log: Log = print,
) -> ReplayReport:
    """Read with `source` (options of the Spark source) and write to `target`, from where an earlier
    run with the same folder has stopped.

    Raises InvalidRequest if the folder belongs to another replay, or another run writes to it;
    DataLoss, also if a topic was re-created since the first run; and Spark's errors.
    """
    notes = HadoopFolder(session, target.notes)
    _check_is_of_a_replay(notes)
    with _alone(notes):
        s3a = settings_of(session)
        begun = position = _begin(notes, _request(source, target), log=log)
        options = parse_options(source, streaming=False, s3a=s3a)
        steps, topic_ids = _steps(options, position, step_bytes=step_bytes, log=log)
        for number, step in enumerate(steps):
            log(f"step {number + 1} of {len(steps)}")
            _check_topics(
                topic_ids, parse_options(step_options(step, source), streaming=False, s3a=s3a)
            )
            with progress_reported(session, progress):
                written = _Step(session, source, target, notes, position.steps, step).write_step()
            position = position.after_step(step, topic_ids, **written._asdict())
            _publish(notes, position)
        return ReplayReport(
            target=target.notes,
            steps=len(steps),
            records=position.records - begun.records,
            total_records=position.records,
        )


@contextmanager
def _alone(notes: HadoopFolder) -> Iterator[None]:
    """Raises InvalidRequest while another run writes to the folder."""
    try:
        with notes.lock(f"{_NOTES}/{_LOCK}"):
            yield
    except FileExistsError as error:
        raise InvalidRequest(f"another run writes to {notes.url()}: it holds {error}") from None


def _check_is_of_a_replay(notes: HadoopFolder) -> None:
    others = [name for name in notes.names() if not name.startswith(("_", "."))]
    if others and not any(map(_POSITION.fullmatch, notes.names(_NOTES))):
        raise InvalidRequest(
            f"{notes.url()} is not empty and not a replay's folder: it contains {others[0]}"
        )


def _begin(notes: HadoopFolder, asked: Mapping[str, str], *, log: Log) -> Position:
    """The position that was published last; its files are in place, and what was not published is
    deleted.
    """
    found = [name for name in notes.names(_NOTES) if _POSITION.fullmatch(name)]
    if not found:
        _delete_all_but(notes, _LOCK)
        return Position(asked=asked)
    file = f"{_NOTES}/{max(found, key=lambda name: (len(name), name))}"
    position = from_json(notes.read_text(file), file=notes.url(file))
    if position.asked != asked:
        names = {*position.asked, *asked}
        changed = sorted(name for name in names if position.asked.get(name) != asked.get(name))
        raise InvalidRequest(
            f"{notes.url()} belongs to another replay: {', '.join(changed)} differ; "
            "use another folder, or the same options"
        )
    log(f"going on from {notes.url(file)}")
    _put_in_place(notes, position)
    return position


def _publish(notes: HadoopFolder, position: Position) -> None:
    """From here on the step's rows are of the replay. Raises InvalidRequest if another run was
    first.
    """
    name = f"{_NOTES}/{_position_name(position.steps)}"
    if notes.exists(name):
        raise InvalidRequest(f"another run has written step {position.steps} of {notes.url()}")
    notes.write_text(name, position.to_json())
    _put_in_place(notes, position)


def _put_in_place(notes: HadoopFolder, position: Position) -> None:
    """Move the files of the last step that are still aside, and delete all else that is there."""
    number = position.steps - 1
    for path in position.files:
        folder, _, name = path.rpartition("/")
        if notes.exists(staged := f"{_staging(number)}/{path}"):
            notes.move(staged, f"{folder}/{number:05d}-{name}")
    _delete_all_but(notes, _LOCK, _position_name(position.steps))


def _delete_all_but(notes: HadoopFolder, *kept: str) -> None:
    for name in notes.names(_NOTES):
        if name not in kept:
            notes.delete(f"{_NOTES}/{name}")


def _position_name(steps: int) -> str:
    return f"position-{steps:05d}.json"


def _staging(number: int) -> str:
    return f"{_NOTES}/step-{number:05d}"


def _steps(
    options: ReadOptions, position: Position, *, step_bytes: int, log: Log
) -> tuple[list[Step], dict[str, str]]:
    """What is left to read, and the ids of the topics."""
    split_bytes = options.limits.split_bytes or MAX_SPLIT_BYTES
    options = replace(options, limits=options.limits._replace(split_bytes=split_bytes))
    _check_topics(position.topic_ids, options)
    reported: list[str] = []
    planner = Planner(options, report=reported.append, warn=log)
    ranges = planner.ranges(position.next_offsets)
    steps = split_into_steps(
        ranges, planner.splits(ranges), split_bytes=split_bytes, step_bytes=step_bytes
    )
    if len(steps) > 1:  # for a single step Spark's source reports the same
        for line in reported:
            log(line)
    return steps, {one.facts.topic: one.facts.topic_id for one in ranges}


def _check_topics(topic_ids: Mapping[str, str], options: ReadOptions) -> None:
    """Raise DataLoss if a topic was re-created: its offsets are not those that were read."""
    for topic, _ in Topics(options, Connections(options.access)).chosen():
        planned = topic_ids.get(topic.name, topic.topic_id)
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


class _Written(NamedTuple):
    records: int
    files: Sequence[str]


@dataclass(frozen=True, repr=False)
class _Step:
    """One step of one replay."""

    session: SparkSession
    source: Mapping[str, str]
    target: ToFiles | ToTopic
    notes: HadoopFolder
    number: int
    reads: Step

    def write_step(self) -> _Written:
        if isinstance(self.target, ToTopic):
            return _Written(records=self._to_topic(self.target), files=())
        return self._to_files(self.target)

    def _to_files(self, target: ToFiles) -> _Written:
        """Write the rows aside: a file a task and day."""
        staging = _staging(self.number)
        frame, counted = _counted(_by_date(self._rows()))
        if target.kind == "json" and not target.base64:
            frame = _as_text(frame)
        writer = frame.write.partitionBy("date").mode("overwrite")
        if target.kind == "parquet":
            writer = writer.option("compression", "zstd")
        writer.format(target.kind).save(self.notes.url(staging))
        files = [path for path in self.notes.walk(staging) if "/" in path]
        return _Written(records=counted(), files=files)

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


def _by_date(rows: DataFrame) -> DataFrame:
    """Add the `date` of each record's timestamp in UTC, whatever the session's time zone."""
    from pyspark.sql import functions as f

    millis = f.unix_millis("timestamp")
    date = f.date_add(f.lit("1970-01-01").cast("date"), f.floor(millis / _DAY_MS).cast("int"))
    return rows.withColumn("date", date)


def _as_text(rows: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    return rows.withColumns({name: f.col(name).cast("string") for name in ("key", "value")})


def _counted(frame: DataFrame) -> tuple[DataFrame, Callable[[], int]]:
    """The same frame, and a function that returns the rows counted by the action that follows."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as f

    seen: Any = Observation()
    return frame.observe(seen, f.count(f.lit(1)).alias("records")), lambda: int(seen.get["records"])
