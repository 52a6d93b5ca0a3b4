import errno
import itertools
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from broker import segment_listing, topic_deletion
from broker.data_folder import LOG_STARTS
from broker.groups.requests import NewOffset
from broker.ownership.allocated_epochs import read_epochs
from broker.segment_listing import iter_segments, open_segment
from cold_tier.object_store import IncompleteUpload
from cold_tier.upload_checkpoints import LogContent, UploadCheckpoints
from hot_tier import durable_file, open_files
from hot_tier.log import PartitionLog
from hot_tier.open_files import OpenFiles
from manifest.garbage import GarbagePolicy
from manifest.keys import PartitionKeys
from manifest.topic_objects import TopicObjects
from record_format.errors import (
    CorruptManifest,
    DiskFull,
    LogOfflineError,
    ManifestConflict,
    StoreUnavailable,
    UnknownGroup,
    UnknownTopic,
)
from record_format.file_slice import OpenFile
from tests.fakes.faulty_object_store import WrongBytes
from tests.fakes.house import House
from tests.fakes.small_disk import no_room, small_disk

NO_GRACE = GarbagePolicy(grace_ms=0)


def test_finishing_a_deletion_leaves_a_new_topic_of_the_name_alone(house) -> None:
    """Topics are re-created while the background removes the previous topic of the name."""

    def create_and_delete(name: str) -> None:
        for turn in range(40):
            house.broker.create_topic(name, partitions=3)
            folder = house.broker.folder.partition_folder(name, 0)
            house.produce(name, [b"%d" % turn])
            assert folder.exists()
            assert [record.value for record in house.records(name)] == [b"%d" % turn]
            house.broker.delete_topic(name)

    with capture_logs() as logs, ThreadPoolExecutor(3) as threads:
        list(threads.map(create_and_delete, ("a", "b", "c")))
    assert [one for one in logs if one["log_level"] == "error"] == []


def test_a_trim_overtaken_by_a_deletion_does_not_trim_the_next_topic(house) -> None:
    """Retention may read manifest pages for seconds before it moves the log start. After a crash
    the new log would end below its start, and be reset to it.
    """
    house.broker.create_topic("t")
    house.produce("t", [b"old"] * 10)
    old = house.broker.partition("t", 0)
    house.broker.delete_topic("t")
    house.broker.create_topic("t")
    house.produce("t", [b"new"] * 3)
    with pytest.raises(LogOfflineError, match="was closed"):
        house.broker.background.janitor.trim(old, 10)
    assert house.broker.folder.read_checkpoint(LOG_STARTS) == {}


def test_the_log_start_of_a_deleted_topic_does_not_apply_to_the_next(house) -> None:
    """After a crash the new log's records would lie below its start, and be deleted."""
    house.broker.create_topic("t")
    house.produce("t", [b"old"] * 3)
    house.broker.trim("t", 0, 2)
    house.broker.delete_topic("t")
    house.broker.create_topic("t")
    assert house.broker.folder.read_checkpoint(LOG_STARTS) == {}


@pytest.mark.parametrize("go", [True, False], ids=["listing shrinks", "still listed"])
def test_incomplete_uploads_of_a_deleted_topic_are_aborted(house, monkeypatch, go) -> None:
    """Garbage collection no longer visits its partitions."""
    monkeypatch.setattr(topic_deletion, "PAGE", 2)
    topic_id = house.broker.create_topic("t").topic_id
    house.wait_for(lambda: not house.broker.registry.by_name("t").dirty)
    folder = f"topics/t/{topic_id}/0/"
    left = [IncompleteUpload(f"{folder}segments/{n}.log", f"u{n}", 0) for n in range(5)]
    aborted: list[IncompleteUpload] = []

    def incomplete_uploads(prefix: str, *, limit: int) -> list[IncompleteUpload]:
        remaining = [one for one in left if not go or one not in aborted]
        return [one for one in remaining if one.key.startswith(prefix)][:limit]

    house.store.incomplete_uploads, house.store.abort_upload = incomplete_uploads, aborted.append
    house.broker.delete_topic("t")
    house.wait_for(lambda: not house.broker.registry.deleted())
    assert aborted == (left if go else left[:2])


