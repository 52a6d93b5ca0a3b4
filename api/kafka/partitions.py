"""Finds the topics and partitions that a request names, for a client that may use them."""

from __future__ import annotations

import uuid

from tierlog.api.kafka.calls import Call
from tierlog.api.kafka.error_codes import Code, Refused
from tierlog.api.serving.grants import Scope
from tierlog.broker.partition import Partition
from tierlog.broker.topics import Topic
from tierlog.record_format.checkpoint_files import format_topic_id
from tierlog.record_format.errors import UnknownTopic

DESCRIBING = (Scope.READ, Scope.PRODUCE)


def topic_of(call: Call, name: str, scopes: tuple[Scope, ...]) -> Topic:
    """Raises Forbidden, whether or not the topic exists; UnknownTopic."""
    grant = call.session.grant
    grant.check_topic(name)
    grant.check_scopes(scopes)
    return call.context.broker.topic(name)


def topic_of_id(call: Call, topic_id: bytes, scopes: tuple[Scope, ...]) -> Topic:
    """Raises Refused with UNKNOWN_TOPIC_ID, Forbidden."""
    text = format_topic_id(uuid.UUID(bytes=topic_id))
    try:
        topic = call.context.broker.topic_by_id(text)
    except UnknownTopic as error:
        raise Refused(Code.UNKNOWN_TOPIC_ID, f"there is no topic with the id {text}") from error
    call.session.grant.check_topic(topic.record.name)
    call.session.grant.check_scopes(scopes)
    return topic


def check_leader_epoch(partition: Partition, epoch: int) -> None:
    """Compare the epoch that a client knows; less than 0: it knows none. Raises Refused."""
    if epoch < 0:
        return
    now = partition.offsets().leader_epoch
    if epoch < now:
        raise Refused(Code.FENCED_LEADER_EPOCH, f"the leader epoch is {now}, not {epoch}")
    if epoch > now:
        raise Refused(Code.UNKNOWN_LEADER_EPOCH, f"the leader epoch is {now}, not {epoch}")
