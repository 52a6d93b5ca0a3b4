import errno
import itertools
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tests.fakes.at_once import at_once
from tests.fakes.broker_harness import BrokerHarness
from tests.fakes.faulty_object_store import FailsBefore, WrongBytes
from tests.fakes.small_disk import no_room, small_disk
from tierlog.broker.background import background_tasks
from tierlog.broker.bucket import topic_deletion
from tierlog.broker.bucket.topic_deletion import OwnedPartition
from tierlog.broker.data_folder.data_folder import LOG_STARTS
from tierlog.broker.group_coordinator.groups import NewOffset
from tierlog.broker.opening.opened_log import EPOCHS
from tierlog.broker.partition.segment_listing import iter_segments, open_segment
from tierlog.broker.topics import live_topics
from tierlog.cold_tier.segment_uploader import LogContent, UploadCheckpoints
from tierlog.host import durable_file
from tierlog.host.file_slice import OpenFile
from tierlog.host.waiting import Wait
from tierlog.hot_tier import log as partition_log
from tierlog.hot_tier import open_files
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.log_writer import LogWriter
from tierlog.hot_tier.open_files import OpenFiles
from tierlog.manifest.garbage import GarbagePolicy
from tierlog.manifest.keys import PartitionKeys, topic_versions
from tierlog.manifest.topic_objects import TopicObjects
from tierlog.object_store.store import IncompleteUpload
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptManifest,
    DiskFull,
    LogOfflineError,
    ManifestConflict,
    StoreUnavailable,
    TooManyThreads,
    UnknownGroup,
    UnknownTopic,
)
from tierlog.repair.repair import repair_topic
from tierlog.repair.verify import verify_topic

NO_GRACE = GarbagePolicy(grace_ms=0)


def test_finishing_a_deletion_leaves_a_new_topic_of_the_name_alone(harness) -> None:
    """Topics are re-created while the background removes the previous topic of the name."""

    def create_and_delete(name: str) -> None:
        for turn in range(40):
            harness.broker.create_topic(name, partitions=3)
            folder = harness.broker.folder.partition_folder(name, 0)
            harness.produce(name, [b"%d" % turn])
            assert folder.exists()
            assert [record.value for record in harness.records(name)] == [b"%d" % turn]
            harness.broker.delete_topic(name)

    with capture_logs() as logs, ThreadPoolExecutor(3) as threads:
        list(threads.map(create_and_delete, ("a", "b", "c")))
    assert [one for one in logs if one["log_level"] == "error"] == []


def test_a_trim_overtaken_by_a_deletion_does_not_trim_the_next_topic(harness) -> None:
    """Retention may read manifest pages for seconds before it moves the log start. After a crash
    the new log would end below its start, and be reset to it.
    """
    harness.broker.create_topic("t")
    harness.produce("t", [b"old"] * 10)
    old = harness.broker.partition("t", 0)
    harness.broker.delete_topic("t")
    harness.broker.create_topic("t")
    harness.produce("t", [b"new"] * 3)
    with pytest.raises(LogOfflineError, match="was closed"):
        harness.broker.background.janitor.trim_partition(old, 10)
    assert harness.broker.folder.read_checkpoint(LOG_STARTS) == {}


def test_the_log_start_of_a_deleted_topic_does_not_apply_to_the_next(harness) -> None:
    """After a crash the new log's records would lie below its start, and be deleted."""
    harness.broker.create_topic("t")
    harness.produce("t", [b"old"] * 3)
    harness.broker.trim("t", 0, 2)
    harness.broker.delete_topic("t")
    harness.broker.create_topic("t")
    assert harness.broker.folder.read_checkpoint(LOG_STARTS) == {}


@pytest.mark.parametrize("go", [True, False], ids=["listing shrinks", "still listed"])
def test_incomplete_uploads_of_a_deleted_topic_are_aborted(harness, monkeypatch, go) -> None:
    """Garbage collection no longer visits its partitions."""
    monkeypatch.setattr(topic_deletion, "PAGE", 2)
    topic_id = harness.broker.create_topic("t").topic_id
    harness.wait_for(lambda: not harness.broker.registry.by_name("t").dirty)
    folder = f"topics/t/{topic_id}/0/"
    left = [IncompleteUpload(f"{folder}segments/{n}.log", f"u{n}", 0) for n in range(5)]
    aborted: list[IncompleteUpload] = []

    def incomplete_uploads(prefix: str, *, limit: int) -> list[IncompleteUpload]:
        remaining = [one for one in left if not go or one not in aborted]
        return [one for one in remaining if one.key.startswith(prefix)][:limit]

    harness.store.incomplete_uploads, harness.store.abort_upload = (
        incomplete_uploads,
        aborted.append,
    )
    harness.broker.delete_topic("t")
    harness.wait_for(lambda: not harness.broker.registry.deleted())
    assert aborted == (left if go else left[:2])


