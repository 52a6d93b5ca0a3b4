"""Keys of the objects that a manifest owns.

* All keys are relative to the store's prefix. No component of a key exceeds 255 bytes.
* Version numbers and offsets have 20 digits, so that a LIST returns them in numeric order.
* Names under `segments/` and `pages/` begin with a base offset: garbage collection looks up the
  entry that would reference an object, instead of keeping all keys in memory.
"""

from __future__ import annotations

import re
from typing import NamedTuple

CLUSTER_KEY = "cluster.json"
TOPICS = "topics/"
BROKERS = "cluster/brokers/"
TOPIC_NAMES = "cluster/topic-names/"
FORCED_CLAIMS = "cluster/forced-claims/"
JSON = ".json"
NODE_ID_MAX = 2**31 - 1  # Kafka's node ids are int32

_DIGITS = 20
PIN_NAME = r"[a-zA-Z0-9._-]{1,128}"
_PIN_NAME = re.compile(PIN_NAME)
_VERSION = re.compile(r"([0-9]{20})\.json")
_REGISTRATION = re.compile(BROKERS + r"(0|[1-9][0-9]{0,9})/registration/([0-9]{20})\.json")
_TOPIC_NAME = re.compile(TOPIC_NAMES + r"([^/]+)/([0-9]{20})\.json")
_SEGMENT_OR_PAGE = re.compile(r".*/(?:segments|pages)/([0-9]{20})-[^/]+")


class PartitionKeys(NamedTuple):
    """The key prefixes of one partition."""

    topic: str
    topic_id: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"

    @property
    def folder(self) -> str:
        return f"{topic_folder(self.topic, self.topic_id)}{self.partition}/"

    @property
    def versions(self) -> str:
        return f"{self.folder}manifest/"

    @property
    def segments(self) -> str:
        return f"{self.folder}segments/"

    @property
    def pages(self) -> str:
        return f"{self.folder}pages/"

    @property
    def pins(self) -> str:
        return f"{self.folder}pins/"

    @property
    def replica_sets(self) -> str:
        return f"{self.folder}replicas/"

    def page(self, base_offset: int, unique: str) -> str:
        return f"{self.pages}{base_offset:0{_DIGITS}d}-{unique}{JSON}"

    def removed_page(self, version: int, unique: str) -> str:
        return f"{self.pages}{version:0{_DIGITS}d}-{unique}.removed{JSON}"

    def pin(self, name: str) -> str:
        return f"{self.pins}{name}{JSON}"


def topic_folder(topic: str, topic_id: str) -> str:
    return f"{TOPICS}{topic}/{topic_id}/"


def topic_versions(topic: str, topic_id: str) -> str:
    return f"{topic_folder(topic, topic_id)}topic/"


def registration_versions(node_id: int) -> str:
    return f"{BROKERS}{node_id}/registration/"


def alive_key(node_id: int) -> str:
    return f"{BROKERS}{node_id}/alive{JSON}"


def topic_name_versions(topic: str) -> str:
    return f"{TOPIC_NAMES}{topic}/"


def version_key(folder: str, version: int) -> str:
    return f"{folder}{version:0{_DIGITS}d}{JSON}"


def version_of(folder: str, key: str) -> int | None:
    """The number in `<folder>/<20 digits>.json`; None for any other name."""
    match = _VERSION.fullmatch(key.removeprefix(folder))
    return int(match[1]) if match else None


def registration_of(key: str) -> tuple[int, int] | None:
    """The node id and version of a registration; None for any other key."""
    match = _REGISTRATION.fullmatch(key)
    if match is None or int(match[1]) > NODE_ID_MAX:
        return None
    return int(match[1]), int(match[2])


def topic_name_of(key: str) -> tuple[str, int] | None:
    """The topic and version of an object below `cluster/topic-names/`; None for any other key."""
    match = _TOPIC_NAME.fullmatch(key)
    return (match[1], int(match[2])) if match else None


def base_offset_of(key: str) -> int | None:
    """The base offset in the name of a segment object or page; None for any other key."""
    match = _SEGMENT_OR_PAGE.fullmatch(key)
    return int(match[1]) if match else None


def is_pin_name(name: str) -> bool:
    return _PIN_NAME.fullmatch(name) is not None
