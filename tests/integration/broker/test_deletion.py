from concurrent.futures import ThreadPoolExecutor

import pytest
from structlog.testing import capture_logs

from broker import topic_deletion
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


@pytest.mark.parametrize("go", [True, False], ids=["they go", "the store lists them for ever"])
def test_all_uploads_of_a_deleted_topic_are_aborted_at_once(house, monkeypatch, go) -> None:
    """No garbage collection comes by its partitions any more."""
    monkeypatch.setattr(topic_deletion, "PAGE", 2)
    topic_id = house.broker.create_topic("t").topic_id
    house.wait_for(lambda: not house.broker.registry.by_name("t").dirty)
    folder = f"topics/t/{topic_id}/0/"
    left = [Unfinished(f"{folder}segments/{n}.log", f"u{n}", 0) for n in range(5)]
    aborted: list[Unfinished] = []

    def unfinished(prefix: str, *, limit: int) -> list[Unfinished]:
        there = [one for one in left if not go or one not in aborted]
        return [one for one in there if one.key.startswith(prefix)][:limit]

    house.store.unfinished, house.store.abort = unfinished, aborted.append
    house.broker.delete_topic("t")
    house.wait_for(lambda: not house.broker.registry.deleted())
    assert aborted == (left if go else left[:2])