@pytest.mark.parametrize("failing", ["t-0", "t-1"])
def test_a_topic_creation_that_ran_out_of_space_can_be_repeated(
    harness, monkeypatch, failing
) -> None:
    opened = PartitionLog.open

    def full(folder, **options):
        if folder.name == failing:
            raise DiskFull("no room", retry_after_s=1)
        return opened(folder, **options)

    with monkeypatch.context() as patched:
        patched.setattr(PartitionLog, "open", full)
        for _ in range(2):
            with pytest.raises(DiskFull):
                harness.broker.create_topic("t", partitions=2)
    harness.broker.create_topic("t", partitions=2)
    harness.produce("t", [b"there is room"])
    harness.restart()
    assert [record.value for record in harness.records("t")] == [b"there is room"]
    harness.wait_for(lambda: not harness.broker.registry.deleted())
    assert [record.name for record in harness.broker.registry.live()] == ["t"]


def test_a_topic_refused_on_a_full_disk_does_not_appear_after_a_restart(tmp_path) -> None:
    """Wherever its creation was interrupted."""
    for room_bytes in itertools.count(step=4096):
        root = tmp_path / str(room_bytes)
        with small_disk(root / "data") as disk:
            harness = BrokerHarness(root)
            (spare := root / "data" / "spare").write_bytes(bytes(room_bytes))
            disk.fill()
            spare.unlink()
            with suppress(DiskFull):
                harness.broker.create_topic("t", partitions=2)
            created = [one.name for one in harness.broker.list_topics()]
            disk.empty()
            harness.restart()
            assert [one.name for one in harness.broker.list_topics()] == created, room_bytes
            harness.wait_for(lambda harness=harness: not harness.broker.registry.deleted())
            assert len(list((root / "data").glob("t-*"))) == 2 * len(created)
            harness.broker.close()
        if created:
            break


def test_a_topic_is_deleted_although_its_delete_folder_exists(harness) -> None:
    """A disk error kept it in the registry, and the next start re-created it."""
    topic_id = harness.broker.create_topic("t").topic_id
    data = harness.root / "data"
    shutil.copytree(data / "t-0", data / f"t-0.{topic_id}-delete")
    harness.broker.delete_topic("t")
    harness.wait_for(lambda: not harness.broker.registry.deleted())
    assert list(data.glob("t-*")) == []


def test_deleting_a_topic_flushes_none_of_its_logs(harness, monkeypatch) -> None:
    """Changes of other topics, and a stop, wait for as long as it takes."""
    harness.broker.create_topic("t", partitions=2)
    harness.produce("t", [b"deleted"])
    flushed: list[LogWriter] = []
    with monkeypatch.context() as patched:
        patched.setattr(LogWriter, "flush", flushed.append)
        harness.broker.delete_topic("t")
    assert not flushed


def test_a_topic_is_deleted_even_if_its_folders_cannot_be_renamed(harness, monkeypatch) -> None:
    harness.broker.create_topic("t")
    harness.broker.groups.commit_offsets("g", [NewOffset("t", 0, 7)])
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", no_room)
        harness.broker.delete_topic("t")
    harness.wait_for(lambda: not harness.broker.registry.deleted())
    harness.broker.create_topic("t")
    with pytest.raises(UnknownGroup):
        harness.broker.groups.group("g")


def test_a_start_succeeds_after_a_crash_while_re_creating_a_topic(harness, monkeypatch) -> None:
    harness.broker.create_topic("t", partitions=2)
    harness.produce("t", [b"old"])
    harness.broker.background.deleting.stop(10)
    harness.broker.delete_topic("t")

    class Killed(BaseException):
        pass

    def killed(folder, **_):
        folder.mkdir()
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(PartitionLog, "open", killed)
        with pytest.raises(Killed):
            harness.broker.create_topic("t", partitions=2)
    harness.restart()
    assert harness.broker.list_topics() == []
    harness.broker.create_topic("t", partitions=2)
    harness.produce("t", [b"new"])
    harness.wait_for(lambda: not harness.broker.registry.deleted())
    harness.restart()
    assert [record.value for record in harness.records("t")] == [b"new"]


def test_partitions_refused_on_a_full_disk_do_not_appear_after_a_restart(
    harness, monkeypatch
) -> None:
    harness.broker.create_topic("t")
    shutil.copytree(
        harness.root / "data" / "t-0", harness.root / "data" / "t-1"
    )  # not created by the call
    opened = PartitionLog.open

    def full(folder, **options):
        log = opened(folder, **options)
        if folder.name == "t-2":
            log.close()
            raise DiskFull("no room", retry_after_s=1)
        return log

    with monkeypatch.context() as patched:
        patched.setattr(PartitionLog, "open", full)
        with pytest.raises(DiskFull):
            harness.broker.alter_topic("t", partitions=3)
    assert sorted(path.name for path in (harness.root / "data").glob("t-*")) == ["t-0", "t-1"]
    harness.restart()
    assert len(harness.broker.topic("t").describe().partitions) == 1
    assert len(harness.broker.alter_topic("t", partitions=3).partitions) == 3
    harness.broker.delete_topic("t")
    harness.restart()
    assert harness.broker.list_topics() == []


