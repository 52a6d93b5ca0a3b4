"""A folder takes a partition over: diverged records are set aside, referenced objects stay."""

import uuid

import msgspec
import pytest

from broker.bucket_state import BucketState
from broker.cold_log import ColdLog
from broker.ownership import take_over
from broker.ownership.take_over_plan import TakeOverPlan
from cold_tier.open import open_store
from hot_tier.log import PartitionLog
from hot_tier.log_config import LogConfig
from manifest.store import ManifestStore
from manifest.topic_objects import TopicObjects
from record_format.checkpoint_files import format_partition_metadata
from record_format.errors import ConfigurationError, FencedError, OutcomeUnknownError
from tests.fakes.compacted_topics import put
from tests.fakes.house import House, tidy
from tests.fakes.records import iter_records

CONFIG = {"segment.bytes": 4096, "retention.ms": -1}
GAP = 1000
TAKE_OVER = {"take_over": True, "restore_offset_gap": GAP}


class Crash(BaseException):
    """The process ends here."""


def die(*args, **kwargs):
    raise Crash


def crash_at(step, when):
    def crash(*args, **kwargs):
        if when == "after":
            step(*args, **kwargs)
        raise Crash

    return crash


@pytest.fixture
def diverged(house, tmp_path):
    """The original wrote 40 records that were not uploaded; a copy took its place and wrote 60."""
    house.broker.create_topic("t", config=CONFIG)
    house.fill(100, mark=b"both")
    house.offload()
    house.broker.close()
    copy = House(house.copy_to(tmp_path / "copy"))
    copy.fill(60, mark=b"copy")
    copy.offload()
    copy.broker.close()
    house.broker = house.open(down=True, store_start_timeout_ms=200)
    house.fill(40, mark=b"original")
    house.broker.close()
    yield house, copy
    copy.broker.close()


@pytest.fixture
def shared_tail(house, tmp_path):
    """A copy took the original's place with 40 records that were not uploaded, acknowledged 60
    more, uploaded nothing, and still runs; the original wrote 20.
    """
    house.broker.create_topic("t", config=CONFIG)
    house.fill(100, mark=b"both")
    house.offload()
    house.fill(40, mark=b"tail")
    house.broker.close()
    copy = House(house.copy_to(tmp_path / "copy"))
    copy.claim()
    copy.stop_copying()
    copy.fill(60, mark=b"copy")
    house.broker = house.open(down=True, store_start_timeout_ms=200)
    house.fill(20, mark=b"original")
    house.broker.close()
    yield house, copy
    copy.broker.close()


def gaps_of(house):
    manifest = house.broker.partition("t", 0).cold.manifest
    return [(gap.start_offset, gap.end_offset) for gap in manifest.gaps]


def assert_continues_above_the_gap(house, *, kept):
    """The next offset, reads across the gap, and the bucket agree on the gap."""
    assert gaps_of(house) == [(kept, kept + GAP)]
    before = house.records("t")
    assert [record.offset for record in before] == list(range(kept))
    assert house.produce("t", [b"after"]).base_offset == kept + GAP
    (after,) = house.records("t", offset=kept + 20)
    assert (after.offset, after.value) == (kept + GAP, b"after")
    house.offload()
    house.restart()
    assert house.records("t") == [*before, after]
    assert house.broker.verify("t", deep=True).ok


def diverged_folders(house):
    return sorted((house.root / "data").glob("*.diverged-*"))


def values_in(folder):
    logs = sorted(folder.glob("*.log"))
    return [record.value for log in logs for record in iter_records(log.read_bytes())]


def test_diverged_records_are_set_aside_and_the_log_continues_at_the_buckets_end(diverged):
    house, _ = diverged
    house.broker = house.open(take_over=True)
    records = house.records("t")
    assert [record.offset for record in records] == list(range(160))
    assert records[99].value.startswith(b"both")
    assert records[100].value.startswith(b"copy")
    (folder,) = diverged_folders(house)
    assert [value.split()[0] for value in values_in(folder)] == [b"original"] * 40
    assert (
        f"diverged records set aside by a take-over: {folder}" in house.broker.readiness().degraded
    )
    (reported,) = house.broker.storage_report().diverged
    assert (reported.folder, reported.size_bytes > 0) == (str(folder), True)
    house.fill(10, mark=b"after")
    house.offload()
    assert house.broker.verify("t", deep=True).ok


