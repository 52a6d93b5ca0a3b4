"""A broker is made out of the bucket alone, and of what an old disk still has."""

import errno
import shutil
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import pytest

from broker.broker import Broker
from broker.data_folder import HIGH_WATERMARKS, RECOVERY_POINTS
from broker.groups.requests import NewOffset
from broker.ownership import take_over
from broker.ownership.ownership import Ownership
from broker.repair import restore as restoring
from broker.repair import restore_tail
from broker.repair.restore import RestoreOptions, restore
from broker.repair.verify import verify_bucket
from cold_tier.open import open_store
from hot_tier import closed_log
from hot_tier.closed_log import first_batch_at
from hot_tier.disk import Disk
from hot_tier.file_names import LOG, path_of
from manifest.topic_objects import TopicObjects
from record_format.consumer_offsets import TOPIC as OFFSETS_TOPIC
from record_format.encode import encode_batch
from record_format.errors import ConfigurationError, CorruptBatch, FencedError, MissingObject
from tests.fakes.compacted_topics import put
from tests.fakes.damage import flip
from tests.fakes.house import House, tidy
from tests.fakes.small_disk import no_room, read_only, small_disk
from tests.integration.broker.test_adopt import copied

CONFIG = {"segment.bytes": 4096, "retention.ms": -1, "local.retention.bytes": 8192}
GAP = 1_000_000


def store_of(house):
    return open_store(f"file://{house.root / 'bucket'}")


def topic_id_of(house):
    return house.broker.topic("t").record.topic_id


def one_segment_of(house):
    """Put the log of the first partition into one segment; its folder."""
    folder = house.root / "data" / "t-0"
    whole = b"".join(log.read_bytes() for log in sorted(folder.glob("*.log")))
    for path in folder.glob("0*"):
        path.unlink()
    log = path_of(folder, 0, LOG)
    log.write_bytes(whole)
    return log


class Restored(House):
    """A broker on a folder that a restore made, on the same bucket."""

    def __init__(self, root, original, *, tail=None, start=True):
        self.root = root
        root.mkdir()
        (root / "bucket").symlink_to(original.root / "bucket")
        options = RestoreOptions(data_dir=root / "data", gap=GAP, clock=lambda: 0, tail=tail)
        self.report = restore(store_of(original), options)
        self.broker = self.open() if start else None


@pytest.fixture
def lost(house):
    """80 records in the bucket of partition 0, 25 more on disk alone; none of partition 1."""
    house.broker.create_topic("t", partitions=2, config=CONFIG)
    house.fill(80)
    house.offload()
    house.fill(20, mark=b"tail")
    house.broker.background.checkpoints.save()
    house.broker.close()
    return house


@pytest.fixture
def opened():
    """Brokers to close at the end."""
    houses = []
    yield houses
    for house in houses:
        if house.broker is not None:
            house.broker.close()


def test_the_bucket_alone_gives_every_record_under_its_offset(lost, tmp_path, opened):
    lost.broker = lost.open()
    before = lost.records("t")
    description = lost.broker.topic("t").describe()
    lost.claim()
    epoch = lost.broker.partition("t", 0).offsets().leader_epoch
    lost.broker.close()
    shutil.rmtree(lost.root / "data")
    new = Restored(tmp_path / "new", lost)
    opened.append(new)
    assert new.records("t") == before[:80]
    now = new.broker.topic("t").describe()
    assert (now.topic_id, now.config) == (description.topic_id, description.config)
    assert len(now.partitions) == 2
    assert new.broker.folder.cluster_id
    assert new.broker.partition("t", 0).offsets().leader_epoch > epoch
    assert not take_over.marker_path(new.root / "data").exists()


def test_no_offset_is_used_twice_and_readers_step_over_the_gap(lost, tmp_path, opened):
    new = Restored(tmp_path / "new", lost)
    opened.append(new)
    assert new.produce("t", [b"after"]).base_offset == 80 + GAP
    assert new.produce("t", [b"first of all"], partition=1).base_offset == GAP
    records = new.records("t")
    assert [record.offset for record in records] == [*range(80), 80 + GAP]
    new.offload()
    cold = new.broker.partition("t", 0).cold
    assert [tuple(g for g in (gap.start_offset, gap.end_offset)) for gap in cold.manifest.gaps] == [
        (80, 80 + GAP)
    ]
    assert new.records("t") == records
    assert [record.offset for record in new.records("t", partition=1)] == [GAP]
    new.restart()
    assert new.produce("t", [b"again"]).base_offset == 81 + GAP
    new.offload()
    assert new.broker.verify("t", deep=True).ok


def test_of_two_restores_that_find_no_manifest_the_later_goes_on_above_the_other(
    house, tmp_path, monkeypatch, opened
):
    house.stop_copying()
    house.broker.create_topic("t", config=CONFIG)
    house.broker.bucket.publish_topics(house.broker.registry)
    house.broker.close()
    assert not list((house.root / "bucket").glob("topics/t/*/0/manifest/*"))
    other = Restored(tmp_path / "other", house, start=False)
    for _ in range(3):  # with the old folder's epochs its claim is the higher one
        house.open(down=True, store_start_timeout_ms=200).close()
    later = Restored(tmp_path / "later", house, start=False, tail=house.root / "data")
    taking, begun = Ownership.take_over, []

    def overtaken(ownership, seen, **how):
        begun.append(seen)
        if len(begun) == 1:
            other.broker = other.open()
            other.fill(30)
            other.offload()
            other.broker.close()
        return taking(ownership, seen, **how)

    monkeypatch.setattr(Ownership, "take_over", overtaken)
    later.broker = later.open()
    opened.append(later)
    assert later.produce("t", [b"after"]).base_offset == GAP + 30 + GAP
    assert len(later.records("t", offset=GAP)) == 31


