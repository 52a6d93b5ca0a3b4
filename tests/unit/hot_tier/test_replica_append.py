"""What a follower has of its leader's log: the same bytes, or nothing of what is not right."""

import errno
import itertools
import random
from contextlib import closing

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.clock import NOW_MS
from tests.fakes.partition_logs import append_values, batch, produced, records_of, unchecked
from tests.fakes.replicas import begin_to_follow, begin_to_lead, catch_up, copy_once, files_of
from tierlog.hot_tier.log_writer import Append
from tierlog.record_format.batch import HEADER_SIZE, parse_header, set_checksum
from tierlog.record_format.codecs import GZIP, NONE, ZSTD
from tierlog.record_format.compaction import PlainKeyTable
from tierlog.record_format.decode import EndMarker
from tierlog.record_format.errors import (
    CorruptBatch,
    DiskFull,
    OffsetPastEnd,
    OffsetTrimmed,
    StoreUnavailable,
)
from tierlog.record_format.produced import build_marker


@pytest.fixture
def pair(open_log, tmp_path):
    """A leader and a follower with this configuration."""

    def _open(**config):
        return (
            begin_to_lead(open_log(tmp_path / "leader-0", config=config)),
            begin_to_follow(open_log(tmp_path / "follower-0", config=config)),
        )

    return _open


def put(log, *appends):
    for outcome in log.writer.append(appends):
        if isinstance(outcome, Exception):
            raise outcome


def transactional(producer, *, sequence=0):
    fields = {"producer_id": producer, "producer_epoch": 0, "base_sequence": sequence}
    return Append(unchecked(batch([b"v"], transactional=True, **fields)), verify=lambda _: None)


def end_of(producer, *, committed):
    marker = EndMarker(committed, 3)
    built = build_marker(marker, producer_id=producer, producer_epoch=0, timestamp=NOW_MS)
    return Append(built, marker=marker)


def append_of_all_kinds(log, *, rounds, seed=1):
    """Idempotent producers, transactions of both ends, codecs, several epochs, many segments."""
    draw, sequences = random.Random(seed), {1: 0, 2: 0, 3: 0}
    for number in range(rounds):
        size = draw.choice((1, 3, 20))
        times = [NOW_MS + draw.randrange(10_000) for _ in range(size)]
        codec = draw.choice((NONE, GZIP, ZSTD))
        put(log, Append(produced(batch([b"plain"] * size, timestamps=times, codec=codec))))
        producer = draw.choice((1, 2, 3))
        fields = {"producer_id": producer, "producer_epoch": 0}
        sent = batch([b"own"] * 2, base_sequence=sequences[producer], **fields)
        put(log, Append(produced(sent)))
        sequences[producer] += 2
        put(log, transactional(10 + number, sequence=0))
        if number % 3:
            put(log, end_of(10 + number, committed=number % 3 == 1))
        if number % 7 == 6:
            log.end_term()
            log.begin_term(log.leader_epoch + 1)


@pytest.mark.parametrize("max_bytes", [1, 700, 1 << 20])
def test_a_follower_has_the_same_files(pair, max_bytes):
    leader, follower = pair(**{"segment.bytes": 2048, "index.interval.bytes": 300})
    for part in range(3):
        append_of_all_kinds(leader, rounds=10, seed=part)
        catch_up(leader, follower, max_bytes=max_bytes)
        assert follower.base_offsets == leader.base_offsets
        assert (follower.offsets, follower.epochs) == (leader.offsets, leader.epochs)
        assert follower.producers() == leader.producers()
    assert len(leader.base_offsets) > 5
    end = leader.log_end_offset
    assert follower.aborted_transactions(0, end) == leader.aborted_transactions(0, end) != []
    assert follower.offset_for_timestamp(NOW_MS + 5000) == leader.offset_for_timestamp(
        NOW_MS + 5000
    )
    assert leader.close()
    assert follower.close()
    assert files_of(follower) == files_of(leader)


def test_what_is_not_flushed_is_replicated_and_seen_by_nobody(pair):
    leader, follower = pair()
    append_values(leader, b"v")
    assert leader.flushed_end == 0
    assert copy_once(leader, follower)
    assert (follower.log_end_offset, follower.flushed_end, follower.high_watermark) == (1, 0, 0)
    assert records_of(follower) == []


def test_a_read_for_a_replica_ends_with_its_segment(pair):
    leader, _ = pair()
    for _ in range(3):
        append_values(leader, b"1")
        append_values(leader, b"2")
        leader.roll()
    read_at = lambda offset, **limits: leader.read_for_replica(  # noqa: E731
        offset, max_bytes=limits.get("max_bytes", 1 << 20)
    )
    found = []
    for offset in range(7):
        with closing(read_at(offset)) as read:
            bases = [parse_header(piece.read()).base_offset for piece in read.slices]
            found.append((bases, read.segment_base_offset))
    assert found == [([0], 0), ([1], 0), ([2], 2), ([3], 2), ([4], 4), ([5], 4), ([], 6)]
    with pytest.raises(OffsetPastEnd):
        read_at(7)
    leader.commit_up_to(6)
    leader.trim(3)
    with closing(read_at(1)) as read:
        assert read.slices, "what is below the log start is replicated, too"
    leader.delete_local(2)
    with pytest.raises(OffsetTrimmed):
        read_at(1)


