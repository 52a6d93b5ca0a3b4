"""Configurations as Kafka shows them: every key, with its value as text, its type and its source.

A broker's entries are its settings, which only a restart changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Final, NamedTuple

from tierlog.api.kafka.settings import BrokerConfig
from tierlog.hot_tier.log_config import KEYS, KEYS_BY_NAME, LogConfig
from tierlog.record_format.topic_rules import ConfigValue


class Source(IntEnum):
    """Of a value: `DescribeConfigsResponse.config_source`."""

    TOPIC = 1
    STATIC_BROKER = 4
    DEFAULT = 5


class Type(IntEnum):
    BOOLEAN = 1
    STRING = 2
    INT = 3
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


class Entry(NamedTuple):
    """`default`: the value that the key has without its own, as text."""

    name: str
    value: str | None
    source: Source
    type: Type
    default: str | None
    doc: str
    read_only: bool = False


def text_of(value: object) -> str:
    """In Kafka's text form."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def entries_of(config: LogConfig) -> Iterator[Entry]:
    """Every key of a topic."""
    for key in KEYS:
        is_set = key.name in config.overrides
        yield Entry(
            name=key.name,
            value=text_of(getattr(config, key.attribute)),
            source=Source.TOPIC if is_set else Source.DEFAULT,
            type=_TYPES[key.kind],
            default=text_of(key.default),
            doc=key.doc,
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
            type=_type_of(one.value),
            default=None if one.default is None else text_of(one.default),
            doc=one.doc,
            read_only=True,
        )


def _type_of(value: object) -> Type:
    if isinstance(value, bool):
        return Type.BOOLEAN
    if isinstance(value, int):
        return Type.LONG
    return Type.DOUBLE if isinstance(value, float) else Type.STRING