def test_the_zombie_is_fenced_and_nothing_that_a_manifest_names_is_lost(lost, tmp_path, opened):
    lost.broker = lost.open()
    lost.offload()
    new = Restored(tmp_path / "new", lost, start=False)
    opened.append(new)
    lost.fill(20, mark=b"zombie")
    lost.offload()  # it is alive, and went on between the restore and the first start
    new.broker = new.open()
    assert len(new.records("t")) == 120
    named = {key for entry in new.broker.partition("t", 0).cold.entries(0) for key in entry.keys}
    lost.produce("t", [b"not seen yet"])
    lost.broker.partition("t", 0).log.roll()
    lost.claim()
    with pytest.raises(FencedError, match="took the partition over; `tierlog serve --take-over`"):
        lost.produce("t", [b"too late"])
    there = {str(p.relative_to(lost.root / "bucket")) for p in (lost.root / "bucket").rglob("*")}
    assert named <= there
    assert new.produce("t", [b"new"]).base_offset == 120 + GAP
    new.offload()
    assert new.broker.verify("t", deep=True).ok
    lost.restart()
    lost.claim()
    assert lost.broker.partition("t", 0).leadership_lost


def test_a_zombie_deletes_and_changes_nothing_of_the_new_owners(lost, tmp_path, opened):
    """It has not noticed yet that it lost the partitions, as one that stood still has not."""
    lost.broker = lost.open(fence_check_ms=10**9)
    lost.claim()
    new = Restored(tmp_path / "new", lost)
    opened.append(new)
    new.broker.alter_topic("t", config={"retention.ms": 10**12}, partitions=3)
    new.claim()
    lost.broker.alter_topic("t", config={"retention.ms": 1000})
    lost.claim()
    assert TopicObjects(store_of(new)).load("t", topic_id_of(new)).partitions == 3
    lost.broker.delete_topic("t")
    lost.wait_for(lambda: not lost.broker.registry.deleted())
    there = TopicObjects(store_of(new)).load("t", topic_id_of(new))
    assert (there.deleted, there.config["retention.ms"]) == (False, 10**12)
    assert new.broker.verify("t", deep=True).ok


def test_a_fenced_broker_refuses_to_delete_or_alter(lost, tmp_path, opened):
    lost.broker = lost.open()
    lost.claim()
    opened.append(Restored(tmp_path / "new", lost))
    lost.broker.background.fence_checker.run_round()
    with pytest.raises(FencedError):
        lost.broker.alter_topic("t", config={"retention.ms": 1000})
    with pytest.raises(FencedError):
        lost.broker.delete_topic("t")
    assert lost.broker.topic("t").config.retention_ms == -1


def test_the_former_owner_may_take_over_again_and_its_tail_is_set_apart(lost, tmp_path, opened):
    new = Restored(tmp_path / "new", lost)
    new.produce("t", [b"new"])
    new.offload()
    new.broker.close()
    lost.broker = lost.open(take_over=True)
    assert [one.offset for one in lost.records("t")] == [*range(80), 80 + GAP]
    (folder,) = (lost.root / "data").glob("t-0.diverged-*")
    assert list(folder.glob("*80.log"))


def test_a_tail_is_taken_over_and_needs_no_gap(lost, tmp_path, opened):
    lost.broker = lost.open()
    before = lost.records("t")
    lost.broker.close()
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    opened.append(new)
    (first, _) = new.report.partitions
    assert (first.tail.whole, first.tail.start_offset, first.tail.end_offset) == (True, 80, 100)
    assert new.records("t") == before
    assert new.produce("t", [b"next"]).base_offset == 100
    assert new.produce("t", [b"first"], partition=1).base_offset == 0
    new.offload()
    assert new.broker.verify("t", deep=True).ok
    assert new.broker.partition("t", 0).cold.manifest.gaps == ()
    new.restart()
    assert len(new.records("t")) == 101


def test_a_tail_within_a_segment_is_taken_from_the_buckets_end_on(lost, tmp_path, opened):
    """The bucket ends where no local segment begins: a copy of the folder rolled elsewhere."""
    old = tmp_path / "old"
    shutil.copytree(lost.root / "data", old)
    lost.broker = lost.open()
    log = lost.broker.partition("t", 0).log
    (active,) = [view.base_offset for view in log.segments() if view.active]
    lost.broker.close()
    assert active == 80
    source, bases = old / "t-0", restore_tail.closed_log.base_offsets(old / "t-0")
    before, last = bases[-2], bases[-1]
    joined = source / f"{before:020d}.log"
    joined.write_bytes(joined.read_bytes() + (source / f"{last:020d}.log").read_bytes())
    for path in source.glob(f"{last:020d}.*"):
        path.unlink()
    new = Restored(tmp_path / "new", lost, tail=old)
    opened.append(new)
    assert new.report.partitions[0].tail.end_offset == 100
    assert [record.offset for record in new.records("t")] == list(range(100))


def test_a_tail_of_a_folder_that_another_owner_came_after_is_left(lost, tmp_path, opened):
    old = tmp_path / "old"
    shutil.copytree(lost.root / "data", old)
    lost.broker = lost.open()
    lost.fill(10, mark=b"later")
    lost.offload()
    lost.broker.close()
    new = Restored(tmp_path / "new", lost, tail=old)
    opened.append(new)
    tail = new.report.partitions[0].tail
    assert not tail.whole
    assert "another owner came after it" in tail.detail
    assert new.produce("t", [b"x"]).base_offset == 110 + GAP


def test_a_tail_whose_folder_went_on_after_it_was_taken_is_set_apart(lost, tmp_path, opened):
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data", start=False)
    opened.append(new)
    lost.broker = lost.open()
    lost.fill(20, mark=b"zombie")
    lost.offload()
    lost.broker.close()
    new.broker = new.open()
    assert [record.offset for record in new.records("t")] == list(range(120))
    assert new.produce("t", [b"x"]).base_offset == 120 + GAP


def last_log(folder):
    return max((folder / "t-0").glob("*.log"))


