"""A topic's configuration: Kafka's key names and defaults, parsed once, then passed in.

* `KEYS` is the only list of topic keys: parsing, `effective()` and the generated reference use it.
* An unknown key, or a value of the wrong type or out of range, is rejected by name, never clamped.
* A `LogConfig` is immutable; altering it creates another one.

A default that differs from Kafka's is noted in the key's doc line.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from tierlog.record_format.errors import FieldProblem, InvalidConfig, did_you_mean
from tierlog.record_format.topic_rules import ConfigValue

Kind = Literal["int", "long", "double", "boolean", "text", "list"]

INT_MAX: Final = 2**31 - 1
LONG_MAX: Final = 2**63 - 1
DAY_MS: Final = 24 * 60 * 60 * 1000
MIN_IN_SYNC: Final = "min.insync.replicas"
MIN_IN_SYNC_DEFAULT: Final = 2  # with one, what was acknowledged may be on one disk alone
LOCAL_FOLLOWS_TOTAL: Final = -2  # local.retention.* = -2 means: same as retention.*


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One topic key. `minimum` and `maximum` are inclusive; `choices` lists all valid strings."""

    name: str
    kind: Kind
    default: ConfigValue
    doc: str
    minimum: int | float | None = None
    maximum: int | float | None = None
    choices: tuple[str, ...] = ()

    @property
    def attribute(self) -> str:
        return self.name.replace(".", "_")

    @property
    def range_text(self) -> str:
        """The valid values, for the reference and error messages."""
        if self.kind == "boolean":
            return "true or false"
        if self.choices:
            joined = ", ".join(self.choices)
            return f"one or more of {joined}" if self.kind == "list" else f"one of {joined}"
        if self.kind == "double":
            return f"a number from {self.minimum} to {self.maximum}"
        return f"a whole number from {self.minimum} to {self.maximum}"

    def parse(self, value: object) -> ConfigValue:
        """The typed value of a JSON value or Kafka's text form. Raises ValueError that says what is
        expected.
        """
        if self.kind == "boolean":
            return self._parse_boolean(value)
        if self.kind in ("text", "list"):
            return self._parse_text(value)
        return self._parse_number(value)

    def _refusal(self, value: object) -> ValueError:
        return ValueError(f"{self.name} must be {self.range_text}, not {value!r}")

    def _parse_boolean(self, value: object) -> bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.strip().lower() in ("true", "false"):
            return value.strip().lower() == "true"
        raise self._refusal(value)

    def _parse_text(self, value: object) -> str:
        if not isinstance(value, str):
            raise self._refusal(value)
        if self.kind == "text":
            if value.strip() not in self.choices:
                raise self._refusal(value)
            return value.strip()
        parts = [part.strip() for part in value.split(",")]
        if len(set(parts)) != len(parts) or not set(parts) <= set(self.choices):
            raise self._refusal(value)
        return ",".join(parts)

    def _parse_number(self, value: object) -> int | float:
        number = self._number(value)
        below = self.minimum is not None and number < self.minimum
        above = self.maximum is not None and number > self.maximum
        if below or above or number != number:  # noqa: PLR0124  NaN
            raise self._refusal(value)
        return number

    def _number(self, value: object) -> int | float:
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise self._refusal(value)
        if isinstance(value, str) and (not value.isascii() or "_" in value):
            raise self._refusal(value)  # int() accepts them, Kafka does not
        try:
            if self.kind == "double":
                return float(value)
            if isinstance(value, float) and not value.is_integer():
                raise self._refusal(value)
            return int(value)
        except (ValueError, OverflowError):
            raise self._refusal(value) from None


def _int(name: str, default: int, minimum: int, doc: str) -> ConfigKey:
    return ConfigKey(name, "int", default, doc, minimum, INT_MAX)


def _long(name: str, default: int, minimum: int, doc: str) -> ConfigKey:
    return ConfigKey(name, "long", default, doc, minimum, LONG_MAX)