@pytest.mark.parametrize("failing", ["t-0", "t-1"])
def test_a_topic_creation_that_ran_out_of_space_can_be_repeated(
    house, monkeypatch, failing
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
                house.broker.create_topic("t", partitions=2)
    house.broker.create_topic("t", partitions=2)
    house.produce("t", [b"there is room"])
    house.restart()
    assert [record.value for record in house.records("t")] == [b"there is room"]
    house.wait_for(lambda: not house.broker.registry.deleted())
    assert [record.name for record in house.broker.registry.live()] == ["t"]


def test_a_topic_refused_on_a_full_disk_does_not_appear_after_a_restart(tmp_path) -> None:
    """Wherever its creation was interrupted."""
    for room_bytes in itertools.count(step=4096):
        root = tmp_path / str(room_bytes)
        with small_disk(root / "data") as disk:
            house = House(root)
            (spare := root / "data" / "spare").write_bytes(bytes(room_bytes))
            disk.fill()
            spare.unlink()
            with suppress(DiskFull):
                house.broker.create_topic("t", partitions=2)
            created = [one.name for one in house.broker.list_topics()]
            disk.empty()
            house.restart()
            assert [one.name for one in house.broker.list_topics()] == created, room_bytes
            house.wait_for(lambda house=house: not house.broker.registry.deleted())
            assert len(list((root / "data").glob("t-*"))) == 2 * len(created)
            house.broker.close()
        if created:
            break


def test_a_topic_is_deleted_although_its_delete_folder_exists(house) -> None:
    """A disk error kept it in the registry, and the next start re-created it."""
    topic_id = house.broker.create_topic("t").topic_id
    data = house.root / "data"
    shutil.copytree(data / "t-0", data / f"t-0.{topic_id}-delete")
    house.broker.delete_topic("t")
    house.wait_for(lambda: not house.broker.registry.deleted())
    assert list(data.glob("t-*")) == []


def test_group_offsets_are_deleted_even_if_a_log_cannot_be_closed(house, monkeypatch) -> None:
    house.broker.create_topic("t", partitions=2)
    house.broker.groups.commit("g", [NewOffset("t", 0, 7)])

    def fails(_log):
        raise LogOfflineError("the disk failed")

    with monkeypatch.context() as patched:
        patched.setattr(PartitionLog, "close", fails)
        house.broker.delete_topic("t")
    house.broker.create_topic("t")
    with pytest.raises(UnknownGroup):
        house.broker.groups.group("g")


def test_a_topic_is_deleted_even_if_its_folders_cannot_be_renamed(house, monkeypatch) -> None:
    house.broker.create_topic("t")
    house.broker.groups.commit("g", [NewOffset("t", 0, 7)])
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", no_room)
        house.broker.delete_topic("t")
    house.wait_for(lambda: not house.broker.registry.deleted())
    house.broker.create_topic("t")
    with pytest.raises(UnknownGroup):
        house.broker.groups.group("g")


def test_a_start_succeeds_after_a_crash_while_re_creating_a_topic(house, monkeypatch) -> None:
    house.broker.create_topic("t", partitions=2)
    house.produce("t", [b"old"])
    house.broker.background.deleting.stop(10)
    house.broker.delete_topic("t")

    class Killed(BaseException):
        pass

    def killed(folder, **_):
        folder.mkdir()
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(PartitionLog, "open", killed)
        with pytest.raises(Killed):
            house.broker.create_topic("t", partitions=2)
    house.restart()
    assert house.broker.list_topics() == []
    house.broker.create_topic("t", partitions=2)
    house.produce("t", [b"new"])
    house.wait_for(lambda: not house.broker.registry.deleted())
    house.restart()
    assert [record.value for record in house.records("t")] == [b"new"]


def test_partitions_refused_on_a_full_disk_do_not_appear_after_a_restart(
    house, monkeypatch
) -> None:
    house.broker.create_topic("t")
    shutil.copytree(
        house.root / "data" / "t-0", house.root / "data" / "t-1"
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
            house.broker.alter_topic("t", partitions=3)
    assert sorted(path.name for path in (house.root / "data").glob("t-*")) == ["t-0", "t-1"]
    house.restart()
    assert len(house.broker.topic("t").describe().partitions) == 1
    assert len(house.broker.alter_topic("t", partitions=3).partitions) == 3
    house.broker.delete_topic("t")
    house.restart()
    assert house.broker.list_topics() == []


def test_a_published_partition_count_is_reverted_if_the_partitions_fail(house, monkeypatch) -> None:
    """A restore would bring them back."""
    house.broker.create_topic("t")
    house.restart()
    house.wait_for(lambda: not house.broker.registry.by_name("t").dirty)
    house.restart()  # starts from what was published
    house.stop_copying()
    bucket, registry = house.broker.bucket, house.broker.registry

    def publish_and_fail(*_given, **_options):
        bucket.publish_topics(registry)
        raise DiskFull("no room", retry_after_s=1)

    with monkeypatch.context() as patched:
        patched.setattr(PartitionLog, "open", publish_and_fail)
        with pytest.raises(DiskFull):
            house.broker.alter_topic("t", partitions=2)
    bucket.publish_topics(registry)
    topic = TopicObjects(house.store).load("t", registry.by_name("t").topic_id)
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
def test_a_change_refused_on_a_full_disk_can_be_repeated(house, monkeypatch, change) -> None:
    house.broker.create_topic("t")
    house.produce("t", [b"1", b"2", b"3"])
    registry = house.broker.registry
    house.wait_for(lambda: not registry.by_name("t").dirty)
    known = registry.live()
    with monkeypatch.context() as patched:
        patched.setattr(durable_file.REAL_DISK, "write_at", no_room, raising=False)
        for _ in range(2):  # the second call is no more durable
            with pytest.raises(DiskFull, match="No space left"):
                change(house.broker)
    assert [one.name for one in house.broker.list_topics()] == ["t"]
    assert (registry.live(), registry.deleted()) == (known, [])
    assert [record.value for record in house.records("t")] == [b"1", b"2", b"3"]
    change(house.broker)


def test_nothing_of_a_deleted_topic_stays_on_disk(house) -> None:
    kept = house.broker.create_topic("kept").topic_id
    gone = house.broker.create_topic("gone", partitions=2).topic_id
    house.produce("gone", [b"x"])
    house.offload("gone")
    keys = PartitionKeys("gone", gone, 1)
    content = LogContent(size_bytes=1, crc32c=2, part_bytes=3)
    checkpoints = UploadCheckpoints(
        house.broker.folder.uploads, max_age_ms=1000, clock=house.broker.clock
    )
    checkpoints.save(keys.segments, f"{keys.segments}interrupted.log", content, upload_id="u")
    house.broker.delete_topic("gone")
    house.wait_for(lambda: not house.broker.registry.deleted())
    house.wait_for(lambda: list(read_epochs(house.broker.folder.path)) == [f"{kept}-0"])
    named = (house.root / "data" / "tierlog").rglob(f"{gone}*")
    assert [*named, *house.broker.folder.uploads.iterdir()] == []


def test_scratch_files_are_removed_at_start(house) -> None:
    scratch = house.broker.folder.scratch("bring-back")
    scratch.mkdir(parents=True)
    (scratch / "half.log").write_bytes(b"half")
    house.restart()
    assert not scratch.exists()


ON_DISK = {"segment.bytes": 1024, "retention.ms": -1, "remote.storage.enable": False}


def fill(house, mark: bytes) -> None:
    for _ in range(5):
        house.produce("t", [mark * 100])


@pytest.mark.parametrize("call", ["maintain", "relieve_disk", "roll", "snapshot"])
def test_late_work_on_a_deleted_topic_leaves_the_next_topic_alone(house, call) -> None:
    """During a round over all partitions a topic may be deleted and re-created."""
    house.broker.create_topic("t", config={**ON_DISK, "retention.bytes": 1})
    fill(house, b"old")
    old = house.broker.partition("t", 0)
    house.broker.delete_topic("t")
    house.broker.create_topic("t", config=ON_DISK)
    fill(house, b"new")
    folder = house.root / "data" / "t-0"
    before = sorted(path.name for path in folder.iterdir())
    with suppress(LogOfflineError):
        match call:
            case "maintain":
                house.broker.background.janitor.maintain(old)
            case "relieve_disk":
                old.log.delete_local(10)
                old.log.reap(at_once=True)
            case "roll":
                old.log.roll()
            case "snapshot":
                (folder / f"{2:020d}.snapshot").unlink()
                old.log.sealed.files(0)
    left = sorted(path.name for path in folder.iterdir())
    assert left == [name for name in before if call != "snapshot" or name != f"{2:020d}.snapshot"]
    house.restart()
    assert [record.value[:3] for record in house.records("t")] == [b"new"] * 5


@pytest.mark.parametrize(
    ("step", "call"),
    [
        ("roll", lambda broker: broker.offload("t")),
        ("maybe_roll", lambda broker: broker.offload("t", wait_ms=10_000)),
        ("delete_local", lambda broker: broker.offload("t", wait_ms=10_000)),
        ("trim", lambda broker: broker.trim("t", 0, 2)),
        ("segments", lambda broker: broker.verify("t")),
    ],
)
def test_a_topic_deleted_during_a_call_is_unknown(house, monkeypatch, step, call) -> None:
    house.broker.create_topic("t", config={"retention.bytes": 1})
    fill(house, b"old")
    method = getattr(PartitionLog, step)

    def deleted_meanwhile(log: PartitionLog, *args: object) -> object:
        monkeypatch.undo()
        found = method(log, *args) if step == "segments" else None
        house.broker.delete_topic("t")
        return found or method(log, *args)

    monkeypatch.setattr(PartitionLog, step, deleted_meanwhile)
    with pytest.raises(UnknownTopic):
        call(house.broker)


@pytest.mark.parametrize(
    "look_up",
    [
        lambda partition: partition.offset_for_timestamp(0),
        lambda partition: partition.try_read(2, max_bytes=1) or partition.read(2, max_bytes=1),
        lambda partition: partition.try_read(4, max_bytes=1) or partition.read(4, max_bytes=1),
        lambda partition: open_segment(partition, 0),
        lambda partition: open_segment(partition, partition.log.active_base_offset),
        lambda partition: list(iter_segments(partition)),
    ],
    ids=["time", "read", "read of the active", "segment", "active segment", "list"],
)
@pytest.mark.parametrize("again", [True, False], ids=["re-created", "deleted"])
def test_a_lookup_during_a_deletion_raises_unknown_topic(
    house, monkeypatch, look_up, again
) -> None:
    """The files of the next topic have the same names."""
    house.broker.create_topic("t", config=ON_DISK)
    fill(house, b"old")
    old = house.broker.partition("t", 0)

    def delete_meanwhile(path: Path | str) -> OpenFile:
        monkeypatch.undo()
        house.broker.delete_topic("t")
        if again:
            house.broker.create_topic("t")
            house.produce("t", [b"another" * 100])
        return OpenFile(path)

    for room in (open_files, segment_listing):
        monkeypatch.setattr(room, "OpenFile", delete_meanwhile)
    with pytest.raises(UnknownTopic):
        look_up(old)


def test_a_read_during_a_deletion_leaves_no_open_file_for_the_next_topic(
    house, monkeypatch
) -> None:
    house.broker.create_topic("t", config=ON_DISK)
    fill(house, b"old")
    old = house.broker.partition("t", 0)
    forget = OpenFiles.invalidate_folder

    def read_once_more(files: OpenFiles, folder: Path) -> None:
        forget(files, folder)
        monkeypatch.undo()
        assert old.log.read(0, max_bytes=1 << 20).slices

    monkeypatch.setattr(OpenFiles, "invalidate_folder", read_once_more)
    house.broker.delete_topic("t")
    with pytest.raises(UnknownTopic):
        old.read(0, max_bytes=1)
    house.broker.create_topic("t", config=ON_DISK)
    fill(house, b"new")
    assert [record.value[:3] for record in house.records("t")] == [b"new"] * 5


def test_a_failed_deletion_blocks_no_other(house, monkeypatch) -> None:
    for name in ("a-fails", "b-goes"):
        house.broker.create_topic(name)
    house.stop_copying()
    house.broker.background.deleting.stop(10)
    assert house.broker.background.copier.wait_until_idle(
        timeout_s=20
    )  # a claim in progress delays a deletion
    for name in ("a-fails", "b-goes"):
        house.broker.delete_topic(name)
    delete = house.broker.bucket.delete_topic

    def failing(record) -> None:
        if record.name == "a-fails":
            raise ManifestConflict("conflicts in a row")
        delete(record)

    monkeypatch.setattr(house.broker.bucket, "delete_topic", failing)
    with pytest.raises(ManifestConflict):
        house.broker.background.deletion_round()
    assert [record.name for record in house.broker.registry.deleted()] == ["a-fails"]


@pytest.mark.parametrize("restarted", [False, True])
def test_a_deleted_topic_with_corrupt_metadata_blocks_nothing(
    house, monkeypatch, restarted
) -> None:
    for name in ("rotten", "whole"):
        house.broker.create_topic(name, config={"segment.bytes": 4096})
    house.produce("whole", [b"x" * 100] * 5)
    folder = house.broker.folder.partition_folder("rotten", 0)
    house.broker.close()
    (folder / "partition.metadata").write_bytes(b"rotten")
    house.broker = house.open()
    with monkeypatch.context() as failing:
        if restarted:  # then the next start deletes it

            def refused(*_, **__):
                raise OSError(errno.EIO, "the disk refuses")

            house.broker.background.deleting.stop(10)
            failing.setattr("broker.deleted_folders.set_aside", refused)
        house.broker.delete_topic("rotten")
    if restarted:
        assert folder.exists()
        house.restart()
    house.offload("whole")
    house.broker.background.deletion_round()
    assert not list(folder.parent.glob("rotten-0*"))


def test_a_topic_object_that_cannot_be_written_blocks_no_upload(house, monkeypatch) -> None:
    house.stop_copying()
    write = TopicObjects.write

    def failing(objects, topic, *, check):
        if topic.name == "a-fails":
            raise ManifestConflict("conflicts in a row")
        return write(objects, topic, check=check)

    monkeypatch.setattr(TopicObjects, "write", failing)
    for name in ("a-fails", "b-goes"):
        house.broker.create_topic(name)
    house.claim()
    assert all(partition.cold.ownership.claimed for partition in house.broker.partitions())
    assert [one.name for one in house.broker.registry.live() if one.dirty] == ["a-fails"]


def test_files_left_below_the_log_start_by_a_crash_are_deleted(house) -> None:
    house.broker.create_topic("t", config=ON_DISK)
    fill(house, b"old")  # two to a segment
    assert house.broker.partition("t", 0).log.trim(4) == 4
    house.restart()  # as after a crash between checkpoint and deletion
    partition = house.broker.partition("t", 0)
    assert (partition.log.log_start_offset, partition.log.first_local_offset) == (4, 0)
    house.broker.background.janitor.maintain(partition)
    assert partition.log.first_local_offset == 4


def test_a_timestamp_lookup_is_repeated_if_its_segment_was_trimmed(house, monkeypatch) -> None:
    house.broker.create_topic("t", config=ON_DISK)
    fill(house, b"old")
    opened = OpenFiles.open

    def trimmed_meanwhile(files: OpenFiles, path: str) -> OpenFile:
        monkeypatch.undo()
        house.broker.trim("t", 0, 4)
        return opened(files, path)

    monkeypatch.setattr(OpenFiles, "open", trimmed_meanwhile)
    assert house.broker.partition("t", 0).offset_for_timestamp(0) == (4, 0)


def test_a_file_that_cannot_be_deleted_does_not_block_retention(house, monkeypatch) -> None:
    house.broker.create_topic("t", config={"segment.bytes": 4096, "retention.ms": -1})
    for _ in range(20):
        house.produce("t", [b"x" * 100] * 10)
    house.offload()
    partition = house.broker.partition("t", 0)

    def refuse(**_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(partition.log, "reap", refuse)
    house.broker.alter_topic("t", config={"retention.bytes": 8192})
    house.broker.background.janitor.maintain(partition)
    assert partition.offsets().log_start_offset > 0


@pytest.fixture
def offloaded(house):
    """Segments of the topic `t` in the bucket, some below its log start."""
    house.broker.create_topic("t", config={"retention.ms": -1, "segment.bytes": 1024})
    for _ in range(10):
        house.produce("t", [b"x" * 100] * 10)
    house.offload()
    house.broker.trim("t", 0, 50)
    return house


def in_bucket(house) -> list[str]:
    bucket = house.root / "bucket"
    return [str(path.relative_to(bucket)) for path in bucket.rglob("*") if path.is_file()]


def test_a_commit_after_the_deletion_of_a_topic_leaves_nothing_in_the_bucket(offloaded) -> None:
    partition = offloaded.broker.partition("t", 0)
    offloaded.broker.delete_topic("t")
    offloaded.wait_for(lambda: not offloaded.broker.registry.deleted())
    for late in (lambda: partition.cold.trim(60), lambda: partition.cold.collect(NO_GRACE)):
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
        offloaded.broker.background.deletion_round()
    assert set(segments) <= set(in_bucket(offloaded))
    offloaded.broker.background.deletion_round()
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
            offloaded.broker.background.deletion_round()
            assert offloaded.broker.registry.deleted()
        return listed(prefix, **limits)

    monkeypatch.setattr(offloaded.store, "list", delete_meanwhile, raising=False)
    assert partition.cold.collect(NO_GRACE) > 0
    offloaded.broker.background.deletion_round()
    assert not offloaded.broker.registry.deleted()
    assert in_bucket(offloaded) == ["cluster.json"]


@pytest.mark.parametrize("by", ["the copier", "a repair"])
def test_a_deletion_waits_for_an_upload(house, monkeypatch, by) -> None:
    """Whatever it uploads at the end would never be deleted."""
    house.broker.create_topic("t")
    house.claim()
    house.stop_copying()
    house.broker.background.deleting.stop(10)
    put = house.store.put_file

    def delete_meanwhile(key, path, **options):
        monkeypatch.undo()
        house.broker.delete_topic("t")
        house.broker.background.deletion_round()
        return put(key, path, **options)

    house.produce("t", [b"v"])
    house.broker.partition("t", 0).log.roll()
    if by == "a repair":
        house.copy_sealed()
        (log_object,) = (house.root / "bucket").rglob("*.log")
        log_object.unlink()
    monkeypatch.setattr(house.store, "put_file", delete_meanwhile, raising=False)
    with pytest.raises(UnknownTopic):
        house.broker.repair("t", apply=True) if by == "a repair" else house.copy_sealed()
    assert house.broker.registry.deleted()
    house.broker.background.deletion_round()
    assert in_bucket(house) == ["cluster.json"]


def test_a_deletion_is_retried_if_the_store_keeps_the_objects(offloaded, monkeypatch) -> None:
    offloaded.broker.background.deleting.stop(10)
    offloaded.broker.delete_topic("t")
    monkeypatch.setattr(offloaded.store, "delete", lambda keys: None, raising=False)
    with pytest.raises(StoreUnavailable, match=r"/t/.*: still listed after the store deleted it"):
        offloaded.broker.background.deletion_round()
    monkeypatch.undo()
    offloaded.broker.background.deletion_round()
    assert not offloaded.broker.registry.deleted()
    assert in_bucket(offloaded) == ["cluster.json"]


def test_a_long_deletion_does_not_block_uploads(house, monkeypatch) -> None:
    """The deletion of a thousand partitions takes many minutes."""
    house.broker.create_topic("going")
    house.produce("going", [b"v"])
    house.offload("going")
    deleting, may_end = threading.Event(), threading.Event()
    delete = house.store.delete

    def delete_slowly(keys) -> None:
        deleting.set()
        assert may_end.wait(30)
        delete(keys)

    monkeypatch.setattr(house.store, "delete", delete_slowly, raising=False)
    house.broker.delete_topic("going")
    try:
        assert deleting.wait(20)
        house.broker.create_topic("t")
        house.produce("t", [b"v"])
        house.offload()
        assert not house.broker.registry.by_name("t").dirty
        assert house.broker.registry.deleted()
    finally:
        may_end.set()
    house.wait_for(lambda: not house.broker.registry.deleted())


def test_a_topic_being_deleted_is_not_published(house, monkeypatch) -> None:
    """One thread publishes topics to the bucket, another deletes them."""
    publishing, deleting, began_early = threading.Event(), threading.Event(), []
    write = TopicObjects.write

    def write_slowly(objects, topic, **options):
        if topic.deleted:
            deleting.set()
        else:
            publishing.set()
            began_early.append(deleting.wait(0.5))
        return write(objects, topic, **options)

    monkeypatch.setattr(TopicObjects, "write", write_slowly)
    topic_id = house.broker.create_topic("t").topic_id
    assert publishing.wait(20)
    house.broker.delete_topic("t")
    house.wait_for(lambda: not house.broker.registry.deleted())
    assert began_early == [False]
    assert TopicObjects(house.store).load("t", topic_id) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda broker: broker.delete_topic("t"),
        lambda broker: broker.alter_topic("t", config={"retention.ms": 1000}),
    ],
)
def test_a_refused_change_does_not_appear_after_a_restart(house, monkeypatch, change):
    """The new list of topics was already renamed into place when the folder sync failed."""
    house.broker.create_topic("t", config={"retention.ms": -1})
    house.fill(20)
    sync, left = durable_file.REAL_DISK.sync_folder, ["once"]
    ours = threading.current_thread()  # background threads sync this folder too

    def failing(path):
        if path.name == "tierlog" and left and threading.current_thread() is ours:
            raise OSError(errno.EIO, left.pop(), str(path))
        sync(path)

    with monkeypatch.context() as failed:
        failed.setattr(durable_file.REAL_DISK, "sync_folder", failing)
        with pytest.raises(OSError, match="once"):
            change(house.broker)
    house.fill(20)
    house.restart()
    assert house.broker.topic("t").config.retention_ms == -1
    assert len(house.records("t")) == 40
