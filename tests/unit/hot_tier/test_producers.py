import pytest

from tests.fakes.clock import NOW_MS, Clock
from tests.fakes.control_markers import marker_key, marker_value
from tests.fakes.partition_logs import unchecked
from tierlog.hot_tier.derived_files import snapshot_before
from tierlog.hot_tier.log_writer import Append
from tierlog.record_format.checkpoint_files import parse_snapshot
from tierlog.record_format.errors import CorruptBatch, OutOfOrderSequence, ProducerFenced

INT_MAX = 2**31 - 1


@pytest.fixture
def send(append_values):
    def _send(log, sequence: int, *, epoch: int = 0, count: int = 1, producer: int = 9):
        values = [b"v"] * count
        return append_values(
            log, *values, producer_id=producer, producer_epoch=epoch, base_sequence=sequence
        )

    return _send


def test_a_duplicate_among_the_last_five_returns_the_original_offsets(open_log, send):
    log = open_log()
    first = [send(log, sequence * 2, count=2) for sequence in range(7)]
    for number in range(2, 7):
        again = send(log, number * 2, count=2)
        assert again.duplicate
        assert (again.base_offset, again.last_offset) == (
            first[number].base_offset,
            first[number].last_offset,
        )
    with pytest.raises(OutOfOrderSequence):
        send(log, 2, count=2)  # older than five
    assert log.log_end_offset == 14


def test_a_duplicate_in_the_same_write_is_recognised(open_log, produced, make_batch):
    log = open_log()
    fields = {"producer_id": 1, "producer_epoch": 0, "base_sequence": 0}
    appends = [Append(produced(make_batch([b"x"], **fields))) for _ in range(2)]
    outcomes = log.writer.append(appends)
    assert [(o.base_offset, o.duplicate) for o in outcomes] == [(0, False), (0, True)]


def test_a_duplicate_returns_the_log_append_time_of_the_original(open_log, send, clock):
    log = open_log(config={"message.timestamp.type": "LogAppendTime"})
    first = send(log, 0)
    clock.now_ms += 1000
    assert send(log, 1).log_append_time == first.log_append_time + 1000
    assert send(log, 0).log_append_time == first.log_append_time


def test_a_sequence_gap_is_rejected(open_log, send):
    log = open_log()
    send(log, 0)
    for sequence in (2, 100):
        with pytest.raises(OutOfOrderSequence, match="1 was expected"):
            send(log, sequence)
    with pytest.raises(OutOfOrderSequence):
        send(log, 0, count=2)  # same first sequence, different last


def test_an_unknown_producer_may_start_at_any_sequence(open_log, send):
    assert send(open_log(), 17).base_offset == 0


def test_sequences_wrap_around(open_log, send):
    log = open_log()
    send(log, INT_MAX - 1, count=2)
    assert send(log, 0).base_offset == 2
    assert send(log, INT_MAX - 1, count=2).duplicate


def test_a_batch_whose_sequences_wrap_is_recognised(open_log, send):
    log = open_log()
    send(log, INT_MAX, count=3)
    assert send(log, INT_MAX, count=3).duplicate
    assert not send(log, 2).duplicate


def test_a_higher_epoch_starts_at_zero_and_fences_the_lower(open_log, send):
    log = open_log()
    send(log, 0)
    with pytest.raises(OutOfOrderSequence):
        send(log, 1, epoch=1)
    send(log, 0, epoch=1)
    with pytest.raises(ProducerFenced):
        send(log, 1, epoch=0)
    assert send(log, 0, epoch=1).duplicate


def test_sequences_of_a_lower_epoch_are_not_duplicates(open_log, send):
    log = open_log()
    send(log, 0, epoch=1)
    send(log, 1, epoch=1)
    send(log, 0, epoch=2)
    assert not send(log, 1, epoch=2).duplicate


def test_a_batch_with_the_same_last_sequence_only_is_not_a_duplicate(open_log, send):
    log = open_log()
    send(log, 0, count=2)
    with pytest.raises(OutOfOrderSequence):
        send(log, 1)


def test_producers_are_independent(open_log, send):
    log = open_log()
    for sequence in range(3):
        for producer in (1, 2):
            assert not send(log, sequence, producer=producer).duplicate


def test_a_request_of_several_batches_is_a_duplicate_as_a_whole_or_rejected(
    open_log, produced, make_batch
):
    def batches(*sequences):
        fields = {"producer_id": 1, "producer_epoch": 0}
        return Append(produced(*(make_batch([b"x"], base_sequence=n, **fields) for n in sequences)))

    log = open_log()
    (first,) = log.writer.append([batches(0, 1)])
    assert (first.base_offset, first.last_offset) == (0, 1)
    (again,) = log.writer.append([batches(0, 1)])
    assert (again.base_offset, again.last_offset, again.duplicate) == (0, 1, True)
    for sequences in ((1, 2), (2, 1)):
        (mixed,) = log.writer.append([batches(*sequences)])
        assert isinstance(mixed, OutOfOrderSequence)
    (following,) = log.writer.append([batches(2, 3)])
    assert (following.base_offset, following.last_offset, following.duplicate) == (2, 3, False)


@pytest.mark.parametrize("count", [2, 5, 8])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_request_of_many_batches_is_recognised_by_its_last(
    open_log, produced, make_batch, count, restarted
):
    def batches(start):
        fields = {"producer_id": 1, "producer_epoch": 0}
        numbers = range(start, start + 2 * count, 2)
        made = [make_batch([b"x", b"y"], base_sequence=number, **fields) for number in numbers]
        return Append(produced(*made))

    log = open_log()
    log.writer.append([Append(produced(make_batch([b"before"])))])
    log.writer.append([batches(0)])
    if restarted:  # only the snapshot's one batch per producer is left
        log.roll()
        log.writer.flush()
        log.delete_local(log.log_end_offset)
        log.close()
        log = open_log()
    (again,) = log.writer.append([batches(0)])
    assert (again.base_offset, again.last_offset, again.duplicate) == (1, 2 * count, True)
    (following,) = log.writer.append([batches(2 * count)])
    assert (following.base_offset, following.duplicate) == (2 * count + 1, False)


