"""One broker's life, by a script, with a fault at any of its calls: those that change the disk, and
those to the store.

| fault       | at the call                                                                       |
|-------------|-----------------------------------------------------------------------------------|
| dies        | the process ends before it                                                        |
| power fails | as before, and what was not synced may be lost                                    |
| lost        | it takes effect, but its response is lost; the process goes on                    |
| down        | the store refuses it, and works again                                             |
| full        | the disk has no room for it, and has room again                                   |
| taken over  | another folder, restored from the bucket, takes everything over; both go on       |

Each step of the script is repeated with a fault, from a copy of the state before it. Afterwards the
topics agree with their models, as does a restore from the bucket; `verify --deep` finds no problem;
a collection leaves only objects that a manifest in force names, and the folder has no temporary
files. One call of each step has its turn with a fault; `make soak` goes on with random ones.
"""

import copy
import errno
import shutil
import time
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from random import Random

import pytest
from structlog.testing import capture_logs

from tests.fakes.broker_harness import run_janitor
from tests.fakes.faulty_object_store import FailsAfter, FailsBefore, FaultyObjectStore
from tests.fakes.soak import MINUTES, soak_seed
from tests.simulation import test_broker_simulation
from tests.simulation.failing_disk import ALLOCATING, Crash, FailingDisk, close_files_below
from tests.simulation.test_broker_simulation import GAP, Known, World
from tests.simulation.test_ownership_simulation import in_files
from tests.simulation.topic_model import Wrong
from tierlog.broker.group_coordinator import groups
from tierlog.broker.group_coordinator.groups import NewOffset
from tierlog.broker.opening import take_over
from tierlog.host.clock import wall_clock_ms
from tierlog.manifest.garbage import Collector, GarbagePolicy
from tierlog.manifest.keys import CLUSTER_KEY, topic_versions
from tierlog.object_store.ledger import PROBE_PREFIX
from tierlog.object_store.open import open_store
from tierlog.record_format.errors import (
    ConfigurationError,
    FencedError,
    OutcomeUnknownError,
    StoreUnavailable,
    TierlogError,
)
from tierlog.repair.repair import repair_topic
from tierlog.repair.restore import RestoreOptions, restore

HOUR_MS = 3_600_000
EVERYTHING = GarbagePolicy(grace_ms=0, keep_ms=0, keep_min=1)
SMALL_FILES = {"segment.index.bytes": 4096}  # the disk is copied for each call
SMALL = {**test_broker_simulation.SMALL, **SMALL_FILES, "local.retention.bytes": 1024}
COMPACTED = {**test_broker_simulation.COMPACTED, **SMALL_FILES, "delete.retention.ms": 0}
SMALL_PAGES = {
    "INLINE_MAX": 3,
    "SMALL_PAGE": 1,
    "PAGE_ENTRIES": 4,
    "RUN_MAX": 3,
    "REMOVED_MAX": 6,
    "REMOVED_KEPT": 2,
}
LEFT_OVER = (".deleted", ".swap", ".cleaned", "-delete", ".new")
STORE_CALLS = ("put", "put_file", "get", "get_range", "head", "list", "delete")


