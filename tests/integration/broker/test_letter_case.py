"""On the disk of a Mac, `Events-0` and `events-0` are one folder. Links make them so here."""

import pytest

from tierlog.record_format.errors import TopicExists


@pytest.fixture
def mac_disk(harness):
    """Finds its own identity file, and partition 0 of `Events`, in the other case too."""
    data = harness.broker.folder.path
    (data / "META.PROPERTIES").symlink_to("meta.properties")
    (data / "events-0").symlink_to("Events-0")
    return harness


def test_a_topic_that_differs_in_letter_case_alone_is_refused(mac_disk) -> None:
    broker = mac_disk.broker
    broker.create_topic("Events")
    mac_disk.produce("Events", [b"1"])
    with pytest.raises(TopicExists, match=r"'events': topic 'Events' already exists.*upper and"):
        broker.create_topic("events")
    assert [record.value for record in mac_disk.records("Events")] == [b"1"]
    with pytest.raises(TopicExists, match="topic 'Events' already exists"):
        broker.create_topic("Events")


def test_its_name_is_free_once_the_other_topic_is_deleted_completely(mac_disk) -> None:
    broker = mac_disk.broker
    broker.create_topic("Events")
    with broker._topics._lock:  # holds up the removal of the folders
        broker.delete_topic("Events")
        with pytest.raises(TopicExists, match="topic 'Events' is being deleted"):
            broker.create_topic("events")
    mac_disk.wait_for(lambda: not broker.registry.deleted())
    (broker.folder.path / "events-0").unlink()
    assert broker.create_topic("events").name == "events"


def test_other_disks_hold_both(harness) -> None:
    ids = {harness.broker.create_topic(name).topic_id for name in ("Events", "events")}
    assert len(ids) == 2
