from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.fakes.plain_store import Fault, PlainStore
from tierlog.manifest.topic_objects import (
    Cluster,
    TopicObject,
    TopicObjects,
    create_cluster,
    load_cluster,
    restorable,
)
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptManifest,
    FencedError,
    OutcomeUnknownError,
    UnknownFormatVersion,
    UnknownTopic,
)

CLUSTER = Cluster(cluster_id="c1", created_ms=5)


def topic(name: str = "flights", topic_id: str = "id-1", **other: object) -> TopicObject:
    fields = {"partitions": 3, "config": {"segment.bytes": 1024}, "created_ms": 10, **other}
    return TopicObject(name=name, topic_id=topic_id, **fields)  # type: ignore[arg-type]


def objects(store: PlainStore) -> TopicObjects:
    return TopicObjects(store, pause=lambda s: None)


def owned() -> None:
    """The check that the topic is the writer's passes."""


def write(store: PlainStore, topic: TopicObject) -> TopicObject:
    return objects(store).write_topic(topic, check=owned)


def test_a_prefix_belongs_to_one_cluster() -> None:
    store = PlainStore()
    assert load_cluster(store) is None
    assert create_cluster(store, CLUSTER) == CLUSTER
    assert create_cluster(store, CLUSTER) == CLUSTER
    with pytest.raises(ConfigurationError, match="c1"):
        create_cluster(store, Cluster(cluster_id="c2", created_ms=6))


@pytest.mark.parametrize("fault", [Fault.LOST_AFTER, Fault.LOST_BEFORE])
def test_a_cluster_object_whose_response_was_lost_is_read_back(fault: Fault) -> None:
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


def test_a_lost_topic_object_is_not_mistaken_for_a_deleted_topic() -> None:
    store = PlainStore()
    store.put("topics/flights/id-1/0/segments/00000000000000000000-x.log", b"garbage of a deletion")
    with pytest.raises(UnknownTopic):
        objects(store).find_topic("flights")
    store.put("topics/flights/id-1/0/manifest/00000000000000000001.json", b"{}")
    with pytest.raises(CorruptManifest, match="id-1/topic/: the topic object, which"):
        objects(store).find_topic("flights")
    made = write(store, topic(topic_id="id-2"))
    assert objects(store).find_topic("flights") == made


def test_a_topic_is_created_changed_and_deleted() -> None:
    store = PlainStore()
    made = write(store, topic())
    assert (made.version, objects(store).load_topic("flights", "id-1")) == (1, made)
    changed = write(store, topic(partitions=5))
    assert (changed.version, changed.partitions) == (2, 5)
    gone = write(store, replace(changed, deleted=True))
    assert objects(store).load_topic("flights", "id-1") == gone
    refused = min(store.objects)
    store.faults = lambda call, key: Fault.REFUSED if (call, key) == ("delete", refused) else None
    with pytest.raises(ConfigurationError):
        objects(store).delete_versions("flights", "id-1", check=owned)
    assert objects(store).load_topic("flights", "id-1") == gone, "a restore does not bring it back"
    store.faults = lambda call, key: None
    objects(store).delete_versions("flights", "id-1", check=owned)
    assert store.objects == {}


@pytest.mark.parametrize("fault", [Fault.LOST_AFTER, Fault.LOST_BEFORE, Fault.CUT, Fault.CONFLICT])
def test_a_topic_is_written_despite_a_failed_put(fault: Fault) -> None:
    store = PlainStore()
    write(store, topic())
    armed = [fault]
    store.faults = lambda call, key: armed.pop() if armed and call == "put" else None
    changed = write(store, topic(partitions=7))
    assert objects(store).load_topic("flights", "id-1") == changed
    assert store.overwritten == []


def test_a_write_checks_the_owner_after_each_load_of_the_newest_version() -> None:
    store = PlainStore()
    write(store, topic(partitions=1))
    owners: list[str] = []

    def check() -> None:
        owners.append("new")
        if len(owners) == 1:  # another cluster takes it over just after this check
            write(store, topic(partitions=5))
        else:
            raise FencedError("another's")

    with pytest.raises(FencedError):
        objects(store).write_topic(topic(partitions=1, deleted=True), check=check)
    loaded = objects(store).load_topic("flights", "id-1")
    assert loaded is not None
    assert (loaded.partitions, loaded.deleted) == (5, False)


def test_a_deletion_checks_the_owner_before_deleting_versions() -> None:
    store = PlainStore()
    write(store, topic())

    def check() -> None:
        raise FencedError("another's")

    with pytest.raises(FencedError):
        objects(store).delete_versions("flights", "id-1", check=check)
    assert objects(store).load_topic("flights", "id-1") is not None


def test_a_scan_takes_one_list_per_topic_name() -> None:
    store = PlainStore()
    wanted = {("a", "1"), ("a-b", "2"), ("a.b", "3"), ("a", "4"), ("__consumer_offsets", "5")}
    for name, topic_id in wanted:
        write(store, topic(name, topic_id))
        for i in range(50):
            store.put(f"topics/{name}/{topic_id}/0/segments/{i:020d}-0-u.log", b"x")
    store.calls.clear()
    assert set(objects(store).scan()) == wanted
    assert store.calls["list"] == len({name for name, _ in wanted}) + 1


@pytest.mark.parametrize("folder", ["", "..", "t 0 5", "t\u2028", "x" * 250])
def test_a_folder_that_no_topic_can_have_is_skipped(folder: str) -> None:
    store = PlainStore()
    made = write(store, topic())
    for key in (f"topics/{folder}/id/topic/1.json", f"topics/flights/{folder}/topic/1.json"):
        store.objects[key] = b"x"
    assert list(objects(store).scan()) == [("flights", made.topic_id)]


def test_a_folder_of_an_impossible_partition_adds_no_partitions() -> None:
    store = PlainStore()
    made = write(store, topic())
    store.put("topics/flights/id-1/999999999/manifest/00000000000000000001.json", b"x")
    assert objects(store).find_topic("flights") == made


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
    write(store, topic("other", "id-9"))
    moved = store.objects["topics/other/id-9/topic/00000000000000000001.json"]
    store.objects["topics/flights/id-1/topic/00000000000000000001.json"] = moved
    with pytest.raises(CorruptManifest, match="other"):
        objects(store).load_topic("flights", "id-1")


def test_finding_one_topic_reads_no_others() -> None:
    store = PlainStore()
    write(store, topic("flights", "old", created_ms=1))
    write(store, topic("flights", "new", created_ms=2))
    write(store, topic("other", "id", created_ms=3))
    keys: list[str] = []
    store.faults = lambda _, key: keys.append(key)  # type: ignore[func-returns-value]
    assert objects(store).find_topic("flights").topic_id == "new"
    assert keys
    assert all(key.startswith("topics/flights/") for key in keys)
    with pytest.raises(UnknownTopic):
        objects(store).find_topic("none")