class Life(World):
    """A world whose steps draw nothing, and of which a copy can be made between two of them."""

    def __init__(self, root: Path, disk: FailingDisk) -> None:
        self.random, self.root, self.disk = Random(0), root, disk
        self.now_ms = wall_clock_ms() + HOUR_MS  # whatever is in the bucket is older
        self.lives = self.sent = self.producers = 0
        self.topics, self.unsure, self.committed = {}, {}, {}
        self.old_folder: Path | None = None  # that a restore takes the tail from
        self.rival: Life | None = None  # from whom everything was taken over
        self.bucket = f"file://{root / 'bucket'}"
        self.folder = self._new_folder()
        self.open()

    def copy_to(self, root: Path) -> "Life":
        """As after the death of the process. The copy is opened, and has claimed its partitions."""
        copied = copy.copy(self)
        copied.root = root
        copied.random, copied.topics = copy.deepcopy((self.random, self.topics))
        copied.unsure, copied.committed = {}, copy.deepcopy(self.committed)
        root.mkdir()
        copied.folder = copied._new_folder()
        self.disk.crash_broker(self.folder, copied.folder, self.random, power_fails=False)
        shutil.copytree(self.root / "bucket", root / "bucket")
        copied.bucket = f"file://{root / 'bucket'}"
        copied.open()
        return copied

    # --- steps ------------------------------------------------------------------------------------

    def _create(self, name: str, config: dict) -> None:
        self.unsure[name] = []
        self.broker.create_topic(name, config=config)
        del self.unsure[name]
        self._add_known(name)

    def _produce(self, name: str, batches: int) -> None:
        for _ in range(batches):
            self._append(self.topics[name], self.broker.partition(name, 0))

    def _roll_and_copy(self, name: str) -> None:
        self.broker.partition(name, 0).upkeep.roll()
        self.copy()

    def create_and_upload(self) -> None:
        self._create("a", {**SMALL, "retention.ms": -1})
        self._produce("a", 12)
        self._roll_and_copy("a")

    def commit_offset(self) -> None:
        self.committed["g", "a"] = {None, 3}
        self.broker.groups.commit_offsets("g", [NewOffset("a", 0, 3)])
        self.committed["g", "a"] = {3}

    def delete_local_segments(self) -> None:
        self.copy()
        run_janitor(self.broker)
        self.broker.partition("a", 0).upkeep.reap(at_once=True)

    def merge(self) -> None:
        self.copy()
        self._alter("a", {"segment.bytes": 2048})
        partition = self.broker.partition("a", 0)
        partition.upkeep.delete_local(partition.cold_end_offset)
        self.broker.merge_segments("a", wait_ms=60_000)
        assert len(list(partition.cold_entries(0))) == 2

    def trim(self) -> None:
        self.copy()
        first = next(self.broker.partition("a", 0).cold_entries(0))
        self.topics["a"].model.trimmed_before = first.next_offset + 1  # within a segment
        self.broker.trim("a", 0, first.next_offset + 1)

    def expire(self) -> None:
        self._alter("a", {"retention.ms": 60_000})
        self.now_ms += 70_000
        self._produce("a", 3)
        self.copy()
        run_janitor(self.broker)

    def _alter(self, name: str, change: dict) -> None:
        self.unsure[name] = [self.broker.topic(name).config.replace(change)]
        self.broker.alter_topic(name, config=change)
        end = self.broker.partition(name, 0).log_end_offset
        self.topics[name].model.configured(self.broker.topic(name).config, end_offset=end)
        del self.unsure[name]

    def create_and_compact(self) -> None:
        self._create("b", COMPACTED)
        self._produce("b", 10)
        self.broker.partition("b", 0).upkeep.roll()
        self.compact()

    def mirror(self) -> None:
        self._roll_and_copy("b")
        self.compact()
        self.copy()

    def add_partitions(self) -> None:
        self.broker.alter_topic("b", partitions=3)
        self.copy()

    def collect(self) -> None:
        self.copy()
        for partition in self.broker.partitions():
            if not partition.leadership_lost:
                partition.upkeep.collect_garbage(EVERYTHING)

    def repair(self) -> None:
        self._produce("a", 3)
        self._roll_and_copy("a")
        for entry in self.broker.partition("a", 0).cold_entries(0):
            (self.root / "bucket" / entry.indexes_key).write_bytes(b"corrupt")
        repair_topic(self.broker, "a", apply=True, deep=True)

    def _repair_all(self) -> None:
        """In case that a repair was interrupted."""
        for name in self.topics:
            repair_topic(self.broker, name, apply=True, deep=True)

    def restart(self) -> None:
        self.broker.close()
        try:
            self.open()
        except ConfigurationError:  # a full disk may refuse a start
            self.open()

    def restore_with_old_tail(self) -> None:
        self._produce("a", 3)
        self._produce("b", 3)
        self._lose_process(power_fails=False)
        self.old_folder, self.folder = self.folder, self._new_folder()
        self.restore_again()
        self.open()
        self.copy()

    def restore_again(self) -> None:
        options = RestoreOptions(self.folder, GAP, lambda: self.now_ms, tail=self.old_folder)
        report = restore(open_store(self.bucket), options)
        assert all(one.tail.whole for one in report.partitions), report

    def delete(self) -> None:
        self.unsure["b"] = []
        self.broker.delete_topic("b")
        del self.unsure["b"]
        self._forget("b")
        self.broker.background.deletions.run_round()

    # --- another folder takes everything over -----------------------------------------------------

    def lose_to_another_folder(self, topics: dict[str, Known]) -> "Life":
        """Returns a life with a folder restored from the bucket, which takes everything over.
        This one goes on, and learns of it later. `topics`: before the step.
        """
        other = copy.copy(self)
        other.random, other.topics = copy.deepcopy((self.random, topics | self.topics))
        other.unsure = self.unsure | {name: [] for name in topics.keys() - self.topics.keys()}
        other.rival, other.committed = self, {}
        other.sent, other.lives = self.sent + 1000, self.lives + 1000
        other.before_store_call = World.before_store_call
        other.folder = other._new_folder()
        for name in self.topics:
            if not (self.root / "bucket" / "topics" / name).exists():
                other._forget(name)
        options = RestoreOptions(other.folder, GAP, lambda: self.now_ms)
        for restored in restore(open_store(self.bucket), options).partitions:
            if restored.topic in other.topics and restored.partition == 0:
                known = other.topics[restored.topic]
                known.producers.clear()
                known.model.begin_history(restored.end_offset, may_lack_replaced=True)
        other.open()
        other._settle_topics()
        other._repair_all()  # of a step that damages objects in the bucket
        other._settle()
        other.go_on()
        return other

    def go_on(self) -> None:
        """Everything that an owner does; a former one is refused some of it."""
        for name in self.topics:
            with suppress(FencedError):
                self._produce(name, 2)
                self.broker.partition(name, 0).upkeep.roll()
        for act in (self.copy, self.compact, lambda: run_janitor(self.broker), self.collect):
            with suppress(FencedError):
                act()
        self.broker.background.fence_checker.run_round()

    def check_lost_to(self, winner: "Life") -> None:
        """Each record is in the winner's log, or still in a file here, at an offset of its own."""
        reasons = "".join(self.broker.readiness().reasons)
        for name in self.topics.keys() & winner.topics.keys():
            partition, found = self.broker.partition(name, 0), in_files(self.folder / f"{name}-0")
            if partition.leadership_lost is None or partition.leadership_lost not in reasons:
                raise Wrong(f"{partition}: {partition.leadership_lost}, and ready: {reasons}")
            theirs = winner.topics[name].model.placed
            for offset, number in self.topics[name].model.placed.items():
                if theirs.get(offset, number) != number:
                    raise Wrong(f"offset {offset} is assigned to {number} and {theirs[offset]}")
                is_here = offset in found or offset < partition.log_start_offset
                if not (offset in theirs or is_here or partition.config.compacts):
                    raise Wrong(f"offset {offset}, which the winner lacks, is lost")

    # --- after the fault --------------------------------------------------------------------------

    def start_again(self, *, power_fails: bool) -> None:
        self._lose_process(power_fails=power_fails)
        if self.old_folder is not None and not (self.folder / "meta.properties").exists():
            self.restore_again()
        self.open()
        self._settle()

    def check_at_the_end(self) -> None:
        self._repair_all()
        self.finish()
        for _ in range(2):
            self.collect()
        self._check_bucket()
        self._check_folder()

    def _check_bucket(self) -> None:
        listed = open_store(self.bucket).list("", limit=10_000)
        # What a probe leaves that dies is deleted by one an hour later.
        found = {stat.key for stat in listed if not stat.key.startswith(PROBE_PREFIX)}
        named = self._named(found) | (self.rival._named(found) if self.rival else set())
        if found != named:
            raise Wrong(f"left over: {sorted(found - named)}; missing: {sorted(named - found)}")

    def _named(self, found: set[str]) -> set[str]:
        """What is in the bucket because of the partitions that it owns."""
        named = {CLUSTER_KEY}
        for partition in self.broker.partitions():
            if partition.leadership_lost:
                continue
            manifests, manifest = partition._cold._manifests, partition.manifest
            lists = (manifest.pages, manifest.removed, manifest.removed_pages)
            named |= {manifests.versions.key(manifest.version)}
            named |= {item.key for items in lists for item in items}
            named |= {key for entry in partition.cold_entries(0) for key in entry.keys}
            keys = manifests.keys
            topics = topic_versions(keys.topic, keys.topic_id)
            named |= {key for key in found if key.startswith(topics)}
        return named

    def _check_folder(self) -> None:
        for partition in self.broker.partitions():
            partition.upkeep.reap(at_once=True)
        places = [self.folder.glob("*"), self.folder.glob("*/*")]
        left = [str(path) for place in places for path in place if path.name.endswith(LEFT_OVER)]
        for name in ("uploads", "scratch"):
            left += map(str, (self.folder / "tierlog" / name).rglob("*"))
        if left:
            raise Wrong(f"left over: {left}")


