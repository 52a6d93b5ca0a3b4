"""A folder takes a partition over: diverged records are set aside, referenced objects stay."""

import shutil
import uuid

import msgspec
import pytest

from tests.fakes.broker_harness import BrokerHarness, run_janitor
from tests.fakes.compacted_topics import put
from tests.fakes.records import iter_records
from tierlog.broker.bucket.cold_log import ColdLog
from tierlog.broker.data_folder.bucket_state import BucketState
from tierlog.broker.opening import take_over
from tierlog.broker.opening.take_over import TakeOverPlan
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.log_config import LogConfig
from tierlog.hot_tier.recovery_scan import OpenRequest
from tierlog.manifest.state import Reason
from tierlog.manifest.store import ManifestStore
from tierlog.manifest.topic_objects import TopicObjects
from tierlog.object_store.open import open_store
from tierlog.record_format.checkpoint_files import format_partition_metadata
from tierlog.record_format.errors import ConfigurationError, FencedError, OutcomeUnknownError
from tierlog.record_format.topic_rules import MAX_NAME_LENGTH
from tierlog.repair.repair import repair_topic
from tierlog.repair.verify import verify_topic

CONFIG = {"segment.bytes": 4096, "retention.ms": -1}
GAP = 1000
TAKE_OVER = {"take_over": True, "restore_offset_gap": GAP}


class Crash(Exception):
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
def diverged(harness, tmp_path):
    """The original wrote 40 records that were not uploaded; a copy took its place and wrote 60."""
    harness.broker.create_topic("t", config=CONFIG)
    harness.fill(100, mark=b"both")
    harness.offload()
    harness.broker.close()
    copy = BrokerHarness(harness.copy_to(tmp_path / "copy"))
    copy.fill(60, mark=b"copy")
    copy.offload()
    copy.broker.close()
    harness.broker = harness.open(down=True, store_start_timeout_ms=200)
    harness.fill(40, mark=b"original")
    harness.broker.close()
    yield harness, copy
    copy.broker.close()


@pytest.fixture
def shared_tail(harness, tmp_path):
    """A copy took the original's place with 40 records that were not uploaded, acknowledged 60
    more, uploaded nothing, and still runs; the original wrote 20.
    """
    harness.broker.create_topic("t", config=CONFIG)
    harness.fill(100, mark=b"both")
    harness.offload()
    harness.fill(40, mark=b"tail")
    harness.broker.close()
    copy = BrokerHarness(harness.copy_to(tmp_path / "copy"))
    copy.claim()
    copy.stop_copying()
    copy.fill(60, mark=b"copy")
    harness.broker = harness.open(down=True, store_start_timeout_ms=200)
    harness.fill(20, mark=b"original")
    harness.broker.close()
    yield harness, copy
    copy.broker.close()


def gaps_of(harness):
    manifest = harness.broker.partition("t", 0).manifest
    return [(gap.start_offset, gap.end_offset) for gap in manifest.gaps]


def assert_continues_above_the_gap(harness, *, kept, set_aside=0):
    """The next offset, reads across the gap, and the bucket agree on the gap."""
    resumed = kept + set_aside + GAP
    assert gaps_of(harness) == [(kept, resumed)]
    before = harness.records("t")
    assert [record.offset for record in before] == list(range(kept))
    assert harness.produce("t", [b"after"]).base_offset == resumed
    (after,) = harness.records("t", offset=kept + 20)
    assert (after.offset, after.value) == (resumed, b"after")
    harness.offload()
    harness.restart()
    assert harness.records("t") == [*before, after]
    assert verify_topic(harness.broker, "t", deep=True).ok


def diverged_folders(harness):
    return sorted((harness.root / "data" / "tierlog" / "diverged").glob("*"))


def values_in(folder):
    logs = sorted(folder.glob("*.log"))
    return [record.value for log in logs for record in iter_records(log.read_bytes())]


