"""Resolves the topics and partitions that a read covers from the options.

* Topics and their ids come from the broker if there is one, since the bucket may lack the latest
  commits; otherwise from the bucket's topic objects.
* A name that does not exist is an error, and so is an option for a partition that is not read,
  which was meant for another.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from types import MappingProxyType
from typing import NamedTuple

from tierlog.client.responses import PartitionDescription
from tierlog.manifest.topic_objects import TopicObjects
from tierlog.record_format.errors import InvalidOption, UnknownTopic
from tierlog.record_format.topic_rules import ConfigValue
from tierlog.spark_reader.access import Connections, parallel_map
from tierlog.spark_reader.options import ReadOptions


class TopicFacts(NamedTuple):
    """`partitions` are their numbers; a topic adopted from a Kafka folder may lack some.

    `described` are those that the broker has and that are not damaged. `config` has overrides.
    """

    name: str
    topic_id: str
    partitions: tuple[int, ...]
    config: Mapping[str, ConfigValue]
    described: Mapping[int, PartitionDescription] = MappingProxyType({})


class Topics:
    """Looks up topics; caches nothing between queries."""

    def __init__(self, options: ReadOptions, connections: Connections) -> None:
        self._options, self._connections = options, connections
        self._with_broker = options.tier == "all"

    def chosen(self, *, may_be_gone: Container[str] = frozenset()) -> list[tuple[TopicFacts, int]]:
        """The partitions that the options choose. Raises UnknownTopic, InvalidOption."""
        choice = self._options.choice
        chosen: list[tuple[TopicFacts, int]] = []
        for topic in self._looked_up(may_be_gone):
            numbers = topic.partitions
            if choice.partitions is not None:
                numbers = choice.partitions[topic.name]
                _check_partitions("assign", topic, numbers)
            chosen += [(topic, number) for number in numbers]
        return chosen

    def _looked_up(self, may_be_gone: Container[str]) -> list[TopicFacts]:
        choice = self._options.choice
        if choice.pattern is not None:
            names = [name for name in self._names() if choice.pattern.fullmatch(name)]
            may_be_gone = names  # they may be deleted since they were listed; no option names them
        else:
            names = list(choice.named)

        def look(name: str) -> TopicFacts | None:
            try:
                return self._look_up(name)
            except UnknownTopic:
                if name in may_be_gone:
                    return None
                raise

        return [topic for topic in parallel_map(look, names) if topic is not None]

    def _names(self) -> list[str]:
        """All topics except internal ones; of a bucket, also those that are deleted."""
        if self._with_broker:
            return [one.name for one in self._connections.broker.list_topics()]
        names = TopicObjects(self._connections.store).names()
        return sorted(name for name in names if not name.startswith("__"))

    def _look_up(self, name: str) -> TopicFacts:
        if self._with_broker:
            topic = self._connections.broker.describe_topic(name)
            described = {one.partition: one for one in topic.partitions}
            numbers = tuple(topic.all_partitions)
            return TopicFacts(topic.name, topic.topic_id, numbers, topic.config, described)
        store = self._connections.store
        try:
            found = TopicObjects(store).find_topic(name)
        except UnknownTopic:
            raise UnknownTopic(name, place=store.url) from None
        return TopicFacts(found.name, found.topic_id, tuple(range(found.partitions)), found.config)

    def check_named(self, chosen: list[tuple[TopicFacts, int]]) -> None:
        """Raise InvalidOption if an option names a topic or partition that is not read."""
        by_name = {topic.name: topic for topic, _ in chosen}
        read = {(topic.name, partition) for topic, partition in chosen}
        options = self._options
        named = {
            "startingOffsets or startingOffsetsByTimestamp": options.starting.named(),
            "endingOffsets or endingOffsetsByTimestamp": options.ending.named(),
            "manifestVersion": [(t, p) for t, of in options.manifest_versions.items() for p in of],
        }
        for option, pairs in named.items():
            for name, partition in pairs:
                if name not in by_name:
                    raise InvalidOption(f"option {option}: topic {name!r} is not among those read")
                _check_partitions(option, by_name[name], (partition,))
                if (name, partition) not in read:
                    raise InvalidOption(f"option {option}: {name}-{partition} is not one assigned")


def _check_partitions(option: str, topic: TopicFacts, numbers: Iterable[int]) -> None:
    for number in numbers:
        if number not in topic.partitions:
            raise InvalidOption(
                f"option {option}: there is no {topic.name}-{number}; "
                f"the topic has {len(topic.partitions)} partitions"
            )