def test_epochs_of_diverged_records_are_not_in_the_history(diverged):
    """Otherwise an older copy of the folder would match its records with the bucket's."""
    house, _ = diverged
    for _ in range(2):
        house.open(down=True, store_start_timeout_ms=1).close()
    house.broker = house.open(take_over=True, restore_offset_gap=0)
    starts = house.broker.partition("t", 0).cold.manifest.epochs
    assert [one.start_offset for one in starts] == [0, 100, 160]


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param(format_partition_metadata(uuid.uuid4()), id="an earlier topic of the name"),
        pytest.param(b"rotten", id="unknown topic"),
    ],
)
def test_earlier_diverged_folders_are_not_overwritten(diverged, metadata):
    house, _ = diverged
    data, earlier = house.root / "data", []
    for epoch in range(4):
        folder = data / f"t-0.diverged-{epoch}"
        folder.mkdir()
        (folder / "partition.metadata").write_bytes(metadata)
        earlier += [folder / path.name for path in (data / "t-0").glob("*.log")]
    for path in earlier:
        path.write_bytes(b"earlier")
    house.broker = house.open(take_over=True)
    assert {path.read_bytes() for path in earlier} == {b"earlier"}
    (folder,) = (one for one in diverged_folders(house) if one not in {e.parent for e in earlier})
    assert [value.split()[0] for value in values_in(folder)] == [b"original"] * 40


def test_no_offset_that_the_former_owner_may_have_assigned_is_reused(diverged):
    house, copy = diverged
    copy.broker = copy.open()
    copy.fill(20, mark=b"never uploaded")
    house.broker = house.open(**TAKE_OVER)
    assert_continues_above_the_gap(house, kept=160)


def test_a_shared_tail_that_was_not_uploaded_is_kept(shared_tail):
    house, _ = shared_tail
    house.broker = house.open(**TAKE_OVER)
    assert house.records("t", offset=100)[0].value.startswith(b"tail")
    assert house.broker.partition("t", 0).cold.end_offset == 140 + GAP
    (folder,) = diverged_folders(house)
    assert [value.split()[0] for value in values_in(folder)] == [b"original"] * 20
    assert_continues_above_the_gap(house, kept=140)


@pytest.mark.parametrize("crashes", [False, True])
def test_producer_state_is_kept_above_the_gap(house, tmp_path, monkeypatch, crashes):
    house.broker.create_topic("t", config=CONFIG)
    house.fill(10, mark=b"both")
    house.offload()
    first = house.produce_idempotent(sequence=0)
    house.broker.close()
    copy = House(house.copy_to(tmp_path / "copy"))
    copy.claim()
    copy.broker.close()
    with monkeypatch.context() as patched:
        if crashes:  # when the log is emptied, before it has a snapshot
            patched.setattr(take_over.closed_log, "write_durably", die)
            with pytest.raises(Crash):
                house.open(**TAKE_OVER)
    house.broker = house.open(**TAKE_OVER)
    again = house.produce_idempotent(sequence=0)
    assert (again.duplicate, again.base_offset) == (True, first.base_offset)
    assert house.produce_idempotent(sequence=1).base_offset == first.base_offset + 1 + GAP


def test_a_trim_past_the_buckets_end_is_kept(shared_tail):
    house, _ = shared_tail
    house.broker = house.open(down=True, store_start_timeout_ms=200)
    house.broker.trim("t", 0, 115)
    house.restart(**TAKE_OVER)
    assert gaps_of(house) == [(140, 140 + GAP)]
    assert house.broker.partition("t", 0).offsets().log_start_offset == 115
    assert [one.offset for one in house.records("t", offset=115)][-25:] == list(range(115, 140))
    assert house.produce("t", [b"after"]).base_offset == 140 + GAP
    house.offload()
    assert house.broker.verify("t", deep=True).ok


@pytest.mark.parametrize(
    ("when", "room", "step"),
    [
        ("after", ColdLog, "upload"),
        ("before", ManifestStore, "confirm"),
        ("before", take_over.closed_log, "replace_with_empty"),
        ("after", take_over.closed_log, "replace_with_empty"),
        ("before", BucketState, "record_manifest"),
        ("before", take_over.PendingTakeOvers, "remove"),
    ],
)
def test_a_crash_while_taking_over_a_shared_tail_is_resumed(
    shared_tail, monkeypatch, room, step, when
):
    house, copy = shared_tail

    with monkeypatch.context() as patched:
        patched.setattr(room, step, crash_at(getattr(room, step), when))
        with pytest.raises(Crash):
            house.open(**TAKE_OVER)
    house.broker = house.open(restore_offset_gap=7)  # a pending take-over keeps its own gap
    assert not take_over.marker_path(house.root / "data").exists()
    assert_continues_above_the_gap(house, kept=140)
    copy.broker.background.fence_checker.run_round()
    with pytest.raises(FencedError):
        copy.fill(10, mark=b"zombie")


