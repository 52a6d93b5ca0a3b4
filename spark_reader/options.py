"""The options of the `format("tierlog")` source, in one table of names, types and uses.

* Options of Spark's Kafka source that have no meaning here are ignored, so that a job can migrate
  by changing its format. An unknown option that resembles one of ours is an error that suggests the
  nearest name.
* Spark passes names in lower case; errors show them as documented, and never values of secrets.
* Parsed options are complete and consistent, and are not checked again. `topics` compares the
  topics and partitions that they name with those that exist.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from tierlog.object_store.s3_connection import S3Options
from tierlog.record_format.errors import InvalidOption, closest_match
from tierlog.spark_reader import option_values as read
from tierlog.spark_reader.access import Access
from tierlog.spark_reader.option_values import EARLIEST, LATEST, Bounds, NoMatch, is_backwards
from tierlog.spark_reader.s3a import S3ASettings
from tierlog.spark_reader.splits import SplitLimits

if TYPE_CHECKING:
    import pyarrow as pa

    from tierlog.record_format.schema_state import Source


class Use(StrEnum):
    """What the options are for."""

    BATCH = "batch reads"
    STREAM = "streams"
    WRITE = "writes"


BATCH_ONLY: Final = frozenset((Use.BATCH,))
STREAM_ONLY: Final = frozenset((Use.STREAM,))
TYPO_LIKENESS: Final = 0.8  # a name at least this similar to one of ours is taken for a typo


class Option(NamedTuple):
    """`read` parses a value, given the option's name and stripped text. Raises InvalidOption."""

    read: Callable[[str, str], Any]
    secret: bool = False
    uses: frozenset[Use] = frozenset(Use)


# Options of Spark's Kafka source and sink that have no meaning here, besides those of `kafka.`.
_KAFKA_OPTIONS: Final = frozenset(
    (
        "groupidprefix",
        "kafkaconsumer.polltimeoutms",
        "fetchoffset.numretries",
        "fetchoffset.retryintervalms",
    )
)


def is_kafka_option(name: str) -> bool:
    return name.lower().startswith("kafka.") or name.lower() in _KAFKA_OPTIONS


def read_options(
    given: Mapping[str, str], table: Mapping[str, Option], *, use: Use
) -> dict[str, Any]:
    """The parsed values, by their names in the table. Raises InvalidOption."""
    by_lower = {name.lower(): name for name in table}
    values: dict[str, Any] = {}
    for key, text in given.items():
        name = by_lower.get(key.lower())
        if name is None:
            _check_unknown(key, by_lower)
            continue
        option = table[name]
        if use not in option.uses:
            raise InvalidOption(
                f"option {name} is only for {', '.join(option.uses)}, not for {use}"
            )
        values[name] = _read(name, option, text)
    return values


def _read(name: str, option: Option, text: str) -> Any:
    try:
        return option.read(name, text.strip())
    except InvalidOption:
        if option.secret:
            raise InvalidOption(f"option {name}: invalid value (not shown)") from None
        raise


def _check_unknown(key: str, by_lower: Mapping[str, str]) -> None:
    """Raise InvalidOption if an unknown option resembles one of ours."""
    if is_kafka_option(key):
        return
    lowered = key.lower()
    near = closest_match(lowered, by_lower, cutoff=TYPO_LIKENESS)
    first_words = {re.split(r"(?=[A-Z])", name)[0] for name in by_lower.values()}
    if near or any(lowered.startswith(word) for word in first_words):
        names = ", ".join(by_lower.values())
        hint = f"did you mean {by_lower[near]}?" if near else f"the options are {names}"
        raise InvalidOption(f"there is no option {key!r}; {hint}")


Tier = Literal["all", "cold"]
Isolation = Literal["read_uncommitted", "read_committed"]


@dataclass(frozen=True, kw_only=True)
class TopicChoice:
    """Exactly one of the three is set."""

    topics: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    partitions: Mapping[str, tuple[int, ...]] | None = None

    @property
    def named(self) -> Collection[str]:
        return self.topics or self.partitions or ()


