"""A folder takes a partition over: what parted is set aside, what a manifest names stays."""

import shutil

import msgspec
import pytest

from broker import take_over
from broker.take_over import LocalLog, Parting, plan_parting
from cold_tier.open import open_store
from hot_tier.log import PartitionLog
from hot_tier.log_config import LogConfig
from manifest.state import EpochStart, Manifest, OffsetGap
from manifest.store import ManifestStore
from manifest.topic_objects import TopicObjects
from record_format.decode import iter_records
from record_format.errors import ConfigurationError, FencedError, OutcomeUnknownError
from tests.integration.broker.conftest import House

CONFIG = {"segment.bytes": 4096, "retention.ms": -1}


def fill(house, count, *, mark):
    start = house.broker.partition("t", 0).offsets().log_end_offset
    for number in range(start, start + count, 10):
        house.produce("t", [b"%s %d " % (mark, number + i) * 9 for i in range(10)], at=number)


def offload(house):
    assert house.broker.offload("t", wait_ms=20_000).remaining_segments == 0


def copy_of(house, root):
    """A second broker on a copy of the stopped folder, on the same bucket."""
    shutil.copytree(house.root / "data", root / "data")
    (root / "bucket").symlink_to(house.root / "bucket")
    return House(root)


@pytest.fixture
def parted(house, tmp_path):
    """The original wrote 35 records that nobody uploaded; a copy took its place and went on."""
    house.broker.create_topic("t", config=CONFIG)
    fill(house, 100, mark=b"both")
    offload(house)
    house.broker.close()
    copy = copy_of(house, tmp_path / "copy")
    fill(copy, 60, mark=b"copy")
    offload(copy)
    copy.broker.close()
    house.broker = house.open(down=True, store_start_timeout_ms=200)
    fill(house, 40, mark=b"original")
    house.broker.close()
    yield house, copy
    copy.broker.close()


def diverged_folders(house):
    return sorted((house.root / "data").glob("*.diverged-*"))


def values_in(folder):
    logs = sorted(folder.glob("*.log"))
    return [record.value for log in logs for record in iter_records(log.read_bytes())]


def test_records_past_the_parting_are_set_aside_and_the_log_goes_on_at_the_buckets_end(parted):
    house, _ = parted
    house.broker = house.open(take_over=True)
    records = house.records("t")
    assert [record.offset for record in records] == list(range(160))
    assert records[99].value.startswith(b"both")
    assert records[100].value.startswith(b"copy")
    (folder,) = diverged_folders(house)
    assert [value.split()[0] for value in values_in(folder)] == [b"original"] * 40
    assert f"records set apart by a take-over: {folder}" in house.broker.readiness().degraded
    (reported,) = house.broker.storage_report().diverged
    assert (reported.folder, reported.size_bytes > 0) == (str(folder), True)
    fill(house, 10, mark=b"after")
    offload(house)
    assert house.broker.verify("t", deep=True).ok


def test_who_takes_over_writes_a_version_of_the_topic_object(parted):
    """So a former owner that stood still in its deletion has not the last word."""
    house, _ = parted
    topics = TopicObjects(open_store(f"file://{house.root / 'bucket'}"))
    (topic,) = topics.scan()
    before = topics.load(*topic)
    topics.write(msgspec.structs.replace(before, deleted=True), check=lambda: None)
    house.broker = house.open(take_over=True)
    house.wait_for(lambda: not any(record.dirty for record in house.broker.registry.live()))
    after = topics.load(*topic)
    assert (after.version, after.deleted) == (before.version + 2, False)


def test_what_was_set_aside_is_a_log_that_opens(parted):
    house, _ = parted
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


def test_the_former_owner_is_fenced_and_stays_so_after_a_restart(parted):
    house, copy = parted
    copy.broker = copy.open()
    offload(copy)
    house.broker = house.open(take_over=True)
    named = {key for e in house.broker.partition("t", 0).cold.entries(0) for key in e.keys}
    copy.broker.janitor.check_fences()
    with pytest.raises(FencedError):
        fill(copy, 10, mark=b"zombie")
    copy.broker.close()
    copy.broker = copy.open()
    copy.broker._copy_round()
    copy.broker.copier.wait_until_idle(timeout_s=10)
    assert copy.broker.partition("t", 0).leadership_lost
    there = {str(p.relative_to(house.root / "bucket")) for p in (house.root / "bucket").rglob("*")}
    assert named <= there
    fill(house, 10, mark=b"after")
    offload(house)


def test_a_restart_after_a_take_over_needs_no_flag_and_is_no_take_over(parted):
    house, _ = parted
    house.broker = house.open(take_over=True)
    before, end = house.records("t"), house.broker.partition("t", 0).offsets().log_end_offset
    assert not take_over.marker_path(house.root / "data").exists()
    house.restart()
    offload(house)
    assert house.records("t") == before
    assert house.broker.partition("t", 0).offsets().log_end_offset == end
    assert "t-0.diverged" not in [topic.name for topic in house.broker.list_topics()]
    house.restart(take_over=True)
    assert len(diverged_folders(house)) == 1
    assert house.records("t") == before


def test_without_the_flag_a_foreign_manifest_is_left_alone(parted):
    house, _ = parted
    house.broker = house.open()
    house.broker._copy_round()
    house.broker.copier.wait_until_idle(timeout_s=10)
    assert house.broker.partition("t", 0).leadership_lost
    assert not diverged_folders(house)