@pytest.mark.parametrize("is_retried", [False, True])
def test_partitions_that_were_neither_added_nor_removed_go_with_the_topic(
    harness, monkeypatch, is_retried
) -> None:
    harness.broker.create_topic("t")
    opened = PartitionLog.open

    def refused(*_):
        raise OSError(errno.EACCES, "refused")

    with monkeypatch.context() as patched:
        patched.setattr(
            PartitionLog,
            "open",
            lambda folder, **at: refused() if folder.name == "t-2" else opened(folder, **at),
        )
        with patched.context() as also:
            also.setattr(live_topics, "_remove_folders", refused)
            with pytest.raises(OSError, match="refused"):
                harness.broker.alter_topic("t", partitions=3)
        if is_retried:
            with pytest.raises(OSError, match="refused"):
                harness.broker.alter_topic("t", config={"retention.ms": 1})
    assert (harness.root / "data" / "t-1").exists()
    assert harness.broker.registry.by_name("t").partitions == 3
    assert harness.broker.topic("t").record.partitions == 1  # so many share the keys
    if is_retried:
        harness.broker.alter_topic("t", config={"retention.ms": 10**12})
        assert harness.broker.topic("t").record.partitions == 3
        assert harness.broker.topic("t").numbers == [0, 1, 2]
    harness.broker.delete_topic("t")
    harness.wait_for(lambda: not harness.broker.registry.ids())
    harness.restart()
    assert harness.broker.list_topics() == []


def test_no_partition_is_opened_unless_a_thread_for_it_starts(harness, monkeypatch) -> None:
    harness.broker.create_topic("t")
    start, permits = threading.Thread.start, iter(range(0))

    def limited(thread: threading.Thread) -> None:
        if next(permits, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", limited)
        with pytest.raises(TooManyThreads):
            harness.broker.alter_topic("t", partitions=3)
        with pytest.raises(TooManyThreads):
            harness.broker.create_topic("new")
    assert [path.name for path in (harness.root / "data").glob("*-[01]")] == ["t-0"]
    harness.restart()
    assert len(harness.broker.topic("t").describe().partitions) == 1
    harness.broker.create_topic("new")


def test_a_published_partition_count_is_reverted_if_the_partitions_fail(
    harness, monkeypatch
) -> None:
    """A restore would bring them back."""
    harness.broker.create_topic("t")
    harness.restart()
    harness.wait_for(lambda: not harness.broker.registry.by_name("t").dirty)
    harness.restart()  # starts from what was published
    harness.stop_copying()
    bucket, registry = harness.broker.bucket, harness.broker.registry

    def publish_and_fail(*_given, **_options):
        bucket.publish_topics(registry)
        raise DiskFull("no room", retry_after_s=1)

    with monkeypatch.context() as patched:
        patched.setattr(PartitionLog, "open", publish_and_fail)
        with pytest.raises(DiskFull):
            harness.broker.alter_topic("t", partitions=2)
    bucket.publish_topics(registry)
    topic = TopicObjects(harness.store).load_topic("t", registry.by_name("t").topic_id)
    assert topic.partitions == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda broker: broker.create_topic("new"),
        lambda broker: broker.alter_topic("t", config={"retention.ms": 1}),
        lambda broker: broker.delete_topic("t"),
        lambda broker: broker.trim("t", 0, 2),
    ],
    ids=["create", "alter", "delete", "trim"],
)
def test_a_change_refused_on_a_full_disk_can_be_repeated(harness, monkeypatch, change) -> None:
    harness.broker.create_topic("t")
    harness.produce("t", [b"1", b"2", b"3"])
    registry = harness.broker.registry
    harness.wait_for(lambda: not registry.by_name("t").dirty)
    known = registry.live()
    with monkeypatch.context() as patched:
        patched.setattr(durable_file.REAL_DISK, "write_at", no_room, raising=False)
        for _ in range(2):  # the second call is no more durable
            with pytest.raises(DiskFull, match="No space left"):
                change(harness.broker)
    assert [one.name for one in harness.broker.list_topics()] == ["t"]
    assert (registry.live(), registry.deleted()) == (known, [])
    assert [record.value for record in harness.records("t")] == [b"1", b"2", b"3"]
    change(harness.broker)


