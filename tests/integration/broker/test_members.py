"""Places in a cluster: who registers as which node, and who is refused."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.fakes.cluster_nodes import SESSION_MS, Killed, Node, World
from tests.fakes.faulty_object_store import FailsAfter, FailsBefore
from tierlog.broker.data_folder.data_folder import FolderInUse
from tierlog.broker.membership.members import HANGS_S
from tierlog.broker.membership.node import NODE
from tierlog.host import durable_file
from tierlog.manifest.registrations import VERSIONS_KEPT
from tierlog.record_format.checkpoint_files import parse_properties
from tierlog.record_format.errors import ConfigurationError, RetriableError


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.close()


def properties(node: Node) -> dict[str, str]:
    return parse_properties((node.path / "meta.properties").read_bytes())


def ids(node: Node) -> list[int]:
    node.members.refresh()
    return [one.node_id for one in node.members.members()]


# --- node ids -------------------------------------------------------------------------------------


def test_new_folders_join_one_cluster_under_the_lowest_free_ids(world: World) -> None:
    nodes = [world.start(name) for name in "abc"]
    assert [node.me.node_id for node in nodes] == [0, 1, 2]
    assert [properties(node)["node.id"] for node in nodes] == ["0", "1", "2"]
    assert len({properties(node)["cluster.id"] for node in nodes}) == 1
    assert [ids(node) for node in nodes] == [[0, 1, 2]] * 3
    assert nodes[0].sees(nodes[2]) == nodes[2].me
    assert nodes[0].members.member_of(nodes[1].folder.owner) == nodes[1].me
    assert nodes[0].members.member_of("nobody") is None


def test_a_restart_keeps_the_id_and_is_another_incarnation(world: World) -> None:
    for starts in range(1, 4):
        node = world.start("a")
        assert (node.me.node_id, node.me.incarnation, node.me.state) == (0, starts, "running")
        node.stop()
        assert world.newest(0).state == "stopped"
    node = world.start("a")
    node.kill()
    assert (world.newest(0).state, world.start("a").me.incarnation) == ("running", 5)


def test_brokers_that_start_at_the_same_time_on_a_new_prefix_get_an_id_each(world: World) -> None:
    with ThreadPoolExecutor(8) as pool:
        nodes = list(pool.map(world.start, "abcdefgh"))
    assert sorted(node.me.node_id for node in nodes) == list(range(8))
    assert len({properties(node)["cluster.id"] for node in nodes}) == 1
    assert len({node.folder.cluster_id for node in nodes}) == 1


def test_a_folder_that_served_alone_keeps_the_node_id_that_it_had(world: World) -> None:
    (world.root / "a" / "tierlog").mkdir(parents=True)
    text = "version=1\ncluster.id=MkU3OEVBNTcwNTJENDM2Qg\nnode.id=7\ndirectory.id=x\nmore=y\n"
    (world.root / "a" / "meta.properties").write_text(text)
    node = world.start("a")
    assert node.me.node_id == 7
    assert properties(node) == parse_properties(text.encode())
    assert world.start("b").me.node_id == 0


def test_node_id_fixes_the_id_and_an_id_does_not_change(world: World) -> None:
    node = world.start("a", node_id=5)
    assert node.me.node_id == 5
    node.stop()
    with pytest.raises(ConfigurationError, match="is of node 5, not of --node-id 6"):
        world.start("a", node_id=6)
    assert world.start("a").me.node_id == 5
    assert world.start("b").me.node_id == 0


def test_the_lowest_id_is_not_that_of_a_broker_that_only_rests(world: World) -> None:
    world.start("a").stop()
    world.start("b").kill()
    assert world.start("c").me.node_id == 2


# --- other folders --------------------------------------------------------------------------------


def test_a_node_id_of_a_broker_that_runs_is_refused(world: World) -> None:
    world.start("a", node_id=3)
    with pytest.raises(ConfigurationError, match="http://a:8640 is node 3, with another data"):
        world.start("b", node_id=3)


@pytest.mark.parametrize("ended", ["stop", "kill"])
def test_an_empty_folder_takes_the_place_of_one_that_is_lost(world: World, ended: str) -> None:
    getattr(world.start("a", node_id=3), ended)()
    began_ms = world.now_ms
    node = world.start("b", node_id=3)
    waited_ms = world.now_ms - began_ms
    assert waited_ms >= SESSION_MS if ended == "kill" else waited_ms == 0
    assert (node.me.incarnation, world.newest(3).folder_id) == (2, node.folder.owner)
    node.stop()
    with pytest.raises(ConfigurationError, match="another folder has since been started as node 3"):
        world.start("a")
    assert world.start("a", take_over=True).me.incarnation == 3


def test_an_older_copy_is_refused_and_an_operator_may_order_it(world: World) -> None:
    world.start("a").stop()
    shutil.copytree(world.root / "a", world.root / "copy")
    world.start("a").stop()
    with pytest.raises(ConfigurationError, match=r"older copy of that of node 0.*--take-over"):
        world.start("copy")
    ordered = world.start("copy", take_over=True)
    assert (ordered.me.node_id, ordered.me.incarnation) == (0, 3)
    ordered.stop()
    with pytest.raises(ConfigurationError, match="another folder has since been started"):
        world.start("a")
    assert world.start("copy").me.incarnation == 4


def test_a_folder_whose_files_were_set_back_is_an_older_copy(world: World) -> None:
    world.start("a").stop()
    record = NODE.path(world.root / "a")
    before = record.read_bytes()
    node = world.start("a")
    former_id = node.folder.owner
    node.stop()
    record.write_bytes(before)
    with pytest.raises(ConfigurationError, match="older copy"):
        world.start("a")
    record.unlink()
    with pytest.raises(ConfigurationError, match="older copy"):
        world.start("a")
    assert world.start("a", take_over=True).folder.owner != former_id


def test_a_copy_of_a_folder_in_use_is_refused_and_a_moved_folder_goes_on(world: World) -> None:
    first = world.start("a")
    with pytest.raises(FolderInUse):
        world.start("a")
    shutil.copytree(world.root / "a", world.root / "copy")
    for take_over in (False, True):
        with pytest.raises(ConfigurationError, match="is a copy: the broker at http://a:8640 runs"):
            world.start("copy", take_over=take_over)
    former_id = first.folder.owner
    first.kill()
    moved = world.start("copy")
    assert (moved.me.node_id, moved.me.incarnation) == (0, 2)
    assert moved.folder.owner == moved.me.folder_id != former_id
    with pytest.raises(ConfigurationError, match="is a copy: the broker at http://copy:8640 runs"):
        world.start("a", take_over=True)


def test_a_clone_with_the_same_folder_id_ends_the_membership_of_the_first(world: World) -> None:
    first, other = world.start("a"), world.start("b")
    clone = replace(world.newest(0), incarnation=2, version=2, url="http://clone:8640")
    world.registrations.write_registration(clone)
    for _ in range(2):
        first.members.refresh()
        assert "http://clone:8640 runs as node 0" in (first.members.membership_lost or "")
    assert not first.me.is_alive
    first.store.calls.clear()
    first.members.beat()
    assert first.store.calls == [], "it is silent"
    with pytest.raises(ConfigurationError, match="clone"):
        first.members.set_state("draining")
    assert world.newest(0).incarnation == 2
    assert ids(first) == [0, 1], "it still knows the others"
    assert ids(other) == [0, 1]


def test_a_broker_that_was_removed_is_refused_and_its_id_is_free(world: World) -> None:
    node, other = world.start("a"), world.start("b")
    world.registrations.write_registration(replace(world.newest(0), version=2, state="removed"))
    assert ids(other) == [1]
    node.members.refresh()
    assert "node 0 was removed" in (node.members.membership_lost or "")
    node.stop()
    for take_over in (False, True):
        with pytest.raises(
            ConfigurationError, match="was removed from the cluster: start an empty"
        ):
            world.start("a", take_over=take_over)
    assert world.start("c").me.node_id == 0


# --- crashes, and a store that does not answer ----------------------------------------------------


class Steps:
    """Ends the process at its n-th write, on disk or in the bucket, before or after it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.after = -1, False
        real_write = durable_file.write_durably

        def write(path: Path, content: bytes) -> None:
            ends = self._ends()
            if ends and not self.after:
                raise Killed
            real_write(path, content)
            if ends:
                raise Killed

        monkeypatch.setattr("tierlog.broker.data_folder.data_folder.write_durably", write)

    def before_call(self, call: str, key: str) -> None:
        if call == "put" and key.startswith("cluster/") and self._ends():
            raise Killed

    def _ends(self) -> bool:
        self.left -= 1
        return self.left == 0


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("has_joined", [False, True])
def test_a_process_that_ends_at_any_write_of_a_start_starts_again(
    world: World, monkeypatch: pytest.MonkeyPatch, has_joined: bool, after: bool
) -> None:
    steps = Steps(monkeypatch)
    world.before_call = steps.before_call
    taken: set[int] = set()
    for number in range(1, 40):
        steps.left, name = -1, f"n{number}"
        incarnation = 0
        if has_joined:
            incarnation = world.start(name).me.incarnation
            world.running[-1].kill()
        steps.left, steps.after = number, after
        try:
            world.start(name)
        except Killed:
            steps.left = -1
        else:
            assert number > 2, "it ends at several places"
            break
        node = world.start(name)
        assert node.me.incarnation > incarnation
        assert (world.newest(node.me.node_id).folder_id) == node.folder.owner
        assert properties(node)["node.id"] == str(node.me.node_id)
        assert node.me.node_id not in taken
        taken.add(node.me.node_id)
        node.kill()
    else:
        pytest.fail("a start has fewer writes")