@dataclass(frozen=True, kw_only=True)
class TriggerLimits:
    """Limits on the size of a stream's micro-batch, and on when one starts."""

    max_offsets: int | None = None
    min_offsets: int | None = None
    max_delay_ms: int = 15 * 60_000
    max_bytes: int | None = None


NO_LIMITS: Final = TriggerLimits()


class Wanted(NamedTuple):
    """By which schema keys, or values, are read, and of Protobuf as which message."""

    schema: Literal["latest", "registry"] | int
    message: str | None


class Reading(NamedTuple):
    """The schema that keys, or values, are read by, and the type of their column."""

    schema_id: int
    source: Source
    type: pa.DataType


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """`wanted`: by column, `key` and `value`; `readings`: what it stood for when the read began."""

    access: Access
    choice: TopicChoice
    starting: Bounds
    ending: Bounds
    tier: Tier = "all"
    isolation: Isolation = "read_uncommitted"
    limits: SplitLimits = field(default_factory=SplitLimits)
    fail_on_data_loss: bool = True
    manifest_versions: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    pin: str | None = None
    single_query: bool = False
    trigger: TriggerLimits = field(default_factory=TriggerLimits)
    wanted: Mapping[str, Wanted] = field(default_factory=dict)
    mode: Literal["failfast", "permissive"] = "failfast"
    readings: Mapping[str, Reading] = field(default_factory=dict)

    def with_readings(self, readings: Mapping[str, Reading]) -> ReadOptions:
        return replace(self, readings=readings)


_ISOLATION: Final = Option(read.one_of("read_uncommitted", "read_committed"))

_OPTIONS: Final[dict[str, Option]] = {
    "store": Option(read.address),
    "endpoint": Option(read.http_address),
    "region": Option(read.text),
    "pathStyle": Option(read.boolean),
    "accessKeyId": Option(read.text, secret=True),
    "secretAccessKey": Option(read.text, secret=True),
    "sessionToken": Option(read.text, secret=True),
    "server": Option(read.address),
    "token": Option(read.text, secret=True),
    "tokenFile": Option(read.text),
    "caFile": Option(read.text),
    "subscribe": Option(read.topic_list),
    "subscribePattern": Option(read.pattern),
    "assign": Option(read.assignment),
    "startingOffsets": Option(read.offsets_or("earliest", "latest")),
    "endingOffsets": Option(read.offsets_or("latest"), uses=BATCH_ONLY),
    "startingTimestamp": Option(read.time_ms),
    "endingTimestamp": Option(read.time_ms, uses=BATCH_ONLY),
    "startingOffsetsByTimestamp": Option(read.times_by_partition),
    "endingOffsetsByTimestamp": Option(read.times_by_partition, uses=BATCH_ONLY),
    "startingOffsetsByTimestampStrategy": Option(read.one_of("error", "latest")),
    "minPartitions": Option(read.count),
    "maxRecordsPerPartition": Option(read.count),
    "splitBytes": Option(read.size),
    # Batch reads ignore these three, as with Kafka's source, since jobs share their options.
    "maxOffsetsPerTrigger": Option(read.count),
    "minOffsetsPerTrigger": Option(read.count),
    "maxTriggerDelay": Option(read.duration_ms),
    "maxBytesPerTrigger": Option(read.size, uses=STREAM_ONLY),
    "failOnDataLoss": Option(read.boolean),
    "includeHeaders": Option(read.boolean),
    "keySchema": Option(read.value_schema),
    "keyMessage": Option(read.text),
    "valueSchema": Option(read.value_schema),
    "valueMessage": Option(read.text),
    "mode": Option(read.one_of("failfast", "permissive")),
    "singleQuery": Option(read.boolean, uses=BATCH_ONLY),
    "isolationLevel": _ISOLATION,
    "kafka.isolation.level": _ISOLATION,  # of a migrated job, since it affects the result
    "tier": Option(read.one_of("all", "cold")),
    "manifestVersion": Option(read.versions_by_partition, uses=BATCH_ONLY),
    "pin": Option(read.text, uses=BATCH_ONLY),
}