def test_nothing_of_a_deleted_topic_stays_on_disk(harness) -> None:
    kept = harness.broker.create_topic("kept").topic_id
    gone = harness.broker.create_topic("gone", partitions=2).topic_id
    harness.produce("gone", [b"x"])
    harness.offload("gone")
    keys = PartitionKeys("gone", gone, 1)
    content = LogContent(size_bytes=1, crc32c=2, part_bytes=3)
    checkpoints = UploadCheckpoints(
        harness.broker.folder.uploads, max_age_ms=1000, clock=harness.broker.clock
    )
    checkpoints.save_checkpoint(
        keys.segments, f"{keys.segments}interrupted.log", content, upload_id="u"
    )
    harness.broker.delete_topic("gone")
    harness.wait_for(lambda: not harness.broker.registry.deleted())
    harness.wait_for(
        lambda: list(EPOCHS.read_document(harness.broker.folder.path)) == [f"{kept}-0"]
    )
    named = (harness.root / "data" / "tierlog").rglob(f"{gone}*")
    assert [*named, *harness.broker.folder.uploads.iterdir()] == []


def test_scratch_files_are_removed_at_start(harness) -> None:
    scratch = harness.broker.folder.scratch("bring-back")
    scratch.mkdir(parents=True)
    (scratch / "half.log").write_bytes(b"half")
    harness.restart()
    assert not scratch.exists()


ON_DISK = {"segment.bytes": 1024, "retention.ms": -1, "remote.storage.enable": False}


def fill(harness, mark: bytes) -> None:
    for _ in range(5):
        harness.produce("t", [mark * 100])


@pytest.mark.parametrize("call", ["maintain", "relieve_disk", "roll", "snapshot"])
def test_late_work_on_a_deleted_topic_leaves_the_next_topic_alone(harness, call) -> None:
    """During a round over all partitions a topic may be deleted and re-created."""
    harness.broker.create_topic("t", config={**ON_DISK, "retention.bytes": 1})
    fill(harness, b"old")
    old = harness.broker.partition("t", 0)
    harness.broker.delete_topic("t")
    harness.broker.create_topic("t", config=ON_DISK)
    fill(harness, b"new")
    folder = harness.root / "data" / "t-0"
    before = sorted(path.name for path in folder.iterdir())
    with suppress(LogOfflineError):
        match call:
            case "maintain":
                harness.broker.background.janitor.maintain(old)
            case "relieve_disk":
                old.upkeep.delete_local(10)
                old.upkeep.reap(at_once=True)
            case "roll":
                old.upkeep.roll()
            case "snapshot":
                (folder / f"{2:020d}.snapshot").unlink()
                old._log.sealed.prepare_upload(0)
    left = sorted(path.name for path in folder.iterdir())
    assert left == [name for name in before if call != "snapshot" or name != f"{2:020d}.snapshot"]
    harness.restart()
    assert [record.value[:3] for record in harness.records("t")] == [b"new"] * 5


@pytest.mark.parametrize(
    ("step", "call"),
    [
        ("roll", lambda broker: broker.offload("t")),
        ("maybe_roll", lambda broker: broker.offload("t", wait_ms=10_000)),
        ("delete_local", lambda broker: broker.offload("t", wait_ms=10_000)),
        ("trim", lambda broker: broker.trim("t", 0, 2)),
        ("segments", lambda broker: verify_topic(broker, "t")),
    ],
)
def test_a_topic_deleted_during_a_call_is_unknown(harness, monkeypatch, step, call) -> None:
    harness.broker.create_topic("t", config={"retention.bytes": 1})
    fill(harness, b"old")
    method = getattr(PartitionLog, step)

    def deleted_meanwhile(log: PartitionLog, *args: object) -> object:
        monkeypatch.undo()
        found = method(log, *args) if step == "segments" else None
        harness.broker.delete_topic("t")
        return found or method(log, *args)

    monkeypatch.setattr(PartitionLog, step, deleted_meanwhile)
    with pytest.raises(UnknownTopic):
        call(harness.broker)


@pytest.mark.parametrize(
    "look_up",
    [
        lambda partition: partition.offset_for_timestamp(0),
        lambda partition: at_once(partition.read, 2, max_bytes=1) or partition.read(2, max_bytes=1),
        lambda partition: at_once(partition.read, 4, max_bytes=1) or partition.read(4, max_bytes=1),
        lambda partition: open_segment(partition, 0),
        lambda partition: open_segment(partition, partition._log.active_base_offset),
        lambda partition: list(iter_segments(partition)),
    ],
    ids=["time", "read", "read of the active", "segment", "active segment", "list"],
)
@pytest.mark.parametrize("again", [True, False], ids=["re-created", "deleted"])
def test_a_lookup_during_a_deletion_raises_unknown_topic(
    harness, monkeypatch, look_up, again
) -> None:
    """The files of the next topic have the same names."""
    harness.broker.create_topic("t", config=ON_DISK)
    fill(harness, b"old")
    old = harness.broker.partition("t", 0)

    def delete_meanwhile(path: Path | str) -> OpenFile:
        monkeypatch.undo()
        harness.broker.delete_topic("t")
        if again:
            harness.broker.create_topic("t")
            harness.produce("t", [b"another" * 100])
        return OpenFile(path)

    for room in (open_files, partition_log):
        monkeypatch.setattr(room, "OpenFile", delete_meanwhile)
    with pytest.raises(UnknownTopic):
        look_up(old)