@pytest.mark.parametrize("fault", [FailsBefore(), FailsAfter()])
def test_a_registration_that_was_recorded_and_perhaps_sent_is_not_an_older_copy(
    world: World, fault: FailsBefore | FailsAfter
) -> None:
    world.start("a").stop()

    def end(key: str) -> Killed:
        return Killed()

    node = world.start("a")
    node.store.fail("put", type(fault)(error=end))  # type: ignore[arg-type]
    with pytest.raises(Killed):
        node.members.set_state("draining")
    node.kill()
    again = world.start("a")
    assert (again.me.incarnation, again.me.state) == (3, "draining")


def test_the_first_start_needs_the_store_and_later_ones_do_not(world: World) -> None:
    world.start("other").stop()
    world.is_down = True
    with pytest.raises(ConfigurationError, match="its first start with --join needs the store"):
        world.start("a")
    world.is_down = False
    node = world.start("a")
    node.stop()
    world.is_down = True
    node = world.start("a")
    assert (node.me.node_id, node.me.incarnation) == (1, 2)
    assert [one.node_id for one in node.members.members()] == [1]
    assert world.newest(1).state == "stopped"
    node.store.heal()
    node.round()
    assert (world.newest(1).state, world.newest(1).incarnation) == ("running", 2)
    assert ids(node) == [0, 1]
    node.kill()
    for _ in range(2):
        world.start("a").kill()
    world.is_down = False
    assert world.start("a").me.incarnation == 5, "also starts that nobody heard of are counted"