def test_an_idle_producer_expires(open_log, send, clock):
    log = open_log()
    send(log, 0, producer=1)
    clock.now_ms += 1000
    send(log, 0, producer=2)
    assert log.expire_producers(idle_ms=1000) == 1
    assert send(log, 5, producer=1).base_offset == 2
    with pytest.raises(OutOfOrderSequence):
        send(log, 5, producer=2)


def test_wall_clock_jumps_expire_no_producer(open_log, send, clock):
    log = open_log(monotonic_clock=Clock())
    send(log, 0, producer=1)
    clock.now_ms += 10 * 365 * 86_400_000
    assert log.expire_producers(idle_ms=86_400_000) == 0
    assert send(log, 0, producer=1).duplicate


def test_a_producer_in_a_transaction_does_not_expire(open_log, make_batch, clock):
    log = open_log()
    fields = {"producer_id": 1, "producer_epoch": 0, "base_sequence": 0}
    batch = make_batch([b"v"], **fields, transactional=True)
    log.writer.append([Append(unchecked(batch), verify=lambda _: None)])
    log.writer.flush()
    assert log.expire_producers(idle_ms=0) == 0
    assert log.offsets.last_stable_offset == 0


def test_a_marker_of_a_higher_epoch_resets_the_sequences(open_log, send, make_batch, tmp_path):
    """As Kafka's coordinator writes it to fence a producer whose transaction timed out."""
    sent = make_batch([b"v"], producer_id=9, producer_epoch=0, base_sequence=0, transactional=True)
    marker = make_batch(
        [marker_value(coordinator_epoch=0)],
        keys=[marker_key(committed=False)],
        base_offset=1,
        producer_id=9,
        producer_epoch=1,
        transactional=True,
        control=True,
    )
    (tmp_path / "t-0").mkdir()
    (tmp_path / "t-0" / f"{0:020d}.log").write_bytes(sent + marker)
    log = open_log(clean=False)
    assert not send(log, 0, epoch=1).duplicate
    with pytest.raises(ProducerFenced):
        send(log, 1, epoch=0)


def test_an_invalid_marker_at_the_end_is_cut_with_its_index_entry(
    open_log, append_values, records_of, make_batch, tmp_path
):
    marker = make_batch([b"v"], keys=[b"no"], timestamps=[NOW_MS + 9], base_offset=1, control=True)
    (tmp_path / "t-0").mkdir()
    (tmp_path / "t-0" / f"{0:020d}.log").write_bytes(make_batch([b"0"]) + marker)
    log = open_log(clean=False, config={"index.interval.bytes": 0})
    assert "control record" in log.recovery.truncate_reason
    append_values(log, b"1", b"2")
    log.writer.flush()
    assert [record.value for record in records_of(log, 1)] == [b"1", b"2"]
    assert [segment.max_timestamp for segment in log.segments()] == [NOW_MS]


def test_snapshot_before_includes_the_batches_after_the_newest_snapshot(
    open_log, append_values, tmp_path
):
    """The newest snapshot, from a clean shutdown, is at an offset inside the segment."""
    sent = {"producer_id": 7, "producer_epoch": 0}
    log = open_log(tmp_path)
    append_values(log, b"a", base_sequence=0, **sent)
    log.close()
    append_values(open_log(tmp_path, clean=True), b"b", base_sequence=1, **sent)
    (producer,) = parse_snapshot(snapshot_before(tmp_path, 2))
    assert (producer.last_sequence, producer.last_offset) == (1, 1)


@pytest.mark.parametrize("behind", [bytes(4096), b"half a batch"])
def test_snapshot_before_does_not_depend_on_what_a_crash_left_at_the_end(
    open_log, append_values, tmp_path, behind
):
    """At that of the segment before, too, if it was being rolled."""
    log = open_log()
    for number in range(4):
        append_values(log, b"v", producer_id=7, producer_epoch=0, base_sequence=number)
        if number == 2:
            log.roll()
    log.close()
    for path in (tmp_path / "t-0").glob("*.snapshot"):
        path.unlink()
    for path in (tmp_path / "t-0").glob("*.log"):
        path.write_bytes(path.read_bytes() + behind)
    for last in (1, 2, 3):
        (producer,) = parse_snapshot(snapshot_before(tmp_path / "t-0", last + 1))
        assert (producer.last_sequence, producer.last_offset) == (last, last)


def test_a_marker_whose_checksum_is_wrong_is_not_applied(tmp_path, make_batch):
    """Its length may be wrong too: it is read as a whole only after the check."""
    marker = bytearray(
        make_batch(
            [marker_value(coordinator_epoch=3)],
            keys=[marker_key(committed=True)],
            producer_id=9,
            producer_epoch=1,
            transactional=True,
            control=True,
        )
    )
    log = tmp_path / f"{0:020d}.log"
    log.write_bytes(marker)
    (producer,) = parse_snapshot(snapshot_before(tmp_path, 1))
    assert producer.coordinator_epoch == 3
    marker[-2] ^= 7  # the coordinator's epoch
    log.write_bytes(marker)
    with pytest.raises(CorruptBatch, match="checksum"):
        snapshot_before(tmp_path, 1)
