"""A broker stands still in the middle of a topic's deletion while another folder takes the topic
over: at every call of the deletion to the store that changes something, and right after it.
"""

import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from broker import topic_deletion
from broker.bucket import Bucket
from broker.data_folder import DataFolder
from broker.repair.restore import RestoreOptions, restore
from broker.settings import BrokerSettings
from broker.topic_registry import TopicRegistry
from cold_tier.open import open_store
from manifest.topic_objects import TopicObjects
from record_format.errors import FencedError
from tests.fakes.house import House

CONFIG = {"segment.bytes": 1024, "retention.ms": -1, "remote.storage.enable": True}
CHANGES = ("put", "delete", "abort_upload")
LOOKS = ("get", "head", "list", "incomplete_uploads")


class StandingStill:
    """A store before whose call number `at` something else happens. `calls`: their names."""

    def __init__(self, store, happens, *, at):
        self._store, self._happens, self._at = store, happens, at
        self.calls: list[str] = []

    def __getattr__(self, name):
        call = getattr(self._store, name)
        return partial(self._counted, name, call) if name in CHANGES + LOOKS else call

    def _counted(self, name, call, *args, **options):
        self.calls.append(name)
        if len(self.calls) == self._at:
            self._happens()
        return call(*args, **options)


def fill(house, count, mark):
    for partition in range(2):
        house.fill(count, mark=mark, partition=partition)
    house.offload()


def records_of(house):
    starts = [house.broker.partition("t", n).offsets().log_start_offset for n in range(2)]
    return [house.records("t", partition=n, offset=start) for n, start in enumerate(starts)]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder and the bucket of a broker that stopped."""
    house = House(tmp_path_factory.mktemp("stopped"))
    house.broker.create_topic("t", partitions=2, config=CONFIG)
    fill(house, 30, b"old")
    house.broker.close()
    return house.root


class Scene:
    """The former owner deletes the topic; a folder that was restored before that starts meanwhile.

    The restored one looked before the deletion began: that is the earliest it can have.
    """

    def __init__(self, stopped: Path, root: Path) -> None:
        shutil.copytree(stopped, root / "old")
        self.bucket = root / "old" / "bucket"
        self._new_root = root / "new"
        self._new_root.mkdir()
        (self._new_root / "bucket").symlink_to(self.bucket)
        self._restore(self._new_root / "data")
        self.new: House | None = None
        self.written: list | None = None
        self._old = root / "old" / "data"

    def _restore(self, data_dir):
        store = open_store(f"file://{self.bucket}")
        return restore(store, RestoreOptions(data_dir=data_dir, gap=1000, clock=lambda: 0))

    def take_over(self):
        """It starts and, where the deletion left it a partition, writes and uploads."""
        self.new = House(self._new_root)
        if not any(self.new.broker.damaged_partitions()):
            fill(self.new, 20, b"new")
            self.written = records_of(self.new)

    def delete(self, *, at: int) -> list[str]:
        """Delete, and let the other start before call number `at`; the calls that were made."""
        folder = DataFolder(self._old)
        store = StandingStill(open_store(f"file://{self.bucket}"), self.take_over, at=at)
        settings = BrokerSettings(data_dir=self._old, cache_bytes=1 << 20).resolve()
        deleting = Bucket(folder, store, settings, clock=lambda: 0)
        (record,) = TopicRegistry(self._old / "tierlog" / "topics.json").live()
        try:
            with suppress(FencedError):
                deleting.delete_topic(record)
        finally:
            deleting.close()
            folder.close()
        return store.calls

    def check(self, data_dir):
        """Nothing that the new owner wrote is gone, and a restore finds all of it."""
        assert records_of(self.new) == self.written
        self.new.broker.background.copy_round()
        report = self.new.broker.verify("t", deep=True)
        assert report.ok, report.problems
        (topic,) = TopicObjects(open_store(f"file://{self.bucket}")).scan()
        assert not TopicObjects(open_store(f"file://{self.bucket}")).load(*topic).deleted
        ends = {one.partition: one.end_offset for one in self._restore(data_dir).partitions}
        assert ends == {
            number: records[-1].offset + 1 for number, records in enumerate(self.written)
        }


@pytest.mark.parametrize("page", [4, topic_deletion.PAGE])
def test_no_record_of_the_new_owner_goes_wherever_the_former_stood_still(
    stopped, tmp_path, monkeypatch, page
):
    monkeypatch.setattr(topic_deletion, "PAGE", page)
    calls = Scene(stopped, tmp_path / "alone").delete(at=0)
    changes = [number for number, name in enumerate(calls, start=1) if name in CHANGES]
    for at in sorted({1, *changes, *(number + 1 for number in changes)}):
        scene = Scene(stopped, tmp_path / f"{at}")
        try:
            scene.delete(at=at)
            if scene.written is None:
                break  # a manifest is gone: who comes now finds nothing to take over
            scene.check(tmp_path / f"{at}" / "again")
        finally:
            if scene.new is not None:
                scene.new.broker.close()
    assert at > changes[3], "it was deleting when the other came"