def test_a_read_during_a_deletion_leaves_no_open_file_for_the_next_topic(
    harness, monkeypatch
) -> None:
    harness.broker.create_topic("t", config=ON_DISK)
    fill(harness, b"old")
    old = harness.broker.partition("t", 0)
    forget = OpenFiles.invalidate_folder

    def read_once_more(files: OpenFiles, folder: Path) -> None:
        forget(files, folder)
        monkeypatch.undo()
        assert old._log.read_hot(0, max_bytes=1 << 20).slices

    monkeypatch.setattr(OpenFiles, "invalidate_folder", read_once_more)
    harness.broker.delete_topic("t")
    with pytest.raises(UnknownTopic):
        old.read(0, max_bytes=1)
    harness.broker.create_topic("t", config=ON_DISK)
    fill(harness, b"new")
    assert [record.value[:3] for record in harness.records("t")] == [b"new"] * 5


def test_a_failed_deletion_blocks_no_other(harness, monkeypatch) -> None:
    for name in ("a-fails", "b-goes"):
        harness.broker.create_topic(name)
    harness.stop_copying()
    harness.broker.background.deleting.stop(10)
    assert harness.broker.background.copier.wait_until_idle(
        timeout_s=20
    )  # a claim in progress delays a deletion
    for name in ("a-fails", "b-goes"):
        harness.broker.delete_topic(name)
    delete = harness.broker.bucket.delete_topic

    def failing(record, *, is_gone) -> None:
        if record.name == "a-fails":
            raise ManifestConflict("conflicts in a row")
        delete(record, is_gone=is_gone)

    monkeypatch.setattr(harness.broker.bucket, "delete_topic", failing)
    with pytest.raises(ManifestConflict):
        harness.broker.background.deletions.run_round()
    assert [record.name for record in harness.broker.registry.deleted()] == ["a-fails"]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_deleted_topic_with_corrupt_metadata_blocks_nothing(
    harness, monkeypatch, restarted
) -> None:
    for name in ("rotten", "whole"):
        harness.broker.create_topic(name, config={"segment.bytes": 4096})
    harness.produce("whole", [b"x" * 100] * 5)
    folder = harness.broker.folder.partition_folder("rotten", 0)
    harness.broker.close()
    (folder / "partition.metadata").write_bytes(b"rotten")
    harness.broker = harness.open()
    with monkeypatch.context() as failing:
        if restarted:  # then the next start deletes it

            def refused(*_, **__):
                raise OSError(errno.EIO, "the disk refuses")

            harness.broker.background.deleting.stop(10)
            failing.setattr("tierlog.broker.topics.live_topics.set_folders_aside", refused)
        harness.broker.delete_topic("rotten")
    if restarted:
        assert folder.exists()
        harness.restart()
    harness.offload("whole")
    harness.broker.background.deletions.run_round()
    assert not list(folder.parent.glob("rotten-0*"))


def test_a_topic_object_that_cannot_be_written_blocks_no_upload(harness, monkeypatch) -> None:
    harness.stop_copying()
    write = TopicObjects.write_topic

    def failing(objects, topic, *, check):
        if topic.name == "a-fails":
            raise ManifestConflict("conflicts in a row")
        return write(objects, topic, check=check)

    monkeypatch.setattr(TopicObjects, "write_topic", failing)
    for name in ("a-fails", "b-goes"):
        harness.broker.create_topic(name)
    with pytest.raises(ManifestConflict):  # which the copier's task counts and logs, once
        harness.broker.background.copy_round()
    assert harness.broker.background.copier.wait_until_idle(timeout_s=20)
    assert all(partition.is_claimed for partition in harness.broker.partitions())
    assert [one.name for one in harness.broker.registry.live() if one.dirty] == ["a-fails"]


def test_topics_published_together_are_marked_in_one_write(harness, monkeypatch) -> None:
    """The file has all topics: one write for each of them is quadratic."""
    harness.stop_copying()
    registry, writes = harness.broker.registry, []
    for name in ("a", "b", "fails"):
        harness.broker.create_topic(name)
    write = registry._write_file
    monkeypatch.setattr(
        registry, "_write_file", lambda path, data: writes.append(path) or write(path, data)
    )
    down = FailsBefore(lambda key: StoreUnavailable("down"))
    harness.store.fail("put", down, when=lambda key: "/fails/" in key, times=10**9)
    with pytest.raises(StoreUnavailable):
        harness.broker.bucket.publish_topics(registry)
    assert [one.name for one in registry.live() if one.dirty] == ["fails"]
    assert len(writes) == 1