def test_a_start_without_the_store_finds_out_that_another_has_its_place(world: World) -> None:
    world.start("a").stop()
    shutil.copytree(world.root / "a", world.root / "moved")
    world.start("moved")
    world.is_down = True
    node = world.start("a")
    node.store.heal()
    with pytest.raises(ConfigurationError, match="http://moved:8640 runs as node 0"):
        node.members.beat()
    assert world.newest(0).url == "http://moved:8640"


# --- states ---------------------------------------------------------------------------------------


def test_draining_outlives_restarts_until_it_is_called_off(world: World) -> None:
    node, other = world.start("a"), world.start("b")
    node.members.set_state("draining")
    other.members.refresh()
    assert [one.state for one in other.members.members()] == ["draining", "running"]
    node.stop()
    assert world.newest(0).state == "stopped"
    node = world.start("a")
    assert (node.me.state, world.newest(0).state) == ("draining", "draining")
    node.members.set_state("running")
    node.stop()
    assert world.start("a").me.state == "running"


def test_a_stop_does_not_wait_for_a_store_that_is_down(world: World) -> None:
    node = world.start("a")
    node.store.go_down()
    node.stop()
    assert world.newest(0).state == "running"


def test_a_broker_registers_every_hour_and_old_versions_go(world: World) -> None:
    node = world.start("a")
    for _ in range(30):
        world.now_ms += 3_600_000
        node.round()
    assert world.newest(0).version == 31
    folder = world.root / "bucket" / "cluster" / "brokers" / "0" / "registration"
    assert len(list(folder.glob("*.json"))) == VERSIONS_KEPT
    assert node.members.membership_lost is None


# --- who is alive ---------------------------------------------------------------------------------


def test_a_broker_that_stops_beating_is_dead_and_alive_again_when_it_beats(world: World) -> None:
    first, second = world.start("a"), world.start("b")
    world.run_for(60_000)
    assert second.is_seen_by(first)
    world.run_for(30_000, first)
    assert not second.is_seen_by(first)
    world.run_for(30_000)
    assert second.is_seen_by(first)
    second.stop()
    first.members.refresh()
    assert not second.is_seen_by(first)