def test_a_follower_of_a_compacted_log_reaches_its_end_and_survives_a_crash(
    pair, open_log, tmp_path
):
    """Compaction may leave the end of a segment without a batch, also of the last sealed one."""
    leader, follower = pair(**{"cleanup.policy": "compact", "segment.bytes": 1024})
    for number in range(4):
        append_values(leader, b"kept" * 150, keys=[b"%d" % number])
        append_values(leader, b"v", keys=[b"k"])
        leader.roll()
    append_values(leader, b"v", keys=[b"k"])
    leader.roll()
    leader.commit_up_to(leader.flushed_end)
    leader.sealed.clean(leader.sealed.cleanable(0), PlainKeyTable(1 << 20))
    assert [leader.sealed.gap_after(base) is None for base in (0, 2, 4)] == [False] * 3
    catch_up(leader, follower)
    assert follower.log_end_offset == leader.log_end_offset
    assert follower.base_offsets == leader.base_offsets
    assert [follower.sealed.gap_after(base) for base in (0, 2, 4)] == [None] * 3
    assert records_of(follower) == records_of(leader)
    follower.abandon()
    again = open_log(tmp_path / "follower-0", clean=False, flushed_end=0)
    assert again.log_end_offset == leader.log_end_offset


@pytest.mark.parametrize("uncommitted", [0, 1, 6])
def test_compaction_leaves_what_tells_that_a_committed_batch_is_repeated(pair, uncommitted):
    """Also if its producer has appended more, which may be cut."""
    leader, follower = pair(**{"cleanup.policy": "compact", "segment.bytes": 1024})

    def send(sequence):
        fields = {"producer_id": 7, "producer_epoch": 0, "base_sequence": sequence}
        put(leader, Append(produced(batch([b"v"], keys=[b"k"], **fields))))

    send(0)
    send(1)
    append_values(leader, b"later", keys=[b"k"])
    leader.roll()
    leader.commit_up_to(leader.flushed_end)
    end = leader.log_end_offset
    for number in range(uncommitted):
        send(2 + number)
    leader.sealed.clean(leader.sealed.cleanable(0), PlainKeyTable(1 << 20))
    assert [record.offset for record in records_of(leader, end_offset=end)] == [2]
    while follower.log_end_offset < end:
        copy_once(leader, follower, max_bytes=1)
    (known,) = follower.producers()
    assert known.last_sequence == 1


def test_a_hole_at_a_segments_end_is_filled(pair, open_log, tmp_path):
    leader, follower = pair()
    append_values(leader, b"v")
    catch_up(leader, follower)
    follower.roll_at(2**31 + 7)  # more offsets than a batch may have
    assert follower.log_end_offset == 2**31 + 7
    assert follower.active_base_offset == 2**31 + 7
    follower.roll_at(5)
    assert follower.active_base_offset == 2**31 + 7, "the records are there, the border is not"
    follower.writer.flush()
    follower.abandon()
    again = open_log(tmp_path / "follower-0", clean=False)
    assert again.log_end_offset == 2**31 + 7
    assert [record.offset for record in records_of(again, 0)] == [0]


def test_a_new_leader_continues_what_it_followed(pair):
    leader, follower = pair()
    put(
        leader,
        transactional(5),
        Append(produced(batch([b"v"], producer_id=6, base_sequence=0, producer_epoch=0))),
    )
    catch_up(leader, follower)
    leader.end_term()
    follower.begin_term(2)
    again = batch([b"v"], producer_id=6, base_sequence=0, producer_epoch=0)
    (outcome,) = follower.writer.append([Append(produced(again))])
    assert outcome.duplicate
    put(follower, transactional(5, sequence=1), end_of(5, committed=False))
    catch_up(follower, leader)
    assert leader.epochs == follower.epochs == ((1, 0), (2, 2))
    assert leader.base_offsets == follower.base_offsets == (0, 2)
    assert leader.aborted_transactions(0, 4) == follower.aborted_transactions(0, 4) != []


# --- what is not right ----------------------------------------------------------------------------


def with_header(sent, **fields):
    """A copy with other header fields, and the checksum of what it is then."""
    changed = bytearray(sent)
    changed[:HEADER_SIZE] = parse_header(sent)._replace(**fields).pack()
    set_checksum(changed)
    return changed


def state_of(log):
    segment = log._state.active.segment
    return (
        log.offsets,
        log.epochs,
        log.producers(),
        log.base_offsets,
        segment.end,
        segment.record_count,
        segment.aborted,
        segment.largest,
        {path.name: path.stat().st_size for path in log.folder.iterdir()},
        (log.folder / "leader-epoch-checkpoint").read_bytes(),
    )


NUMBERS = itertools.count()


