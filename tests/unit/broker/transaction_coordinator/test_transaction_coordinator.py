"""The coordinator of transactions: what is written when, what follows a restart, and time."""

from concurrent.futures import Future

import pytest

from tierlog.broker.transaction_coordinator.coordinator import (
    NONE,
    Outcome,
    TransactionCoordinator,
)
from tierlog.broker.transaction_coordinator.transaction import V1, V2, ProducerEpoch, State
from tierlog.record_format.errors import DiskFull, ProducerFenced, ShuttingDown

PLACE, OTHER = ("flights", 0), ("flights", 1)
TIMEOUT_MS = 60_000


class World:
    """The logs, in memory, the clock and the timer. What is written is durable when `flush` is
    called; `restart` keeps what is durable alone.
    """

    def __init__(self) -> None:
        self.now_ms = 1_000_000
        self.states: dict[str, bytes] = {}
        self.markers: list[tuple[object, ProducerEpoch, bool]] = []
        self.pending: list[tuple[Future, object]] = []
        self.timers: list[tuple[int, object]] = []
        self.gone: set[object] = set()
        self.refuse_with: Exception | None = None
        self.start()

    def start(self) -> None:
        self.coordinator = TransactionCoordinator(
            self,
            max_timeout_ms=900_000,
            call_after=lambda delay, call: self.timers.append((self.now_ms + delay, call)),
            now_ms=lambda: self.now_ms,
        )

    def restart(self) -> None:
        self.pending.clear()
        self.timers.clear()
        self.start()
        self.coordinator.load(dict(self.states))

    # --- what it writes

    def append_state(self, transactional_id, key, value):
        def apply() -> None:
            if value is None:
                self.states.pop(transactional_id)
            else:
                self.states[transactional_id] = value

        return self._queue(apply)

    def append_together(self, states):
        return self._queue(
            lambda: self.states.update((name, value) for name, (_, value) in states.items())
        )

    def append_marker(self, _transactional_id, place, producer, *, commit):
        if place in self.gone:
            return None
        return self._queue(lambda: self.markers.append((place, producer, commit)))

    def _queue(self, apply) -> Future:
        if self.refuse_with is not None:
            raise self.refuse_with
        future: Future = Future()
        self.pending.append((future, apply))
        return future

    def flush(self, *, error: Exception | None = None) -> int:
        """All that is queued now; returns how much that was."""
        pending, self.pending = self.pending, []
        for future, apply in pending:
            if error is None:
                apply()
                future.set_result(None)
            else:
                future.set_exception(error)
        return len(pending)

    def pass_time(self, ms: int) -> None:
        self.now_ms += ms
        due = [call for at, call in self.timers if at <= self.now_ms]
        self.timers = [(at, call) for at, call in self.timers if at > self.now_ms]
        for call in due:
            call()

    # --- calls

    def init(self, transactional_id="id", *, expected=None, timeout_ms=TIMEOUT_MS) -> list[Outcome]:
        told: list[Outcome] = []
        self.coordinator.init_producer(
            transactional_id, timeout_ms=timeout_ms, expected=expected, reply=told.append
        )
        return told

    def begun(self, *places, version=V1, name="id") -> ProducerEpoch:
        told = self.init(name)
        self.flush()
        producer = told[0].producer
        added: list[Outcome] = []
        self.coordinator.add_partitions(name, producer, places, version=version, reply=added.append)
        self.flush()
        assert added[0].reason == NONE
        return producer

    def end(self, producer, *, commit=True, version=V1) -> list[Outcome]:
        told: list[Outcome] = []
        self.coordinator.end_transaction(
            "id", producer, commit=commit, version=version, reply=told.append
        )
        return told

    @property
    def state(self) -> State:
        return self.coordinator.describe("id").state


@pytest.fixture
def world() -> World:
    return World()


