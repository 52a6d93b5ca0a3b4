"""A sealed segment that rots before its upload is reported, and repaired without losing valid
batches or reusing an offset.
"""

import struct

import pytest

from tests.fakes.bad_sectors import cannot_read
from tests.fakes.damage import flip
from tests.integration.repair.test_verify import path_of
from tierlog.hot_tier.log_writer import Acks
from tierlog.record_format.errors import CorruptDataError, StoreUnavailable
from tierlog.record_format.topic_rules import MAX_NAME_LENGTH, MAX_PARTITIONS
from tierlog.repair.local_repair import unused_path
from tierlog.repair.repair import repair_topic
from tierlog.repair.verify import verify_topic

BATCHES, EACH = 10, 3


@pytest.fixture
def harness(harness):
    """`t-0`, not in the bucket: a sealed segment of offsets 0 to 29 in batches of three, and one of
    30 to 32.
    """
    harness.broker.create_topic("t", config={"retention.ms": -1})
    harness.stop_copying()
    for number in range(BATCHES):
        harness.produce("t", [b"%d-%d" % (number, n) for n in range(EACH)])
    harness.broker.partition("t", 0).upkeep.roll()
    harness.produce("t", [b"behind"] * EACH)
    harness.broker.partition("t", 0).upkeep.roll()
    return harness


def log_of(harness):
    return harness.root / "data" / "t-0" / f"{0:020d}.log"


def positions(harness):
    data, found = log_of(harness).read_bytes(), [0]
    while found[-1] < len(data):
        found.append(found[-1] + 12 + struct.unpack_from(">i", data, found[-1] + 8)[0])
    return found


def damage(harness, *patches):
    """Overwrite bytes of the log; `patches` are (position, bytes)."""
    data = bytearray(log_of(harness).read_bytes())
    for position, patch in patches:
        data[position : position + len(patch)] = patch
    log_of(harness).write_bytes(data)
    return bytes(data)


def repair(harness, **options):
    (step,) = repair_topic(harness.broker, "t", apply=True, **options)
    return step


def all_but(*batches):
    return [one for n in range(BATCHES + 1) if n not in batches for one in range(3 * n, 3 * n + 3)]


def corrupt_record(at):
    return [(at[4] + 70, b"\xff")], (4,)


def corrupt_length(at):
    return [(at[4] + 8, b"\0\0\1\0")], (4,)


def length_shorter_than_a_header(at):
    return [(at[0] + 8, b"\0\0\0\1")], (0,)


def offset_too_high(at):
    return [(at[4] + 7, b"\x0f")], (4,)  # 15 to 17 where 12 to 14 were


def offset_too_low(at):
    return [(at[4] + 7, b"\x01")], (4,)


def offset_too_low_after_a_lost_batch(at):
    return [(at[3] + 70, b"\xff"), (at[5] + 7, b"\x0d")], (3, 5)  # 13 to 15, not 15 to 17


def zeroed_batches(at):
    return [(at[4] + 30, bytes(at[6] - at[4]))], (4, 5, 6)


def corrupt_last_batch(at):
    return [(at[9] + 70, b"\xff")], (9,)


def all_batches_corrupt(at):
    return [(position + 62, b"\xff") for position in at[:-1]], tuple(range(10))


