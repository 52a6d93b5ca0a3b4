"""The recovery table: what an open does with each state that a crash or a failing disk leaves."""

import errno
import os
import random
import shutil
from pathlib import Path

import pytest

from tests.fakes.bad_sectors import cannot_read
from tests.fakes.damage import cut, flip
from tests.fakes.lossy_disk import LossyDisk
from tests.fakes.partition_logs import first_offset, unchecked
from tierlog.hot_tier import reaper
from tierlog.hot_tier.log_folder import LEADER_EPOCHS
from tierlog.hot_tier.log_writer import Append, AppendResult
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.errors import (
    CorruptBatch,
    CorruptDataError,
    CorruptSnapshot,
    LogOfflineError,
    OutOfOrderSequence,
)
from tierlog.record_format.index_layouts import OFFSET_ENTRY, AbortedTxn, pack_txn_index

NOW_MS = 1_700_000_000_000
CONFIG = {"segment.bytes": 2048, "index.interval.bytes": 200}


def file_of(folder: Path, base_offset: int, suffix: str) -> Path:
    return folder / f"{base_offset:020d}{suffix}"


def indexes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*index"))}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "t-0"


@pytest.fixture
def written(open_log, append_values, folder):
    """A closed log of several segments; gives its records' values."""
    log = open_log(config=CONFIG)
    values = [b"%d-" % n + b"v" * (n % 90) for n in range(120)]
    for number in range(0, 120, 2):
        append_values(log, *values[number : number + 2], timestamps=[NOW_MS + number] * 2)
    log.close()
    assert len(log.segments()) > 4
    return values


@pytest.fixture
def last(written, folder):
    """The last segment's base offset and the headers of its batches."""
    base_offset = max(int(path.stem) for path in folder.glob("*.log"))
    return base_offset, list(iter_headers(file_of(folder, base_offset, ".log").read_bytes()))


# --- the tail -------------------------------------------------------------------------------------


def test_a_tail_truncated_at_every_byte_keeps_every_whole_batch(
    open_log, records_of, written, last, folder, tmp_path
):
    base_offset, headers = last
    log_file = file_of(folder, base_offset, ".log")
    size = log_file.stat().st_size
    for length in range(headers[-2].position, size + 1):
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        with file_of(copy, base_offset, ".log").open("r+b") as file:
            file.truncate(length)
        log = open_log(copy, config=CONFIG, clean=False, recovery_point=base_offset)
        whole = [header for header in headers if header.position + header.size_bytes <= length]
        end = whole[-1].next_offset
        assert (log.log_end_offset, log.high_watermark, log.flushed_end) == (end, end, end)
        assert [record.value for record in records_of(log)] == written[:end]
        log.close()
        assert file_of(copy, base_offset, ".log").stat().st_size == sum(
            header.size_bytes for header in whole
        )
        shutil.rmtree(copy)


@pytest.mark.parametrize("junk", [bytes(1), bytes(4096), b"\xff" * 500, b"\x00" * 8 + b"\x01" * 99])
def test_garbage_after_the_last_batch_is_truncated(
    open_log, append_values, records_of, written, last, folder, junk
):
    log_file = file_of(folder, last[0], ".log")
    good = log_file.read_bytes()
    log_file.write_bytes(good + junk)
    log = open_log(config=CONFIG, clean=False, recovery_point=120)
    assert log.recovery.truncated_bytes == len(junk)
    assert log_file.read_bytes() == good
    assert [record.value for record in records_of(log)] == written
    append_values(log, b"next")
    log.writer.flush()
    assert records_of(log, 120)[0].value == b"next"


def test_a_clean_shutdown_with_a_corrupt_tail_is_recovered_like_a_crash(
    open_log, written, last, folder
):
    log_file = file_of(folder, last[0], ".log")
    log_file.write_bytes(log_file.read_bytes()[:-5])
    log = open_log(config=CONFIG, clean=True, recovery_point=last[0])
    assert not log.recovery.clean
    assert log.log_end_offset == last[1][-1].base_offset