def rot(folder):
    """In the midst of the tail."""
    last = last_log(folder)
    flip(last, last.stat().st_size // 2)


def lose_the_last_segment(folder):
    last_log(folder).unlink()


def flip_a_byte_past_the_checkpoints(folder):
    for checkpoint in (RECOVERY_POINTS, HIGH_WATERMARKS):
        (folder / checkpoint).unlink()
    rot(folder)


@pytest.mark.parametrize(
    ("harm", "kept", "words"),
    [
        (lose_the_last_segment, 80, "it ends at offset 80, but had 100"),
        (flip_a_byte_past_the_checkpoints, 90, "10 offsets copied; a gap follows"),
    ],
)
def test_a_tail_that_may_lack_what_was_acknowledged_is_followed_by_a_gap(
    lost, tmp_path, opened, harm, kept, words
):
    harm(lost.root / "data")
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    opened.append(new)
    tail = new.report.partitions[0].tail
    assert (tail.whole, tail.end_offset) == (False, kept)
    assert words in tail.detail
    assert [record.offset for record in new.records("t")] == list(range(kept))
    assert new.produce("t", [b"x"]).base_offset == kept + GAP
    assert new.broker.verify("t", deep=True).ok


@pytest.mark.parametrize("was_whole", [True, False])
def test_a_tail_that_rots_before_the_first_start_is_cut_only_where_the_loss_is_accepted(
    lost, tmp_path, opened, was_whole
):
    if not was_whole:
        lost.broker = lost.open()
        lost.fill(20, mark=b"tail")
        lost.broker.partition("t", 0).log.roll()
        lost.fill(10, mark=b"lost")
        lost.broker.close()
        lose_the_last_segment(lost.root / "data")
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data", start=False)
    opened.append(new)
    tail = new.report.partitions[0].tail
    assert tail.whole is was_whole
    rot(new.root / "data")
    new.broker = new.open()
    with pytest.raises(
        CorruptBatch, match=f"below offset {tail.end_offset + 10 * (not was_whole)}"
    ):
        new.broker.partition("t", 0)
    (step,) = [one for one in new.broker.repair("t", apply=True, accept_loss=True) if one.done]
    assert step.action == "cut"
    kept = new.records("t")[-1].offset + 1
    assert 80 < kept < tail.end_offset
    assert new.produce("t", [b"next"]).base_offset == (kept if was_whole else kept + GAP)
    new.offload()
    assert new.broker.verify("t", deep=True).ok
    assert not take_over.marker_path(new.root / "data").exists()
    new.restart()
    assert len(new.records("t")) == kept + 1


def test_a_tail_that_loses_a_file_before_the_first_start_is_followed_by_a_gap(
    lost, tmp_path, opened
):
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data", start=False)
    opened.append(new)
    lose_the_last_segment(new.root / "data")
    new.broker = new.open()
    assert new.produce("t", [b"next"]).base_offset == 80 + GAP
    new.offload()
    assert new.broker.verify("t", deep=True).ok


@pytest.fixture
def on_disk_alone(house):
    """100 records, in segments of ten, of a topic that the bucket has nothing of."""
    house.broker.create_topic("t", config={**CONFIG, "remote.storage.enable": False})
    for _ in range(10):
        house.fill(10)
        house.broker.partition("t", 0).log.roll()
    house.broker.background.checkpoints.save()
    house.claim()
    return house


def test_a_tail_that_ends_too_soon_is_refused_where_no_gap_can_follow(
    on_disk_alone, tmp_path, opened
):
    on_disk_alone.broker.close()
    for _ in range(2):  # the last is empty
        lose_the_last_segment(on_disk_alone.root / "data")
    new = Restored(tmp_path / "new", on_disk_alone, tail=on_disk_alone.root / "data")
    opened.append(new)
    tail = new.report.partitions[0].tail
    assert "no gap follows: it ends at offset 90, but had 100" in tail.detail
    with pytest.raises(CorruptBatch, match="it had reached offset 100"):
        new.broker.partition("t", 0)


@pytest.mark.parametrize("has_bucket", [False, True])
def test_what_was_trimmed_stays_so_with_the_tail(house, tmp_path, opened, request, has_bucket):
    if has_bucket:
        house.broker.create_topic("t", config=CONFIG)
        house.fill(100)
        house.offload()
        house.set_down(True)
    else:
        request.getfixturevalue("on_disk_alone")
    house.broker.trim("t", 0, 55)
    house.broker.close()
    new = Restored(tmp_path / "new", house, tail=house.root / "data")
    opened.append(new)
    assert new.broker.partition("t", 0).offsets().log_start_offset == 55
    assert [one.offset for one in new.records("t", offset=55)] == list(range(55, 100))
    new.offload()
    assert new.broker.verify("t", deep=True).ok


def test_a_tail_that_begins_where_a_trim_past_the_buckets_end_did_is_taken(lost, tmp_path, opened):
    lost.broker = lost.open(down=True, store_start_timeout_ms=200)
    lost.broker.partition("t", 0).log.roll()
    lost.fill(10, mark=b"tail")
    lost.broker.trim("t", 0, 100)
    assert lost.broker.partition("t", 0).log.first_local_offset == 100
    lost.broker.close()
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    opened.append(new)
    assert new.report.partitions[0].tail.whole
    assert [one.offset for one in new.records("t", offset=100)] == list(range(100, 110))
    assert new.produce("t", [b"next"]).base_offset == 110
    new.offload()
    assert new.broker.verify("t", deep=True).ok


def test_a_gap_is_known_also_once_remote_storage_was_turned_off(lost, tmp_path, opened):
    """Of a partition that has nothing else in the bucket."""
    new = Restored(tmp_path / "new", lost)
    opened.append(new)
    new.produce("t", [b"after"], partition=1)
    new.broker.trim("t", 0, new.broker.partition("t", 0).offsets().high_watermark)
    new.broker.alter_topic("t", config={"remote.storage.enable": False})
    for _ in range(2):
        assert [one.offset for one in new.records("t", partition=1)] == [GAP]
        assert new.broker.verify("t", deep=True).ok
        new.restart()


def test_no_offset_is_given_again_once_remote_storage_was_turned_off(house, tmp_path, opened):
    """Nothing is in the bucket any more but the manifest, which knows how far the log had come."""
    house.broker.create_topic("t", config=CONFIG)
    house.fill(20)
    house.offload()
    house.broker.trim("t", 0, 20)
    house.broker.alter_topic("t", config={"remote.storage.enable": False})
    house.wait_for(lambda: not house.broker.registry.by_name("t").dirty)
    house.broker.close()
    new = Restored(tmp_path / "new", house)
    opened.append(new)
    for turn in range(2):
        assert new.produce("t", [b"next"]).base_offset == 20 + GAP + turn
        new.restart()


def test_a_tail_is_whole_also_where_a_file_that_nobody_needs_is_spoilt(lost, tmp_path):
    (lost.root / "data" / HIGH_WATERMARKS).write_bytes(b"rotten")
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data", start=False)
    assert [one.tail.whole for one in new.report.partitions] == [True, True]


def test_a_tail_out_of_an_older_copy_is_followed_by_a_gap(house, tmp_path, opened):
    """It knows the epoch in force, and not all that was written under it."""
    house.broker.create_topic("t", config=CONFIG)
    house.fill(80)
    house.offload()
    older = tmp_path / "older"
    shutil.copytree(house.root / "data", older)
    house.fill(80)
    house.offload()
    house.fill(10, mark=b"acknowledged")
    house.broker.close()
    new = Restored(tmp_path / "new", house, tail=older)
    opened.append(new)
    assert "it ends at offset 80, but had 160" in new.report.partitions[0].tail.detail
    assert new.produce("t", [b"x"]).base_offset == 160 + GAP


def test_what_an_older_copy_had_still_to_tell_the_bucket_is_left(house, tmp_path, opened):
    house.broker.create_topic("t", config=CONFIG)
    house.fill(40)
    house.offload()
    house.set_down(True)
    house.broker.alter_topic("t", config={"retention.ms": 3_600_000_001})
    older = tmp_path / "older"
    shutil.copytree(house.root / "data", older)
    house.set_down(False)
    house.broker.alter_topic("t", config={"retention.ms": 3_600_000_002})
    house.claim()
    assert not house.broker.registry.by_name("t").dirty
    for _ in range(5):
        house.fill(10)
        house.offload()
    house.broker.close()
    new = Restored(tmp_path / "new", house, tail=older)
    opened.append(new)
    assert new.broker.topic("t").config.retention_ms == 3_600_000_002


def test_a_partition_whose_manifests_were_lost_is_not_begun_anew_over_its_segments(
    lost, tmp_path, opened
):
    """They would be garbage to a first manifest."""
    (manifests,) = (lost.root / "bucket").glob("topics/t/*/0/manifest")
    shutil.copytree(manifests, tmp_path / "kept")
    shutil.rmtree(manifests)
    store = store_of(lost)
    (problem,) = verify_bucket(
        store, TopicObjects(store).find("t"), deep=False, clock=lambda: 0
    ).problems
    assert problem.kind == "manifest-missing"
    report = restore(store, RestoreOptions(tmp_path / "other", GAP, lambda: 0))
    (left,) = [one for one in report.others if one.name == "t"]
    assert "the manifest is missing although there are segments" in left.unreadable
    for note in (lost.root / "data" / "tierlog" / "manifests").iterdir():
        note.unlink()
    lost.broker = lost.open()
    with pytest.raises(MissingObject, match="although there are segments"):
        lost.broker.background.copier.claim(lost.broker.partition("t", 0))
    lost.broker.close()
    shutil.copytree(tmp_path / "kept", manifests)
    new = Restored(tmp_path / "new", lost)
    opened.append(new)
    assert len(new.records("t")) == 80


def test_a_topic_whose_object_was_lost_is_named(house, tmp_path):
    house.broker.create_topic("t", config=CONFIG)
    house.fill(40)
    house.offload()
    old_id = topic_id_of(house)
    house.broker.close()
    (objects,) = (house.root / "bucket").glob("topics/t/*/topic")
    shutil.rmtree(objects)
    report = restore(store_of(house), RestoreOptions(tmp_path / "other", GAP, lambda: 0))
    (left,) = [one for one in report.others if one.name == "t"]
    assert (left.topic_id, "the topic object, which" in left.unreadable) == (old_id, True)


def test_a_tail_that_is_bad_below_its_recovery_point_keeps_no_other_from_being_restored(
    lost, tmp_path, opened
):
    lost.broker = lost.open()
    lost.fill(20, mark=b"tail", partition=1)
    lost.broker.close()
    (tail,) = (lost.root / "data" / "t-0").glob("*80.log")
    flip(tail, tail.stat().st_size - 20)
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    opened.append(new)
    first, second = new.report.partitions
    assert (first.is_damaged, second.is_damaged, second.tail.whole) == (True, False, True)
    assert str(new.root / "data" / "t-0") in first.tail.detail
    with pytest.raises(CorruptBatch, match="below offset 100"):
        new.broker.partition("t", 0)
    assert new.broker.partition("t", 1).offsets().high_watermark == 20
    (step,) = [one for one in new.broker.repair("t", apply=True, accept_loss=True) if one.done]
    assert step.action == "cut"
    assert [record.offset for record in new.records("t")] == list(range(90))
    assert new.produce("t", [b"next"]).base_offset == 90 + GAP
    new.offload()
    assert new.broker.verify("t", deep=True).ok


def test_what_a_power_cut_left_of_a_tail_keeps_nothing_from_being_restored(lost, tmp_path, opened):
    """A segment that was not flushed yet."""
    (lost.root / "data" / "t-0" / f"{100:020d}.log").write_bytes(bytes(200))
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    opened.append(new)
    tail = new.report.partitions[0].tail
    assert (tail.whole, tail.damaged, tail.end_offset) == (False, False, 100)
    assert [record.offset for record in new.records("t")] == list(range(100))
    assert new.produce("t", [b"next"]).base_offset == 100 + GAP


@pytest.mark.parametrize("kept", [0, 5])
def test_a_tail_ends_where_a_power_cut_took_the_end_of_a_segment(lost, tmp_path, opened, kept):
    """It left the next one, and neither was flushed yet; the first may be as long as nothing."""
    folder = lost.root / "data" / "t-1"
    values, stamps = [b"x"] * 10, [1] * 10
    left = encode_batch(values[:kept], timestamps=stamps[:kept]) if kept else b""
    path_of(folder, 0, LOG).write_bytes(left)
    following = encode_batch(values, timestamps=stamps, base_offset=10)
    path_of(folder, 10, LOG).write_bytes(following)
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    opened.append(new)
    tail = new.report.partitions[1].tail
    assert (tail.whole, tail.damaged, tail.end_offset) == (False, False, kept)
    assert [one.offset for one in new.records("t", partition=1)] == list(range(kept))
    assert new.produce("t", [b"next"], partition=1).base_offset == kept + GAP


def test_a_tail_ends_with_the_bucket_where_a_power_cut_took_what_followed(lost, tmp_path, opened):
    """The segment reaches beyond the bucket's end, and no checkpoint says that this was flushed."""
    log = one_segment_of(lost)
    beyond = first_batch_at(log, 80)
    following = first_batch_at(log, beyond.next_offset)
    whole = log.read_bytes()
    log.write_bytes(whole[: beyond.position])
    path_of(log.parent, following.base_offset, LOG).write_bytes(whole[following.position :])
    for checkpoint in (RECOVERY_POINTS, HIGH_WATERMARKS):
        (lost.root / "data" / checkpoint).unlink()
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    opened.append(new)
    tail = new.report.partitions[0].tail
    assert (tail.whole, tail.damaged, tail.end_offset) == (False, False, 80)
    assert [record.offset for record in new.records("t")] == list(range(80))
    assert new.produce("t", [b"next"]).base_offset == 80 + GAP


def test_what_the_bucket_has_may_be_rotten_in_the_segment_that_the_tail_begins_in(
    lost, tmp_path, opened
):
    lost.broker = lost.open()
    lost.fill(20, mark=b"more")
    lost.broker.close()
    log = one_segment_of(lost)
    rotten = bytearray(log.read_bytes())
    rotten[16] = 0  # the magic of the first batch
    log.write_bytes(rotten)
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    opened.append(new)
    assert new.report.partitions[0].tail.whole
    assert [record.offset for record in new.records("t")] == list(range(120))


def test_a_tail_that_is_bad_in_the_midst_is_mended_where_it_was_taken_to(
    on_disk_alone, tmp_path, opened
):
    on_disk_alone.broker.close()
    bad = on_disk_alone.root / "data" / "t-0" / f"{30:020d}.log"
    bad.write_bytes(bad.read_bytes()[:-1] + b"\xff")
    new = Restored(tmp_path / "new", on_disk_alone, tail=on_disk_alone.root / "data")
    opened.append(new)
    assert new.report.partitions[0].is_damaged
    (step,) = new.broker.repair("t", deep=True, apply=True, accept_loss=True)
    assert (step.action, step.done) == ("drop-batches", True)
    kept = [record.offset for record in new.records("t")]
    assert (len(kept), kept[-1]) == (90, 99)


def test_what_compaction_left_out_of_a_tail_is_no_loss(house, tmp_path, opened):
    """Of a topic that is no longer compacted."""
    config = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0.01, "retention.ms": -1}
    config |= {"segment.bytes": 1400, "remote.storage.enable": False}
    house.broker.create_topic("t", config=config)
    for keys in ((b"once", b"again"), (b"more", b"again"), (b"last",)):
        for key in keys:
            put(house, "t", [(key, b"x" * 600)])
        house.broker.partition("t", 0).log.roll()
    house.broker.background.compactor.run_round()
    house.broker.alter_topic("t", config={"cleanup.policy": "delete"})
    house.claim()
    assert house.broker.verify("t", deep=True).ok
    house.broker.close()
    new = Restored(tmp_path / "new", house, tail=house.root / "data")
    opened.append(new)
    tidy(new.broker)
    assert [one.offset for one in new.records("t")] == [0, 2, 3, 4]
    assert new.broker.verify("t", deep=True).ok
    assert new.broker.readiness().degraded == []