def test_an_upload_by_the_former_owner_during_the_take_over_is_included(shared_tail, monkeypatch):
    house, copy = shared_tail
    real = ColdLog.upload

    def upload_by_copy_first(self, files):
        monkeypatch.setattr(ColdLog, "upload", real)
        copy.broker.partition("t", 0).log.roll()
        copy.broker.background.copier.run_round()
        assert copy.broker.background.copier.wait_until_done(copy.broker.partitions(), timeout_s=10)
        return real(self, files)

    monkeypatch.setattr(ColdLog, "upload", upload_by_copy_first)
    house.broker = house.open(**TAKE_OVER)
    assert house.records("t")[140].value.startswith(b"copy")
    assert_continues_above_the_gap(house, kept=200)


def test_a_take_over_by_the_current_owner_leaves_no_gap(house):
    house.broker.create_topic("t", config=CONFIG)
    house.fill(100, mark=b"own")
    house.offload()
    house.fill(10, mark=b"own")
    for _ in range(2):
        house.restart(**TAKE_OVER)
    house.fill(10, mark=b"own")
    house.offload()
    assert [record.offset for record in house.records("t")] == list(range(120))
    assert gaps_of(house) == []


@pytest.mark.parametrize("crashes", [False, True])
def test_a_folder_without_a_manifest_copy_keeps_the_buckets_log_start(
    house, tmp_path, monkeypatch, crashes
):
    """It has no log start checkpoint either, and the log is re-created."""
    house.restart(down=True, store_start_timeout_ms=200)
    house.broker.create_topic("t", config=CONFIG)
    house.fill(100, mark=b"both")
    house.broker.close()
    (house.root / "data" / "log-start-offset-checkpoint").unlink()
    copy = House(house.copy_to(tmp_path / "copy"))
    copy.offload()
    copy.broker.close()
    with monkeypatch.context() as patched:
        if crashes:  # when the log is re-created
            patched.setattr(PartitionLog, "bump_epoch", die)
            with pytest.raises(Crash):
                house.open(**TAKE_OVER)
    house.broker = house.open(**TAKE_OVER)
    tidy(house.broker)
    assert house.broker.partition("t", 0).offsets().log_start_offset == 0
    assert_continues_above_the_gap(house, kept=100)


def test_a_damaged_log_is_taken_over_when_it_is_repaired(diverged):
    house, copy = diverged
    log = max((house.root / "data" / "t-0").glob("*.log"))
    log.write_bytes(log.read_bytes()[:-1] + b"\xff")
    (house.root / "data" / ".kafka_cleanshutdown").unlink()
    house.broker = house.open(**TAKE_OVER)
    (reason,) = house.broker.readiness().reasons
    assert "was flushed" in reason
    (step,) = [one for one in house.broker.repair("t", apply=True, accept_loss=True) if one.done]
    assert step.action == "cut"
    assert not take_over.marker_path(house.root / "data").exists()
    assert_continues_above_the_gap(house, kept=160)
    copy.broker = copy.open()
    copy.broker.background.fence_checker.run_round()
    assert copy.broker.partition("t", 0).leadership_lost


def test_planted_a_take_over_without_a_gap_reuses_offsets(diverged, monkeypatch):
    house, copy = diverged
    copy.broker = copy.open()
    given = copy.produce("t", [b"acknowledged"]).base_offset
    monkeypatch.setattr(take_over.PendingTakeOver, "gap_over", lambda self, manifest: 0)
    house.broker = house.open(**TAKE_OVER)
    assert house.produce("t", [b"another"]).base_offset == given


def test_a_take_over_writes_a_new_version_of_the_topic_object(diverged):
    """So a former owner that was paused in a deletion does not win."""
    house, _ = diverged
    topics = TopicObjects(open_store(f"file://{house.root / 'bucket'}"))
    (topic,) = topics.scan()
    before = topics.load(*topic)
    topics.write(msgspec.structs.replace(before, deleted=True), check=lambda: None)
    house.broker = house.open(take_over=True)
    house.wait_for(lambda: not any(record.dirty for record in house.broker.registry.live()))
    after = topics.load(*topic)
    assert (after.version, after.deleted) == (before.version + 2, False)


def test_a_diverged_folder_is_a_valid_log(diverged):
    house, _ = diverged
    house.broker = house.open(take_over=True)
    (folder,) = diverged_folders(house)
    opened = PartitionLog.open(
        folder,
        topic="t",
        partition=0,
        topic_id=house.broker.topic("t").record.topic_id,
        config=LogConfig.parse({}),
        clock=lambda: 0,
        clean=False,
    )
    assert (opened.log_start_offset, opened.log_end_offset) == (100, 140)
    opened.close()


