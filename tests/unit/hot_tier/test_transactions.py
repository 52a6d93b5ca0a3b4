"""Transactions in one log: what begins one, what ends it, and what is left of it after a crash."""

import shutil

import pytest

from tests.fakes.clock import NOW_MS
from tests.fakes.partition_logs import batch, unchecked
from tierlog.hot_tier.log_folder import TRANSACTION_INDEX
from tierlog.hot_tier.log_writer import Append
from tierlog.record_format.decode import EndMarker
from tierlog.record_format.errors import ProducerFenced, TransactionRefused
from tierlog.record_format.index_layouts import AbortedTxn
from tierlog.record_format.produced import build_marker

ABORT, COMMIT = EndMarker(False, 0), EndMarker(True, 0)


def allowed(_):
    """The coordinator knows of the transaction."""


def refused(header):
    raise TransactionRefused("INVALID_TXN_STATE", f"producer {header.producer_id} has ended it")


def data(producer=9, *, epoch=0, sequence=0, transactional=True, verify=allowed):
    sent = batch(
        [b"v"],
        producer_id=producer,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=transactional,
    )
    return Append(unchecked(sent), verify=verify)


def end(marker, producer=9, *, epoch=0):
    built = build_marker(marker, producer_id=producer, producer_epoch=epoch, timestamp=NOW_MS)
    return Append(built, marker=marker)


def put(log, *appends):
    """In one write; the last outcome, raised if it is an error."""
    outcome = log.writer.append(appends)[-1]
    if isinstance(outcome, Exception):
        raise outcome
    log.writer.flush()
    return outcome


@pytest.mark.parametrize("in_one_write", [True, False])
def test_the_end_of_a_transaction_moves_the_last_stable_offset(open_log, in_one_write):
    log = open_log()
    appends = [data(1), data(2), end(COMMIT, 2), end(ABORT, 1)]
    if in_one_write:
        put(log, *appends)
    else:
        stable = [put(log, one) and log.offsets.last_stable_offset for one in appends]
        assert stable == [0, 0, 0, 4]
    assert log.offsets.last_stable_offset == 4
    assert log.aborted_transactions(0, 4) == [AbortedTxn(1, 0, 3, 4)]


def test_an_abort_beside_another_transaction_is_stable_where_that_one_began(open_log):
    log = open_log()
    put(log, data(1), data(2), end(ABORT, 2))
    assert log.offsets.last_stable_offset == 0
    assert log.aborted_transactions(0, 3) == [AbortedTxn(2, 1, 2, 0)]


def test_what_is_aborted_is_known_before_its_records_are_stable(open_log):
    """Also while the marker is not flushed: a reader may come between the write and the flush."""
    log = open_log()
    put(log, data(1))
    log.writer.append([end(ABORT, 1)])
    assert log.offsets.last_stable_offset == 1
    assert log.aborted_transactions(0, 1) == [AbortedTxn(1, 0, 1, 2)]


@pytest.mark.parametrize("verify", [None, refused])
def test_a_transaction_begins_only_if_its_coordinator_knows_of_it(open_log, verify):
    log = open_log()
    with pytest.raises(TransactionRefused):
        put(log, data(verify=verify))
    assert log.log_end_offset == 0
    put(log, data())
    put(log, data(sequence=1, verify=refused))  # it is not asked about what is in progress
    put(log, end(COMMIT))
    with pytest.raises(TransactionRefused):
        put(log, data(sequence=2, verify=verify))
    with pytest.raises(TransactionRefused):  # in one write with the end
        put(log, data(7), end(COMMIT, 7), data(7, sequence=1, verify=verify))


def test_a_producer_is_in_its_transaction_with_all_it_sends(open_log):
    log = open_log()
    put(log, data())
    with pytest.raises(TransactionRefused, match="is in a transaction"):
        put(log, data(sequence=1, transactional=False))


def test_a_repeated_batch_is_no_new_transaction(open_log):
    log = open_log()
    put(log, data(), end(COMMIT))
    assert put(log, data(verify=refused)).duplicate


def test_an_end_with_a_raised_epoch_fences_what_is_late(open_log):
    log = open_log()
    put(log, data(), end(COMMIT, epoch=1))
    with pytest.raises(ProducerFenced):
        put(log, data(sequence=1))
    assert put(log, data(epoch=1)).base_offset == 2


def test_ends_of_earlier_epochs_are_refused(open_log):
    log = open_log()
    put(log, data(epoch=3), end(COMMIT, epoch=3))
    with pytest.raises(ProducerFenced):
        put(log, end(COMMIT, epoch=2))


def test_what_a_coordinator_writes_for_a_producer_has_no_sequence(open_log):
    log = open_log()
    put(log, data(sequence=-1), data(sequence=-1), end(COMMIT, epoch=1))
    with pytest.raises(ProducerFenced):
        put(log, data(sequence=-1))
    assert log.log_end_offset == 3


@pytest.fixture
def written(open_log):
    """A log of three segments: aborted in the first, across the first two, and in the last."""

    def write():
        log = open_log()
        put(log, data(1), end(ABORT, 1), data(2))
        log.roll()
        put(log, data(3), end(ABORT, 2), end(COMMIT, 3))
        log.roll()
        put(log, data(4), end(ABORT, 4), data(5))
        return log

    return write


ABORTED = [AbortedTxn(1, 0, 1, 2), AbortedTxn(2, 2, 4, 3), AbortedTxn(4, 6, 7, 8)]


def test_the_indexes_say_which_transactions_were_aborted(written):
    log = written()
    assert log.aborted_transactions(0, 9) == ABORTED
    assert log.offsets.last_stable_offset == 8


@pytest.mark.parametrize("how", ["closed", "killed", "killed behind the flush of the roll"])
def test_aborted_transactions_outlive_the_process(written, open_log, tmp_path, how):
    log = written()
    if how == "closed":
        assert log.close()
    folder = tmp_path / "copy" / "t-0"
    shutil.copytree(tmp_path / "t-0", folder)
    points = {"closed": 9, "killed": 0, "killed behind the flush of the roll": 6}
    if how == "killed behind the flush of the roll":  # the power failed: names may not be there
        for path in folder.glob(f"*{TRANSACTION_INDEX}"):
            if not path.name.startswith(f"{0:020d}"):
                path.unlink()
    again = open_log(folder, clean=how == "closed", recovery_point=points[how])
    assert again.aborted_transactions(0, 9) == ABORTED
    assert again.offsets.last_stable_offset == 8
    put(again, end(ABORT, 5))
    assert again.aborted_transactions(0, 10) == [*ABORTED, AbortedTxn(5, 8, 9, 10)]


def test_the_index_of_a_segment_is_written_when_it_is_sealed(open_log, tmp_path):
    log = open_log()
    put(log, data(1), end(ABORT, 1))
    assert not list((tmp_path / "t-0").glob(f"*{TRANSACTION_INDEX}"))
    assert log.roll()
    (index,) = (tmp_path / "t-0").glob(f"*{TRANSACTION_INDEX}")
    assert index.stat().st_size == 34
    assert log.aborted_transactions(0, 2) == [AbortedTxn(1, 0, 1, 2)]