def test_nobody_is_told_before_it_is_durable(world):
    told = world.init()
    assert told == []
    assert world.init()[0].reason == "CONCURRENT_TRANSACTIONS"  # one change at a time
    world.flush()
    assert (told[0].reason, told[0].producer.epoch) == (NONE, 0)
    producer = world.begun(PLACE)
    ended = world.end(producer)
    assert (ended, world.markers) == ([], [])
    world.flush()
    assert (ended[0].reason, world.markers) == (NONE, [])
    assert (
        world.end(producer)[0].reason == "CONCURRENT_TRANSACTIONS"
    )  # the markers are on their way
    world.flush()
    assert world.markers == [(PLACE, producer, True)]
    world.flush()
    assert world.state is State.COMPLETE_COMMIT


def test_v2_writes_markers_with_the_raised_epoch_and_tells_it(world):
    producer = world.begun(PLACE, version=V2)
    ended = world.end(producer, version=V2)
    world.flush()
    raised = producer._replace(epoch=1)
    assert ended[0].producer == raised
    world.flush()
    assert world.markers == [(PLACE, raised, True)]
    world.flush()
    assert world.end(producer, version=V2)[0] == Outcome(NONE, raised)  # the answer was lost


@pytest.mark.parametrize("commit", [True, False])
def test_a_restart_at_any_moment_goes_on_with_what_was_decided(world, commit):
    """Each prefix of the writes of one transaction, up to its end."""
    for durable in range(4):  # decision, markers, completion
        world = World()
        producer = world.begun(PLACE, OTHER)
        world.end(producer, commit=commit)
        for _ in range(durable):
            world.flush()
        world.restart()
        if durable == 0:
            assert world.state is State.ONGOING
            continue
        while world.flush():
            pass
        wanted = State.COMPLETE_COMMIT if commit else State.COMPLETE_ABORT
        assert world.state is wanted
        assert set(world.markers) == {(PLACE, producer, commit), (OTHER, producer, commit)}


def test_markers_that_cannot_be_written_are_tried_again(world):
    producer = world.begun(PLACE, OTHER, ("gone", 0))
    world.gone.add(("gone", 0))
    world.end(producer)
    world.flush()
    world.flush(error=DiskFull("full"))
    assert world.state is State.PREPARE_COMMIT
    world.refuse_with = DiskFull("full")
    world.pass_time(1000)
    world.refuse_with = None
    world.pass_time(1000)
    while world.flush():
        pass
    assert sorted(place for place, _, _ in world.markers) == [PLACE, OTHER]
    assert world.state is State.COMPLETE_COMMIT


def test_a_log_that_knows_a_later_epoch_has_nothing_to_end(world):
    world.end(world.begun(PLACE))
    world.flush()
    world.flush(error=ProducerFenced("later"))
    world.flush()
    assert world.state is State.COMPLETE_COMMIT


def test_a_completion_that_cannot_be_written_is_tried_again(world):
    world.end(world.begun(PLACE))
    world.flush()
    world.flush()
    world.flush(error=DiskFull("full"))
    assert world.state is State.PREPARE_COMMIT
    world.pass_time(1000)
    world.flush()
    assert world.state is State.COMPLETE_COMMIT
    assert len(world.markers) == 1


def test_what_could_not_be_written_did_not_happen(world):
    told = world.init()
    world.flush(error=ShuttingDown("closing"))
    assert told[0].reason == "NOT_COORDINATOR"
    assert world.coordinator.describe("id") is None
    producer = world.begun(PLACE)
    ended = world.end(producer)
    world.flush(error=DiskFull("full"))
    assert ended[0].reason == "COORDINATOR_NOT_AVAILABLE"
    assert world.state is State.ONGOING
    assert world.end(producer) == []  # it may end it yet


def together(world, parts) -> list[Outcome]:
    told: list[Outcome] = []
    world.coordinator.commit_together(parts, reply=told.append)
    return told