def test_with_the_store_down_a_take_over_does_not_start(parted):
    house, _ = parted
    with pytest.raises(ConfigurationError, match="take-over"):
        house.open(take_over=True, down=True, store_start_timeout_ms=200)


@pytest.mark.parametrize("step", ["split_at", "move_from", "start_empty"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_any_step_is_gone_on_from_by_the_next_start(parted, monkeypatch, step, when):
    house, _ = parted

    class Crash(BaseException):
        pass

    real = getattr(take_over.parting, step)

    def dies(*args, **kwargs):
        if when == "after":
            real(*args, **kwargs)
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(take_over.parting, step, dies)
        with pytest.raises(Crash):
            house.open(take_over=True)
    assert take_over.marker_path(house.root / "data").exists()
    house.broker = house.open()
    records = house.records("t")
    assert [record.offset for record in records] == list(range(160))
    assert records[100].value.startswith(b"copy")
    set_apart = [value for folder in diverged_folders(house) for value in values_in(folder)]
    assert [value.split()[0] for value in set_apart] == [b"original"] * 40
    offload(house)


def test_a_claim_whose_confirmation_was_lost_is_no_second_take_over(parted):
    house, _ = parted
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
    fill(house, 10, mark=b"after")
    offload(house)
    assert len(house.records("t")) == 170
    assert house.broker.partition("t", 0).cold.claimed


def test_planted_a_take_over_that_keeps_what_parted_serves_records_twice(parted, monkeypatch):
    house, _ = parted
    monkeypatch.setattr(
        take_over, "plan_parting", lambda local, manifest, *, gap: Parting(None, None, None)
    )
    house.broker = house.open(take_over=True)
    records = house.records("t")
    assert records[100].value.startswith(b"original"), "the planted bug shows the wrong history"


# --- the decision ---------------------------------------------------------------------------------


def manifest(*, end, epochs, gaps=()):
    return Manifest(
        topic="t",
        topic_id="id",
        partition=0,
        version=1,
        nonce="n",
        created_ms=0,
        owner=epochs[-1].owner,
        leader_epoch=epochs[-1].epoch,
        epochs=tuple(epochs),
        log_start_offset=0,
        end_offset=end,
        gaps=tuple(OffsetGap(*gap) for gap in gaps),
    )


def local_log(history, ranges, end_offset):
    recorded = frozenset((start.owner, start.epoch) for start in history)
    return LocalLog(history, recorded, ranges, end_offset)


A1, A2, B3 = EpochStart(1, 0, "a"), EpochStart(2, 100, "a"), EpochStart(3, 100, "b")
B3_LATER = EpochStart(3, 130, "b")
NOTHING = Parting(None, None, None)


@pytest.mark.parametrize(
    ("local", "remote", "gap", "expected"),
    [
        pytest.param(
            local_log((A1, A2), ((0, 80), (80, 120)), 120),
            manifest(end=80, epochs=[A1]),
            0,
            NOTHING,
            id="the bucket is a prefix of the local log, on a border of segments",
        ),
        pytest.param(
            local_log((A1, A2), ((0, 80), (80, 120)), 120),
            manifest(end=100, epochs=[A1]),
            0,
            Parting(None, None, 100),
            id="the same, within a segment",
        ),
        pytest.param(
            local_log((A1, A2), ((0, 100), (100, 120)), 120),
            manifest(end=150, epochs=[A1, B3]),
            0,
            Parting(100, 150, None),
            id="another went on from 100 where we did",
        ),
        pytest.param(
            local_log((A1,), ((0, 100), (100, 160)), 160),
            manifest(end=100, epochs=[A1, B3_LATER]),
            0,
            Parting(130, None, None),
            id="what another copied of us and did not upload stays",
        ),
        pytest.param(
            local_log((A1,), ((0, 90),), 90),
            manifest(end=150, epochs=[A1, B3]),
            0,
            Parting(None, 150, None),
            id="we only lag",
        ),
        pytest.param(
            local_log((A1,), ((0, 100), (100, 120)), 120),
            manifest(end=1100, epochs=[A1, EpochStart(3, 1100, "b")], gaps=[(100, 1100)]),
            0,
            Parting(100, 1100, None),
            id="a restore stepped over offsets that we wrote",
        ),
        pytest.param(
            local_log((), (), 0),
            manifest(end=100, epochs=[A1]),
            1000,
            Parting(None, 1100, None),
            id="a restore leaves a gap",
        ),
        pytest.param(
            local_log((A1,), ((100, 120),), 120),
            manifest(end=110, epochs=[A1, EpochStart(4, 120, "a")]),
            1000,
            Parting(110, 1110, None),
            id="a tail whose folder went on after it was taken",
        ),
        pytest.param(
            local_log((A1, EpochStart(3, 80, "a")), ((80, 100),), 100)._replace(
                recorded=frozenset({("a", 2)})
            ),
            manifest(end=80, epochs=[A1, EpochStart(2, 80, "a")]),
            0,
            NOTHING,
            id="a restart under which nothing was written is in force",
        ),
        pytest.param(
            local_log((), (), 0), None, 1000, Parting(None, 1000, None), id="nothing was uploaded"
        ),
    ],
)
def test_what_becomes_of_a_local_log(local, remote, gap, expected):
    assert plan_parting(local, remote, gap=gap) == expected