def test_transactions_that_were_aborted_stay_so_in_a_tail(tmp_path, opened):
    house = House(copied(tmp_path, "txn-0", clean=True))
    opened.append(house)
    house.stop_copying()
    house.broker.alter_topic("txn", config={"remote.storage.enable": False})
    house.claim()
    end = house.broker.partition("txn", 0).offsets().high_watermark
    aborted = house.broker.partition("txn", 0).log.aborted_transactions(0, end)
    assert aborted
    house.broker.close()
    new = Restored(tmp_path / "new", house, tail=house.root / "data")
    opened.append(new)
    assert new.broker.partition("txn", 0).log.aborted_transactions(0, end) == aborted


def test_a_topic_that_the_bucket_was_never_told_of_comes_with_the_tail(lost, tmp_path, opened):
    lost.broker = lost.open(down=True)
    config = {"retention.ms": 10**12}
    topic_id = lost.broker.create_topic("new", partitions=2, config=config).topic_id
    lost.produce("new", [b"a", b"b"], partition=1, at=10**12)
    before = lost.records("new", partition=1)
    lost.broker.close()
    without = Restored(tmp_path / "without", lost, start=False)
    assert {one.topic for one in without.report.partitions} == {"t"}
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    opened.append(new)
    assert new.broker.topic("new").record.topic_id == topic_id
    assert new.broker.topic("new").config.retention_ms == 10**12
    assert new.records("new", partition=1) == before
    assert new.produce("new", [b"c"], partition=1).base_offset == 2
    new.claim()
    assert TopicObjects(store_of(new)).load("new", topic_id).partitions == 2
    assert new.broker.verify("new", deep=True).ok


