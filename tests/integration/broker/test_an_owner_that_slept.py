"""An owner whose process was suspended looks who owns its partitions before it acknowledges."""

import threading

import pytest

from tests.fakes.broker_harness import BrokerHarness
from tests.fakes.faulty_object_store import FaultyObjectStore
from tierlog.broker.broker import Broker
from tierlog.broker.bucket import ownership
from tierlog.broker.bucket.ownership import Ownership
from tierlog.broker.settings import BrokerSettings
from tierlog.hot_tier.log_writer import Acks
from tierlog.object_store.open import open_store
from tierlog.record_format.errors import CorruptDataError, FencedError
from tierlog.repair.verify import verify_topic

CONFIG = {"segment.bytes": 4096, "retention.ms": -1}
GAP = 1000


class Sleeper(BrokerHarness):
    """A broker without background work, which sleeps when it is told to."""

    def __init__(self, root):
        self.boot_ms = 0
        super().__init__(root)
        settings = self.broker.settings
        self.broker.create_topic("t", config=CONFIG)
        self.fill(20)
        self.offload()
        self.broker.close()
        self.store = FaultyObjectStore(open_store(f"file://{root / 'bucket'}"))
        self.broker = Broker.open_idle(settings, store=self.store, boot_clock=lambda: self.boot_ms)
        self.broker.partition("t", 0).claim()
        self.fill(10)
        self.store.calls.clear()

    def sleep(self):
        self.boot_ms += self.broker.settings.fence_check_ms + 1

    @property
    def looks(self):
        return [call for call in self.store.calls if call[0] in ("head", "list")]


@pytest.fixture
def owner(tmp_path):
    owner = Sleeper(tmp_path)
    yield owner
    owner.broker.close()


@pytest.fixture
def replaced(owner, tmp_path):
    """The owner, after a copy of its folder took its partitions over; and the new owner."""
    root = owner.copy_to(tmp_path / "copy")
    copy = BrokerHarness.__new__(BrokerHarness)
    copy.root = root
    copy.broker = copy.open(take_over=True, restore_offset_gap=GAP)
    yield owner, copy
    copy.broker.close()


@pytest.mark.parametrize("acks", list(Acks))
def test_an_owner_that_slept_looks_before_it_acknowledges(replaced, acks):
    owner, _ = replaced
    owner.sleep()
    with pytest.raises(FencedError, match="another data folder took the partition over"):
        owner.produce("t", [b"too late"], acks=acks)
    (reason,) = owner.broker.readiness().reasons
    assert reason.startswith("leadership lost")


def test_an_owner_that_slept_wakes_those_who_wait_for_records_once_it_is_fenced(replaced):
    owner, _ = replaced
    partition, woken = owner.broker.partition("t", 0), threading.Event()
    partition.wait_beyond(10_000, woken.set)
    owner.sleep()
    with pytest.raises(FencedError):
        owner.produce("t", [b"too late"])
    assert woken.wait(20)


def test_a_take_over_of_a_copy_leaves_a_gap_above_what_the_original_may_have_acknowledged(replaced):
    owner, copy = replaced
    before = owner.produce("t", [b"acknowledged before it looks"]).base_offset
    assert copy.produce("t", [b"of the new owner"]).base_offset == 30 + GAP > before
    assert [record.offset for record in copy.records("t")] == [*range(30), 30 + GAP]
    copy.offload()
    copy.restart(take_over=True, restore_offset_gap=GAP)
    assert copy.produce("t", [b"its own folder needs no gap"]).base_offset == 31 + GAP
    copy.offload()
    assert verify_topic(copy.broker, "t", deep=True).ok


def test_an_owner_that_is_awake_never_waits_for_a_look(owner):
    for _ in range(3):
        owner.produce("t", [b"x"])
    assert owner.looks == []
    owner.boot_ms += owner.broker.settings.fence_check_ms
    owner.broker.background.fence_checker.run_round()
    owner.store.calls.clear()
    owner.boot_ms += owner.broker.settings.fence_check_ms
    owner.produce("t", [b"x"])
    assert owner.looks == []