@pytest.mark.parametrize(
    "rot",
    [
        corrupt_record,
        corrupt_length,
        length_shorter_than_a_header,
        offset_too_high,
        offset_too_low,
        offset_too_low_after_a_lost_batch,
        zeroed_batches,
        corrupt_last_batch,
        all_batches_corrupt,
    ],
)
def test_only_corrupt_batches_are_dropped_and_offload_resumes(harness, rot):
    before = harness.records("t")
    patches, lost = rot(positions(harness))
    corrupt = damage(harness, *patches)
    partition = harness.broker.partition("t", 0)
    step = repair(harness, accept_loss=True)
    assert (step.action, step.done) == ("drop-batches", True), step
    remaining = harness.records("t")
    assert [one.offset for one in remaining] == all_but(*lost)
    assert remaining == [one for one in before if one.offset // 3 not in lost]
    assert (harness.broker.folder.damaged / "t-0-0" / log_of(harness).name).read_bytes() == corrupt
    harness.copy_sealed()
    assert partition.cold_end_offset == 33
    assert partition.manifest.compacted_before == 0
    assert verify_topic(harness.broker, "t", deep=True).ok
    assert repair_topic(harness.broker, "t", deep=True) == []
    partition.upkeep.delete_local(33)
    assert harness.records("t") == remaining
    assert harness.produce("t", [b"new"]).base_offset == 33
    harness.restart()
    assert [one.offset for one in harness.records("t")] == [*all_but(*lost), 33]


def unreachable():
    raise StoreUnavailable("down")


def test_corruption_is_reported_until_repaired(harness, monkeypatch):
    damage(harness, (positions(harness)[4] + 70, b"\xff"))
    harness.copy_sealed()
    assert harness.broker.partition("t", 0).cold_end_offset == 0
    (degraded,) = harness.broker.readiness().degraded
    assert "t-0" in degraded
    assert log_of(harness).name in degraded
    assert "storage repair --deep" in degraded
    assert harness.broker.readiness().reasons == [], "the partition is served"
    partition = harness.broker.partition("t", 0)
    with monkeypatch.context() as down:
        down.setattr(partition._cold, "resolve_failed_commit", unreachable)
        harness.copy_sealed()
    assert harness.broker.readiness().degraded == [degraded], "not checked yet"
    corrupt = log_of(harness).read_bytes()
    (step,) = repair_topic(harness.broker, "t")
    assert not repair(harness).done, "the loss must be accepted"
    assert "offsets 12 to 14 are lost, all others are kept; requires --accept-loss" in step.detail
    assert log_of(harness).read_bytes() == corrupt
    assert repair(harness, accept_loss=True).detail.endswith("all others are kept")
    harness.copy_sealed()
    assert harness.broker.readiness().degraded == []


@pytest.mark.parametrize(
    "remove",
    [
        lambda broker: broker.trim("t", 0, 33),
        lambda broker: broker.alter_topic("t", config={"remote.storage.enable": False}),
    ],
)
def test_corruption_is_not_reported_once_the_segment_need_not_be_uploaded(harness, remove):
    damage(harness, (positions(harness)[4] + 70, b"\xff"))
    partition, failures = harness.copy_sealed(), harness.broker.background.failures
    assert harness.broker.background.copier.blocked().keys() == {partition}
    assert failures.by_task()["offload"].failing == 1
    remove(harness.broker)
    harness.copy_sealed()
    assert harness.broker.readiness().degraded == []
    assert failures.by_task()["offload"] == (1, 0)


def test_a_batch_inside_a_record_is_not_taken_for_a_log_batch(harness):
    """After a corrupt length the next batch is searched for: a record may contain a valid batch."""
    data, at = log_of(harness).read_bytes(), positions(harness)
    partition = harness.broker.partition("t", 0)
    inner = bytearray(data[at[4] : at[5]])
    inner[7] = 34  # a good batch of offsets 34 to 36
    harness.produce("t", [bytes(inner)])
    harness.produce("t", [b"a"] * 3)
    partition.upkeep.roll()
    harness.produce("t", [b"b"])
    bad = log_of(harness).with_name(f"{33:020d}.log")
    patched = bytearray(bad.read_bytes())
    patched[8:12] = b"\0\0\1\0"
    bad.write_bytes(patched)
    harness.copy_sealed()
    assert repair(harness, accept_loss=True).done
    assert [one.value for one in harness.records("t", offset=33)] == [b"a", b"a", b"a", b"b"]


def test_a_corrupt_segment_that_was_uploaded_is_set_aside(harness):
    before = harness.records("t")
    harness.copy_sealed()
    damage(harness, (positions(harness)[4] + 70, b"\xff"))
    assert repair_topic(harness.broker, "t") == [], "only a deep check reads uploaded segments"
    assert repair(harness, deep=True).action == "set-aside"
    assert harness.broker.partition("t", 0).first_local_offset == 30
    assert harness.records("t") == before
    assert verify_topic(harness.broker, "t", deep=True).ok


def test_repairs_of_the_longest_partition_name_have_folders_of_their_own(tmp_path):
    wanted = tmp_path / f"{'t' * MAX_NAME_LENGTH}-{MAX_PARTITIONS - 1}-123456789"
    first = unused_path(wanted)
    first.mkdir()
    unused_path(wanted).mkdir()
    assert len(list(tmp_path.iterdir())) == 2


def test_a_corrupt_segment_before_unflushed_records_is_set_aside(harness):
    """The end of the segment is flushed first."""
    harness.broker.alter_topic("t", config={"segment.bytes": 1024, "flush.ms": 86_400_000})
    harness.produce("t", [b"flushed"])
    harness.produce("t", [b"of the next" * 100], acks=Acks.LEADER)
    log = harness.copy_sealed()._log
    assert (log.high_watermark, log.active_base_offset) == (34, 34)
    flip(log_of(harness).with_name(f"{33:020d}.log"), 70)
    assert repair(harness, deep=True).action == "set-aside"
    assert log.first_local_offset == 34
    assert verify_topic(harness.broker, "t", deep=True).ok


def test_a_segment_corrupt_in_both_tiers_is_kept(harness):
    harness.copy_sealed()
    (entry, _) = list(harness.broker.partition("t", 0).cold_entries(0))
    damage(harness, (positions(harness)[4] + 70, b"\xff"))
    path_of(harness, entry.log_key).write_bytes(log_of(harness).read_bytes())
    steps = [(one.action, one.done) for one in repair_topic(harness.broker, "t", deep=True)]
    assert steps == [("drop-batches", False), ("none", False)]


def test_setting_a_segment_aside_drops_no_earlier_segment_that_the_bucket_lacks(harness):
    harness.copy_sealed()
    (entry, _) = list(harness.broker.partition("t", 0).cold_entries(0))
    damage(harness, (positions(harness)[4] + 70, b"\xff"))
    path_of(harness, entry.log_key).write_bytes(log_of(harness).read_bytes())
    next_log = log_of(harness).with_name(f"{30:020d}.log")
    next_log.write_bytes(next_log.read_bytes()[:-1] + b"\xff")
    steps = repair_topic(harness.broker, "t", deep=True, apply=True)
    assert [one.action for one in steps] == ["drop-batches", "none", "none"]
    assert f"but not all of {log_of(harness).name}" in steps[-1].detail
    assert harness.broker.partition("t", 0).first_local_offset == 0


def test_a_compacted_topic_is_rehydrated_from_the_bucket(harness):
    harness.broker.alter_topic("t", config={"cleanup.policy": "compact"})
    before = harness.records("t")
    harness.copy_sealed()
    damage(harness, (positions(harness)[4] + 70, b"\xff"))
    assert repair(harness, deep=True).action == "set-aside"
    assert harness.broker.partition("t", 0).first_local_offset == 30
    harness.broker.background.compactor._rehydrate_all()
    assert harness.broker.partition("t", 0).first_local_offset == 0
    assert harness.records("t") == before
    assert repair_topic(harness.broker, "t", deep=True) == []


def test_only_corrupt_batches_of_a_local_topic_are_dropped(harness):
    harness.broker.alter_topic("t", config={"remote.storage.enable": False})
    harness.restart()
    assert not harness.broker.partition("t", 0).has_bucket
    damage(harness, (positions(harness)[4] + 70, b"\xff"))
    with pytest.raises(CorruptDataError):
        harness.records("t")
    assert not repair(harness, deep=True).done, "the loss must be accepted"
    assert repair(harness, deep=True, accept_loss=True).action == "drop-batches"
    assert [one.offset for one in harness.records("t")] == all_but(4)
    assert verify_topic(harness.broker, "t", deep=True).ok


@pytest.mark.parametrize("in_bucket", [True, False])
def test_a_batch_in_a_bad_sector_is_corrupt(harness, monkeypatch, in_bucket):
    """A bad sector in the middle of the fifth batch."""
    harness.broker.create_topic("u", config={"retention.ms": -1})
    for number in range(BATCHES):
        harness.produce("u", [b"%d" % number * 3000] * EACH)
    partition = harness.broker.partition("u", 0)
    partition.upkeep.roll()
    if in_bucket:
        harness.copy_sealed()
    before, path = harness.records("u"), partition.local_segments()[0].path
    written = path.read_bytes()
    with monkeypatch.context() as disk:
        bad = range(10 * 4096, 11 * 4096)
        cannot_read(disk, path, kept=harness.root / "kept", where=bad)
        (step,) = repair_topic(harness.broker, "u", apply=True, deep=True, accept_loss=True)
        assert step.action == ("set-aside" if in_bucket else "drop-batches"), step
        lost = () if in_bucket else range(12, 15)
        assert harness.records("u") == [one for one in before if one.offset not in lost]
    (aside,) = (harness.root / "data" / "tierlog" / "damaged").glob(f"u-0-*/{path.name}")
    evidence = bytearray(written)
    evidence[bad.start : bad.stop] = bytes(4096)
    assert aside.read_bytes() == evidence
