"""The broker's topics, as groups of consumers see them: ids, and the numbers of partitions."""

from __future__ import annotations

import uuid

from tierlog.broker.group_coordinator.subscriptions import TopicFacts
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.record_format.checkpoint_files import format_topic_id, parse_topic_id
from tierlog.record_format.errors import UnknownTopic


class GroupTopics:
    """A `TopicView`. Takes no lock."""

    def __init__(self, topics: LiveTopics) -> None:
        self._topics = topics

    @property
    def version(self) -> int:
        return self._topics.version

    def find(self, name: str) -> TopicFacts | None:
        try:
            topic = self._topics.find(name)
        except UnknownTopic:
            return None
        return TopicFacts(parse_topic_id(topic.record.topic_id).bytes, topic.numbers)

    def name_of(self, topic_id: bytes) -> str | None:
        try:
            topic = self._topics.find_by_id(format_topic_id(uuid.UUID(bytes=topic_id)))
        except UnknownTopic:
            return None
        return topic.record.name

    def names(self) -> list[str]:
        return [topic.record.name for topic in self._topics]