def test_diverged_records_are_set_aside_and_the_log_continues_at_the_buckets_end(diverged):
    harness, _ = diverged
    harness.broker = harness.open(take_over=True)
    records = harness.records("t")
    assert [record.offset for record in records] == list(range(160))
    assert records[99].value.startswith(b"both")
    assert records[100].value.startswith(b"copy")
    (folder,) = diverged_folders(harness)
    assert [value.split()[0] for value in values_in(folder)] == [b"original"] * 40
    assert (
        f"diverged records set aside by a take-over: {folder}"
        in harness.broker.readiness().degraded
    )
    (reported,) = harness.broker.storage_report().diverged
    assert (reported.folder, reported.size_bytes > 0) == (str(folder), True)
    harness.fill(10, mark=b"after")
    harness.offload()
    assert verify_topic(harness.broker, "t", deep=True).ok


def test_diverged_records_of_the_longest_topic_name_are_set_aside(harness, tmp_path):
    topic = "t" * MAX_NAME_LENGTH
    harness.broker.create_topic(topic, config=CONFIG)
    harness.fill(10, topic)
    harness.offload(topic)
    harness.broker.close()
    copy = BrokerHarness(harness.copy_to(tmp_path / "copy"))
    copy.fill(10, topic)
    copy.offload(topic)
    copy.broker.close()
    harness.broker = harness.open(down=True, store_start_timeout_ms=200)
    harness.fill(20, topic, mark=b"original")
    harness.broker.close()
    harness.broker = harness.open(take_over=True)
    (folder,) = diverged_folders(harness)
    assert [value.split()[0] for value in values_in(folder)] == [b"original"] * 20
    assert len(harness.records(topic)) == 20
    harness.restart()
    assert [one.name for one in harness.broker.list_topics()] == [topic]


def test_a_diverged_folder_that_is_being_removed_fails_no_report(diverged):
    harness, _ = diverged
    harness.broker = harness.open(take_over=True)
    (folder,) = diverged_folders(harness)
    (folder / "gone").symlink_to("removed between the listing and the look at its size")
    assert str(folder) in "".join(harness.broker.readiness().degraded)
    assert harness.broker.storage_report().diverged == []
    shutil.rmtree(folder)
    assert str(folder) not in "".join(harness.broker.readiness().degraded)


def test_epochs_of_diverged_records_are_not_in_the_history(diverged):
    """Otherwise an older copy of the folder would match its records with the bucket's."""
    harness, _ = diverged
    for _ in range(2):
        harness.open(down=True, store_start_timeout_ms=1).close()
    harness.broker = harness.open(take_over=True, restore_offset_gap=0)
    starts = harness.broker.partition("t", 0).manifest.epochs
    assert [one.start_offset for one in starts] == [0, 100, 160]


@pytest.mark.parametrize(
    "metadata",
    [
        pytest.param(format_partition_metadata(uuid.uuid4()), id="an earlier topic of the name"),
        pytest.param(b"rotten", id="unknown topic"),
    ],
)
def test_earlier_diverged_folders_are_not_overwritten(diverged, metadata):
    harness, _ = diverged
    data, earlier = harness.root / "data", []
    for epoch in range(4):
        folder = data / "tierlog" / "diverged" / f"t-0-{epoch}"
        folder.mkdir(parents=True)
        (folder / "partition.metadata").write_bytes(metadata)
        earlier += [folder / path.name for path in (data / "t-0").glob("*.log")]
    for path in earlier:
        path.write_bytes(b"earlier")
    harness.broker = harness.open(take_over=True)
    assert {path.read_bytes() for path in earlier} == {b"earlier"}
    (folder,) = (one for one in diverged_folders(harness) if one not in {e.parent for e in earlier})
    assert [value.split()[0] for value in values_in(folder)] == [b"original"] * 40


def test_no_offset_that_the_former_owner_may_have_assigned_is_reused(diverged):
    harness, copy = diverged
    copy.broker = copy.open()
    copy.fill(20, mark=b"never uploaded")
    harness.broker = harness.open(**TAKE_OVER)
    assert_continues_above_the_gap(harness, kept=160)


