"""A broker is paused in the middle of a topic's deletion while another folder takes the topic over:
before and after every modifying store call of the deletion.
"""

import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.fakes.broker_harness import BrokerHarness
from tierlog.broker.bucket import topic_deletion
from tierlog.broker.bucket.bucket import Bucket
from tierlog.broker.data_folder.data_folder import DataFolder
from tierlog.broker.data_folder.topic_registry import TopicRegistry
from tierlog.broker.settings import BrokerSettings
from tierlog.manifest.topic_objects import TopicObjects
from tierlog.object_store.open import open_store
from tierlog.record_format.errors import FencedError
from tierlog.repair.restore import RestoreOptions, restore
from tierlog.repair.verify import verify_topic

CONFIG = {"segment.bytes": 1024, "retention.ms": -1, "remote.storage.enable": True}
CHANGES = ("put", "delete", "abort_upload")
READS = ("get", "head", "list", "incomplete_uploads")


class PausingStore:
    """A store that calls `action` before its call number `at`. `calls`: the names of all calls."""

    def __init__(self, store, action, *, at):
        self._store, self._action, self._at = store, action, at
        self.calls: list[str] = []

    def __getattr__(self, name):
        call = getattr(self._store, name)
        return partial(self._counted, name, call) if name in CHANGES + READS else call

    def _counted(self, name, call, *args, **options):
        self.calls.append(name)
        if len(self.calls) == self._at:
            self._action()
        return call(*args, **options)


def fill(harness, count, mark):
    for partition in range(2):
        harness.fill(count, mark=mark, partition=partition)
    harness.offload()


def records_of(harness):
    starts = [harness.broker.partition("t", n).offsets().log_start_offset for n in range(2)]
    return [harness.records("t", partition=n, offset=start) for n, start in enumerate(starts)]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The data folder and bucket of a stopped broker."""
    harness = BrokerHarness(tmp_path_factory.mktemp("stopped"))
    harness.broker.create_topic("t", partitions=2, config=CONFIG)
    fill(harness, 30, b"old")
    harness.broker.close()
    return harness.root


class Scenario:
    """The former owner deletes the topic while a restored folder starts.

    The restore read the bucket before the deletion began, the earliest that it can.
    """

    def __init__(self, stopped: Path, root: Path) -> None:
        shutil.copytree(stopped, root / "old")
        self.bucket = root / "old" / "bucket"
        self._new_root = root / "new"
        self._new_root.mkdir()
        (self._new_root / "bucket").symlink_to(self.bucket)
        self._restore(self._new_root / "data")
        self.new: BrokerHarness | None = None
        self.written: list | None = None
        self._old = root / "old" / "data"

    def _restore(self, data_dir):
        store = open_store(f"file://{self.bucket}")
        return restore(store, RestoreOptions(data_dir=data_dir, gap=1000, clock=lambda: 0))

    def take_over(self):
        """Start the restored broker; it writes and uploads if the deletion left its partitions."""
        self.new = BrokerHarness(self._new_root)
        if not any(self.new.broker.damaged_partitions()):
            fill(self.new, 20, b"new")
            self.written = records_of(self.new)

    def delete(self, *, at: int) -> list[str]:
        """Delete, and start the other broker before call number `at`; return all calls."""
        folder = DataFolder(self._old)
        store = PausingStore(open_store(f"file://{self.bucket}"), self.take_over, at=at)
        settings = BrokerSettings(data_dir=self._old, cache_bytes=1 << 20).resolve()
        deleting = Bucket(folder, store, settings, clock=lambda: 0)
        (record,) = TopicRegistry(self._old).live()
        try:
            with suppress(FencedError):
                deleting.delete_topic(record, is_gone=lambda _: False)
        finally:
            deleting.close()
            folder.close()
        return store.calls

    def check(self, data_dir):
        """All that the new owner wrote is still there, and a restore finds it."""
        assert records_of(self.new) == self.written
        self.new.broker.background.copy_round()
        report = verify_topic(self.new.broker, "t", deep=True)
        assert report.ok, report.problems
        (topic,) = TopicObjects(open_store(f"file://{self.bucket}")).scan()
        assert not TopicObjects(open_store(f"file://{self.bucket}")).load_topic(*topic).deleted
        ends = {one.partition: one.end_offset for one in self._restore(data_dir).partitions}
        assert ends == {
            number: records[-1].offset + 1 for number, records in enumerate(self.written)
        }


@pytest.mark.parametrize("page", [4, topic_deletion.PAGE])
def test_no_record_of_the_new_owner_is_deleted_by_the_paused_broker(
    stopped, tmp_path, monkeypatch, page
):
    monkeypatch.setattr(topic_deletion, "PAGE", page)
    calls = Scenario(stopped, tmp_path / "alone").delete(at=0)
    changes = [number for number, name in enumerate(calls, start=1) if name in CHANGES]
    for at in sorted({1, *changes, *(number + 1 for number in changes)}):
        scenario = Scenario(stopped, tmp_path / f"{at}")
        try:
            scenario.delete(at=at)
            if scenario.written is None:
                break  # a manifest is deleted: nothing is left to take over
            scenario.check(tmp_path / f"{at}" / "again")
        finally:
            if scenario.new is not None:
                scenario.new.broker.close()
    assert at > changes[3], "the take-over came during the deletion"