def test_a_topic_is_published_as_it_is_when_its_turn_comes(harness, monkeypatch) -> None:
    """An older state would be the newest version in the bucket, with another publisher forever."""
    harness.stop_copying()
    write, registry = TopicObjects.write_topic, harness.broker.registry
    for name in ("a-slow", "t"):
        harness.broker.create_topic(name)

    def alter_the_next(objects, topic, *, check):
        if topic.name == "a-slow":
            harness.broker.alter_topic("t", partitions=2)
        return write(objects, topic, check=check)

    monkeypatch.setattr(TopicObjects, "write_topic", alter_the_next)
    harness.broker.bucket.publish_topics(registry)
    topic = registry.by_name("t")
    assert not topic.dirty
    assert TopicObjects(harness.store).load_topic("t", topic.topic_id).partitions == 2


def test_a_topic_that_was_changed_and_changed_back_is_published_again(harness, monkeypatch) -> None:
    """A repair has published what it was between, before this publisher marks its state."""
    harness.stop_copying()
    broker, registry = harness.broker, harness.broker.registry
    broker.create_topic("t", config={"flush.ms": 1})
    mark = registry.mark_published

    def mark_late(published) -> None:
        monkeypatch.setattr(registry, "mark_published", mark)
        broker.alter_topic("t", config={"flush.ms": 2})
        broker.bucket.publish_topics(registry)
        broker.alter_topic("t", config={"flush.ms": 1})
        mark(published)

    monkeypatch.setattr(registry, "mark_published", mark_late)
    broker.bucket.publish_topics(registry)
    assert registry.by_name("t").dirty


def test_publishing_a_change_of_a_large_topic_does_not_delay_uploads(harness, monkeypatch) -> None:
    """The owner of each partition is checked: those of a thousand take half a minute."""
    monkeypatch.setattr(background_tasks, "COPY_INTERVAL_S", 0.0)
    harness.broker.create_topic("large", partitions=3)
    harness.broker.create_topic("t")
    harness.claim()
    harness.stop_copying()
    harness.broker.alter_topic("large", config={"flush.ms": 5})
    harness.fill(10)
    partition, check = harness.broker.partition("t", 0), OwnedPartition.check
    partition.upkeep.roll()

    def wait_for_upload(owned: OwnedPartition) -> object:
        if str(owned.keys) == "large-2":
            harness.wait_for(lambda: partition.cold_end_offset == 10)
        return check(owned)

    monkeypatch.setattr(OwnedPartition, "check", wait_for_upload)
    harness.broker.background.copy_round()
    assert not harness.broker.registry.by_name("large").dirty


def test_a_topic_that_cannot_be_marked_as_published_blocks_no_upload(harness, monkeypatch) -> None:
    harness.stop_copying()
    monkeypatch.setattr(harness.broker.registry, "mark_published", no_room)
    harness.broker.create_topic("t")
    with pytest.raises(OSError, match="No space left"):
        harness.broker.background.copy_round()
    assert harness.broker.background.copier.wait_until_idle(timeout_s=20)
    assert harness.broker.partition("t", 0).is_claimed


def test_files_left_below_the_log_start_by_a_crash_are_deleted(harness) -> None:
    harness.broker.create_topic("t", config=ON_DISK)
    fill(harness, b"old")  # two to a segment
    assert harness.broker.partition("t", 0)._log.trim(4) == 4
    harness.restart()  # as after a crash between checkpoint and deletion
    partition = harness.broker.partition("t", 0)
    assert (partition.log_start_offset, partition.first_local_offset) == (4, 0)
    harness.broker.background.janitor.maintain(partition)
    assert partition.first_local_offset == 4


def test_a_timestamp_lookup_is_repeated_if_its_segment_was_trimmed(harness, monkeypatch) -> None:
    harness.broker.create_topic("t", config=ON_DISK)
    fill(harness, b"old")
    opened = OpenFiles.open

    def trimmed_meanwhile(files: OpenFiles, path: str, *wait: Wait) -> OpenFile:
        monkeypatch.undo()
        harness.broker.trim("t", 0, 4)
        return opened(files, path, *wait)

    monkeypatch.setattr(OpenFiles, "open", trimmed_meanwhile)
    assert harness.broker.partition("t", 0).offset_for_timestamp(0) == (4, 0)