def test_a_broker_that_does_not_answer_is_dead_a_session_time_out_later(world: World) -> None:
    a, b = world.start("a"), world.start("b")
    world.run_for(4 * SESSION_MS)
    a.kill()
    began_ms = world.now_ms
    b.store.calls.clear()
    while a.is_seen_by(b):
        world.now_ms += 500
        b.members.doubt()  # with each second that it does not answer
        b.members.beat()
        b.members.look_around()
    assert world.now_ms - began_ms <= SESSION_MS + 1_000
    looks = [key for call, key in b.store.calls if key.endswith("0/alive.json")]
    assert len(looks) <= 3, "and not looked at all the time"


def test_one_doubt_is_enough_even_if_it_had_beaten_since_the_last_look(world: World) -> None:
    a, b = world.start("a"), world.start("b")
    world.run_for(4 * SESSION_MS)
    b.members.refresh()
    world.run_for(SESSION_MS, a)  # nobody looked
    a.kill()
    b.members.beat()
    b.members.doubt()
    began_ms = world.now_ms
    while a.is_seen_by(b):
        b.members.look_around()
        b.members.beat()
        world.now_ms += 500
    assert world.now_ms - began_ms <= 2 * SESSION_MS


def test_a_broker_that_hangs_does_not_beat_until_it_is_back(world: World) -> None:
    a, b, waited_s = world.start("a"), world.start("b"), 0.0
    a.members.watch_for_hangs("the event loop has not run", lambda: 0.0)
    a.members.watch_for_hangs("the disk has not answered", lambda: waited_s)
    world.run_for(4 * SESSION_MS)
    waited_s = HANGS_S
    world.run_for(4 * SESSION_MS)
    assert a.is_seen_by(b), "slow is not dead"
    waited_s = HANGS_S + 0.1
    with pytest.raises(RetriableError, match="the disk has not answered for 10 s"):
        a.members.beat()
    world.run_for(4 * SESSION_MS, b)
    assert not a.is_seen_by(b)
    waited_s = 0.0
    world.run_for(4 * SESSION_MS)
    assert a.is_seen_by(b)


def test_nobody_is_dead_after_an_outage_of_the_store_or_a_sleep_of_the_observer(
    world: World,
) -> None:
    first, second = world.start("a"), world.start("b")
    world.run_for(60_000)
    first.members.refresh()
    world.now_ms += 600_000  # nobody could beat
    first.members.refresh()
    assert second.is_seen_by(first)
    first.members.beat()
    first.members.refresh()
    assert second.is_seen_by(first)
    world.run_for(30_000, first)
    assert not second.is_seen_by(first), "now it had the time to beat"


def test_the_beats_of_another_folder_do_not_keep_a_broker_alive(world: World) -> None:
    first, second = world.start("a"), world.start("b")
    world.run_for(60_000)
    fresh = replace(world.newest(1), folder_id="new", incarnation=9, version=2)
    world.registrations.write_registration(fresh)
    for _ in range(30):
        world.now_ms += 2_000
        first.round()
        second.members._registrations.write_beat(  # the one that was replaced, and was asleep
            replace(world.registrations.read_beat(1), beat=world.now_ms)  # type: ignore[type-var]
        )
    assert not second.is_seen_by(first)


def test_a_registration_that_cannot_be_read_hides_neither_itself_nor_others(world: World) -> None:
    first, second, third = (world.start(name) for name in "abc")
    world.run_for(60_000)
    key = "cluster/brokers/1/registration/00000000000000000002.json"
    first.store.put(key, b'{"node_id":1}')
    third.members.set_state("draining")
    world.run_for(60_000, first, third)
    assert [(one.node_id, one.state) for one in first.members.members()] == [
        (0, "running"),
        (1, "running"),
        (2, "draining"),
    ]
    assert not second.is_seen_by(first), "its beats are still looked at"


@pytest.mark.parametrize("count", [1, 3, 8])
def test_at_rest_a_broker_sends_less_than_three_requests_in_four_seconds(
    world: World, count: int
) -> None:
    nodes = [world.start(f"n{number}") for number in range(count)]
    world.run_for(60_000)
    for node in nodes:
        node.store.calls.clear()
    world.run_for(600_000)
    for node in nodes:
        assert len(node.store.calls) / 600 < 0.75
    assert all(one.is_seen_by(other) for one in nodes for other in nodes)