def test_a_log_that_ends_below_its_index_is_recovered_like_a_crash_after_a_clean_shutdown_too(
    open_log, records_of, written, last, folder, tmp_path
):
    base_offset, headers = last
    *_, (_, indexed) = OFFSET_ENTRY.iter_unpack(file_of(folder, base_offset, ".index").read_bytes())
    cuts = [header for header in headers if header.position <= indexed]
    for missing in cuts:
        copy = tmp_path / f"copy-{missing.position}"
        shutil.copytree(folder, copy)
        os.truncate(file_of(copy, base_offset, ".log"), missing.position)
        log = open_log(copy, config=CONFIG, clean=True, recovery_point=base_offset)
        assert not log.recovery.clean
        assert log.log_end_offset == missing.base_offset
        assert [record.value for record in records_of(log)] == written[: missing.base_offset]
    assert len(cuts) > 2


@pytest.mark.parametrize("clean", [True, False])
def test_segments_below_the_recovery_point_are_not_read(open_log, written, last, folder, clean):
    # Startup does not read them: reads or `verify` find damage there.
    first = file_of(folder, 0, ".log")
    flip(first, 70)
    log = open_log(config=CONFIG, clean=clean, recovery_point=last[0])
    assert log.log_end_offset == 120
    assert log.recovery.clean == clean
    read = 0 if clean else file_of(folder, last[0], ".log").stat().st_size
    assert log.recovery.checked_bytes == read


def test_segments_after_a_truncated_one_are_removed(open_log, records_of, written, folder):
    bases = sorted(int(path.stem) for path in folder.glob("*.log"))
    log_file = file_of(folder, bases[2], ".log")
    log_file.write_bytes(log_file.read_bytes()[:-1])
    log = open_log(config=CONFIG, clean=False, recovery_point=bases[2])
    assert log.recovery.removed_segments == bases[3:]
    assert log.active_base_offset == bases[2]
    assert [record.value for record in records_of(log)] == written[: log.log_end_offset]
    left = sorted(int(path.stem) for path in folder.glob("*.log"))
    assert left == bases[:3]
    assert not [
        path
        for path in folder.iterdir()
        if path.stem > f"{log.log_end_offset:020d}"
        and path.suffix != ".cut"
        and path.stem[0] == "0"
    ]


def test_a_crash_while_they_are_removed_leaves_no_hole(
    open_log, records_of, written, folder, tmp_path
):
    bases = sorted(int(path.stem) for path in folder.glob("*.log"))
    cut(file_of(folder, bases[-4], ".log"))
    config, disk, images = {**CONFIG, "cleanup.policy": "compact"}, LossyDisk(), []

    def crash(_call):
        for seed in range(3):
            images.append(tmp_path / str(len(images)))
            disk.crash_into(images[-1], random.Random(seed), of=folder)

    disk.before_call = crash
    open_log(config=config, clean=False, recovery_point=bases[-4], disk=disk)
    disk.before_call = lambda _call: None
    for image in images:
        log = open_log(image, config=config, clean=False, recovery_point=bases[-4])
        assert [record.value for record in records_of(log)] == written[: log.log_end_offset]
    assert len(images) > 60


@pytest.mark.parametrize("policy", ["delete", "compact"])
@pytest.mark.parametrize("flushed", [2, 3])
def test_a_segment_that_lost_whole_batches_at_its_end_is_truncated_too(
    open_log, records_of, written, folder, policy, flushed
):
    # A crash can keep a later file and lose an earlier one's end. In what was flushed, the same
    # picture is no loss: compaction, now or earlier, removed the records.
    bases = sorted(int(path.stem) for path in folder.glob("*.log"))
    log_file = file_of(folder, bases[2], ".log")
    headers = list(iter_headers(log_file.read_bytes()))
    with log_file.open("r+b") as file:
        file.truncate(headers[-2].position)
    config = {**CONFIG, "cleanup.policy": policy}
    flushed_end = bases[flushed]
    log = open_log(config=config, clean=False, recovery_point=bases[2], flushed_end=flushed_end)
    if flushed == 3:
        assert log.log_end_offset == 120
        return
    assert log.log_end_offset == headers[-2].base_offset
    assert f"the next begins at {bases[3]}" in log.recovery.truncate_reason
    assert log.recovery.removed_segments == bases[3:]
    assert [record.value for record in records_of(log)] == written[: log.log_end_offset]