def test_a_tail_of_which_compaction_took_the_front_has_no_hole(house, tmp_path, opened):
    """The first batch that is left lies above the bucket's end."""
    config = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0.01, "retention.ms": -1}
    house.broker.create_topic("t", config=config)
    put(house, "t", [(b"before", b"1")])
    house.offload()
    house.stop_copying()
    for number in range(3):
        put(house, "t", [(b"again", b"%d" % number)])
    put(house, "t", [(b"once", b"kept")])
    log = house.broker.partition("t", 0).log
    log.roll()
    put(house, "t", [(b"again", b"last")])
    log.roll()
    house.broker.background.compactor.run_round()
    assert [one.offset for one in house.records("t")] == [0, 4, 5]
    house.broker.close()
    new = Restored(tmp_path / "new", house, tail=house.root / "data")
    opened.append(new)
    assert [one.offset for one in new.records("t")] == [0, 4, 5]
    new.offload()
    assert new.broker.verify("t", deep=True).ok


def change_unseen(house):
    """While the store is down: more partitions, records in one, another configuration."""
    house.broker = house.open(down=True)
    house.broker.alter_topic("t", config={"retention.ms": 10**12}, partitions=4)
    house.fill(10, partition=3)
    house.broker.close()


def test_a_change_that_the_bucket_was_never_told_of_comes_with_the_tail(lost, tmp_path, opened):
    change_unseen(lost)
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    opened.append(new)
    assert len(new.broker.topic("t").describe().partitions) == 4
    assert new.broker.topic("t").config.retention_ms == 10**12
    assert len(new.records("t", partition=3)) == 10
    new.claim()
    assert TopicObjects(store_of(new)).load("t", topic_id_of(new)).partitions == 4