def test_a_shared_tail_that_was_not_uploaded_is_kept(shared_tail):
    harness, _ = shared_tail
    harness.broker = harness.open(**TAKE_OVER)
    assert harness.records("t", offset=100)[0].value.startswith(b"tail")
    assert harness.broker.partition("t", 0).cold_end_offset == 160 + GAP
    (folder,) = diverged_folders(harness)
    assert [value.split()[0] for value in values_in(folder)] == [b"original"] * 20
    assert_continues_above_the_gap(harness, kept=140, set_aside=20)


@pytest.mark.parametrize("crashes", [False, True])
def test_producer_state_is_kept_above_the_gap(harness, tmp_path, monkeypatch, crashes):
    harness.broker.create_topic("t", config=CONFIG)
    harness.fill(10, mark=b"both")
    harness.offload()
    first = harness.produce_idempotent(sequence=0)
    harness.broker.close()
    copy = BrokerHarness(harness.copy_to(tmp_path / "copy"))
    copy.claim()
    copy.broker.close()
    with monkeypatch.context() as patched:
        if crashes:  # when the log is emptied, before it has a snapshot
            patched.setattr(take_over.closed_log, "write_durably", die)
            with pytest.raises(Crash):
                harness.open(**TAKE_OVER)
    harness.broker = harness.open(**TAKE_OVER)
    again = harness.produce_idempotent(sequence=0)
    assert (again.duplicate, again.base_offset) == (True, first.base_offset)
    assert harness.produce_idempotent(sequence=1).base_offset == first.base_offset + 1 + GAP


def test_a_trim_past_the_buckets_end_is_kept(shared_tail):
    harness, _ = shared_tail
    harness.broker = harness.open(down=True, store_start_timeout_ms=200)
    harness.broker.trim("t", 0, 115)
    harness.restart(**TAKE_OVER)
    assert gaps_of(harness) == [(140, 160 + GAP)]
    assert harness.broker.partition("t", 0).offsets().log_start_offset == 115
    removed = harness.broker.partition("t", 0).manifest.removed
    assert {one.reason for one in removed} == {Reason.TRIM}
    assert [one.offset for one in harness.records("t", offset=115)][-25:] == list(range(115, 140))
    assert harness.produce("t", [b"after"]).base_offset == 160 + GAP
    harness.offload()
    assert verify_topic(harness.broker, "t", deep=True).ok