def test_transactions_that_are_committed_together_are_one_decision(world):
    """Each prefix of the writes: all of them go on, or none is decided."""
    for durable in range(4):
        world = World()
        parts = {name: world.begun(PLACE, version=V2, name=name) for name in ("a", "b", "c")}
        told = together(world, parts)
        assert world.end(parts["a"])[0].reason == "INVALID_PRODUCER_ID_MAPPING"  # of another id
        for _ in range(durable):
            world.flush()
        assert [one.reason for one in told] == ([NONE] if durable else [])
        world.restart()
        states = {one.state for one in world.coordinator.transactions()}
        if durable == 0:
            assert states == {State.ONGOING}
            continue
        while world.flush():
            pass
        assert {one.state for one in world.coordinator.transactions()} == {State.COMPLETE_COMMIT}
        assert len(set(world.markers)) == 3
        assert together(world, parts)[0].producer == parts["a"]._replace(epoch=1)  # again


def test_of_transactions_that_are_committed_together_none_is_if_one_cannot(world):
    parts = {name: world.begun(PLACE, version=V2, name=name) for name in ("a", "b")}
    wrong = {**parts, "b": parts["b"]._replace(epoch=7)}
    assert together(world, wrong)[0].reason == "PRODUCER_FENCED"
    assert together(world, {**parts, "nobody": parts["a"]})[0].reason != NONE
    told = together(world, parts)
    assert together(world, parts)[0].reason == "CONCURRENT_TRANSACTIONS"
    world.flush(error=DiskFull("full"))
    assert told[0].reason == "COORDINATOR_NOT_AVAILABLE"
    assert {one.state for one in world.coordinator.transactions()} == {State.ONGOING}
    again = together(world, parts)
    world.flush()
    assert again[0].reason == NONE


@pytest.mark.parametrize("restarts", [False, True])
def test_a_transaction_that_takes_too_long_is_aborted(world, restarts):
    producer = world.begun(PLACE)
    if restarts:
        world.restart()
    world.pass_time(TIMEOUT_MS - 1)
    assert world.flush() == 0
    world.pass_time(1)
    while world.flush():
        pass
    assert world.markers == [(PLACE, producer._replace(epoch=1), False)]
    assert world.end(producer)[0].reason == "PRODUCER_FENCED"


def test_time_does_not_overtake_an_end_that_is_being_written(world):
    producer = world.begun(PLACE)
    world.end(producer)
    world.pass_time(TIMEOUT_MS)
    while world.flush():
        pass
    world.pass_time(TIMEOUT_MS)
    assert world.state is State.COMPLETE_COMMIT


def test_who_begins_anew_waits_until_what_was_left_is_aborted(world):
    producer = world.begun(PLACE)
    heir = world.init()
    world.flush()
    assert heir[0].reason == "CONCURRENT_TRANSACTIONS"
    while world.flush():
        pass
    heir = world.init()
    world.flush()
    assert heir[0].producer == producer._replace(epoch=2)
    assert world.markers == [(PLACE, producer._replace(epoch=1), False)]


@pytest.mark.parametrize("timeout_ms", [0, -1, 900_001])
def test_a_time_out_above_the_limit_is_refused(world, timeout_ms):
    assert world.init(timeout_ms=timeout_ms)[0].reason == "INVALID_TRANSACTION_TIMEOUT"


def test_ids_that_nobody_uses_are_forgotten(world):
    world.begun(PLACE)
    idle = world.init("idle")
    world.flush()
    world.pass_time(1000)
    world.coordinator.expire(idle_ms=1000)
    world.flush()
    assert set(world.states) == {"id"}, "one in progress stays"
    again = world.init("idle")
    world.flush()
    assert again[0].producer.producer_id != idle[0].producer.producer_id
    world.coordinator.expire(idle_ms=1)
    assert world.flush() == 0


def test_a_record_that_cannot_be_read_costs_no_other(world):
    world.begun(PLACE)
    world.states |= {"bad": b"\0\1\2", "odd": world.states["id"][:-1]}
    world.restart()
    assert world.state is State.ONGOING
    assert len(world.coordinator.transactions()) == 1