def test_corrupt_bytes_below_the_recovery_point_are_refused(open_log, written, last, folder):
    base_offset, headers = last
    log_file = file_of(folder, base_offset, ".log")
    flip(log_file, headers[1].position + 70)
    bad = log_file.read_bytes()
    for recovery_point in (headers[1].base_offset + 1, 120):
        with pytest.raises(CorruptBatch, match="tierlog storage repair") as refusal:
            open_log(config=CONFIG, clean=False, recovery_point=recovery_point)
        assert refusal.value.file == str(log_file)
        assert refusal.value.position == headers[1].position
        assert log_file.read_bytes() == bad


def test_a_corrupt_header_below_the_recovery_point_truncates_nothing(open_log, written, folder):
    bases = sorted(int(path.stem) for path in folder.glob("*.log"))
    log_file = file_of(folder, bases[1], ".log")
    flip(log_file, list(iter_headers(log_file.read_bytes()))[1].position + 16)
    bad = log_file.read_bytes()
    with pytest.raises(CorruptBatch, match="magic"):
        open_log(config=CONFIG, clean=False, recovery_point=bases[2])
    assert log_file.read_bytes() == bad


# The base offset has no checksum: its highest bits make offsets that no index can hold.
@pytest.mark.parametrize("byte", [0, 3, 5])
@pytest.mark.parametrize("batch", [1, -1])
def test_a_wrong_base_offset_below_the_recovery_point_is_refused(
    open_log, written, folder, batch, byte
):
    bases = sorted(int(path.stem) for path in folder.glob("*.log"))
    log_file = file_of(folder, bases[1], ".log")
    flip(log_file, list(iter_headers(log_file.read_bytes()))[batch].position + byte)
    bad = log_file.read_bytes()
    with pytest.raises(CorruptBatch, match="out of the segment's range") as refusal:
        open_log(config=CONFIG, clean=False, recovery_point=bases[2])
    assert refusal.value.file == str(log_file)
    assert log_file.read_bytes() == bad


@pytest.mark.parametrize("byte", [0, 3])
def test_a_wrong_base_offset_at_the_end_of_a_log_is_refused_after_a_clean_shutdown_too(
    open_log, append_values, folder, byte
):
    log = open_log()  # one segment, whose last batch is in no index
    for _ in range(3):
        append_values(log, b"v")
    log.close()
    log_file = file_of(folder, 0, ".log")
    position = list(iter_headers(log_file.read_bytes()))[-1].position
    flip(log_file, position + byte)
    with pytest.raises(CorruptBatch, match="out of the segment's range") as refusal:
        open_log(clean=True, recovery_point=3)
    assert refusal.value.position == position


def test_a_recovery_point_beyond_the_end_is_lowered(open_log, written):
    log = open_log(config=CONFIG, clean=False, recovery_point=500)
    assert log.flushed_end == log.log_end_offset == 120


def test_segments_that_overlap_are_refused(open_log, written, folder):
    bases = sorted(int(path.stem) for path in folder.glob("*.log"))
    for suffix in (".log", ".index", ".timeindex"):
        source = file_of(folder, bases[1], suffix)
        source.rename(file_of(folder, bases[1] - 1, suffix))
    with pytest.raises(CorruptDataError, match=r"another segment begins.*tierlog storage restore"):
        open_log(config=CONFIG, clean=False, recovery_point=0)


@pytest.mark.parametrize("clean", [True, False])
def test_an_empty_last_segment_is_resumed(open_log, append_values, folder, written, clean):
    log = open_log(config=CONFIG)
    log.roll()
    log.close()
    assert file_of(folder, 120, ".log").stat().st_size == 0
    log = open_log(config=CONFIG, clean=clean, recovery_point=120)
    assert (log.active_base_offset, log.log_end_offset) == (120, 120)
    append_values(log, b"x")
    assert log.writer.flush() == 121


def test_an_empty_folder_starts_at_the_given_offset(open_log, append_values, folder):
    folder.mkdir()
    (folder / LEADER_EPOCHS).write_bytes(b"0\n2\n1 0\n2 1000\n")  # the last epoch began above that
    log = open_log(start_offset=1000, log_start_offset=3, clean=False)
    assert (log.log_start_offset, log.local_log_start_offset, log.log_end_offset) == (3, 1000, 1000)
    assert append_values(log, b"x").base_offset == 1000
    assert file_of(folder, 1000, ".log").exists()
    assert (folder / LEADER_EPOCHS).read_bytes() == b"0\n1\n1 0\n"