SCRIPT = (
    Life.create_and_upload,
    Life.commit_offset,
    Life.delete_local_segments,
    Life.merge,
    Life.trim,
    Life.expire,
    Life.create_and_compact,
    Life.mirror,
    Life.collect,
    Life.repair,
    Life.restart,
    Life.add_partitions,
    Life.restore_with_old_tail,
    Life.delete,
)


# --- faults ---------------------------------------------------------------------------------------


# Each repeats a step with the fault at call `number`, and returns how many calls it has seen: not
# more than `number` if the step has no such call.


class Calls:
    """Counts calls of a life's disk and store; from number `until` on, each calls `fault`."""

    def __init__(self, until: int, fault) -> None:
        self._until, self._fault = until, fault
        self._numbers = count()
        self.seen = 0

    def __call__(self, _call: str, _key: str = "") -> None:
        number = next(self._numbers)
        self.seen = number + 1
        if number >= self._until:
            self._fault()


@contextmanager
def watched(life: Life, calls: Calls):
    life.before_store_call = life.store.before_call = life.disk.before_call = calls
    try:
        yield
    finally:
        assert life.broker.background.copier.wait_until_idle(timeout_s=60)
        life.disk.before_call = life.disk._maybe_fail
        del life.before_store_call
        life.store.before_call = life.before_store_call


