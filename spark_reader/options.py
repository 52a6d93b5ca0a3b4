"""The options of `format("tierlog")`: one table says which there are and how each is read.

Rules that keep it honest:

* An option of Spark's Kafka source that has no meaning here is passed over (a job moves by changing
  the format); one that looks like ours and is not is refused by name, with the nearest that exists.
* Spark hands names over in lower case; errors show them as the documentation does.
* Values of secrets are in no error and no repr.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Final, Literal, NamedTuple

from cold_tier.open import S3Options
from spark_reader import option_values as read
from spark_reader.access import Access
from spark_reader.bounds import EARLIEST, LATEST, Bounds, NoMatch
from spark_reader.option_values import InvalidOption

SPLIT_BYTES: Final = 64 * 1024 * 1024

Tier = Literal["all", "cold"]
Isolation = Literal["read_uncommitted", "read_committed"]


@dataclass(frozen=True, kw_only=True)
class TopicChoice:
    """Exactly one of the three."""

    topics: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None
    partitions: Mapping[str, tuple[int, ...]] | None = None


@dataclass(frozen=True, kw_only=True)
class TriggerLimits:
    """What one micro-batch of a stream may hold, and when one begins."""

    max_offsets: int | None = None
    min_offsets: int | None = None
    max_delay_ms: int = 15 * 60_000
    max_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    access: Access
    choice: TopicChoice
    starting: Bounds
    ending: Bounds
    tier: Tier = "all"
    isolation: Isolation = "read_uncommitted"
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    split_bytes: int = SPLIT_BYTES
    fail_on_data_loss: bool = True
    manifest_versions: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    pin: str | None = None
    trigger: TriggerLimits = field(default_factory=TriggerLimits)


class _Option(NamedTuple):
    read: Callable[[str, str], Any]
    secret: bool = False
    streaming: bool = True
    batch: bool = True


_OPTIONS: Final[dict[str, _Option]] = {
    "store": _Option(read.text),
    "endpoint": _Option(read.text),
    "region": _Option(read.text),
    "pathStyle": _Option(read.boolean),
    "accessKeyId": _Option(read.text, secret=True),
    "secretAccessKey": _Option(read.text, secret=True),
    "sessionToken": _Option(read.text, secret=True),
    "server": _Option(read.text),
    "token": _Option(read.text, secret=True),
    "tokenFile": _Option(read.text),
    "caFile": _Option(read.text),
    "subscribe": _Option(read.topic_list),
    "subscribePattern": _Option(read.pattern),
    "assign": _Option(read.assignment),
    "startingOffsets": _Option(read.offsets_or("earliest", "latest")),
    "endingOffsets": _Option(read.offsets_or("latest"), streaming=False),
    "startingTimestamp": _Option(read.time_ms),
    "endingTimestamp": _Option(read.time_ms, streaming=False),
    "startingOffsetsByTimestamp": _Option(read.times_by_partition),
    "endingOffsetsByTimestamp": _Option(read.times_by_partition, streaming=False),
    "startingOffsetsByTimestampStrategy": _Option(read.one_of("error", "latest")),
    "minPartitions": _Option(read.count),
    "maxRecordsPerPartition": _Option(read.count),
    "splitBytes": _Option(read.size),
    "maxOffsetsPerTrigger": _Option(read.count, batch=False),
    "minOffsetsPerTrigger": _Option(read.count, batch=False),
    "maxTriggerDelay": _Option(read.duration_ms, batch=False),
    "maxBytesPerTrigger": _Option(read.size, batch=False),
    "failOnDataLoss": _Option(read.boolean),
    "includeHeaders": _Option(read.boolean),
    "isolationLevel": _Option(read.one_of("read_uncommitted", "read_committed")),
    "tier": _Option(read.one_of("all", "cold")),
    "manifestVersion": _Option(read.versions_by_partition, streaming=False),
    "pin": _Option(read.text, streaming=False),
}
_BY_LOWER: Final = {name.lower(): name for name in _OPTIONS}

# Of Spark's Kafka source, without a meaning here.
_KAFKAS: Final = frozenset(
    (
        "groupidprefix",
        "kafkaconsumer.polltimeoutms",
        "fetchoffset.numretries",
        "fetchoffset.retryintervalms",
    )
)
_FIRST_WORDS: Final = frozenset(re.split(r"(?=[A-Z])", name)[0] for name in _OPTIONS)


def parse_options(given: Mapping[str, str], *, streaming: bool) -> ReadOptions:
    """Read and check all options. Raises InvalidOption."""
    values = _values(given, streaming=streaming)
    options = ReadOptions(
        access=_access(values),
        choice=_choice(values),
        starting=_starting(values, streaming=streaming),
        ending=_ending(values),
        tier=values.get("tier", "all"),
        isolation=values.get("isolationLevel", "read_uncommitted"),
        min_partitions=values.get("minPartitions"),
        max_records_per_partition=values.get("maxRecordsPerPartition"),
        split_bytes=values.get("splitBytes", SPLIT_BYTES),
        fail_on_data_loss=values.get("failOnDataLoss", True),
        manifest_versions=values.get("manifestVersion", {}),
        pin=values.get("pin"),
        trigger=_trigger(values),
    )
    _check_together(options)
    return options


def wants_headers(given: Mapping[str, str]) -> bool:
    """`includeHeaders`, which decides about the schema before all else is looked at."""
    name = "includeHeaders"
    lowered = {key.lower(): value for key, value in given.items()}
    return read.boolean(name, lowered.get(name.lower(), "false"))


def _values(given: Mapping[str, str], *, streaming: bool) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in given.items():
        name = _BY_LOWER.get(key.lower())
        if name is None:
            _refuse_if_like_ours(key)
            continue
        option = _OPTIONS[name]
        if not (option.streaming if streaming else option.batch):
            kind = "streams" if option.batch else "batch reads"
            other = "batch reads" if option.batch else "streams"
            raise InvalidOption(f"option {name} is for {other}, not for {kind}")
        try:
            values[name] = option.read(name, value)
        except InvalidOption:
            if option.secret:
                raise InvalidOption(f"option {name}: its value is not usable") from None
            raise
    return values


def _refuse_if_like_ours(key: str) -> None:
    lowered = key.lower()
    if lowered.startswith("kafka.") or lowered in _KAFKAS:
        return
    near = get_close_matches(lowered, _BY_LOWER, n=1, cutoff=0.8)
    if near or any(lowered.startswith(word) for word in _FIRST_WORDS):
        hint = f"; did you mean {_BY_LOWER[near[0]]}?" if near else "."
        raise InvalidOption(f"there is no option {key!r}{hint} There are: {', '.join(_OPTIONS)}")


def _access(values: Mapping[str, Any]) -> Access:
    return Access(
        store=values.get("store"),
        server=values.get("server"),
        s3=S3Options(
            endpoint=values.get("endpoint"),
            region=values.get("region"),
            path_style=values.get("pathStyle"),
            access_key_id=values.get("accessKeyId"),
            secret_access_key=values.get("secretAccessKey"),
            session_token=values.get("sessionToken"),
        ),
        token=values.get("token"),
        token_file=values.get("tokenFile"),
        ca_file=values.get("caFile"),
    )


def _choice(values: Mapping[str, Any]) -> TopicChoice:
    given = [name for name in ("subscribe", "subscribePattern", "assign") if name in values]
    if len(given) != 1:
        raise InvalidOption(
            "give exactly one of the options subscribe, subscribePattern and assign"
            + (f", not {' and '.join(given)}" if given else "")
        )
    return TopicChoice(
        topics=values.get("subscribe", ()),
        pattern=values.get("subscribePattern"),
        partitions=values.get("assign"),
    )


def _starting(values: Mapping[str, Any], *, streaming: bool) -> Bounds:
    default = LATEST if streaming else EARLIEST
    given = values.get("startingOffsets")
    if not streaming and _has_latest(given):
        raise InvalidOption(
            "option startingOffsets: a batch cannot start at the latest offset; it is earliest, "
            'or JSON as in {"topic": {"0": 23, "1": -2}}'
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
        raise InvalidOption("option store: tier=cold reads the bucket alone, so it must be given")
    if access.server is None and options.tier == "all":
        raise InvalidOption(
            "option server: the tail of the log is read from the broker; give its address, or "
            "tier=cold for what is in the bucket alone"
        )
    if access.store is None and (options.pin or options.manifest_versions):
        raise InvalidOption("options pin and manifestVersion need the option store")
    if options.pin and options.manifest_versions:
        raise InvalidOption("give one of the options pin and manifestVersion, not both")
    if trigger.max_offsets and trigger.min_offsets and trigger.min_offsets > trigger.max_offsets:
        raise InvalidOption("option minOffsetsPerTrigger: is above maxOffsetsPerTrigger")