def test_an_owner_that_slept_looks_once(owner):
    owner.sleep()
    for _ in range(3):
        owner.produce("t", [b"x"])
    assert len(owner.looks) == 1


def test_an_owner_goes_on_while_the_store_is_down_and_says_so(owner):
    owner.sleep()
    owner.set_down(True)
    for _ in range(3):
        owner.produce("t", [b"x"])
    assert len(owner.looks) == 1
    assert any("whether another broker took" in one for one in owner.broker.readiness().degraded)
    owner.set_down(False)
    owner.sleep()
    owner.produce("t", [b"x"])
    assert len(owner.looks) == 2
    assert not owner.broker.readiness().degraded


def test_a_store_that_hangs_is_waited_for_once(owner, monkeypatch):
    answered, looks, real = threading.Event(), [], Ownership.check_fence

    def hangs(self, **options):
        looks.append(self)
        answered.wait(30)
        real(self, **options)

    monkeypatch.setattr(ownership, "LEAST_PATIENCE_MS", 1)
    monkeypatch.setattr(Ownership, "check_fence", hangs)
    monkeypatch.setattr(owner.broker.bucket.silence, "patience_s", 0.01)
    owner.sleep()
    for _ in range(3):
        owner.produce("t", [b"x"])
    assert len(looks) == 1
    (said,) = owner.broker.readiness().degraded
    assert "no answer within" in said
    answered.set()
    owner.wait_for(lambda: not owner.broker.readiness().degraded)


def test_a_look_that_began_before_the_sleep_does_not_count(replaced, monkeypatch):
    """The request was sent before another folder took over, and is answered after it."""
    owner, _ = replaced
    partition, old, real = owner.broker.partition("t", 0), threading.Event(), Ownership.check_fence
    begun = threading.Event()

    def answers_of_before(self, **options):
        monkeypatch.setattr(Ownership, "check_fence", real)
        begun.set()
        old.wait(30)

    monkeypatch.setattr(Ownership, "check_fence", answers_of_before)
    looking = threading.Thread(target=partition.look_for_owner)
    looking.start()
    assert begun.wait(20)
    owner.sleep()
    old.set()
    looking.join()
    with pytest.raises(FencedError):
        owner.produce("t", [b"too late"])


def test_a_manifest_that_cannot_be_read_fences_nobody(owner, monkeypatch):
    def fails(self, **_):
        raise CorruptDataError("a manifest of nonsense")

    monkeypatch.setattr(Ownership, "check_fence", fails)
    owner.sleep()
    owner.produce("t", [b"x"])


def test_without_a_bucket_there_is_nothing_to_look_at(tmp_path, harness):
    now_ms = iter(range(0, 10**12, 10**9))
    harness.broker.close()
    settings = BrokerSettings(data_dir=tmp_path / "without")
    harness.broker = Broker.open_idle(settings, store=None, boot_clock=lambda: next(now_ms))
    harness.broker.create_topic("t")
    assert harness.produce("t", [b"x"]).base_offset == 0


def test_answers_do_not_wait_for_a_store_whose_silence_the_background_found(owner, monkeypatch):
    answered, looks, real = threading.Event(), [], Ownership.check_fence

    def hangs(self, **options):
        looks.append(self)
        answered.wait(30)
        real(self, **options)

    monkeypatch.setattr(Ownership, "check_fence", hangs)
    monkeypatch.setattr(owner.broker.bucket.silence, "patience_s", 0.01)
    background = threading.Thread(target=owner.broker.background.fence_checker.run_round)
    background.start()
    owner.wait_for(lambda: owner.broker.readiness().degraded)
    owner.sleep()  # so long ago was the last answer
    owner.wait_for(lambda: owner.broker.bucket.silence.excuses(owner.boot_ms))
    owner.produce("t", [b"x"])
    assert len(looks) == 1
    answered.set()
    background.join()
    owner.broker.background.fence_checker.run_round()
    assert not owner.broker.readiness().degraded