def dies(life: Life, step, number: int, *, power_fails: bool = False) -> int:
    def crash():
        raise Crash

    calls = Calls(number, crash)
    with watched(life, calls), suppress(Crash):
        step(life)
    if calls.seen > number:
        life.start_again(power_fails=power_fails)
        life.check_at_the_end()
    return calls.seen


def power_fails(life: Life, step, number: int) -> int:
    return dies(life, step, number, power_fails=True)


def _lost(key: str) -> Exception:
    is_conditional = key.endswith(".json") and "/pages/" not in key
    return (OutcomeUnknownError if is_conditional else StoreUnavailable)(f"{key}: lost")


def lost(life: Life, step, number: int) -> int:
    return _with_store_fault(life, step, number, FailsAfter(_lost), of=("put", "put_file"))


def down(life: Life, step, number: int) -> int:
    return _with_store_fault(life, step, number, FailsBefore(), of=STORE_CALLS)


def _with_store_fault(life: Life, step, number: int, fault, *, of) -> int:
    numbers = count()

    def plan(store: FaultyObjectStore) -> None:
        for call in of:
            store.fail(call, fault, when=lambda _key: next(numbers) == number)

    life.plan_store_faults = plan
    plan(life.store)
    with suppress(TierlogError):
        step(life)
    assert life.broker.background.copier.wait_until_idle(timeout_s=60)
    del life.plan_store_faults
    life.store.heal()
    return _go_on(life, number, next(numbers))


def full(life: Life, step, number: int) -> int:
    numbers = count()

    def before_call(call: str) -> None:
        if call in ALLOCATING and next(numbers) == number:
            raise OSError(errno.ENOSPC, "No space left")

    life.disk.before_call = before_call
    with suppress(TierlogError, OSError):
        step(life)
    assert life.broker.background.copier.wait_until_idle(timeout_s=60)
    life.disk.before_call = life.disk._maybe_fail
    life.broker.background._check_reserve()  # as it does every few seconds
    return _go_on(life, number, next(numbers))


