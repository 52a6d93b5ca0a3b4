"""Finds the topics and partitions that a request names, for a client that may use them, and says
what it may not.
"""

from __future__ import annotations

import uuid
from typing import Final

from tierlog.api.kafka.calls import Call
from tierlog.api.kafka.error_codes import Code, Refused
from tierlog.api.serving.grants import Scope
from tierlog.broker.partition.partition import Partition
from tierlog.broker.topics.topics import Topic
from tierlog.record_format.checkpoint_files import format_topic_id
from tierlog.record_format.errors import Forbidden, UnknownTopic

DESCRIBING: Final = (Scope.READ, Scope.PRODUCE)
ADMINISTERING: Final = (Scope.ADMIN,)
NO_ID: Final = bytes(16)  # of a topic that is named, or that there is not


def refusal_of(call: Call, scopes: tuple[Scope, ...]) -> str:
    """Why the client may not do what needs one of the scopes; empty if it may."""
    try:
        call.session.grant.check_scopes(scopes)
    except Forbidden as error:
        return str(error)
    return ""


def seen_topics(call: Call) -> list[str]:
    """The names of all topics that the client may see, in their order."""
    listed = call.context.broker.list_topics(internal=True)
    return [one.name for one in listed if call.session.grant.sees_topic(one.name)]


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
