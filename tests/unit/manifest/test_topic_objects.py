from __future__ import annotations

import pytest
from msgspec.structs import replace as altered

from manifest.topic_objects import (
    Cluster,
    TopicObject,
    TopicObjects,
    create_cluster,
    load_cluster,
    restorable,
)
from record_format.errors import (
    ConfigurationError,
    CorruptManifest,
    OutcomeUnknownError,
    TopicExists,
    UnknownFormatVersion,
    UnknownTopic,
)
from tests.fakes.plain_store import Fault, PlainStore

CLUSTER = Cluster(cluster_id="c1", created_ms=5)


def topic(name: str = "flights", topic_id: str = "id-1", **other: object) -> TopicObject:
    fields = {"partitions": 3, "config": {"segment.bytes": 1024}, "created_ms": 10, **other}
    return TopicObject(name=name, topic_id=topic_id, **fields)  # type: ignore[arg-type]


def objects(store: PlainStore) -> TopicObjects:
    return TopicObjects(store, pause=lambda s: None)


def test_a_prefix_belongs_to_one_cluster() -> None:
    store = PlainStore()
    assert load_cluster(store) is None
    assert create_cluster(store, CLUSTER) == CLUSTER
    assert create_cluster(store, CLUSTER) == CLUSTER
    with pytest.raises(ConfigurationError, match="c1"):
        create_cluster(store, Cluster(cluster_id="c2", created_ms=6))


@pytest.mark.parametrize("fault", [Fault.LOST_AFTER, Fault.LOST_BEFORE])
def test_a_lost_answer_to_the_cluster_object_is_read_back(fault: Fault) -> None:
    store = PlainStore()
    armed = [fault]
    store.faults = lambda call, key: armed.pop() if armed else None
    if fault is Fault.LOST_BEFORE:
        with pytest.raises(OutcomeUnknownError):
            create_cluster(store, CLUSTER)
    assert create_cluster(store, CLUSTER) == CLUSTER


def test_a_newer_format_is_refused_by_name() -> None:
    store = PlainStore()
    create_cluster(store, CLUSTER)
    body, _ = store.objects["cluster.json"]
    store.objects["cluster.json"] = (body.replace(b'"format_version":1', b'"format_version":2'), 0)
    with pytest.raises(UnknownFormatVersion, match="version 2"):
        load_cluster(store)


def test_a_topic_is_created_changed_and_deleted() -> None:
    store = PlainStore()
    made = objects(store).create(topic())
    assert (made.version, objects(store).load("flights", "id-1")) == (1, made)
    changed = objects(store).commit(made, lambda t: altered(t, partitions=5))
    assert (changed.version, changed.partitions) == (2, 5)
    gone = objects(store).commit(changed, lambda t: altered(t, deleted=True))
    assert objects(store).load("flights", "id-1") == gone
    objects(store).delete_versions("flights", "id-1")
    assert store.objects == {}
    armed = [Fault.CONFLICT]
    store.faults = lambda call, key: armed.pop() if armed and call == "put" else None
    with pytest.raises(UnknownTopic):
        objects(store).commit(gone, lambda t: altered(t, partitions=9))


def test_creating_again_is_answered_with_what_is_there() -> None:
    store = PlainStore()
    made = objects(store).create(topic())
    assert objects(store).create(topic()) == made
    with pytest.raises(TopicExists):
        objects(store).create(topic(created_ms=11))


@pytest.mark.parametrize("fault", [Fault.LOST_AFTER, Fault.LOST_BEFORE, Fault.CUT, Fault.CONFLICT])
def test_a_topic_commit_survives_a_fault(fault: Fault) -> None:
    store = PlainStore()
    made = objects(store).create(topic())
    armed = [fault]
    store.faults = lambda call, key: armed.pop() if armed and call == "put" else None
    changed = objects(store).commit(made, lambda t: altered(t, partitions=7))
    assert objects(store).load("flights", "id-1") == changed
    assert store.overwritten == []


def test_two_writers_of_a_topic_lose_nothing() -> None:
    store = PlainStore()
    made = objects(store).create(topic())
    objects(store).commit(made, lambda t: altered(t, partitions=5))
    both = objects(store).commit(
        made, lambda t: altered(t, config={**t.config, "retention.ms": -1})
    )
    assert (both.partitions, dict(both.config)) == (5, {"segment.bytes": 1024, "retention.ms": -1})


def test_a_scan_finds_every_topic_with_a_list_for_each_name() -> None:
    store = PlainStore()
    wanted = {("a", "1"), ("a-b", "2"), ("a.b", "3"), ("a", "4"), ("__consumer_offsets", "5")}
    for name, topic_id in wanted:
        objects(store).create(topic(name, topic_id))
        for i in range(50):
            store.put(f"topics/{name}/{topic_id}/0/segments/{i:020d}-0-u.log", b"x")
    store.calls.clear()
    assert set(objects(store).scan()) == wanted
    assert store.calls["list"] == len({name for name, _ in wanted}) + 1


def test_a_restore_takes_the_newest_undeleted_id_and_reports_the_others() -> None:
    old = topic(topic_id="1", created_ms=1)
    new = topic(topic_id="2", created_ms=2)
    deleted = topic(topic_id="3", created_ms=3, deleted=True)
    only_deleted = topic("gone", "4", deleted=True)
    chosen = restorable([deleted, new, old, only_deleted])
    assert chosen.topics == {"flights": new}
    assert {t.topic_id for t in chosen.others} == {"1", "3", "4"}


def test_a_topic_object_of_another_topic_is_refused() -> None:
    store = PlainStore()
    objects(store).create(topic("other", "id-9"))
    moved = store.objects["topics/other/id-9/topic/00000000000000000001.json"]
    store.objects["topics/flights/id-1/topic/00000000000000000001.json"] = moved
    with pytest.raises(CorruptManifest, match="other"):
        objects(store).load("flights", "id-1")