def test_a_change_by_a_folder_that_others_came_after_is_left(lost, tmp_path, opened):
    other = Restored(tmp_path / "other", lost)
    other.broker.alter_topic("t", config={"retention.ms": 10**11})
    other.claim()
    other.broker.close()
    change_unseen(lost)
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    opened.append(new)
    assert len(new.broker.topic("t").describe().partitions) == 2
    assert new.broker.topic("t").config.retention_ms == 10**11


def delete_unseen(house):
    """While the store is down."""
    house.broker = house.open(down=True)
    house.broker.delete_topic("t")


def test_a_deletion_that_the_bucket_was_never_told_of_comes_with_the_tail(lost, tmp_path, opened):
    delete_unseen(lost)
    lost.broker.create_topic("t", config=CONFIG)
    lost.produce("t", [b"of the next topic of the name"])
    lost.broker.close()
    topic_id = topic_id_of(lost)
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    opened.append(new)
    (other,) = new.report.others
    assert (other.name, other.deleted) == ("t", True)
    assert topic_id_of(new) == topic_id
    assert [one.value for one in new.records("t")] == [b"of the next topic of the name"]
    new.wait_for(lambda: not new.broker.registry.deleted())
    new.claim()
    assert list(TopicObjects(store_of(new)).scan()) == [("t", topic_id)]


def test_a_deletion_is_finished_also_where_the_topic_object_is_gone_already(lost, tmp_path, opened):
    topic_id = topic_id_of(lost)
    delete_unseen(lost)
    lost.broker.close()
    shutil.rmtree(lost.root / "bucket" / "topics" / "t" / topic_id / "topic")
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    opened.append(new)
    new.wait_for(lambda: not new.broker.registry.deleted())
    assert list(TopicObjects(store_of(new)).scan()) == []


def test_a_deletion_by_a_folder_that_others_came_after_is_left(lost, tmp_path, opened):
    other = Restored(tmp_path / "other", lost)
    other.claim()
    other.broker.close()
    delete_unseen(lost)
    lost.broker.close()
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    opened.append(new)
    assert new.report.others == []
    assert len(new.records("t")) == 80


def test_a_tail_of_another_cluster_is_refused(lost, tmp_path):
    other = House(tmp_path / "other")
    other.broker.close()
    with pytest.raises(ConfigurationError, match="belongs to cluster"):
        Restored(tmp_path / "new", lost, tail=other.root / "data")


def test_a_tail_that_a_broker_has_open_is_refused(lost, tmp_path):
    lost.broker = lost.open()
    with pytest.raises(ConfigurationError, match="in use"):
        Restored(tmp_path / "new", lost, tail=lost.root / "data")


@pytest.mark.parametrize("with_tail", [False, True])
def test_a_repeat_is_known_after_a_restore(lost, tmp_path, opened, with_tail):
    lost.broker = lost.open()
    first = lost.produce_idempotent(sequence=0)
    lost.offload()
    if with_tail:
        lost.fill(10)
    lost.broker.close()
    tail = lost.root / "data" if with_tail else None
    new = Restored(tmp_path / "new", lost, tail=tail)
    opened.append(new)
    again = new.produce_idempotent(sequence=0)
    assert (again.duplicate, again.base_offset) == (True, first.base_offset)
    assert not new.produce_idempotent(sequence=1).duplicate