TABLE_HINT: Final = (
    "; Spark hands over none of those of CREATE TABLE: name them in each query, as in "
    "SELECT * FROM flights WITH ('server' = '…', 'subscribe' = 'flights'), or create a temporary "
    "view instead"
)
"""For a read or write without any option."""

NAMES: Final = frozenset(name.lower() for name in _OPTIONS)
_OF_VALUES: Final = frozenset(
    (
        *("store", "endpoint", "region", "pathstyle"),
        *("accesskeyid", "secretaccesskey", "sessiontoken"),
        *("server", "token", "tokenfile", "cafile"),
        *("subscribe", "subscribepattern", "assign", "tier"),
        *("keyschema", "keymessage", "valueschema", "valuemessage"),
    )
)


def parse_options(
    given: Mapping[str, str], *, streaming: bool, s3a: S3ASettings | None = None
) -> ReadOptions:
    """Parse and check all options; `s3a` provides defaults. Raises InvalidOption."""
    values = read_options(given, _OPTIONS, use=Use.STREAM if streaming else Use.BATCH)
    options = ReadOptions(
        access=access_of(values, s3a),
        choice=_choice(values),
        starting=_starting(values, streaming=streaming),
        ending=_ending(values),
        tier=values.get("tier", "all"),
        isolation=values.get("isolationLevel")
        or values.get("kafka.isolation.level", "read_uncommitted"),
        limits=SplitLimits(
            split_bytes=values.get("splitBytes"),
            min_splits=values.get("minPartitions"),
            max_records=values.get("maxRecordsPerPartition"),
        ),
        fail_on_data_loss=values.get("failOnDataLoss", True),
        manifest_versions=values.get("manifestVersion", {}),
        pin=values.get("pin"),
        single_query=values.get("singleQuery", False),
        trigger=_trigger(values),
        wanted=_wanted(values),
        mode=values.get("mode", "failfast"),
    )
    _check_together(options)
    return options


def wants_headers(given: Mapping[str, str]) -> bool:
    """`includeHeaders`, which Spark needs for the schema before all options are parsed."""
    name = "includeHeaders"
    lowered = {key.lower(): value.strip() for key, value in given.items()}
    return read.boolean(name, lowered.get(name.lower(), "false"))


def parse_value_options(
    given: Mapping[str, str], s3a: S3ASettings | None = None
) -> ReadOptions | None:
    """What of the options `keySchema` and `valueSchema` need, which Spark needs for the schema
    before it says what the read is; None without those options. Raises InvalidOption.
    """
    needed = {name: text for name, text in given.items() if name.lower() in _OF_VALUES}
    if not any(name.lower() in {"keyschema", "valueschema"} for name in needed):
        return None
    return parse_options(needed, streaming=False, s3a=s3a)


def _wanted(values: Mapping[str, Any]) -> dict[str, Wanted]:
    found: dict[str, Wanted] = {}
    for column in ("key", "value"):
        schema, message = values.get(f"{column}Schema"), values.get(f"{column}Message")
        if schema is not None:
            found[column] = Wanted(schema, message)
        elif message is not None:
            raise InvalidOption(f"option {column}Message requires the option {column}Schema")
    return found


def access_of(values: Mapping[str, Any], s3a: S3ASettings | None = None) -> Access:
    """The options for reaching the bucket and the broker."""
    store = values.get("store")
    s3 = S3Options(
        endpoint=values.get("endpoint"),
        region=values.get("region"),
        path_style=values.get("pathStyle"),
        access_key_id=values.get("accessKeyId"),
        secret_access_key=values.get("secretAccessKey"),
        session_token=values.get("sessionToken"),
    )
    return Access(
        store=store,
        server=values.get("server"),
        s3=s3 if s3a is None else s3a.complete(s3, store),
        token=values.get("token"),
        token_file=values.get("tokenFile"),
        ca_file=values.get("caFile"),
    )


