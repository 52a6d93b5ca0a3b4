from concurrent.futures import ThreadPoolExecutor

from structlog.testing import capture_logs

from cold_tier.object_store import Unfinished


def test_finishing_a_deletion_leaves_a_new_topic_of_the_name_alone(house) -> None:
    """Topics are made anew while the background clears away what the last of their name left."""

    def make_and_delete(name: str) -> None:
        for turn in range(40):
            house.broker.create_topic(name, partitions=3)
            folder = house.broker.folder.partition_folder(name, 0)
            house.produce(name, [b"%d" % turn])
            assert folder.exists()
            assert [record.value for record in house.records(name)] == [b"%d" % turn]
            house.broker.delete_topic(name)

    with capture_logs() as logs, ThreadPoolExecutor(3) as threads:
        list(threads.map(make_and_delete, ("a", "b", "c")))
    assert [one for one in logs if one["log_level"] == "error"] == []


def test_an_upload_of_a_deleted_topic_is_aborted_at_once(house) -> None:
    """No garbage collection comes by its partitions any more."""
    topic_id = house.broker.create_topic("t").topic_id
    house.wait_for(lambda: house.broker.bucket.is_ours)
    left = Unfinished(f"topics/t/{topic_id}/0/segments/left.log", "u1", 0)
    aborted: list[Unfinished] = []
    house.store.unfinished = lambda prefix, *, limit: [left] if left.key.startswith(prefix) else []
    house.store.abort = aborted.append
    house.broker.delete_topic("t")
    house.wait_for(lambda: not house.broker.registry.deleted())
    assert aborted == [left]