def _boolean(name: str, default: bool, doc: str) -> ConfigKey:
    return ConfigKey(name, "boolean", default, doc)


KEYS: Final[tuple[ConfigKey, ...]] = (
    _int(
        "segment.bytes",
        1 << 30,
        1024,
        "A segment is rolled before it would exceed this; a batch that is larger, up to "
        "max.message.bytes, is a segment of its own. Kafka's minimum is 1 MiB.",
    ),
    _long(
        "segment.ms",
        7 * DAY_MS,
        1,
        "A segment is rolled if a record's timestamp is more than this after its first record's.",
    ),
    _long(
        "segment.jitter.ms",
        0,
        0,
        "A random amount up to this is subtracted from segment.ms, so that rolls are spread out.",
    ),
    _int(
        "segment.index.bytes",
        10 << 20,
        24,
        "Space reserved for each index of the active segment; a full index rolls the segment.",
    ),
    _int(
        "index.interval.bytes",
        4096,
        0,
        "An index entry is added when more than this many bytes were appended since the last one.",
    ),
    _boolean("preallocate", False, "Reserve the disk space of a new segment when it is created."),
    _long(
        "retention.ms",
        7 * DAY_MS,
        -1,
        "Segments older than this are deleted from both tiers; -1: never.",
    ),
    _long(
        "retention.bytes",
        -1,
        -1,
        "The oldest segments are deleted while both tiers together hold more; -1: no limit.",
    ),
    _long(
        "local.retention.ms",
        LOCAL_FOLLOWS_TOTAL,
        -2,
        "Like retention.ms, and at most that, for local segments that are also in the bucket; -1: "
        "never; -2: same value.",
    ),
    _long(
        "local.retention.bytes",
        LOCAL_FOLLOWS_TOTAL,
        -2,
        "Like retention.bytes, and at most that, for local segments that are also in the bucket; "
        "-1: no limit; -2: same value.",
    ),
    _boolean(
        "remote.storage.enable",
        True,
        "Sealed segments are copied to the bucket; cannot be turned off while the bucket has any. "
        "On by default here, off in Kafka.",
    ),
    ConfigKey(
        "replication.store",
        "text",
        "none",
        "Whether the bucket is one of the replicas in sync, in a cluster: what is acknowledged is "
        "there, within `store.flush.ms`, before it is. `stand-in`: only while fewer replicas than "
        "`min.insync.replicas` are in sync without it. Not in Kafka.",
        choices=("none", "stand-in", "always"),
    ),
    ConfigKey(
        "cleanup.policy",
        "list",
        "delete",
        "delete by retention, compact to the last record of each key, or both. What is compacted "
        "stays local in full: local.retention.* has no effect.",
        choices=("delete", "compact"),
    ),
    ConfigKey(
        "compression.type",
        "text",
        "producer",
        "The codec of stored batches; producer keeps the one they were sent with.",
        choices=("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"),
    ),
    _int(
        "max.message.bytes", (1 << 20) + 12, 0, "The largest record batch, as sent; beyond it 413."
    ),
    ConfigKey(
        "message.timestamp.type",
        "text",
        "CreateTime",
        "Whether a record's timestamp is set by its producer or when it is appended.",
        choices=("CreateTime", "LogAppendTime"),
    ),
    _long(
        "message.timestamp.before.max.ms",
        LONG_MAX,
        0,
        "A record whose timestamp is further in the past is refused (CreateTime).",
    ),
    _long(
        "message.timestamp.after.max.ms",
        60 * 60 * 1000,
        0,
        "A record whose timestamp is further in the future is refused (CreateTime).",
    ),
    ConfigKey(
        "min.cleanable.dirty.ratio",
        "double",
        0.5,
        "Compaction waits until at least this share of the log is not compacted yet.",
        0.0,
        1.0,
    ),
    _long("min.compaction.lag.ms", 0, 0, "A record is left uncompacted for at least this long."),
    _long(
        "max.compaction.lag.ms",
        LONG_MAX,
        1,
        "A record is compacted after this long, regardless of the dirty ratio.",
    ),
    _long(
        "delete.retention.ms",
        DAY_MS,
        0,
        "How long a tombstone is kept after compaction has seen it.",
    ),
    _long(
        "file.delete.delay.ms",
        60_000,
        0,
        "How long a deleted file stays on disk under its .deleted name.",
    ),
    _int(
        "min.insync.replicas",
        1,
        1,
        "Replicas that have to be in sync for a write with acks=all; with fewer it gets 503. By "
        "default 1 for topics with one replica, else 2.",
    ),
    _long("flush.messages", LONG_MAX, 1, "A flush starts once this many records are unflushed."),
    _long(
        "flush.ms",
        100,
        0,
        "A record is flushed, and so visible, after at most this long. Kafka's default is never.",
    ),
    _long(
        "offload.max.lag.ms",
        10 * 60 * 1000,
        -1,
        "An active segment is rolled and uploaded at this age; -1: never. Not one of Kafka's keys.",
    ),
    _long(
        "cold.merge.min.bytes",
        -1,
        -1,
        "Neighbouring segments in the bucket are merged once they have this much together, within "
        "segment.bytes, segment.ms and a tenth of retention.*; those that are on local disk too, "
        "and compacted topics, are left as they are; -1: never. Not one of Kafka's keys.",
    ),
    _boolean(
        "key.filter",
        True,
        "Segments in the bucket have filters of their keys, so that who looks for one reads the "
        "chunks that may have it. Not one of Kafka's keys.",
    ),
    ConfigKey(
        "schema.validation",
        "text",
        "none",
        "A produced value has to begin with the id of a schema of the subject <topic>-value (id), "
        "and to be what that schema says (full). Not one of Kafka's keys.",
        choices=("none", "id", "full"),
    ),
    ConfigKey(
        "iceberg.mode",
        "text",
        "none",
        "What `tierlog table` makes of the topic: a table with its values as they are (raw), or "
        "with their fields as columns, by what JSON says (json) or by the registry's schema that a "
        "value names (schema). Not one of Kafka's keys.",
        choices=("none", "raw", "json", "schema"),
    ),
)
KEYS_BY_NAME: Final[Mapping[str, ConfigKey]] = {key.name: key for key in KEYS}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Every topic key, by Kafka's name with underscores. `overrides`: the keys that were set.
    Created by `parse`.
    """

    segment_bytes: int
    segment_ms: int
    segment_jitter_ms: int
    segment_index_bytes: int
    index_interval_bytes: int
    preallocate: bool
    retention_ms: int
    retention_bytes: int
    local_retention_ms: int
    local_retention_bytes: int
    remote_storage_enable: bool
    replication_store: str
    cleanup_policy: str
    compression_type: str
    max_message_bytes: int
    message_timestamp_type: str
    message_timestamp_before_max_ms: int
    message_timestamp_after_max_ms: int
    min_cleanable_dirty_ratio: float
    min_compaction_lag_ms: int
    max_compaction_lag_ms: int
    delete_retention_ms: int
    file_delete_delay_ms: int
    min_insync_replicas: int
    flush_messages: int
    flush_ms: int
    offload_max_lag_ms: int
    cold_merge_min_bytes: int
    key_filter: bool
    schema_validation: str
    iceberg_mode: str
    overrides: Mapping[str, ConfigValue]

    @classmethod
    def parse(cls, overrides: Mapping[str, object]) -> LogConfig:
        """The defaults overridden by `overrides` (Kafka's names; JSON values or Kafka's text
        forms).

        Raises InvalidConfig naming every bad key with its value and its limit.
        """
        typed: dict[str, ConfigValue] = {}
        problems: list[FieldProblem] = []
        for name, value in overrides.items():
            key = KEYS_BY_NAME.get(name)
            try:
                if key is None:
                    near = did_you_mean(name, KEYS_BY_NAME)
                    raise ValueError(f"there is no topic configuration key {name!r}{near}")
                typed[name] = key.parse(value)
            except ValueError as refusal:
                problems.append(FieldProblem(f"config.{name}", str(refusal)))
        effective = {key.name: typed.get(key.name, key.default) for key in KEYS}
        if problems := problems or _conflicts(effective):
            raise InvalidConfig("; ".join(p.msg for p in problems), problems=tuple(problems))
        by_field = {KEYS_BY_NAME[name].attribute: value for name, value in effective.items()}
        return cls(**by_field, overrides=typed)  # type: ignore[arg-type]

    def replace(self, changes: Mapping[str, object]) -> LogConfig:
        """A copy with `changes` applied; None restores a key's default."""
        merged: dict[str, object] = {**self.overrides, **changes}
        kept = {n: v for n, v in merged.items() if v is not None or n not in KEYS_BY_NAME}
        return LogConfig.parse(kept)

    def effective(self, *, replication_factor: int = 1) -> dict[str, ConfigValue]:
        """Every key by Kafka's name, typed, for a topic with so many replicas."""
        typed = {key.name: getattr(self, key.attribute) for key in KEYS}
        return typed | {MIN_IN_SYNC: self.min_in_sync(replication_factor)}

    def min_in_sync(self, replication_factor: int) -> int:
        """`min.insync.replicas` of a topic with so many replicas."""
        if MIN_IN_SYNC in self.overrides:
            return self.min_insync_replicas
        with_store = self.replication_store == "always"
        return min(MIN_IN_SYNC_DEFAULT, replication_factor + with_store)

    def effective_min_in_sync(self, replicas: int) -> int:
        """What `acks=all` needs in a partition with so many: no more than all, as in Kafka, and the
        bucket if that may be one more.
        """
        return min(self.min_in_sync(replicas), replicas + (self.replication_store != "none"))

    @property
    def compacts(self) -> bool:
        return "compact" in self.cleanup_policy.split(",")

    @property
    def deletes(self) -> bool:
        return "delete" in self.cleanup_policy.split(",")

    @property
    def effective_segment_ms(self) -> int:
        """The active segment is not compacted, so the maximum compaction lag limits its age too."""
        return (
            min(self.segment_ms, self.max_compaction_lag_ms) if self.compacts else self.segment_ms
        )

    @property
    def log_append_time(self) -> bool:
        return self.message_timestamp_type == "LogAppendTime"

    @property
    def effective_local_retention_ms(self) -> int:
        follows = self.local_retention_ms == LOCAL_FOLLOWS_TOTAL
        return self.retention_ms if follows else self.local_retention_ms

    @property
    def effective_local_retention_bytes(self) -> int:
        follows = self.local_retention_bytes == LOCAL_FOLLOWS_TOTAL
        return self.retention_bytes if follows else self.local_retention_bytes


def _conflicts(effective: Mapping[str, ConfigValue]) -> list[FieldProblem]:
    """Values that are in range but contradict each other (rejected as in Kafka)."""
    problems = []
    if effective["min.compaction.lag.ms"] > effective["max.compaction.lag.ms"]:  # type: ignore[operator]
        problems.append(_conflict(effective, "min.compaction.lag.ms", "max.compaction.lag.ms"))
    for unit in ("ms", "bytes"):
        local, total = effective[f"local.retention.{unit}"], effective[f"retention.{unit}"]
        assert isinstance(local, int)
        assert isinstance(total, int)
        unlimited_within_limit = local == -1 and total != -1
        longer = total != -1 and local > total
        if local != LOCAL_FOLLOWS_TOTAL and (unlimited_within_limit or longer):
            problems.append(_conflict(effective, f"local.retention.{unit}", f"retention.{unit}"))
    return problems


def _conflict(effective: Mapping[str, ConfigValue], name: str, limit: str) -> FieldProblem:
    value = "-1, no limit" if effective[name] == -1 else effective[name]
    text = f"{name} ({value}) must not be more than {limit} ({effective[limit]})"
    return FieldProblem(f"config.{name}", text)