@pytest.mark.parametrize(
    ("when", "room", "step"),
    [
        ("after", ColdLog, "upload_files"),
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
    harness, copy = shared_tail

    with monkeypatch.context() as patched:
        patched.setattr(room, step, crash_at(getattr(room, step), when))
        with pytest.raises(Crash):
            harness.open(**TAKE_OVER)
    harness.broker = harness.open(restore_offset_gap=7)  # a pending take-over keeps its own gap
    assert not take_over.TAKE_OVERS.path(harness.root / "data").exists()
    assert_continues_above_the_gap(harness, kept=140, set_aside=20)
    copy.broker.background.fence_checker.run_round()
    with pytest.raises(FencedError):
        copy.fill(10, mark=b"zombie")


def test_an_upload_by_the_former_owner_during_the_take_over_is_included(shared_tail, monkeypatch):
    harness, copy = shared_tail
    real = ColdLog.upload_files

    def upload_by_copy_first(self, files):
        monkeypatch.setattr(ColdLog, "upload_files", real)
        copy.broker.partition("t", 0).upkeep.roll()
        copy.upload_sealed()
        return real(self, files)

    monkeypatch.setattr(ColdLog, "upload_files", upload_by_copy_first)
    harness.broker = harness.open(**TAKE_OVER)
    assert harness.records("t")[140].value.startswith(b"copy")
    assert_continues_above_the_gap(harness, kept=200)


def test_a_take_over_by_the_current_owner_leaves_no_gap(harness):
    harness.broker.create_topic("t", config=CONFIG)
    harness.fill(100, mark=b"own")
    harness.offload()
    harness.fill(10, mark=b"own")
    for _ in range(2):
        harness.restart(**TAKE_OVER)
    harness.fill(10, mark=b"own")
    harness.offload()
    assert [record.offset for record in harness.records("t")] == list(range(120))
    assert gaps_of(harness) == []


@pytest.mark.parametrize("crashes", [False, True])
def test_a_folder_without_a_manifest_copy_keeps_the_buckets_log_start(
    harness, tmp_path, monkeypatch, crashes
):
    """It has no log start checkpoint either, and the log is re-created."""
    harness.restart(down=True, store_start_timeout_ms=200)
    harness.broker.create_topic("t", config=CONFIG)
    harness.fill(100, mark=b"both")
    harness.broker.close()
    (harness.root / "data" / "log-start-offset-checkpoint").unlink()
    copy = BrokerHarness(harness.copy_to(tmp_path / "copy"))
    copy.offload()
    copy.broker.close()
    with monkeypatch.context() as patched:
        if crashes:  # when the log is re-created
            patched.setattr(PartitionLog, "bump_epoch", die)
            with pytest.raises(Crash):
                harness.open(**TAKE_OVER)
    harness.broker = harness.open(**TAKE_OVER)
    run_janitor(harness.broker)
    assert harness.broker.partition("t", 0).offsets().log_start_offset == 0
    assert_continues_above_the_gap(harness, kept=100)


def test_a_damaged_log_is_taken_over_when_it_is_repaired(diverged):
    harness, copy = diverged
    log = max((harness.root / "data" / "t-0").glob("*.log"))
    log.write_bytes(log.read_bytes()[:-1] + b"\xff")
    (harness.root / "data" / ".kafka_cleanshutdown").unlink()
    harness.broker = harness.open(**TAKE_OVER)
    (reason,) = harness.broker.readiness().reasons
    assert "was flushed" in reason
    (step,) = [
        one for one in repair_topic(harness.broker, "t", apply=True, accept_loss=True) if one.done
    ]
    assert step.action == "cut"
    assert not take_over.TAKE_OVERS.path(harness.root / "data").exists()
    assert_continues_above_the_gap(harness, kept=160)
    copy.broker = copy.open()
    copy.broker.background.fence_checker.run_round()
    assert copy.broker.partition("t", 0).leadership_lost


def test_planted_a_take_over_without_a_gap_reuses_offsets(diverged, monkeypatch):
    harness, copy = diverged
    copy.broker = copy.open()
    given = copy.produce("t", [b"acknowledged"]).base_offset
    monkeypatch.setattr(take_over.PendingTakeOver, "gap_over", lambda self, manifest: 0)
    harness.broker = harness.open(**TAKE_OVER)
    assert harness.produce("t", [b"another"]).base_offset == given


def test_a_take_over_writes_a_new_version_of_the_topic_object(diverged):
    """So a former owner that was paused in a deletion does not win."""
    harness, _ = diverged
    topics = TopicObjects(open_store(f"file://{harness.root / 'bucket'}"))
    (topic,) = topics.scan()
    before = topics.load_topic(*topic)
    topics.write_topic(msgspec.structs.replace(before, deleted=True), check=lambda: None)
    harness.broker = harness.open(take_over=True)
    harness.wait_for(lambda: not any(record.dirty for record in harness.broker.registry.live()))
    after = topics.load_topic(*topic)
    assert (after.version, after.deleted) == (before.version + 2, False)


def test_a_diverged_folder_is_a_valid_log(diverged):
    harness, _ = diverged
    harness.broker = harness.open(take_over=True)
    (folder,) = diverged_folders(harness)
    opened = PartitionLog.open(
        folder,
        topic="t",
        partition=0,
        topic_id=harness.broker.topic("t").record.topic_id,
        config=LogConfig.parse({}),
        clock=lambda: 0,
        request=OpenRequest(clean=False),
    )
    assert (opened.log_start_offset, opened.log_end_offset) == (100, 140)
    opened.close()


def test_the_former_owner_is_fenced_and_stays_so_after_a_restart(diverged):
    harness, copy = diverged
    copy.broker = copy.open()
    copy.offload()
    harness.broker = harness.open(take_over=True)
    named = {key for e in harness.broker.partition("t", 0).cold_entries(0) for key in e.keys}
    copy.broker.background.fence_checker.run_round()
    with pytest.raises(FencedError):
        copy.fill(10, mark=b"zombie")
    copy.restart()
    with pytest.raises(FencedError):  # before it serves anything, not only at its claim
        copy.fill(10, mark=b"zombie")
    objects = {
        str(p.relative_to(harness.root / "bucket")) for p in (harness.root / "bucket").rglob("*")
    }
    assert named <= objects
    harness.fill(10, mark=b"after")
    harness.offload()


def test_a_restart_after_a_take_over_is_an_ordinary_start(diverged):
    harness, _ = diverged
    harness.broker = harness.open(take_over=True)
    before, end = harness.records("t"), harness.broker.partition("t", 0).offsets().log_end_offset
    assert not take_over.TAKE_OVERS.path(harness.root / "data").exists()
    harness.restart()
    harness.offload()
    assert harness.records("t") == before
    assert harness.broker.partition("t", 0).offsets().log_end_offset == end
    assert "t-0.diverged" not in [topic.name for topic in harness.broker.list_topics()]
    harness.restart(take_over=True)
    assert len(diverged_folders(harness)) == 1
    assert harness.records("t") == before


def test_without_the_flag_a_foreign_manifest_is_not_touched(diverged):
    harness, _ = diverged
    harness.broker = harness.open()
    harness.claim()
    assert harness.broker.partition("t", 0).leadership_lost
    assert not diverged_folders(harness)


def test_a_take_over_needs_the_store(diverged):
    harness, _ = diverged
    with pytest.raises(ConfigurationError, match="take-over"):
        harness.open(take_over=True, down=True, store_start_timeout_ms=200)


@pytest.mark.parametrize("step", ["split_at", "move_segments", "replace_with_empty"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_any_step_is_resumed_by_the_next_start(diverged, monkeypatch, step, when):
    harness, _ = diverged

    with monkeypatch.context() as patched:
        patched.setattr(
            take_over.closed_log, step, crash_at(getattr(take_over.closed_log, step), when)
        )
        with pytest.raises(Crash):
            harness.open(take_over=True)
    assert take_over.TAKE_OVERS.path(harness.root / "data").exists()
    harness.broker = harness.open()
    records = harness.records("t")
    assert [record.offset for record in records] == list(range(160))
    assert records[100].value.startswith(b"copy")
    set_aside = [value for folder in diverged_folders(harness) for value in values_in(folder)]
    assert [value.split()[0] for value in set_aside] == [b"original"] * 40
    harness.offload()


def test_a_claim_of_unknown_outcome_is_not_taken_over_again(diverged):
    harness, _ = diverged
    harness.store.heal()
    real = ManifestStore.confirm
    with pytest.MonkeyPatch.context() as patched:

        def lost(self, manifest):
            real(self, manifest)
            raise OutcomeUnknownError("lost")

        patched.setattr(ManifestStore, "confirm", lost)
        with pytest.raises(OutcomeUnknownError):
            harness.open(take_over=True)
    harness.broker = harness.open()
    harness.fill(10, mark=b"after")
    harness.offload()
    assert len(harness.records("t")) == 170
    assert harness.broker.partition("t", 0).is_claimed


@pytest.mark.parametrize("splits", [False, True])  # True: it opens the log a second time
def test_compacted_offsets_are_not_a_loss_when_a_take_over_resumes(harness, monkeypatch, splits):
    """Everything is checked then, including flushed records; the topic is no longer compacted."""
    harness.broker.create_topic("t", config={**CONFIG, "cleanup.policy": "compact"})
    harness.wait_for(lambda: harness.broker.partition("t", 0).is_claimed)
    harness.stop_copying()
    for number in range(30):
        key = b"once %d" % number if number % 5 == 0 else b"again and again"
        put(harness, "t", [(key, b"v" * 40)] * 10)
    harness.broker.partition("t", 0).upkeep.roll()
    harness.broker.background.compactor.run_round()
    harness.broker.alter_topic("t", config={"cleanup.policy": "delete"})
    before = harness.records("t")
    assert len(before) == 7
    topic_id = harness.broker.topic("t").record.topic_id
    harness.broker.close()
    (harness.root / "data" / ".kafka_cleanshutdown").unlink()
    pending = {f"{topic_id}-0": take_over.PendingTakeOver(gap=GAP)}
    take_over.write_take_overs(harness.root / "data", pending)
    assert before[1].offset == 59
    if splits:  # at the batch of that record
        plan = TakeOverPlan(split_at=50)
        monkeypatch.setattr(take_over, "plan_take_over", lambda local, manifest, *, gap: plan)
    harness.broker = harness.open()
    assert harness.records("t") == before
    assert (50 in harness.broker.partition("t", 0)._log.base_offsets) == splits


def test_planted_a_take_over_that_keeps_what_parted_serves_records_twice(diverged, monkeypatch):
    harness, _ = diverged
    monkeypatch.setattr(take_over, "plan_take_over", lambda local, manifest, *, gap: TakeOverPlan())
    harness.broker = harness.open(take_over=True)
    records = harness.records("t")
    assert records[100].value.startswith(b"original"), "the planted bug shows the wrong history"


def test_a_topic_may_have_a_name_that_older_trees_gave_to_diverged_records(harness):
    harness.broker.create_topic("x-0.diverged", partitions=4)
    harness.produce("x-0.diverged", [b"v"], partition=3)
    harness.restart()
    assert harness.broker.readiness().degraded == []
    assert harness.broker.storage_report().diverged == []
    assert [one.value for one in harness.records("x-0.diverged", partition=3)] == [b"v"]


@pytest.mark.parametrize("name", ["t-0.diverged-1", "deleted-2.diverged-7"])
def test_diverged_records_that_an_older_tree_set_aside_move_and_are_reported(diverged, name):
    harness, _ = diverged
    harness.broker = harness.open(take_over=True)
    harness.broker.close()
    (folder,) = diverged_folders(harness)
    values = values_in(folder)
    folder.rename(harness.root / "data" / name)
    for _ in range(2):
        harness.broker = harness.open()
        (moved,) = diverged_folders(harness)
        assert (moved.name, values_in(moved)) == (name.replace(".diverged", ""), values)
        assert str(moved) in "".join(harness.broker.readiness().degraded)
        assert [one.name for one in harness.broker.list_topics()] == ["t"]
        harness.broker.close()


def test_a_topic_that_was_deleted_meanwhile_is_no_reason_to_be_unready(harness, tmp_path):
    """The operator deletes it here too, or repairs it."""
    harness.broker.create_topic("t", config=CONFIG)
    harness.fill(100)
    harness.offload()
    harness.broker.close()
    copy = BrokerHarness(harness.copy_to(tmp_path / "copy"))
    copy.claim()
    copy.broker.delete_topic("t")
    copy.broker.background.deletions.run_round()
    copy.broker.close()
    harness.broker = harness.open(take_over=True)
    assert harness.broker.readiness().reasons == []
    assert len(harness.records("t")) == 100
    harness.broker.delete_topic("t")
    harness.wait_for(lambda: harness.broker.readiness() == ([], []))


def test_a_manifest_that_went_back_is_not_taken_over(diverged):
    """Somebody put an older copy of the bucket in its place."""
    harness, _ = diverged
    harness.broker = harness.open()
    harness.broker.close()
    versions = sorted((harness.root / "bucket").glob("topics/t/*/0/manifest/*.json"))
    for path in versions[1:]:
        path.unlink()
    harness.broker = harness.open(take_over=True)
    assert harness.broker.readiness().reasons
