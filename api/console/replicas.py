"""What pages show of replicas: who has a partition, who of them is in sync, and what lacks some.

* It is what the leaders said a second ago at most: no other broker is asked.
* A partition with one replica shows none: it has its leader.
* The bucket is shown as a replica where it is to be in sync; as a stand-in, while it is.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tierlog.api.http.context import Context
from tierlog.broker.topics.topics import Topic

BUCKET: Final = "bucket"
BEHIND_SHOWN: Final = 1_000  # offsets: a replica in sync is always a few behind a busy leader


class Replica(NamedTuple):
    """`who`: a node id, or BUCKET. `behind`: by how many offsets; 0 if it is not known, or not
    worth telling.
    """

    who: int | str
    is_in_sync: bool
    behind: int


class Held(NamedTuple):
    """The replicas of a broker. `behind`: as of the one that is furthest behind."""

    replicas: int = 0
    out_of_sync: int = 0
    behind: int = 0


def replicas_of(context: Context, topic: Topic, number: int) -> list[Replica]:
    cluster = context.broker.cluster
    if cluster is None:
        return []
    shown = cluster.sets.shown(topic.record.topic_id, number)
    is_stored = shown.has_store or topic.config.replication_store == "always"
    if len(shown.replicas) == 1 and not is_stored:
        return []
    lags = dict(zip(shown.replicas, shown.lags, strict=False))
    found = []
    for node_id in shown.replicas:
        is_in_sync, behind = node_id in shown.in_sync, max(0, lags.get(node_id, 0))
        is_told = not is_in_sync or behind >= BEHIND_SHOWN
        found.append(Replica(node_id, is_in_sync, behind if is_told else 0))
    return [*found, *([Replica(BUCKET, shown.has_store, 0)] if is_stored else [])]


def lacking(context: Context, topic: Topic) -> dict[str, int]:
    """What its partitions lack, in words, and how many do. Those without a leader are not here."""
    cluster = context.broker.cluster
    if cluster is None:
        return {}
    short = cluster.sets.count_short([topic])
    marks = {
        "under-replicated": short.under_replicated - short.under_min_isr,
        "refusing acks=all": short.under_min_isr,
    }
    return {mark: count for mark, count in marks.items() if count}


def count_held(context: Context) -> dict[int | str, Held]:
    """By node id, and of BUCKET, of all partitions with several replicas."""
    held: dict[int | str, Held] = {}
    for topic in context.broker.topics():
        for number in topic.numbers:
            for one in replicas_of(context, topic, number):
                before = held.get(one.who, Held())
                held[one.who] = Held(
                    before.replicas + 1,
                    before.out_of_sync + (not one.is_in_sync),
                    max(before.behind, one.behind),
                )
    return held