def test_the_former_owner_is_fenced_and_stays_so_after_a_restart(diverged):
    house, copy = diverged
    copy.broker = copy.open()
    copy.offload()
    house.broker = house.open(take_over=True)
    named = {key for e in house.broker.partition("t", 0).cold.entries(0) for key in e.keys}
    copy.broker.background.fence_checker.run_round()
    with pytest.raises(FencedError):
        copy.fill(10, mark=b"zombie")
    copy.restart()
    with pytest.raises(FencedError):  # before it serves anything, not only at its claim
        copy.fill(10, mark=b"zombie")
    objects = {
        str(p.relative_to(house.root / "bucket")) for p in (house.root / "bucket").rglob("*")
    }
    assert named <= objects
    house.fill(10, mark=b"after")
    house.offload()


def test_a_restart_after_a_take_over_is_an_ordinary_start(diverged):
    house, _ = diverged
    house.broker = house.open(take_over=True)
    before, end = house.records("t"), house.broker.partition("t", 0).offsets().log_end_offset
    assert not take_over.marker_path(house.root / "data").exists()
    house.restart()
    house.offload()
    assert house.records("t") == before
    assert house.broker.partition("t", 0).offsets().log_end_offset == end
    assert "t-0.diverged" not in [topic.name for topic in house.broker.list_topics()]
    house.restart(take_over=True)
    assert len(diverged_folders(house)) == 1
    assert house.records("t") == before


def test_without_the_flag_a_foreign_manifest_is_not_touched(diverged):
    house, _ = diverged
    house.broker = house.open()
    house.claim()
    assert house.broker.partition("t", 0).leadership_lost
    assert not diverged_folders(house)


def test_a_take_over_needs_the_store(diverged):
    house, _ = diverged
    with pytest.raises(ConfigurationError, match="take-over"):
        house.open(take_over=True, down=True, store_start_timeout_ms=200)


@pytest.mark.parametrize("step", ["split_at", "move_segments", "replace_with_empty"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_any_step_is_resumed_by_the_next_start(diverged, monkeypatch, step, when):
    house, _ = diverged

    with monkeypatch.context() as patched:
        patched.setattr(
            take_over.closed_log, step, crash_at(getattr(take_over.closed_log, step), when)
        )
        with pytest.raises(Crash):
            house.open(take_over=True)
    assert take_over.marker_path(house.root / "data").exists()
    house.broker = house.open()
    records = house.records("t")
    assert [record.offset for record in records] == list(range(160))
    assert records[100].value.startswith(b"copy")
    set_aside = [value for folder in diverged_folders(house) for value in values_in(folder)]
    assert [value.split()[0] for value in set_aside] == [b"original"] * 40
    house.offload()


def test_a_claim_of_unknown_outcome_is_not_taken_over_again(diverged):
    house, _ = diverged
    house.store.heal()
    real = ManifestStore.confirm
    with pytest.MonkeyPatch.context() as patched:

        def lost(self, manifest):
            real(self, manifest)
            raise OutcomeUnknownError("lost")

        patched.setattr(ManifestStore, "confirm", lost)
        with pytest.raises(OutcomeUnknownError):
            house.open(take_over=True)
    house.broker = house.open()
    house.fill(10, mark=b"after")
    house.offload()
    assert len(house.records("t")) == 170
    assert house.broker.partition("t", 0).cold.ownership.claimed


def test_compacted_offsets_are_not_a_loss_when_a_take_over_resumes(house):
    """Everything is checked then, including flushed records; the topic is no longer compacted."""
    house.broker.create_topic("t", config={**CONFIG, "cleanup.policy": "compact"})
    house.wait_for(lambda: house.broker.partition("t", 0).cold.ownership.claimed)
    house.stop_copying()
    for number in range(30):
        key = b"once %d" % number if number % 5 == 0 else b"again and again"
        put(house, "t", [(key, b"v" * 40)] * 10)
    house.broker.partition("t", 0).log.roll()
    house.broker.background.compactor.run_round()
    house.broker.alter_topic("t", config={"cleanup.policy": "delete"})
    before = house.records("t")
    assert len(before) == 7
    topic_id = house.broker.topic("t").record.topic_id
    house.broker.close()
    (house.root / "data" / ".kafka_cleanshutdown").unlink()
    pending = {f"{topic_id}-0": take_over.PendingTakeOver(gap=GAP)}
    take_over.write_marker(take_over.marker_path(house.root / "data"), pending)
    house.broker = house.open()
    assert house.records("t") == before


def test_planted_a_take_over_that_keeps_what_parted_serves_records_twice(diverged, monkeypatch):
    house, _ = diverged
    monkeypatch.setattr(take_over, "plan_take_over", lambda local, manifest, *, gap: TakeOverPlan())
    house.broker = house.open(take_over=True)
    records = house.records("t")
    assert records[100].value.startswith(b"original"), "the planted bug shows the wrong history"