def test_a_file_that_cannot_be_deleted_does_not_block_retention(harness, monkeypatch) -> None:
    harness.broker.create_topic("t", config={"segment.bytes": 4096, "retention.ms": -1})
    for _ in range(20):
        harness.produce("t", [b"x" * 100] * 10)
    harness.offload()
    partition = harness.broker.partition("t", 0)

    def refuse(**_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(partition._log, "reap", refuse)
    harness.broker.alter_topic("t", config={"retention.bytes": 8192})
    harness.broker.background.janitor.maintain(partition)
    assert partition.offsets().log_start_offset > 0


@pytest.fixture
def offloaded(harness):
    """Segments of the topic `t` in the bucket, some below its log start."""
    harness.broker.create_topic("t", config={"retention.ms": -1, "segment.bytes": 1024})
    for _ in range(10):
        harness.produce("t", [b"x" * 100] * 10)
    harness.offload()
    harness.broker.trim("t", 0, 50)
    return harness


def in_bucket(harness) -> list[str]:
    bucket = harness.root / "bucket"
    return [str(path.relative_to(bucket)) for path in bucket.rglob("*") if path.is_file()]


def test_a_commit_after_the_deletion_of_a_topic_leaves_nothing_in_the_bucket(offloaded) -> None:
    partition = offloaded.broker.partition("t", 0)
    offloaded.broker.delete_topic("t")
    offloaded.wait_for(lambda: not offloaded.broker.registry.deleted())
    for late in (
        lambda: partition._cold.follow_log_start(60),
        lambda: partition.upkeep.collect_garbage(NO_GRACE),
    ):
        with pytest.raises(UnknownTopic):
            late()
    assert in_bucket(offloaded) == ["cluster.json"]
    assert not list((offloaded.root / "data" / "tierlog" / "manifests").iterdir())


def test_no_object_is_deleted_before_its_manifest_is_read_back(offloaded) -> None:
    """If the store lost it, the previous manifest is current for whoever takes the topic over."""
    offloaded.stop_copying()
    offloaded.broker.background.deleting.stop(10)
    segments = [name for name in in_bucket(offloaded) if "/segments/" in name]
    offloaded.store.fail("put", WrongBytes(), when=lambda key: "/manifest/" in key)
    offloaded.broker.delete_topic("t")
    with pytest.raises(CorruptManifest):
        offloaded.broker.background.deletions.run_round()
    assert set(segments) <= set(in_bucket(offloaded))
    offloaded.broker.background.deletions.run_round()
    assert in_bucket(offloaded) == ["cluster.json"]


def test_a_deletion_waits_for_garbage_collection(offloaded, monkeypatch) -> None:
    """Whatever it commits at the end would never be deleted."""
    partition, listed = offloaded.broker.partition("t", 0), offloaded.store.list
    deletions: list[str] = []

    def delete_meanwhile(prefix: str, **limits: object):
        if "/pins/" in prefix and not deletions:
            deletions.append(prefix)
            offloaded.broker.delete_topic("t")
            offloaded.broker.background.deleting.stop(10)
            offloaded.broker.background.deletions.run_round()
            assert offloaded.broker.registry.deleted()
        return listed(prefix, **limits)

    monkeypatch.setattr(offloaded.store, "list", delete_meanwhile, raising=False)
    assert partition.upkeep.collect_garbage(NO_GRACE) > 0
    offloaded.broker.background.deletions.run_round()
    assert not offloaded.broker.registry.deleted()
    assert in_bucket(offloaded) == ["cluster.json"]


@pytest.mark.parametrize("by", ["the copier", "a repair"])
def test_a_deletion_waits_for_an_upload(harness, monkeypatch, by) -> None:
    """Whatever it uploads at the end would never be deleted."""
    harness.broker.create_topic("t")
    harness.claim()
    harness.stop_copying()
    harness.broker.background.deleting.stop(10)
    put = harness.store.put_file

    def delete_meanwhile(key, path, **options):
        monkeypatch.undo()
        harness.broker.delete_topic("t")
        harness.broker.background.deletions.run_round()
        return put(key, path, **options)

    harness.produce("t", [b"v"])
    harness.broker.partition("t", 0).upkeep.roll()
    if by == "a repair":
        harness.copy_sealed()
        (log_object,) = (harness.root / "bucket").rglob("*.log")
        log_object.unlink()
    monkeypatch.setattr(harness.store, "put_file", delete_meanwhile, raising=False)
    with pytest.raises(UnknownTopic):
        repair_topic(harness.broker, "t", apply=True) if by == "a repair" else harness.copy_sealed()
    assert harness.broker.registry.deleted()
    harness.broker.background.deletions.run_round()
    assert in_bucket(harness) == ["cluster.json"]


def test_a_deletion_is_retried_if_the_store_keeps_the_objects(offloaded, monkeypatch) -> None:
    offloaded.broker.background.deleting.stop(10)
    offloaded.broker.delete_topic("t")
    monkeypatch.setattr(offloaded.store, "delete", lambda keys: None, raising=False)
    with pytest.raises(StoreUnavailable, match=r"/t/.*: still listed after the store deleted it"):
        offloaded.broker.background.deletions.run_round()
    monkeypatch.undo()
    offloaded.broker.background.deletions.run_round()
    assert not offloaded.broker.registry.deleted()
    assert in_bucket(offloaded) == ["cluster.json"]


def test_a_deletion_that_keeps_failing_writes_one_topic_object(offloaded) -> None:
    offloaded.stop_copying()
    offloaded.broker.background.deleting.stop(10)
    versions = topic_versions("t", offloaded.broker.topic("t").record.topic_id)
    before = len(offloaded.store.list(versions, limit=100))
    denied = FailsBefore(lambda key: ConfigurationError(f"{key}: no permission to delete"))
    offloaded.store.fail("delete", denied, times=10)
    offloaded.broker.delete_topic("t")
    for _ in range(3):
        with pytest.raises(ConfigurationError):
            offloaded.broker.background.deletions.run_round()
    assert len(offloaded.store.list(versions, limit=100)) == before + 1
    offloaded.store.heal()
    offloaded.broker.background.deletions.run_round()
    assert in_bucket(offloaded) == ["cluster.json"]


def test_an_object_that_may_not_be_deleted_keeps_no_other_partition(harness) -> None:
    harness.broker.create_topic("t", partitions=3)
    harness.claim()
    harness.stop_copying()
    harness.broker.background.deleting.stop(10)
    denied = FailsBefore(lambda key: ConfigurationError(f"{key}: no permission to delete"))
    harness.store.fail("delete", denied, when=lambda key: "/1/manifest/" in key)
    harness.broker.delete_topic("t")
    with pytest.raises(ConfigurationError, match=r"/1/manifest/.*: no permission"):
        harness.broker.background.deletions.run_round()
    folders = {key.split("/")[3] for key in in_bucket(harness) if key.startswith("topics/")}
    assert folders == {"1", "topic"}
    harness.broker.background.deletions.run_round()
    assert in_bucket(harness) == ["cluster.json"]


def test_a_long_deletion_does_not_block_uploads(harness, monkeypatch) -> None:
    """The deletion of a thousand partitions takes many minutes."""
    harness.broker.create_topic("going")
    harness.produce("going", [b"v"])
    harness.offload("going")
    deleting, may_end = threading.Event(), threading.Event()
    delete = harness.store.delete

    def delete_slowly(keys) -> None:
        deleting.set()
        assert may_end.wait(30)
        delete(keys)

    monkeypatch.setattr(harness.store, "delete", delete_slowly, raising=False)
    harness.broker.delete_topic("going")
    try:
        assert deleting.wait(20)
        harness.broker.create_topic("t")
        harness.produce("t", [b"v"])
        harness.offload()
        assert not harness.broker.registry.by_name("t").dirty
        assert harness.broker.registry.deleted()
    finally:
        may_end.set()
    harness.wait_for(lambda: not harness.broker.registry.deleted())


def test_a_topic_being_deleted_is_not_published(harness, monkeypatch) -> None:
    """One thread publishes topics to the bucket, another deletes them."""
    publishing, deleting, began_early = threading.Event(), threading.Event(), []
    write = TopicObjects.write_topic

    def write_slowly(objects, topic, **options):
        if topic.deleted:
            deleting.set()
        else:
            publishing.set()
            began_early.append(deleting.wait(0.5))
        return write(objects, topic, **options)

    monkeypatch.setattr(TopicObjects, "write_topic", write_slowly)
    topic_id = harness.broker.create_topic("t").topic_id
    assert publishing.wait(20)
    harness.broker.delete_topic("t")
    harness.wait_for(lambda: not harness.broker.registry.deleted())
    assert began_early == [False]
    assert TopicObjects(harness.store).load_topic("t", topic_id) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda broker: broker.delete_topic("t"),
        lambda broker: broker.alter_topic("t", config={"retention.ms": 1000}),
    ],
)
def test_a_refused_change_does_not_appear_after_a_restart(harness, monkeypatch, change):
    """The new list of topics was already renamed into place when the folder sync failed."""
    harness.broker.create_topic("t", config={"retention.ms": -1})
    harness.fill(20)
    sync, left = durable_file.REAL_DISK.sync_folder, ["once"]
    ours = threading.current_thread()  # background threads sync this folder too

    def failing(path):
        if path.name == "tierlog" and left and threading.current_thread() is ours:
            raise OSError(errno.EIO, left.pop(), str(path))
        sync(path)

    with monkeypatch.context() as failed:
        failed.setattr(durable_file.REAL_DISK, "sync_folder", failing)
        with pytest.raises(OSError, match="once"):
            change(harness.broker)
    harness.fill(20)
    harness.restart()
    assert harness.broker.topic("t").config.retention_ms == -1
    assert len(harness.records("t")) == 40