def taken_over(life: Life, step, number: int) -> int:
    if step is Life.restore_with_old_tail:
        return 0  # another take-over
    numbers, winners, topics = count(), [], dict(life.topics)

    def before_call(_call: str, _key: str) -> None:
        if next(numbers) == number:
            winners.append(others.submit(life.lose_to_another_folder, topics))
            wait(winners)

    with ThreadPoolExecutor(1) as others:
        life.before_store_call = life.store.before_call = before_call
        with suppress(TierlogError):
            step(life)
        assert life.broker.background.copier.wait_until_idle(timeout_s=60)
    if winners:
        winner = winners[0].result()
        try:
            life.go_on()
            life.check_lost_to(winner)
            life.collect()
            winner.check()
            winner.check_at_the_end()
        finally:
            winner.close()
    return next(numbers)


def _go_on(life: Life, number: int, seen: int) -> int:
    if number >= seen:
        return seen
    if life.old_folder is not None or any(one.is_offline for one in life.broker.partitions()):
        life.start_again(power_fails=False)  # the restore failed, or a swap
    life._settle_topics()
    life.check()
    life.check_at_the_end()
    return seen


@pytest.fixture(autouse=True)
def small_files(monkeypatch):
    monkeypatch.setattr(groups, "CONFIG", {**groups.CONFIG, **SMALL_FILES, "segment.bytes": 1024})
    for name, value in SMALL_PAGES.items():
        monkeypatch.setattr(f"tierlog.manifest.codec.{name}", value)


def _calls(fault, script: Life, step, number: int) -> int:
    life = script.copy_to(script.root.parent / "life")
    try:
        return fault(life, step, number)
    except Exception as error:
        error.add_note(f"{step.__name__}, call {number}")
        raise
    finally:
        life.close()
        shutil.rmtree(life.root)


@contextmanager
def begun_life(root: Path, disk: FailingDisk):
    """Not a fixture: pytest would keep it, and its open files, beyond the test."""
    (root / "script").mkdir()
    life = Life(root / "script", disk)
    try:
        yield life
    finally:
        life.close()


FAULTS = (dies, power_fails, lost, down, full, taken_over)


def play(root: Path, disk: FailingDisk, *, random: Random) -> None:
    """The script, and each step of it with one of the faults, at one of its calls."""
    with begun_life(root, disk) as script:
        for step in SCRIPT:
            fault, number = random.choice(FAULTS), random.randrange(100)
            calls = _calls(fault, script, step, number)
            if 0 < calls <= number:
                _calls(fault, script, step, number % calls)
            step(script)
            script.check()


@pytest.mark.parametrize("seed", range(2))
def test_a_fault_at_any_call_loses_nothing_and_leaves_nothing(seed, tmp_path, failing_disk):
    play(tmp_path, failing_disk, random=Random(seed))


@pytest.mark.soak
def test_faults_at_random_calls_lose_nothing_and_leave_nothing(tmp_path, failing_disk):
    random, ends = Random(soak_seed()), time.monotonic() + MINUTES * 60
    for number in count(1):
        root = tmp_path / str(number)
        root.mkdir()
        with capture_logs():
            play(root, failing_disk, random=random)
        close_files_below(root)
        shutil.rmtree(root)
        print("life", number, flush=True)
        if time.monotonic() > ends:
            return


def test_the_script_catches_objects_that_are_never_collected(tmp_path, failing_disk, monkeypatch):
    monkeypatch.setattr(Collector, "_orphans", lambda *_, **__: ())
    with (
        begun_life(tmp_path, failing_disk) as script,
        pytest.raises(Wrong, match=r"left over: \['topics/a/.*\.log'\]"),
    ):
        _calls(lost, script, Life.create_and_upload, number=2)


def test_the_script_catches_a_take_over_without_a_gap(tmp_path, failing_disk, monkeypatch):
    plan = take_over.plan_take_over
    monkeypatch.setattr(take_over, "plan_take_over", lambda *facts, gap: plan(*facts, gap=0))
    with (
        begun_life(tmp_path, failing_disk) as script,
        pytest.raises(Wrong, match=r"offset \d+ is assigned to"),
    ):
        _calls(taken_over, script, Life.create_and_upload, number=20)
