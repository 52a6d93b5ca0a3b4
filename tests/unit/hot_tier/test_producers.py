import pytest

from hot_tier.append import Append
from record_format.errors import OutOfOrderSequence, ProducerFenced
from tests.fakes.partition_logs import unchecked

INT_MAX = 2**31 - 1


@pytest.fixture
def send(append_values):
    def _send(log, sequence: int, *, epoch: int = 0, count: int = 1, producer: int = 9):
        values = [b"v"] * count
        return append_values(
            log, *values, producer_id=producer, producer_epoch=epoch, base_sequence=sequence
        )

    return _send


def test_a_repeat_among_the_last_five_gives_the_first_offsets(open_log, send):
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


def test_a_repeat_in_the_same_write_is_seen(open_log, produced, make_batch):
    log = open_log()
    fields = {"producer_id": 1, "producer_epoch": 0, "base_sequence": 0}
    appends = [Append(produced(make_batch([b"x"], **fields))) for _ in range(2)]
    outcomes = log.append(appends)
    assert [(o.base_offset, o.duplicate) for o in outcomes] == [(0, False), (0, True)]


def test_a_repeat_is_told_the_time_that_its_first_copy_was_given(open_log, send, clock):
    log = open_log(config={"message.timestamp.type": "LogAppendTime"})
    first = send(log, 0)
    clock.now_ms += 1000
    assert send(log, 1).log_append_time == first.log_append_time + 1000
    assert send(log, 0).log_append_time == first.log_append_time


def test_a_gap_is_refused(open_log, send):
    log = open_log()
    send(log, 0)
    for sequence in (2, 100):
        with pytest.raises(OutOfOrderSequence, match="1 was expected"):
            send(log, sequence)
    with pytest.raises(OutOfOrderSequence):
        send(log, 0, count=2)  # the same first, another last


def test_a_producer_that_is_not_known_may_begin_anywhere(open_log, send):
    assert send(open_log(), 17).base_offset == 0


def test_sequences_wrap(open_log, send):
    log = open_log()
    send(log, INT_MAX - 1, count=2)
    assert send(log, 0).base_offset == 2
    assert send(log, INT_MAX - 1, count=2).duplicate


def test_a_batch_whose_sequences_wrap_inside_is_known_again(open_log, send):
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


def test_producers_do_not_touch_each_other(open_log, send):
    log = open_log()
    for sequence in range(3):
        for producer in (1, 2):
            assert not send(log, sequence, producer=producer).duplicate


def test_a_request_of_several_batches_is_repeated_whole_or_not_at_all(
    open_log, produced, make_batch
):
    def batches(*sequences):
        fields = {"producer_id": 1, "producer_epoch": 0}
        return Append(produced(*(make_batch([b"x"], base_sequence=n, **fields) for n in sequences)))

    log = open_log()
    (first,) = log.append([batches(0, 1)])
    assert (first.base_offset, first.last_offset) == (0, 1)
    (again,) = log.append([batches(0, 1)])
    assert (again.base_offset, again.last_offset, again.duplicate) == (0, 1, True)
    (mixed,) = log.append([batches(1, 2)])
    assert isinstance(mixed, OutOfOrderSequence)


def test_an_idle_producer_is_forgotten(open_log, send, clock):
    log = open_log()
    send(log, 0, producer=1)
    clock.now_ms += 1000
    send(log, 0, producer=2)
    assert log.expire_producers(seen_before_ms=clock.now_ms) == 1
    assert send(log, 5, producer=1).base_offset == 2
    with pytest.raises(OutOfOrderSequence):
        send(log, 5, producer=2)


def test_a_producer_in_a_transaction_is_not_forgotten(open_log, make_batch, clock):
    log = open_log()
    fields = {"producer_id": 1, "producer_epoch": 0, "base_sequence": 0}
    batch = make_batch([b"v"], **fields, transactional=True)
    log.append([Append(unchecked(batch))])
    log.flush()
    assert log.expire_producers(seen_before_ms=clock() + 1) == 0
    assert log.last_stable_offset == 0
