from concurrent.futures import ThreadPoolExecutor

from structlog.testing import capture_logs


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
