"""The state machine of a transactional id: each state and call, and what holds whatever happens."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tierlog.broker.transaction_coordinator.transaction import (
    LAST_EPOCH,
    V1,
    V2,
    ProducerEpoch,
    State,
    Transaction,
    add_partitions,
    check_takes_part,
    complete_transaction,
    end_transaction,
    fence_producer,
    from_record,
    init_producer,
    to_record,
)
from tierlog.record_format.errors import TransactionRefused
from tierlog.record_format.kafka_messages import codec
from tierlog.record_format.kafka_messages.messages import TransactionLogValue

PLACE, OTHER = ("flights", 0), ("flights", 1)
NEW_ID, NOW_MS = 777, 1_000


def in_state(state: State, *, version: int = V1, epoch: int = 5, **more) -> Transaction:
    """With the epoch that the client has."""
    raised = version == V2 and state not in (State.EMPTY, State.ONGOING)
    has = state in (State.ONGOING, State.PREPARE_COMMIT, State.PREPARE_ABORT)
    return Transaction(
        "id",
        42,
        epoch=epoch + raised,
        last_epoch=epoch if raised else -1,
        timeout_ms=60_000,
        state=state,
        partitions=frozenset({PLACE}) if has else frozenset(),
        start_ms=10,
        update_ms=10,
        version=version,
        **more,
    )


def outcome(call) -> object:
    """What it became, or why it is refused; "same" for what changes nothing."""
    try:
        return call()
    except TransactionRefused as refused:
        return refused.reason


def init(found: Transaction, expected: ProducerEpoch | None = None) -> object:
    def call() -> object:
        now = init_producer(found, timeout_ms=9, expected=expected, new_id=NEW_ID, now_ms=NOW_MS)
        return now.state, now.producer_id, now.epoch

    return outcome(call)


def end(found: Transaction, *, commit: bool, version: int = V1, epoch: int = 5) -> object:
    def call() -> object:
        now = end_transaction(
            found,
            ProducerEpoch(42, epoch),
            commit=commit,
            version=version,
            new_id=NEW_ID,
            now_ms=NOW_MS,
        )
        return "same" if now is found else (now.state, now.epoch, now.next_id)

    return outcome(call)


CONCURRENT, INVALID, FENCED = "CONCURRENT_TRANSACTIONS", "INVALID_TXN_STATE", "PRODUCER_FENCED"
IDLE = (State.EMPTY, State.COMPLETE_COMMIT, State.COMPLETE_ABORT)
DECIDED = (State.PREPARE_COMMIT, State.PREPARE_ABORT)


@pytest.mark.parametrize("state", State)
def test_a_producer_that_begins(state):
    found = in_state(state)
    wanted = {
        **dict.fromkeys(IDLE, (State.EMPTY, 42, 6)),
        **dict.fromkeys(DECIDED, CONCURRENT),
        State.ONGOING: (State.PREPARE_ABORT, 42, 6),
    }
    assert init(found) == wanted[state]


@pytest.mark.parametrize(
    ("expected", "found", "wanted"),
    [
        (ProducerEpoch(42, 5), {}, (State.EMPTY, 42, 6)),
        (ProducerEpoch(42, 4), {"last_epoch": 4}, (State.EMPTY, 42, 5)),  # it asks again
        (ProducerEpoch(42, 4), {}, FENCED),
        (ProducerEpoch(41, 5), {"previous_id": 41}, FENCED),
        (ProducerEpoch(41, LAST_EPOCH - 1), {"previous_id": 41, "epoch": 0}, FENCED),
        (
            ProducerEpoch(41, LAST_EPOCH - 1),
            {"previous_id": 41, "epoch": 0, "last_epoch": LAST_EPOCH - 1},
            (State.EMPTY, 42, 0),
        ),
        (ProducerEpoch(42, LAST_EPOCH - 1), {"epoch": LAST_EPOCH - 1}, (State.EMPTY, NEW_ID, 0)),
    ],
)
def test_a_producer_that_goes_on_after_an_error(expected, found, wanted):
    assert init(in_state(State.EMPTY)._replace(**found), expected) == wanted


@pytest.mark.parametrize("epoch", [LAST_EPOCH - 1, LAST_EPOCH])
def test_a_new_id_follows_one_whose_epochs_are_used_up(epoch):
    assert init(in_state(State.EMPTY, epoch=epoch)) == (State.EMPTY, NEW_ID, 0)


@pytest.mark.parametrize("state", State)
def test_partitions_are_added_while_nothing_is_decided(state):
    found = in_state(state)

    def add(*places: object, epoch: int = 5) -> object:
        return outcome(
            lambda: add_partitions(
                found, ProducerEpoch(42, epoch), places, version=V2, now_ms=NOW_MS
            )
        )

    now = add(OTHER)
    if state in DECIDED:
        assert now == CONCURRENT
        return
    assert now.state is State.ONGOING
    assert now.partitions == found.partitions | {OTHER}
    assert now.start_ms == (10 if state is State.ONGOING else NOW_MS)
    assert (add(PLACE) is found) == (state is State.ONGOING)
    assert add(OTHER, epoch=4) == FENCED


@pytest.mark.parametrize("state", State)
def test_a_partition_takes_part_while_its_transaction_is_in_progress(state):
    found = in_state(state)

    def check(place, producer=42, epoch=5) -> object:
        return outcome(lambda: check_takes_part(found, ProducerEpoch(producer, epoch), place))

    out = "CONCURRENT_TRANSACTIONS" if state in DECIDED else "TRANSACTION_ABORTABLE"
    assert check(PLACE) == (None if state is State.ONGOING else out)
    assert check(OTHER) == out
    assert check(PLACE, epoch=4) == FENCED
    assert check(PLACE, producer=41) == "INVALID_PRODUCER_ID_MAPPING"


@pytest.mark.parametrize(
    ("state", "commit", "wanted"),
    [
        (State.EMPTY, True, INVALID),
        (State.EMPTY, False, INVALID),
        (State.ONGOING, True, (State.PREPARE_COMMIT, 5, -1)),
        (State.ONGOING, False, (State.PREPARE_ABORT, 5, -1)),
        (State.PREPARE_COMMIT, True, CONCURRENT),
        (State.PREPARE_COMMIT, False, INVALID),
        (State.PREPARE_ABORT, True, INVALID),
        (State.PREPARE_ABORT, False, CONCURRENT),
        (State.COMPLETE_COMMIT, True, "same"),
        (State.COMPLETE_COMMIT, False, INVALID),
        (State.COMPLETE_ABORT, True, INVALID),
        (State.COMPLETE_ABORT, False, "same"),
    ],
)
def test_the_end_of_a_transaction_of_v1(state, commit, wanted):
    assert end(in_state(state), commit=commit) == wanted


@pytest.mark.parametrize(
    ("state", "commit", "again", "next_one"),
    [
        (State.EMPTY, True, INVALID, FENCED),
        (State.EMPTY, False, (State.PREPARE_ABORT, 6, -1), FENCED),
        (State.ONGOING, True, (State.PREPARE_COMMIT, 6, -1), FENCED),
        (State.ONGOING, False, (State.PREPARE_ABORT, 6, -1), FENCED),
        (State.PREPARE_COMMIT, True, CONCURRENT, CONCURRENT),
        (State.PREPARE_COMMIT, False, INVALID, CONCURRENT),
        (State.PREPARE_ABORT, True, INVALID, CONCURRENT),
        (State.PREPARE_ABORT, False, CONCURRENT, CONCURRENT),
        (State.COMPLETE_COMMIT, True, "same", INVALID),
        (State.COMPLETE_COMMIT, False, INVALID, (State.PREPARE_ABORT, 7, -1)),
        (State.COMPLETE_ABORT, True, INVALID, INVALID),
        (State.COMPLETE_ABORT, False, "same", (State.PREPARE_ABORT, 7, -1)),
    ],
)
def test_the_end_of_a_transaction_of_v2(state, commit, again, next_one):
    """`again`: with the epoch that the client had; `next_one`: with the one that it has since."""
    found = in_state(state, version=V2)
    assert end(found, commit=commit, version=V2) == again
    assert end(found, commit=commit, version=V2, epoch=6) == next_one


def test_v2_goes_on_with_a_new_id_once_the_epochs_are_used_up():
    found = in_state(State.ONGOING, version=V2, epoch=LAST_EPOCH - 1)
    used = ProducerEpoch(42, LAST_EPOCH - 1)

    def commit(now: Transaction) -> Transaction:
        return end_transaction(now, used, commit=True, version=V2, new_id=NEW_ID, now_ms=NOW_MS)

    decided = commit(found)
    assert (decided.producer, decided.next_id) == (ProducerEpoch(42, LAST_EPOCH), NEW_ID)
    done = complete_transaction(decided, now_ms=NOW_MS)
    assert done.producer == ProducerEpoch(NEW_ID, 0)
    assert commit(done) is done  # the answer was lost
    assert commit(reread(done)).producer == done.producer


@pytest.mark.parametrize("version", [V1, V2])
def test_who_was_fenced_cannot_end_the_transaction_as_if_again(version):
    found = in_state(State.ONGOING, version=version)
    fenced = fence_producer(found, now_ms=NOW_MS)
    for now in fenced, reread(fenced), complete_transaction(fenced, now_ms=NOW_MS):
        for commit in True, False:
            assert end(now, commit=commit, version=version) == FENCED


def reread(found: Transaction) -> Transaction:
    data = codec.encode_versioned(to_record(found), 1)
    return from_record("id", codec.decode_versioned(TransactionLogValue, data))


class Life(RuleBasedStateMachine):
    """A client that may die and come back, lose answers, be late, and a broker that restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.now = Transaction("id", 1)
        self.ids = iter(range(2, 10_000))
        self.client: ProducerEpoch | None = None
        self.old: list[ProducerEpoch] = []
        self.highest: dict[int, int] = {}

    @rule(continues=st.booleans(), heard=st.booleans())
    def init(self, continues, heard):
        expected = self.client if continues else None
        now = self._try(
            lambda: init_producer(
                self.now, timeout_ms=9, expected=expected, new_id=next(self.ids), now_ms=NOW_MS
            )
        )
        if now is not None and now.state is State.EMPTY and heard:
            self.hear(now.producer)

    def hear(self, producer: ProducerEpoch) -> None:
        if self.client not in (None, producer):
            self.old.append(self.client)
        self.client = producer

    @rule(place=st.sampled_from([PLACE, OTHER]))
    def add(self, place):
        if self.client is not None:
            self._try(
                lambda: add_partitions(self.now, self.client, [place], version=V2, now_ms=NOW_MS)
            )

    @rule(commit=st.booleans(), version=st.sampled_from([V1, V2]), heard=st.booleans())
    def end(self, commit, version, heard):
        if self.client is None:
            return
        now = self._try(
            lambda: end_transaction(
                self.now,
                self.client,
                commit=commit,
                version=version,
                new_id=next(self.ids),
                now_ms=NOW_MS,
            )
        )
        if now is not None and version == V2 and heard:
            self.hear(now.producer if now.next_id < 0 else ProducerEpoch(now.next_id, 0))

    @rule()
    def markers_are_written(self):
        if self.now.state.is_decided:
            self.now = complete_transaction(self.now, now_ms=NOW_MS)

    @rule()
    def time_is_over(self):
        if self.now.state is State.ONGOING:
            self.now = fence_producer(self.now, now_ms=NOW_MS)

    @rule()
    def epochs_are_nearly_used_up(self):
        if self.now.state is State.EMPTY and self.now.epoch < 100 and self.client:
            self.now = self.now._replace(epoch=LAST_EPOCH - 2, last_epoch=-1)
            self.hear(self.now.producer)

    @rule()
    def broker_restarts(self):
        self.now = reread(self.now)

    @rule()
    def old_producers_are_late(self):
        for producer in set(self.old) - {self.client, self.now.producer}:
            for commit in True, False:
                refused = outcome(
                    lambda commit=commit, producer=producer: end_transaction(
                        self.now,
                        producer,
                        commit=commit,
                        version=V1,
                        new_id=next(self.ids),
                        now_ms=NOW_MS,
                    )
                )
                assert isinstance(refused, str), "an old producer changed something"

    def _try(self, change):
        try:
            self.now = change()
        except TransactionRefused:
            return None
        return self.now

    @invariant()
    def epochs_only_rise(self):
        epoch = self.highest.get(self.now.producer_id, -1)
        assert self.now.epoch >= epoch
        assert self.now.epoch <= LAST_EPOCH
        self.highest[self.now.producer_id] = self.now.epoch

    @invariant()
    def only_what_is_in_progress_has_partitions(self):
        assert not self.now.partitions or self.now.state in (State.ONGOING, *DECIDED)


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