@pytest.mark.parametrize("trimmed", ["to the end", "within a segment", "past a segment"])
def test_a_repeat_is_known_where_a_trim_left_nothing_in_the_bucket(lost, tmp_path, opened, trimmed):
    lost.broker = lost.open(down=trimmed == "past a segment", store_start_timeout_ms=200)
    first = lost.produce_idempotent(sequence=0)
    if trimmed == "past a segment":
        lost.broker.partition("t", 0).log.roll()
    else:
        lost.claim()
    if trimmed != "to the end":
        lost.fill(10)
    lost.broker.trim("t", 0, first.base_offset + 1)
    lost.broker.close()
    (lost.root / "data" / "t-0" / f"{111:020}.snapshot").unlink(missing_ok=True)  # of the stop
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data")
    opened.append(new)
    again = new.produce_idempotent(sequence=0)
    assert (again.duplicate, again.base_offset) == (True, first.base_offset)


@pytest.mark.parametrize("with_tail", [False, True])
def test_group_offsets_come_back(lost, tmp_path, opened, with_tail):
    lost.broker = lost.open()
    for offset in (5, 77):
        lost.broker.groups.commit("readers", [NewOffset("t", 0, offset)])
    if not with_tail:
        lost.offload(OFFSETS_TOPIC)
    lost.broker.close()
    new = Restored(tmp_path / "new", lost, tail=lost.root / "data" if with_tail else None)
    opened.append(new)
    assert [one.offset for one in new.broker.groups.group("readers")] == [77]
    new.broker.groups.commit("readers", [NewOffset("t", 0, 78)])
    new.offload(OFFSETS_TOPIC)
    new.restart()
    assert [one.offset for one in new.broker.groups.group("readers")] == [78]
    assert new.broker.verify(OFFSETS_TOPIC, deep=True).ok


def test_the_trimmed_start_is_restored(lost, tmp_path, opened):
    lost.broker = lost.open()
    lost.claim()
    lost.broker.trim("t", 0, 35)
    lost.broker.close()
    new = Restored(tmp_path / "new", lost)
    opened.append(new)
    assert new.broker.partition("t", 0).offsets().log_start_offset == 35
    assert new.records("t", offset=35)[0].offset <= 35
    new.restart()
    assert new.broker.partition("t", 0).offsets().log_start_offset == 35


def test_deleted_topics_are_reported_and_stay_deleted(lost, tmp_path, opened):
    store = store_of(lost)
    objects = restoring.TopicObjects(store)
    ((name, topic_id),) = objects.scan()
    there = objects.load(name, topic_id)
    objects.write(msgspec.structs.replace(there, deleted=True), check=lambda: None)
    new = Restored(tmp_path / "new", lost)
    opened.append(new)
    assert new.broker.list_topics() == []
    assert [(one.topic_id, one.deleted) for one in new.report.others] == [(topic_id, True)]


def test_a_topic_that_cannot_be_read_keeps_no_other_from_being_restored(lost, tmp_path, opened):
    """Nor is an older state, or an older topic of its name, taken in its place."""
    lost.broker = lost.open()
    ids = {name: lost.broker.create_topic(name).topic_id for name in ("bad-topic", "bad-manifest")}
    lost.broker.background.copier.run_round()
    lost.wait_for(lambda: all(one.cold.ownership.claimed for one in lost.broker.partitions()))
    lost.wait_for(lambda: not any(one.dirty for one in lost.broker.registry.live()))
    before = lost.records("t")
    lost.broker.close()
    objects = restoring.TopicObjects(store_of(lost))
    whole = objects.load("bad-topic", ids["bad-topic"])
    older = msgspec.structs.replace(whole, topic_id="older", created_ms=0)
    objects.write(older, check=lambda: None)
    topics = lost.root / "bucket" / "topics"
    for folder in (f"bad-topic/{ids['bad-topic']}/topic", "bad-manifest/*/0/manifest"):
        (newest,) = [max(one.iterdir()) for one in topics.glob(folder)]
        newest.write_bytes(newest.read_bytes().replace(b"crc32c", b"crc32x"))
    new = Restored(tmp_path / "new", lost)
    opened.append(new)
    unreadable = {one.topic_id for one in new.report.others if one.unreadable}
    assert unreadable == set(ids.values())
    assert [one.topic_id for one in new.report.others if not one.unreadable] == ["older"]
    assert [topic.name for topic in new.broker.list_topics()] == ["t"]
    assert new.records("t") == before[:80]


def test_the_newer_topic_of_a_name_is_restored_whatever_the_clock_said(
    house, tmp_path, opened, monkeypatch
):
    """The disk is lost before the bucket heard that the older one was deleted."""
    house.broker.create_topic("t", config=CONFIG)
    house.stop_copying()
    house.broker.background.deleting.stop(10)
    house.broker.bucket.publish_topics(house.broker.registry)
    monkeypatch.setattr(house.broker._topics, "_clock", lambda: 0)
    house.broker.delete_topic("t")
    house.broker.create_topic("t", config=CONFIG)
    house.broker.bucket.publish_topics(house.broker.registry)
    newer = topic_id_of(house)
    house.broker.close()
    new = Restored(tmp_path / "new", house)
    opened.append(new)
    assert topic_id_of(new) == newer


def test_a_folder_in_use_or_not_empty_and_a_bucket_of_nobody_are_refused(lost, tmp_path):
    store = store_of(lost)
    with pytest.raises(ConfigurationError, match="not empty"):
        restore(store, RestoreOptions(lost.root / "data", GAP, lambda: 0))
    empty = open_store(f"file://{tmp_path / 'empty'}")
    with pytest.raises(ConfigurationError, match="no cluster"):
        restore(empty, RestoreOptions(tmp_path / "x", GAP, lambda: 0))


class Crash(BaseException):
    pass


@pytest.fixture
def crash(monkeypatch):
    """A restore within it ends right before it would be done."""

    def dies(path, pending):
        raise Crash

    @contextmanager
    def crashes():
        with monkeypatch.context() as patched:
            patched.setattr(restoring, "write_marker", dies)
            with pytest.raises(Crash):
                yield

    return crashes


