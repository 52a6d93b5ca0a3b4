"""Configurations as Kafka shows them: every key, with its value as text, its type and its source.

A broker's entries are its settings, which only a restart changes. A group's are those that it has
of its own, or the broker's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Final, NamedTuple

from tierlog.api.kafka.settings import BrokerConfig
from tierlog.broker.group_coordinator.group_configs import GroupConfigs
from tierlog.hot_tier.log_config import KEYS, KEYS_BY_NAME, LogConfig
from tierlog.record_format.topic_rules import ConfigValue


class Source(IntEnum):
    """Of a value: `DescribeConfigsResponse.config_source`."""

    TOPIC = 1
    STATIC_BROKER = 4
    DEFAULT = 5
    GROUP = 8


class Type(IntEnum):
    BOOLEAN = 1
    STRING = 2
    INT = 3
    SHORT = 4
    LONG = 5
    DOUBLE = 6
    LIST = 7


_TYPES: Final = {
    "boolean": Type.BOOLEAN,
    "text": Type.STRING,
    "int": Type.INT,
    "long": Type.LONG,
    "double": Type.DOUBLE,
    "list": Type.LIST,
}


# Settings of the broker that Kafka has as INT; others, and those of our own, are LONG.
_INTS: Final = frozenset(
    (
        "connection.failed.authentication.delay.ms",
        "default.replication.factor",
        "fetch.max.bytes",
        "group.consumer.assignment.interval.ms",
        "group.consumer.heartbeat.interval.ms",
        "group.consumer.max.size",
        "group.consumer.session.timeout.ms",
        "group.initial.rebalance.delay.ms",
        "group.max.session.timeout.ms",
        "group.max.size",
        "group.min.session.timeout.ms",
        "group.share.assignment.interval.ms",
        "group.share.delivery.count.limit",
        "group.share.heartbeat.interval.ms",
        "group.share.max.delivery.count.limit",
        "group.share.max.partition.max.record.locks",
        "group.share.max.record.lock.duration.ms",
        "group.share.max.share.sessions",
        "group.share.max.size",
        "group.share.min.delivery.count.limit",
        "group.share.min.partition.max.record.locks",
        "group.share.min.record.lock.duration.ms",
        "group.share.partition.max.record.locks",
        "group.share.record.lock.duration.ms",
        "group.share.session.timeout.ms",
        "max.connections",
        "max.incremental.fetch.session.cache.slots",
        "node.id",
        "num.partitions",
        "offset.metadata.max.bytes",
        "offsets.retention.minutes",
        "offsets.topic.num.partitions",
        "producer.id.expiration.ms",
        "remote.fetch.max.wait.ms",
        "replica.fetch.max.bytes",
        "replica.fetch.wait.max.ms",
        "share.coordinator.snapshot.update.records.per.snapshot",
        "share.coordinator.state.topic.num.partitions",
        "socket.request.max.bytes",
        "transaction.max.timeout.ms",
        "transaction.state.log.num.partitions",
        "transactional.id.expiration.ms",
    )
)


_SHORTS: Final = frozenset(
    (
        "offsets.topic.replication.factor",
        "share.coordinator.state.topic.replication.factor",
        "transaction.state.log.replication.factor",
    )
)


class Entry(NamedTuple):
    """`default`: the value that the key has without its own, as text; `inherited` and
    `default_source`: the broker's setting that it then is, and whose that is.
    """

    name: str
    value: str | None
    source: Source
    type: Type
    default: str | None
    doc: str
    read_only: bool = False
    inherited: str | None = None
    default_source: Source = Source.DEFAULT


def text_of(value: object) -> str:
    """In Kafka's text form."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def entries_of(config: LogConfig, *, replication_factor: int) -> Iterator[Entry]:
    """Every key of a topic with so many replicas."""
    values = config.effective(replication_factor=replication_factor)
    for key in KEYS:
        is_set = key.name in config.overrides
        yield Entry(
            name=key.name,
            value=text_of(values[key.name]),
            source=Source.TOPIC if is_set else Source.DEFAULT,
            type=_TYPES[key.kind],
            default=text_of(key.default),
            doc=key.doc,
        )


def group_entries(configs: GroupConfigs, group: str) -> Iterator[Entry]:
    """Every key of a group."""
    given = configs.overrides(group)
    for name, (key, synonym) in configs.keys.items():
        default_source = Source.DEFAULT if configs.is_default(name) else Source.STATIC_BROKER
        yield Entry(
            name=name,
            value=text_of(given.get(name, key.default)),
            source=Source.GROUP if name in given else default_source,
            type=_TYPES[key.kind],
            default=text_of(key.default),
            doc=key.doc,
            inherited=synonym,
            default_source=default_source,
        )


def changed_value(config: LogConfig, name: str) -> ConfigValue:
    value: ConfigValue = getattr(config, KEYS_BY_NAME[name].attribute)
    return value


def broker_entries(configs: Iterable[BrokerConfig]) -> Iterator[Entry]:
    for one in configs:
        is_default = one.value == one.default
        yield Entry(
            name=one.name,
            value=None if one.value is None else text_of(one.value),
            source=Source.DEFAULT if is_default else Source.STATIC_BROKER,
            type=_type_of(one),
            default=None if one.default is None else text_of(one.default),
            doc=one.doc,
            read_only=True,
        )


def _type_of(config: BrokerConfig) -> Type:
    if config.name in _INTS:
        return Type.INT
    if config.name in _SHORTS:
        return Type.SHORT
    if isinstance(config.value, bool):
        return Type.BOOLEAN
    if isinstance(config.value, int):
        return Type.LONG
    return Type.DOUBLE if isinstance(config.value, float) else Type.STRING