def _choice(values: Mapping[str, Any]) -> TopicChoice:
    given = [name for name in ("subscribe", "subscribePattern", "assign") if name in values]
    if len(given) != 1:
        hint = f", not {' and '.join(given)}" if given else ""
        if not values:
            hint = TABLE_HINT
        raise InvalidOption(
            f"give exactly one of the options subscribe, subscribePattern and assign{hint}"
        )
    return TopicChoice(
        topics=values.get("subscribe", ()),
        pattern=values.get("subscribePattern"),
        partitions=values.get("assign"),
    )


def _starting(values: Mapping[str, Any], *, streaming: bool) -> Bounds:
    default = LATEST if streaming else EARLIEST
    given = values.get("startingOffsets")
    if not streaming and "startingTimestamp" not in values and _has_latest(given):
        raise InvalidOption(
            "option startingOffsets: a batch cannot start at the latest offset; use earliest, "
            'or JSON such as {"topic": {"0": 23, "1": -2}}'
        )
    if isinstance(given, str):
        default = EARLIEST if given == "earliest" else LATEST
    return Bounds(
        default=default,
        offsets=given if isinstance(given, dict) else {},
        timestamp=values.get("startingTimestamp"),
        timestamps=values.get("startingOffsetsByTimestamp", {}),
        no_match=NoMatch(values.get("startingOffsetsByTimestampStrategy", "error")),
    )


def _has_latest(given: str | dict[str, dict[int, int]] | None) -> bool:
    if isinstance(given, dict):
        return any(LATEST in partitions.values() for partitions in given.values())
    return given == "latest"


def _ending(values: Mapping[str, Any]) -> Bounds:
    given = values.get("endingOffsets")
    return Bounds(
        default=LATEST,
        offsets=given if isinstance(given, dict) else {},
        timestamp=values.get("endingTimestamp"),
        timestamps=values.get("endingOffsetsByTimestamp", {}),
        no_match=NoMatch.LATEST,
    )


def _trigger(values: Mapping[str, Any]) -> TriggerLimits:
    return TriggerLimits(
        max_offsets=values.get("maxOffsetsPerTrigger"),
        min_offsets=values.get("minOffsetsPerTrigger"),
        max_delay_ms=values.get("maxTriggerDelay", TriggerLimits.max_delay_ms),
        max_bytes=values.get("maxBytesPerTrigger"),
    )


def _check_together(options: ReadOptions) -> None:
    access, trigger = options.access, options.trigger
    if options.tier == "cold" and access.store is None:
        raise InvalidOption("option store: required with tier=cold, which reads only the bucket")
    if access.server is None and access.store is None:
        raise InvalidOption(
            "option server or store: one of them is required; the brokers of a cluster are found "
            "in the store"
        )
    if access.store is None and (options.pin or options.manifest_versions):
        raise InvalidOption("options pin and manifestVersion require the option store")
    if options.pin and options.manifest_versions:
        raise InvalidOption("options pin and manifestVersion exclude each other")
    if trigger.max_offsets and trigger.min_offsets and trigger.min_offsets > trigger.max_offsets:
        raise InvalidOption(
            f"option minOffsetsPerTrigger: {trigger.min_offsets} exceeds maxOffsetsPerTrigger, "
            f"which is {trigger.max_offsets}"
        )
    _check_order(options.starting, options.ending)


def _check_order(starting: Bounds, ending: Bounds) -> None:
    """Swapped bounds are an error, not an empty read, as in Spark's Kafka source."""
    if starting.timestamp is not None and ending.timestamp is not None:
        if starting.timestamp > ending.timestamp:
            raise InvalidOption(
                f"option startingTimestamp: {starting.timestamp} is later than endingTimestamp, "
                f"which is {ending.timestamp}"
            )
        return
    for topic, partition in (*starting.named(), *ending.named()):
        start, end = starting.spec_for(topic, partition), ending.spec_for(topic, partition)
        if is_backwards(start, end):
            raise InvalidOption(
                f"the starting options place {topic}-{partition} at {start}, after the ending "
                f"options, which place it at {end}"
            )