def test_an_interrupted_restore_may_be_repeated_on_the_same_folder(lost, tmp_path, crash):
    with crash():
        Restored(tmp_path / "new", lost, tail=lost.root / "data")
    options = RestoreOptions(tmp_path / "new" / "data", GAP, lambda: 0, lost.root / "data")
    restore(store_of(lost), options)
    with pytest.raises(ConfigurationError, match="not empty, it belongs to a broker: serve it"):
        restore(store_of(lost), options)


def test_the_folder_of_a_start_that_the_bucket_refused_is_restored_into(lost, tmp_path):
    settings = replace(lost.broker.settings, data_dir=tmp_path / "new")
    with pytest.raises(ConfigurationError, match="belongs to cluster"):
        Broker.open(settings, store=store_of(lost))
    assert (tmp_path / "new" / "meta.properties").exists()
    options = RestoreOptions(data_dir=tmp_path / "new", gap=GAP, clock=lambda: 0)
    restore(store_of(lost), options)
    broker = Broker.open(settings, store=store_of(lost))
    assert broker.partition("t", 0).log.log_end_offset == 80 + GAP
    broker.close()
    with pytest.raises(ConfigurationError, match="not empty, it belongs to a broker: serve it"):
        restore(store_of(lost), options)


def test_what_an_interrupted_restore_made_is_neither_served_nor_left_to_the_next(
    lost, tmp_path, opened, crash
):
    """The next takes no tail."""
    new = Restored.__new__(Restored)
    with crash():
        new.__init__(tmp_path / "new", lost, tail=lost.root / "data")
    with pytest.raises(ConfigurationError, match="a restore into it is incomplete: run"):
        new.open()
    restore(store_of(lost), RestoreOptions(new.root / "data", GAP, lambda: 0))
    assert not list((new.root / "data").glob("*/*.log"))
    opened.append(new)
    new.broker = new.open()
    assert [record.offset for record in new.records("t")] == list(range(80))
    assert new.produce("t", [b"next"]).base_offset == 80 + GAP


@pytest.mark.parametrize("call", ["open", "rename", "sync_folder"])
def test_a_restore_that_a_full_disk_broke_off_at_once_may_be_repeated(
    lost, tmp_path, monkeypatch, call
):
    with monkeypatch.context() as disk:
        disk.setattr(Disk, call, no_room)
        with pytest.raises(ConfigurationError, match=r"data folder .*new/data: .*No space left"):
            Restored(tmp_path / "new", lost)
    options = RestoreOptions(tmp_path / "new" / "data", GAP, lambda: 0)
    assert len(restore(store_of(lost), options).partitions) == 2


def test_a_disk_that_is_full_in_the_midst_of_a_tail_is_named_and_the_restore_repeated(
    lost, tmp_path
):
    with small_disk(tmp_path / "small") as disk:
        options = RestoreOptions(disk.path / "new", GAP, lambda: 0, lost.root / "data")
        copy_tail = closed_log.copy_tail

        def fills(*args):
            disk.fill()
            copy_tail(*args)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(closed_log, "copy_tail", fills)
            with pytest.raises(ConfigurationError, match=r"t-0/0*80\.log: No space left"):
                restore(store_of(lost), options)
        (disk.path / "ballast").unlink()
        first, _ = restore(store_of(lost), options).partitions
        assert (first.tail.whole, first.tail.end_offset) == (True, 100)


def test_a_tail_is_taken_off_a_disk_that_is_mounted_to_be_read_alone(lost, tmp_path):
    with read_only(lost.root / "data", tmp_path / "rescued") as old:
        options = RestoreOptions(tmp_path / "new", GAP, lambda: 0, old)
        first, _ = restore(store_of(lost), options).partitions
    assert (first.tail.whole, first.tail.end_offset) == (True, 100)


def test_the_first_start_after_a_restore_needs_the_store(lost, tmp_path, opened):
    new = Restored(tmp_path / "new", lost, start=False)
    with pytest.raises(ConfigurationError, match="take-over"):
        new.open(down=True, store_start_timeout_ms=200)
    new.broker = new.open()
    opened.append(new)
    assert len(new.records("t")) == 80


def test_planted_a_restore_without_a_gap_gives_offsets_twice(lost, tmp_path, opened, monkeypatch):
    monkeypatch.setattr(take_over.PendingTakeOver, "gap_over", lambda self, manifest: 0)
    new = Restored(tmp_path / "new", lost)
    opened.append(new)
    assert new.produce("t", [b"x"]).base_offset == 80, "an offset that the lost disk had given"


@pytest.mark.parametrize("renames", range(12))
def test_a_tail_has_the_keys_of_a_compaction_that_broke_off(
    house, tmp_path, opened, monkeypatch, renames
):
    """Between two renames of its swap, where the disk failed, or the broker died."""
    config = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0.01, "retention.ms": -1}
    house.broker.create_topic("t", config=config)
    put(house, "t", [(b"before", b"1")])
    house.offload()
    house.stop_copying()
    log = house.broker.partition("t", 0).log
    for number in range(3):
        put(house, "t", [(b"k%d" % number, b"kept"), (b"again", b"%d" % number)])
    log.roll()
    put(house, "t", [(b"again", b"last")])
    log.roll()
    put(house, "t", [(b"z", b"active")])
    before = latest_of(house)
    left = iter([True] * renames)

    def rename(disk, source, target):
        is_of_swap = source.suffix in (".swap", ".cleaned") or target.suffix == ".deleted"
        if is_of_swap and not next(left, False):
            raise OSError(errno.EIO, "the disk failed", str(source))
        source.replace(target)

    with monkeypatch.context() as failing:
        failing.setattr(Disk, "rename", rename)
        house.broker.background.compactor.run_round()
    house.broker.close()
    new = Restored(tmp_path / "new", house, tail=house.root / "data")
    opened.append(new)
    assert new.report.partitions[0].tail.whole
    assert latest_of(new) == before


def latest_of(house):
    return {record.key: (record.offset, record.value) for record in house.records("t")}