def follower_in(open_log, folder):
    """It has offsets 0 to 2 of epoch 4."""
    log = begin_to_follow(open_log(folder))
    log.append_replicated(memoryview(with_header(batch([b"v"] * 3), leader_epoch=4)))
    log.writer.flush()
    return log


@pytest.fixture
def follower(open_log, tmp_path):
    return follower_in(open_log, tmp_path / "t-0")


def next_batch(**fields):
    return with_header(batch([b"v"] * 2), **{"base_offset": 3, "leader_epoch": 4, **fields})


def marker(value=b"\0\0\0\0\0\0", key=b"\0\0\0\0", **fields):
    sent = batch(
        [value], keys=[key], producer_id=5, producer_epoch=0, transactional=True, control=True
    )
    return with_header(sent, **{"base_offset": 3, "leader_epoch": 4, **fields})


WRONG = {
    "cut off in its header": next_batch()[:40],
    "cut off in its records": next_batch()[:-1],
    "more bytes after it": next_batch() + b"\0",
    "an old format": bytes(next_batch()[:16]) + b"\1" + bytes(next_batch()[17:]),
    "a bit of its records": next_batch()[:-1] + bytes([next_batch()[-1] ^ 1]),
    "offsets that are there": next_batch(base_offset=2),
    "offsets that are there, within": next_batch() + next_batch(base_offset=4),
    "an offset that a segment cannot have": next_batch(base_offset=2**31 - 1),
    "the last offset there is": next_batch(base_offset=2**63 - 2),
    "an epoch that ended": next_batch(leader_epoch=3),
    "an epoch that ended, within": next_batch(leader_epoch=6) + next_batch(base_offset=5),
    "a marker without a key": marker(key=b""),
    "a marker without a value": marker(value=b""),
    "a marker of a version that cannot be": marker(key=b"\xff\xff\0\0"),
    "a marker in an unknown codec": marker(attributes=0x37),
    "a marker that is not compressed": marker(attributes=0x31),
    "a marker after what is right": next_batch() + marker(key=b"", base_offset=5),
}


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG.keys())
def test_a_body_that_is_not_right_changes_nothing(follower, body):
    before = state_of(follower)
    with pytest.raises(CorruptBatch):
        follower.append_replicated(memoryview(bytes(body)))
    assert state_of(follower) == before
    assert follower.append_replicated(memoryview(b"")) == 3
    assert follower.append_replicated(memoryview(next_batch())) == 5


def without_answer(_):
    raise StoreUnavailable("whether there are producers is not known")


def test_an_empty_log_begins_with_the_batch_that_its_start_lies_in(open_log, tmp_path):
    """A trim need not end where a batch does."""
    log = begin_to_follow(open_log(log_start_offset=4))
    assert (log.log_start_offset, log.log_end_offset) == (4, 4)
    with pytest.raises(CorruptBatch, match="offset 3 follows 3"):
        log.append_replicated(memoryview(with_header(batch([b"v"]), base_offset=3, leader_epoch=4)))
    with pytest.raises(StoreUnavailable):
        log.append_replicated(memoryview(next_batch()), without_answer)
    assert (log.first_local_offset, log.high_watermark) == (4, 4)
    assert log.append_replicated(memoryview(next_batch())) == 5
    assert (log.log_start_offset, log.first_local_offset) == (4, 3)
    log.writer.flush()
    log.commit_up_to(5)
    again = open_log(tmp_path / "t-0", log_start_offset=4)
    assert (again.log_start_offset, again.log_end_offset) == (4, 5)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_no_mutation_of_a_body_does_harm(open_log, tmp_path, data):
    """It is refused and changes nothing, or it is what a log may hold."""
    follower = follower_in(open_log, tmp_path / f"{next(NUMBERS)}-0")
    sound = data.draw(
        st.sampled_from([next_batch(), marker(), next_batch() + marker(base_offset=5)])
    )
    body = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()) and len(body) < 100:  # else there are two
        set_checksum(body)
    before = state_of(follower)
    try:
        end = follower.append_replicated(memoryview(bytes(body)))
    except CorruptBatch:
        assert state_of(follower) == before
        assert not follower.offline
    else:
        assert end > 3
        follower.writer.flush()
        follower.abandon()
        again = open_log(follower.folder, clean=False)
        assert (again.log_end_offset, again.epochs) == (end, follower.epochs)
        assert again.producers() == follower.producers()


@pytest.mark.parametrize("call", ["write_at", "rename"])
def test_a_full_disk_appends_nothing_and_the_next_try_all(open_log, tmp_path, disk, call):
    """The rename is that of the epoch checkpoint."""
    log = follower_in(lambda folder: open_log(folder, disk=disk), tmp_path / "t-0")
    body = memoryview(next_batch(leader_epoch=5))
    disk.fail(call, errno.ENOSPC)
    with pytest.raises(DiskFull):
        log.append_replicated(body)
    assert (log.log_end_offset, log.epochs) == (3, ((4, 0),))
    disk.heal()
    assert log.append_replicated(body) == 5
    log.writer.flush()
    log.abandon()
    again = open_log(log.folder, clean=False)
    assert again.epochs == log.epochs == ((4, 0), (5, 3))