# --- indexes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["missing", "short", "garbage", "oversized", "empty"])
@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
@pytest.mark.parametrize("which", [1, -1])
def test_indexes_above_the_recovery_point_are_rebuilt(
    open_log, written, folder, suffix, damage, which
):
    good = indexes_of(folder)
    bases = sorted(int(path.stem) for path in folder.glob("*.log"))
    path = file_of(folder, bases[which], suffix)
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {
                "short": data[: len(data) // 2],
                "garbage": bytes(reversed(data)) + b"\x01",
                "oversized": data + bytes(12 * 1000),
                "empty": b"",
            }[damage]
        )
    log = open_log(config=CONFIG, clean=False, recovery_point=0)
    for offset in range(120):
        assert first_offset(log.read_hot(offset, max_bytes=1)) == offset // 2 * 2
        assert log.offset_for_timestamp(NOW_MS + offset) == (
            None if offset > 118 else ((offset + 1) // 2 * 2, NOW_MS + (offset + 1) // 2 * 2)
        )
    log.close()
    assert indexes_of(folder) == good


def test_an_index_whose_trim_was_not_synced_is_rebuilt(open_log, written, folder):
    good = indexes_of(folder)
    bases = sorted(int(path.stem) for path in folder.glob("*.log"))
    path = file_of(folder, bases[1], ".timeindex")
    path.write_bytes(path.read_bytes() + bytes(24))
    open_log(config=CONFIG, clean=False, recovery_point=bases[2]).close()
    assert indexes_of(folder) == good


def test_a_recovered_log_has_the_indexes_that_appends_wrote(open_log, written, folder):
    good = indexes_of(folder)
    for _ in range(3):
        open_log(config=CONFIG, clean=False, recovery_point=0).close()
        assert indexes_of(folder) == good


def test_indexes_are_the_same_whether_or_not_the_log_was_reopened(
    open_log, append_values, folder, tmp_path
):
    def write(target: Path, *, reopen: bool) -> None:
        log = open_log(target, config=CONFIG)
        for number in range(60):
            append_values(log, b"v" * (number % 50), timestamps=[NOW_MS + number % 17])
            if reopen and number % 7 == 0:
                log.close()
                log = open_log(target, config=CONFIG)
        log.close()

    write(folder, reopen=False)
    write(tmp_path / "other", reopen=True)
    assert indexes_of(tmp_path / "other") == indexes_of(folder)


@pytest.mark.parametrize("suffix", [".index", ".timeindex", ".snapshot", "epoch-checkpoint"])
@pytest.mark.parametrize("which", [0, -1])
@pytest.mark.parametrize("clean", [True, False])
def test_an_unreadable_file_is_rebuilt(
    open_log, records_of, written, folder, tmp_path, monkeypatch, suffix, which, clean
):
    path = sorted(folder.glob(f"*{suffix}"))[which]
    cannot_read(monkeypatch, path, kept=tmp_path / "bad sectors")
    log = open_log(config=CONFIG, clean=clean, recovery_point=120)
    assert [record.value for record in records_of(log)] == written
    assert [log.offset_for_timestamp(NOW_MS + offset) for offset in range(0, 120, 2)] == [
        (offset, NOW_MS + offset) for offset in range(0, 120, 2)
    ]
    for view in log.segments()[:-1]:
        files = log.sealed.prepare_upload(view.base_offset)
        assert all(path.read_bytes() is not None for path in (files.index, files.timeindex))
        assert files.snapshot.read_bytes()


# --- leftovers ------------------------------------------------------------------------------------


def test_leftovers_of_a_crash_are_removed(open_log, records_of, written, folder):
    for name in (
        f"{0:020d}.log.cleaned",
        f"{0:020d}.index.cleaned",
        f"{7:020d}.log.deleted",
        f"{7:020d}.snapshot.deleted",
        f"{9:020d}.index",
        f"{9:020d}.timeindex",
        "leader-epoch-checkpoint.tmp",
    ):
        (folder / name).write_bytes(b"left")
    (folder / "somebody-s-notes.txt").write_bytes(b"kept")
    log = open_log(config=CONFIG, clean=False, recovery_point=0)
    assert [record.value for record in records_of(log)] == written
    log.close()
    names = {path.name for path in folder.iterdir()}
    assert not [name for name in names if name.endswith((".cleaned", ".deleted", ".swap", ".tmp"))]
    assert "somebody-s-notes.txt" in names


@pytest.mark.parametrize("steps", range(4))
def test_an_interrupted_swap_is_finished(open_log, records_of, written, folder, steps):
    """Compaction merged the first two segments; the crash was after `steps` steps of the swap."""
    bases = sorted(int(path.stem) for path in folder.glob("*.log"))
    merged = b"".join(file_of(folder, base, ".log").read_bytes() for base in bases[:2])
    file_of(folder, 0, ".log.swap").write_bytes(merged)
    file_of(folder, 0, ".index.swap").write_bytes(b"")
    file_of(folder, 0, ".timeindex.swap").write_bytes(b"")
    if steps > 0:
        file_of(folder, bases[1], ".log").unlink()
        file_of(folder, bases[1], ".index").unlink()
    if steps > 1:
        file_of(folder, 0, ".log").unlink()
    if steps > 2:
        file_of(folder, 0, ".index.swap").rename(file_of(folder, 0, ".index"))
    log = open_log(config=CONFIG, clean=False, recovery_point=0)
    assert [segment.base_offset for segment in log.segments()] == [0, *bases[2:]]
    assert [record.value for record in records_of(log)] == written


def test_a_crash_while_a_swap_is_finished_leaves_nothing_of_the_old_segments(
    open_log, written, folder, tmp_path
):
    """Planted bug: the `.log` goes first. The transaction index that outlives it would become that
    of the new segment, and hide what its producers wrote later.
    """
    bases = sorted(int(path.stem) for path in folder.glob("*.log"))
    merged = b"".join(file_of(folder, base, ".log").read_bytes() for base in bases[:2])
    for suffix, content in ((".log", merged), (".index", b""), (".timeindex", b"")):
        file_of(folder, 0, f"{suffix}.swap").write_bytes(content)
    file_of(folder, 0, ".txnindex").write_bytes(pack_txn_index([AbortedTxn(9, 0, 1, 2)]))
    disk, copies = LossyDisk(), []
    disk.before_call = lambda _call: copies.append(
        shutil.copytree(folder, tmp_path / str(len(copies)))
    )
    at_crash = {"config": CONFIG, "clean": False, "recovery_point": 120}
    opened = open_log(disk=disk, **at_crash)
    disk.before_call = lambda _call: None
    for log in (opened, *(open_log(copy, **at_crash) for copy in copies)):
        assert log.base_offsets == (0, *bases[2:])
        assert log.aborted_transactions(0, 120) == []
    assert len(copies) > 10


def test_a_folder_of_another_topic_is_rejected(open_log, written):
    with pytest.raises(CorruptSnapshot, match="has topic id"):
        open_log(config=CONFIG, topic_id="AAAAAAAAAAAAAAAAAAAAAQ")


# --- epochs and producers -------------------------------------------------------------------------


@pytest.mark.parametrize("clean", [True, False])
def test_a_lost_epoch_file_is_rebuilt_from_trusted_segments_too(
    open_log, append_values, folder, clean
):
    log = open_log(config=CONFIG)
    for epoch in range(6):
        log.bump_epoch(epoch)
        for _ in range(8):
            append_values(log, b"v" * 200)
    log.close()
    path, bases = folder / "leader-epoch-checkpoint", [view.base_offset for view in log.segments()]
    good = path.read_bytes()
    path.unlink()
    open_log(config=CONFIG, clean=clean, recovery_point=bases[len(bases) // 2]).close()
    assert path.read_bytes() == good


@pytest.mark.parametrize("damage", ["missing", "garbage", "cut"])
@pytest.mark.parametrize("clean", [True, False])
def test_a_lost_epoch_file_is_rebuilt_from_the_batches(
    open_log, append_values, folder, damage, clean
):
    log = open_log()
    for epoch in (0, 3, 4):
        log.bump_epoch(epoch)
        append_values(log, b"x", b"y")
    log.bump_epoch(9)  # it has no records
    log.close()
    path = folder / "leader-epoch-checkpoint"
    good = path.read_bytes()
    assert good == b"0\n3\n0 0\n3 2\n4 4\n"
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(good[:-1] if damage == "cut" else b"\x00" * 20)
    log = open_log(clean=clean)
    assert log.epochs == ((0, 0), (3, 2), (4, 4))
    assert log.leader_epoch == 4
    log.close()
    assert path.read_bytes() == good


def idempotent(make_batch, produced, sequence: int, *, epoch: int = 0, count: int = 1) -> Append:
    values = [b"%d" % (sequence + number) for number in range(count)]
    return Append(
        produced(make_batch(values, producer_id=77, producer_epoch=epoch, base_sequence=sequence))
    )


@pytest.mark.parametrize("damage", ["none", "missing", "garbage", "older", "all missing"])
@pytest.mark.parametrize("clean", [True, False])
def test_producers_are_known_after_a_restart(open_log, make_batch, produced, folder, damage, clean):
    log = open_log(config={**CONFIG, "segment.bytes": 1024})
    for sequence in range(40):
        log.writer.append([idempotent(make_batch, produced, sequence)])
    log.close()
    snapshots = sorted(folder.glob("*.snapshot"))
    assert len(snapshots) > 2
    if damage == "missing":
        snapshots[-1].unlink()
    elif damage == "garbage":
        snapshots[-1].write_bytes(b"\x00\x01garbage")
    elif damage == "older":
        snapshots[0].unlink()
    elif damage == "all missing":
        for snapshot in snapshots:
            snapshot.unlink()
    log = open_log(config=CONFIG, clean=clean, recovery_point=20)
    repeats = log.writer.append([idempotent(make_batch, produced, n) for n in (39, 38, 37, 36, 35)])
    assert [outcome.base_offset for outcome in repeats] == [39, 38, 37, 36, 35]
    assert all(outcome.duplicate for outcome in repeats)
    gap, following = log.writer.append([idempotent(make_batch, produced, n) for n in (41, 40)])
    assert isinstance(gap, OutOfOrderSequence)
    assert (following.base_offset, following.duplicate) == (40, False)


@pytest.mark.parametrize("damage", [None, b"", b"garbage", bytes(100)])
@pytest.mark.parametrize("which", [0, 2])
@pytest.mark.parametrize("clean", [True, False])
def test_corrupt_snapshots_are_rebuilt_before_they_are_used(
    open_log, make_batch, produced, folder, clean, which, damage
):
    # A crash leaves zeros if a file's size reached the medium before its bytes.
    log = open_log(config={**CONFIG, "segment.bytes": 1024})
    for sequence in range(40):
        log.writer.append([idempotent(make_batch, produced, sequence)])
    log.close()
    bases = [view.base_offset for view in log.segments()]
    good = {path.name: path.read_bytes() for path in folder.glob("*.snapshot")}
    for name in good:
        (folder / name).write_bytes(damage) if damage is not None else (folder / name).unlink()
    log = open_log(config=CONFIG, clean=clean, recovery_point=bases[which])
    for base_offset in bases[:-1]:
        snapshot = log.sealed.prepare_upload(base_offset).snapshot
        assert snapshot.read_bytes() == good[snapshot.name]
    (repeat,) = log.writer.append([idempotent(make_batch, produced, 39)])
    assert repeat.duplicate
    log.close()
    assert {path.name: path.read_bytes() for path in folder.glob("*.snapshot")} == good


@pytest.mark.parametrize("chunk_bytes", [1000, 1 << 20])
def test_recovery_restores_all_producers(open_log, make_batch, monkeypatch, chunk_bytes):
    # Alternating producers, one with a newer epoch, plain batches and transactions in between: some
    # are recovered as runs, in chunks of any size, others batch by batch.
    monkeypatch.setattr("tierlog.hot_tier.border_check.CHECK_CHUNK_BYTES", chunk_bytes)
    dice, sequences = random.Random(3), dict.fromkeys(range(6), 0)
    log = open_log(config={"segment.bytes": 1 << 20})
    for turn in range(300):
        producer_id = dice.choice((0, 0, 0, 1, 1, 2, 3, 4, 5))
        epoch = int(producer_id == 1 and turn > 150)
        if producer_id == 1 and turn > 150 and sequences[1] < 1000:
            sequences[1] = 1000  # the newer epoch starts at 0
        fields = {"producer_id": producer_id, "producer_epoch": epoch}
        fields["base_sequence"] = sequences[producer_id] % 1000
        if producer_id == 5:
            fields = {}
        values = [b"v"] * dice.randrange(1, 4)
        batch = make_batch(values, **fields, transactional=producer_id == 4)
        (outcome,) = log.writer.append([Append(unchecked(batch), verify=lambda _: None)])
        assert isinstance(outcome, AppendResult), outcome
        sequences[producer_id] += len(values)
    log.close()
    before = list(log._state.producers)
    log = open_log(clean=False)
    after = list(log._state.producers)
    assert sorted(after) == sorted(before)
    assert len(after) == 5
    assert log.offsets.last_stable_offset < log.log_end_offset


def test_a_truncated_producer_batch_is_forgotten(open_log, make_batch, produced, folder):
    log = open_log()
    for sequence in range(5):
        log.writer.append([idempotent(make_batch, produced, sequence)])
    log.close()
    log_file = file_of(folder, 0, ".log")
    log_file.write_bytes(log_file.read_bytes()[:-1])
    log = open_log(clean=False)
    assert log.log_end_offset == 4
    (again,) = log.writer.append([idempotent(make_batch, produced, 4)])
    assert (again.base_offset, again.duplicate) == (4, False)


@pytest.mark.parametrize("is_truncated", [False, True])
@pytest.mark.parametrize("next_is_preallocated", [False, True])
def test_an_interrupted_roll_of_a_preallocated_segment_is_not_corruption(
    open_log, append_values, records_of, folder, tmp_path, next_is_preallocated, is_truncated
):
    """Everything was flushed and the next segment exists, but the truncation of the old one to its
    length is missing, or was not synced.
    """
    config = {"preallocate": True, "segment.bytes": 100_000}
    log = open_log(config=config)
    for value in (b"a", b"b"):
        append_values(log, value)
    size_bytes, end = log.size_bytes, log.writer.flush()
    crashed = tmp_path / "crashed"
    shutil.copytree(folder, crashed)
    file_of(crashed, end, ".log").write_bytes(bytes(100_000 if next_is_preallocated else 0))
    disk = LossyDisk()
    if is_truncated:
        fd = disk.open(file_of(crashed, 0, ".log"), os.O_RDWR)
        disk.truncate(fd, size_bytes)
        os.close(fd)
    log = open_log(crashed, config=config, clean=False, recovery_point=end, disk=disk)
    assert [view.size_bytes for view in log.segments()] == [size_bytes, 0]
    for seed in range(10):
        disk.crash_into(tmp_path / str(seed), random.Random(seed), of=crashed)
        assert file_of(tmp_path / str(seed), 0, ".log").stat().st_size == size_bytes
    append_values(log, b"c")
    log.writer.flush()
    assert [r.value for r in records_of(log)] == [b"a", b"b", b"c"]


@pytest.mark.parametrize("behind", [b"", bytes(500)])
def test_the_lost_end_of_a_compacted_log_is_not_mistaken_for_compaction(
    open_log, append_values, records_of, folder, tmp_path, behind
):
    """Power fails during a roll: the next segment's name survives, not the last one's bytes."""
    config = {"cleanup.policy": "compact"}
    log = open_log(config=config)
    append_values(log, b"a", keys=[b"a"])
    log.roll()
    append_values(log, b"b", b"c", keys=[b"b", b"c"])
    crashed = tmp_path / "crashed"
    shutil.copytree(folder, crashed)
    file_of(crashed, 1, ".log").write_bytes(b"")
    file_of(crashed, 3, ".log").write_bytes(behind)
    log = open_log(crashed, config=config, clean=False, recovery_point=1)
    assert log.log_end_offset == log.high_watermark == 1, "a reader gets to the end"
    assert append_values(log, b"d", b"e", keys=[b"d", b"e"]).base_offset == 1
    log.roll()
    append_values(log, b"f", keys=[b"f"])
    log.writer.flush()
    assert log.active_base_offset == 3, "it has the name of the file that went"
    assert [r.value for r in records_of(log)] == [b"a", b"d", b"e", b"f"]


@pytest.mark.parametrize("in_order", [reaper.DELETED_IN_ORDER, reaper.REPLACED_IN_ORDER])
def test_a_crash_during_a_deletion_forgets_no_producer(
    open_log, append_values, folder, tmp_path, monkeypatch, in_order
):
    """Planted bug: the `.log` is renamed last, and lacks the snapshot before it until then."""
    disk, sent, copies = LossyDisk(), {"producer_id": 7, "producer_epoch": 0}, []
    log = open_log(disk=disk)
    append_values(log, b"once", base_sequence=0, **sent)
    for value in (b"1", b"2"):
        log.roll()
        append_values(log, value)
    log.delete_local(1)
    log.writer.flush()

    def copy(_call):
        copies.append(shutil.copytree(folder, tmp_path / str(len(copies))))

    monkeypatch.setattr(reaper, "DELETED_IN_ORDER", in_order)
    disk.before_call = copy
    log.delete_local(2)
    opened = [open_log(copy, clean=False, recovery_point=1) for copy in copies]
    known = [append_values(log, b"once", base_sequence=0, **sent).duplicate for log in opened]
    assert len(known) > 4
    assert all(known) == (in_order is not reaper.REPLACED_IN_ORDER)


@pytest.mark.parametrize("made_by", ["a roll", "an append", "a recovery", "a clean stop"])
def test_producers_of_deleted_segments_survive_a_power_failure(
    open_log, append_values, folder, tmp_path, made_by
):
    """The segments are in the bucket and were deleted here: only the snapshot has the producers."""
    disk, sent = LossyDisk(), {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0}
    log = open_log(config={"segment.bytes": 1024}, disk=disk)
    append_values(log, b"once", **sent)
    if made_by == "an append":  # not flushed; everything before it is
        log.writer.flush()
        append_values(log, b"v" * 1000)
    else:
        log.roll()
    if made_by == "a recovery":
        file_of(folder, 1, ".snapshot").unlink()
        log = open_log(disk=disk, clean=False, recovery_point=1)
    log.delete_local(1)
    crashed = []

    def crash(_call, seeds=4):
        for seed in range(seeds):
            crashed.append(tmp_path / str(len(crashed)))
            disk.crash_into(crashed[-1], random.Random(seed), of=folder)

    if made_by == "a clean stop":  # at any moment of it
        disk.before_call = crash
        log.close()
    crash("after it", seeds=20)
    for found in crashed:
        after = open_log(found, clean=False, recovery_point=1)
        assert append_values(after, b"once", **sent).duplicate, found


# --- a disk that failed ---------------------------------------------------------------------------


def test_bytes_are_rewritten_after_a_failed_flush(
    open_log, append_values, records_of, folder, disk
):
    log = open_log(config=CONFIG, disk=disk)
    for _ in range(20):
        append_values(log, b"v" * 100)
    flushed = log.writer.flush()
    append_values(log, b"unflushed")
    disk.fail("sync_bytes", suffix=".log")
    with pytest.raises(LogOfflineError):
        log.writer.flush()
    assert not log.close()
    disk.heal()
    disk.calls.clear()
    disk.most_bytes_a_write = 100
    log = open_log(config=CONFIG, disk=disk, clean=True, recovery_point=flushed)
    assert not log.recovery.clean
    assert log.recovery.rewritten_bytes > 0
    active = str(file_of(folder, log.active_base_offset, ".log"))
    rewritten = [call.name for call in disk.calls if call.path == active]
    assert rewritten.index("write_at") < rewritten.index("sync_bytes")
    size_bytes = log.segments()[-1].size_bytes
    assert rewritten.count("write_at") == -(-size_bytes // 100), "a short write is gone on with"
    assert records_of(log)[-1].value == b"unflushed"
    log.close()
    log = open_log(config=CONFIG, clean=True)
    assert log.recovery.clean


def test_a_log_whose_recovery_cannot_flush_does_not_open(open_log, written, disk):
    disk.fail("sync_bytes", errno.EIO, suffix=".log")
    with pytest.raises(LogOfflineError):
        open_log(config=CONFIG, clean=False, recovery_point=0, disk=disk)


def test_recovery_syncs_what_it_keeps_and_the_folder(open_log, written, folder, disk):
    open_log(config=CONFIG, clean=False, recovery_point=0, disk=disk)
    synced = {call.path for call in disk.calls if call.name == "sync_bytes"}
    assert {str(path) for path in folder.glob("*.log")} <= synced
    assert str(folder) in {call.path for call in disk.calls if call.name == "sync_folder"}
