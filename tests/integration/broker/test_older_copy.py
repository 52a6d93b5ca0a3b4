"""A copy of a live data folder is started after the original is lost, and the bucket reaches no
further than the copy: later offsets may have been acknowledged, and must not be reused.
"""

import shutil

import pytest

from tierlog.broker.background.fence_checker import FenceChecker
from tierlog.object_store.open import open_store
from tierlog.repair.restore import RestoreOptions, restore

GAP = 1000


@pytest.fixture
def copied(harness, tmp_path):
    """20 offsets, all in the bucket; `older` is a copy of the folder at this point."""
    harness.broker.create_topic("t", config={"retention.ms": -1})
    harness.stop_copying()
    harness.produce("t", [b"x"] * 20)
    harness.broker.partition("t", 0).upkeep.roll()
    harness.broker.bucket.publish_topics(harness.broker.registry)
    harness.copy_sealed()
    harness.broker.checkpoints.save()
    shutil.copytree(harness.root / "data", tmp_path / "older")
    return harness


def write_more_and_lose_the_folder(harness, *, commits):
    """Add a record that is only on disk, and commits that do not move the bucket's end."""
    assert harness.produce("t", [b"acknowledged"]).base_offset == 20
    for number in range(commits):
        harness.broker.trim("t", 0, 1 + number)
    harness.broker.close()
    shutil.rmtree(harness.root / "data")
    (harness.root / "data").parent.joinpath("older").rename(harness.root / "data")


@pytest.mark.parametrize("is_checked_first", [True, False], ids=["at start", "by its claim"])
def test_an_older_copy_is_fenced_and_can_take_over_above_a_gap(
    copied, monkeypatch, is_checked_first
):
    write_more_and_lose_the_folder(copied, commits=3)
    if not is_checked_first:  # as if the store were down
        monkeypatch.setattr(FenceChecker, "check_before_serving", lambda *_, **__: None)
    for _ in range(2):
        copied.broker = copied.open(fence_check_ms=3_600_000)
        copied.stop_copying()
        copied.copy_sealed()
        assert "it is an older copy" in copied.broker.partition("t", 0).leadership_lost
        copied.broker.close()
    copied.broker = copied.open(take_over=True, restore_offset_gap=GAP)
    assert copied.broker.partition("t", 0).leadership_lost is None
    assert copied.produce("t", [b"new"]).base_offset >= 20 + GAP
    assert [one.offset for one in copied.records("t", offset=3)][:17] == list(range(3, 20))
    copied.restart()
    copied.offload()


def put_back_in_place(harness):
    """Restore a disk snapshot in place: the folder keeps its inode, and with it its owner id."""
    data = harness.root / "data"
    for path in data.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.copytree(data.parent / "older", data, dirs_exist_ok=True)


@pytest.mark.parametrize("restarts", [1, 2])
def test_an_older_copy_that_reuses_epochs_stays_fenced(copied, restarts):
    owner = copied.broker.folder.owner
    for _ in range(restarts):
        copied.restart()
        copied.wait_for(lambda: copied.broker.partition("t", 0).is_claimed)
    assert copied.produce("t", [b"acknowledged"]).base_offset == 20
    copied.broker.close()
    put_back_in_place(copied)
    copied.broker = copied.open(down=True, store_start_timeout_ms=200)
    copied.broker.close()
    for _ in range(3):
        copied.broker = copied.open()
        assert copied.broker.folder.owner == owner
        assert "never recorded it" in (copied.broker.partition("t", 0).leadership_lost or "")
        copied.broker.close()
    copied.broker = copied.open(take_over=True, restore_offset_gap=GAP)
    assert copied.produce("t", [b"new"]).base_offset >= 20 + GAP
    copied.restart()
    copied.offload()


def test_a_copy_taken_during_a_claim_is_fenced(copied, monkeypatch):
    """Copied between the note of the epoch allocation and the note of the claim's manifest."""
    copied.restart(down=True, store_start_timeout_ms=200)
    put, older = copied.store.put, copied.root / "older"
    shutil.rmtree(older)

    def put_and_copy(key, body, **options):
        if "/manifest/" in key and not older.exists():
            shutil.copytree(copied.root / "data", older)
        return put(key, body, **options)

    monkeypatch.setattr(copied.store, "put", put_and_copy, raising=False)
    copied.set_down(False)
    copied.wait_for(lambda: copied.broker.partition("t", 0).is_claimed)
    copied.stop_copying()
    write_more_and_lose_the_folder(copied, commits=2)
    copied.broker = copied.open()
    copied.wait_for(lambda: copied.broker.partition("t", 0).leadership_lost is not None)
    assert "it is an older copy" in copied.broker.partition("t", 0).leadership_lost


def test_a_copy_that_reused_an_epoch_is_rejected_as_the_tail_of_a_restore(copied, tmp_path):
    copied.restart()
    copied.wait_for(lambda: copied.broker.partition("t", 0).is_claimed)
    copied.produce("t", [b"acknowledged"])
    copied.broker.close()
    put_back_in_place(copied)
    copied.broker = copied.open(down=True, store_start_timeout_ms=200)
    copied.produce("t", [b"while the store was down"])
    copied.broker.close()
    options = RestoreOptions(
        data_dir=tmp_path / "new", gap=GAP, clock=lambda: 0, tail=copied.root / "data"
    )
    (one,) = restore(open_store(f"file://{copied.root / 'bucket'}"), options).partitions
    assert "another owner came after it" in one.tail.detail


def test_a_restore_with_an_older_copy_as_tail_leaves_a_gap(copied, tmp_path):
    copied.produce("t", [b"in the copy"])
    copied.broker.checkpoints.save()
    shutil.rmtree(tmp_path / "older")
    shutil.copytree(copied.root / "data", tmp_path / "older")
    copied.produce("t", [b"acknowledged"])
    for number in range(3):
        copied.broker.trim("t", 0, 1 + number)
    copied.broker.close()
    options = RestoreOptions(
        data_dir=tmp_path / "new", gap=GAP, clock=lambda: 0, tail=tmp_path / "older"
    )
    report = restore(open_store(f"file://{copied.root / 'bucket'}"), options)
    (one,) = report.partitions
    assert (one.tail.whole, one.tail.end_offset) == (False, 21)
    assert "an older copy" in one.tail.detail


def test_a_folder_missing_only_two_commits_is_not_an_older_copy(copied):
    write_more_and_lose_the_folder(copied, commits=2)
    copied.broker = copied.open()
    copied.copy_sealed()
    assert copied.broker.partition("t", 0).leadership_lost is None
    assert copied.produce("t", [b"not seen"]).base_offset == 20
