import dataclasses
import shutil
import threading
from contextlib import nullcontext, suppress
from queue import Queue

import pytest

from tests.fakes.broker_harness import BrokerHarness
from tests.fakes.waiting import until
from tierlog.broker.data_folder.data_folder import format_topic_id_partition
from tierlog.broker.group_coordinator.group_events import Identity, Join, Protocol, Sync
from tierlog.broker.group_coordinator.groups import Groups, NewOffset, OffsetState
from tierlog.broker.group_coordinator.offset_log import GroupView
from tierlog.broker.opening.take_over import TAKE_OVERS
from tierlog.broker.partition.checkpoints import TRUNCATIONS, Truncations
from tierlog.broker.partition.partition import Partition
from tierlog.hot_tier.log_folder import LOG, path_of
from tierlog.hot_tier.log_writer import Acks
from tierlog.object_store.open import open_store
from tierlog.record_format.checkpoint_files import parse_topic_id
from tierlog.record_format.consumer_offsets import (
    TOPIC,
    Commit,
    CommitKey,
    encode_key,
    encode_value,
    partition_for_group,
)
from tierlog.record_format.errors import (
    FencedError,
    GroupRefused,
    InvalidPartitionCount,
    InvalidRequest,
    StoreUnavailable,
    Throttled,
    UnknownGroup,
    UnknownPartition,
    UnknownTopic,
)
from tierlog.record_format.produced import build_produced
from tierlog.repair.repair import repair_topic
from tierlog.repair.restore import RestoreOptions, restore


@pytest.fixture
def topic(harness):
    harness.broker.create_topic("t", partitions=3)
    return "t"


def offsets_of(harness, group):
    return {
        (state.topic, state.partition): state.offset for state in harness.broker.groups.group(group)
    }


def commit(harness, group, **offsets):
    """`t0=5`: partition 0 of topic t."""
    rows = [NewOffset(name[:-1], int(name[-1]), offset) for name, offset in offsets.items()]
    harness.broker.groups.commit_offsets(group, rows)


def write_raw(harness, keys, values):
    """Append records directly, as another broker would have left them."""
    batches = build_produced(
        values, keys=keys, timestamps=[1] * len(keys), max_message_bytes=1 << 20
    )
    return harness.broker.partition(TOPIC, 0).append(batches, acks=Acks.ALL).result(10)


def test_commits_survive_a_restart(harness, topic):
    commit(harness, "g", t0=5, t1=7)
    commit(harness, "g", t0=6)
    commit(harness, "h", t2=1)
    harness.restart()
    assert offsets_of(harness, "g") == {("t", 0): 6, ("t", 1): 7}
    assert offsets_of(harness, "h") == {("t", 2): 1}


def test_the_offsets_topic_cannot_gain_partitions(harness, topic):
    """The partition of a group depends on their number: earlier commits would be found in another
    partition, and be taken for the latest.
    """
    commit(harness, "g2", t0=5)
    with pytest.raises(InvalidPartitionCount, match="cannot change"):
        harness.broker.alter_topic(TOPIC, partitions=3)
    harness.broker.alter_topic(TOPIC, partitions=1, config={"segment.bytes": 1 << 20})
    commit(harness, "g2", t0=6)
    harness.restart()
    assert offsets_of(harness, "g2") == {("t", 0): 6}


def test_the_first_commit_creates_the_offsets_topic_internal_and_compacted(harness, topic):
    with pytest.raises(UnknownTopic):
        harness.broker.topic(TOPIC)
    with pytest.raises(UnknownTopic):
        commit(harness, "g", u0=1)
    with pytest.raises(UnknownTopic):
        harness.broker.topic(TOPIC)  # a refused commit changed nothing
    commit(harness, "g", t0=1)
    assert [one.name for one in harness.broker.list_topics()] == ["t"]
    assert harness.broker.topic(TOPIC).config.compacts


def test_lag_counts_the_unread_records(harness, topic):
    harness.produce("t", [b"x"] * 10)
    commit(harness, "g", t0=4)
    (state,) = harness.broker.groups.group("g")
    assert state == OffsetState("t", 0, 4, 10, 6, "")
    commit(harness, "g", t0=25)  # past the log end
    assert harness.broker.groups.group("g")[0].lag == 0


def test_a_commit_is_atomic(harness, topic):
    with pytest.raises(UnknownPartition):
        commit(harness, "g", t0=1, t9=1)
    with pytest.raises(UnknownGroup):
        harness.broker.groups.group("g")


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [NewOffset("t", 0, 1), NewOffset("t", 0, 2)],
        [NewOffset("t", 0, 1, "ä" * 2049)],
    ],
)
def test_an_invalid_commit_is_refused_with_the_member(harness, topic, rows):
    with pytest.raises(InvalidRequest) as refused:
        harness.broker.groups.commit_offsets("g", rows)
    assert refused.value.problems[0].loc.startswith("offsets")


@pytest.mark.parametrize("name", ["", "x" * 256])
def test_group_names_have_1_to_255_characters(harness, topic, name):
    with pytest.raises(InvalidRequest):
        commit(harness, name, t0=1)
    commit(harness, "\U0001f680" * 255, t0=1)


def test_a_deleted_group_stays_deleted_after_a_restart(harness, topic):
    commit(harness, "g", t0=1, t1=1)
    harness.broker.groups.delete("g")
    for _ in range(2):
        with pytest.raises(UnknownGroup):
            harness.broker.groups.group("g")
        with pytest.raises(UnknownGroup):
            harness.broker.groups.delete("g")
        harness.restart()


def test_deleting_a_topic_deletes_its_committed_offsets(harness, topic):
    harness.broker.create_topic("u")
    commit(harness, "g", t0=9, u0=3)
    commit(harness, "only", t0=9)
    harness.broker.delete_topic("t")
    assert offsets_of(harness, "g") == {("u", 0): 3}
    harness.broker.create_topic("t", partitions=3)
    for _ in range(2):
        assert offsets_of(harness, "g") == {("u", 0): 3}
        with pytest.raises(UnknownGroup):
            harness.broker.groups.group("only")
        harness.restart()


@pytest.mark.parametrize("deleted", ["t", TOPIC])
def test_a_commit_on_a_re_created_topic_survives_the_deletion_of_the_old_one(
    harness, topic, monkeypatch, deleted
):
    """The new topic is created and committed to before the deletion reaches the groups."""
    commit(harness, "g", t0=9, t1=8)
    forget = harness.broker.groups.forget_topic

    def overtaken(name):
        if deleted == "t":
            harness.broker.create_topic("t", partitions=3)
        commit(harness, "g", t0=2)
        forget(name)

    monkeypatch.setattr(harness.broker.groups, "forget_topic", overtaken)
    harness.broker.delete_topic(deleted)
    for _ in range(2):
        assert offsets_of(harness, "g") == {("t", 0): 2}
        harness.restart()


def test_offsets_of_a_deleted_topic_are_hidden_before_they_are_deleted(harness, topic):
    """A name can be reused before the old topic's offsets are deleted."""
    groups = harness.broker.groups
    groups.commit_offsets("g", [NewOffset(topic, 0, 7)])
    harness.broker._topics.delete(topic)
    harness.broker.create_topic(topic)
    assert groups.group("g") == []


def test_offsets_of_a_topic_that_no_longer_exists_are_deleted(harness, topic):
    commit(harness, "g", t0=9)
    write_raw(
        harness,
        [encode_key(CommitKey("g", "vanished", 0))],
        [encode_value(Commit(4))],
    )
    harness.restart()
    assert offsets_of(harness, "g") == {("t", 0): 9}
    harness.broker.groups.run_round()
    harness.broker.create_topic("vanished")
    harness.restart()
    assert offsets_of(harness, "g") == {("t", 0): 9}


def test_offsets_of_an_earlier_topic_id_are_ignored(harness, topic):
    commit(harness, "g", t1=9)
    earlier = parse_topic_id("vXjwGcGzSnOCS3EL5WHZPQ")
    keys = [encode_key(CommitKey("g", "t", partition)) for partition in (0, 2)]
    write_raw(harness, keys, [encode_value(Commit(4, topic_id=earlier)), encode_value(Commit(5))])
    harness.restart()
    assert offsets_of(harness, "g") == {("t", 1): 9, ("t", 2): 5}  # one commit has no topic id


def test_deleting_the_offsets_topic_deletes_all_commits_and_the_next_one_re_creates_it(
    harness, topic
):
    commit(harness, "g", t0=9)
    harness.broker.delete_topic(TOPIC)
    assert list(harness.broker.groups.all_groups()) == []
    commit(harness, "h", t0=2)
    harness.restart()
    assert [name for name, _ in harness.broker.groups.all_groups()] == ["h"]


@pytest.mark.parametrize("store_works", [True, False])
def test_groups_are_reset_to_the_log_end_after_a_truncation(harness, topic, store_works):
    """Even if the store fails the rest of the repair."""
    harness.broker.alter_topic("t", config={"segment.bytes": 1024})
    for _ in range(4):
        harness.produce("t", [b"lost" * 15] * 10)
    commit(harness, "g", t0=35, t1=50)
    commit(harness, "h", t0=7)
    harness.stop_copying()
    harness.broker.close()
    max((harness.root / "data" / "t-0").glob("*.log")).unlink()
    harness.broker = harness.open()
    harness.set_down(not store_works)
    with nullcontext() if store_works else pytest.raises(StoreUnavailable):
        steps = repair_topic(harness.broker, "t", apply=True, accept_loss=True)
        assert [one.action for one in steps if one.done] == ["cut"]
    for _ in range(2):
        assert offsets_of(harness, "g") == {("t", 0): 30, ("t", 1): 50}
        assert offsets_of(harness, "h") == {("t", 0): 7}
        harness.restart()


@pytest.mark.parametrize(
    "failing",
    [
        (GroupView, "replay"),
        (Partition, "append"),
        (Truncations, "end"),
        (Groups, "follow_truncations"),
    ],
)
def test_a_group_reset_that_failed_is_repeated(harness, topic, monkeypatch, failing):
    """Or at the next start, if the process died first."""
    harness.broker.alter_topic("t", config={"segment.bytes": 1024})
    for _ in range(4):
        harness.produce("t", [b"lost" * 15] * 10)
    harness.broker.groups.commit_offsets("g", [NewOffset("t", 0, 35, "kept")])
    harness.broker.close()
    max((harness.root / "data" / "t-0").glob("*.log")).unlink()

    def fails(*_, **__):
        raise StoreUnavailable("not now")

    with monkeypatch.context() as patched:
        patched.setattr(*failing, fails)
        harness.broker = harness.open()
        with suppress(StoreUnavailable):
            repair_topic(harness.broker, "t", apply=True, accept_loss=True)
        if failing[1] in ("end", "follow_truncations"):
            harness.broker.close()
    if failing[1] in ("end", "follow_truncations"):
        harness.broker = harness.open()
    harness.produce("t", [b"new"] * 10)
    harness.broker.groups.run_round()
    assert offsets_of(harness, "g") == {("t", 0): 30}
    assert harness.broker.groups.group("g")[0].metadata == "kept"
    commit(harness, "g", t0=40)
    for _ in range(2):
        assert offsets_of(harness, "g") == {("t", 0): 40}
        harness.restart()


def test_a_commit_since_a_truncation_survives_a_crash(harness, topic, monkeypatch, tmp_path):
    """It may come before the first background round."""
    harness.produce("t", [b"x"] * 10)
    commit(harness, "g", t0=9)
    harness.broker.groups.truncations.end((harness.broker.topic("t").record.topic_id, 0), 5)
    harness.broker.close()
    with monkeypatch.context() as patched:
        patched.setattr(Groups, "run_round", lambda _: None)
        harness.broker = harness.open()
        assert offsets_of(harness, "g") == {("t", 0): 5}
        commit(harness, "g", t0=8)
        crashed = harness.copy_to(tmp_path / "crashed")
        harness.broker.close()
    copy = BrokerHarness(crashed)
    assert offsets_of(copy, "g") == {("t", 0): 8}
    copy.broker.close()


def test_records_that_are_not_commits_are_skipped(harness, topic):
    commit(harness, "g", t0=1)
    write_raw(
        harness,
        [b"\0\x02\0\x01g", b"?", encode_key(CommitKey("g", "t", 1)), b"\0\x01\0\x09cut"],
        [b"\0\x03member", b"!", b"\0\x09unknown version", b""],
    )
    commit(harness, "g", t2=3)
    harness.restart()
    assert offsets_of(harness, "g") == {("t", 0): 1, ("t", 2): 3}


def test_only_groups_wait_for_an_unavailable_store(harness, topic):
    commit(harness, "g", t0=1)
    harness.broker.alter_topic(TOPIC, config={"cleanup.policy": "delete", "local.retention.ms": 0})
    harness.broker.offload(TOPIC, wait_ms=20_000)
    assert harness.broker.partition(TOPIC, 0).offsets().local_log_start_offset == 1
    harness.restart(down=True, store_start_timeout_ms=100)
    harness.produce("t", [b"x"])
    with pytest.raises(StoreUnavailable):
        harness.broker.groups.group("g")
    harness.set_down(False)
    assert offsets_of(harness, "g") == {("t", 0): 1}


def test_a_broker_that_lost_the_offsets_topic_raises_fenced(harness, topic, tmp_path):
    commit(harness, "g", t0=5)
    harness.claim()
    copy = BrokerHarness(harness.copy_to(tmp_path / "copy"))
    copy.claim()
    harness.broker.background.fence_checker.run_round()
    with pytest.raises(FencedError):
        harness.broker.groups.group("g")
    with pytest.raises(FencedError):
        list(harness.broker.groups.all_groups())
    copy.broker.close()


def test_a_restore_recovers_groups_and_their_lag_excludes_the_gap(harness, topic, tmp_path):
    harness.produce("t", [b"x"] * 10)
    commit(harness, "g", t0=4, t1=0)
    commit(harness, "gone", t0=4)
    harness.broker.groups.delete("gone")
    for name in ("t", TOPIC):
        harness.offload(name)
    harness.broker.close()
    options = RestoreOptions(data_dir=tmp_path / "new", gap=1_000_000, clock=lambda: 0)
    restore(open_store(f"file://{harness.root / 'bucket'}"), options)
    (harness.root / "data").rename(harness.root / "lost")
    (tmp_path / "new").rename(harness.root / "data")
    harness.broker = harness.open()
    assert harness.broker.partition("t", 0).offsets().log_end_offset == 1_000_010
    harness.produce("t", [b"y"] * 3)
    found = {(one.partition, one.offset, one.lag) for one in harness.broker.groups.group("g")}
    assert found == {(0, 4, 9), (1, 0, 0)}
    assert [name for name, _ in harness.broker.groups.all_groups()] == ["g"]
    commit(harness, "g", t0=1_000_011)
    harness.restart()
    assert harness.broker.groups.group("g")[0].lag == 2


def stable_group(harness, name):
    """With one static member, which has an assignment."""
    harness.broker.groups.log.prepare_for(name)
    coordinator, answers = harness.broker.groups.coordinator, Queue()
    protocols = (Protocol("range", b"all"),)
    join = Join("", "i", "c", "/h", "consumer", protocols, 60_000, 60_000, "i-1")
    coordinator.join(name, join, answers.put)
    joined = answers.get(timeout=10)
    sync = Sync("i-1", "i", joined.generation, None, None, {"i-1": b"mine"})
    coordinator.sync(name, sync, answers.put)
    assert answers.get(timeout=10).assignment == b"mine"
    return coordinator.describe(name)


def test_a_restore_recovers_groups_with_their_members(harness, topic, tmp_path):
    before = stable_group(harness, "g")
    harness.restart()
    harness.broker.groups.log.load()
    assert harness.broker.groups.coordinator.describe("g") == before
    harness.offload(TOPIC)
    harness.claim()
    harness.broker.close()
    (harness.root / "data").rename(harness.root / "lost")
    options = RestoreOptions(data_dir=harness.root / "data", gap=10, clock=lambda: 0)
    restore(open_store(f"file://{harness.root / 'bucket'}"), options)
    harness.broker = harness.open()
    harness.broker.groups.log.load()
    assert harness.broker.groups.coordinator.describe("g") == before
    who = Identity("i-1", "i")
    rows = [NewOffset("t", 0, 1)]
    harness.broker.groups.commit_offsets("g", rows, member=who, generation=before.generation)
    with pytest.raises(GroupRefused, match="ILLEGAL_GENERATION"):
        harness.broker.groups.commit_offsets("g", rows, member=who, generation=9)
    harness.broker.groups.coordinator.leave("g", [who])
    until(lambda: harness.broker.groups.coordinator.describe("g").state == "Empty")
    harness.broker.groups.delete("g")
    harness.restart()
    assert harness.broker.groups.names() == []


def test_unused_offsets_expire_as_kafkas_do(harness, topic):
    now_ms = [1_000_000_000_000]
    harness.broker.groups._clock = harness.broker.groups.coordinator._wall_ms = lambda: now_ms[0]
    commit(harness, "simple", t0=1)
    stable_group(harness, "member")
    who = Identity("i-1", "i")
    harness.broker.groups.commit_offsets("member", [NewOffset("t", 0, 1)], member=who, generation=1)
    harness.broker.groups.expire_offsets()
    now_ms[0] += 3_600_000
    harness.broker.groups.expire_offsets()
    assert harness.broker.groups.names() == ["member", "simple"], "never by default"
    settings = dataclasses.replace(harness.broker.groups._settings, offsets_retention_minutes=60)
    harness.broker.groups._settings = settings
    harness.broker.groups.expire_offsets()
    assert harness.broker.groups.names() == ["member"], "it is not empty"
    harness.broker.groups.coordinator.leave("member", [who])
    now_ms[0] += 3_600_000 - 1
    harness.broker.groups.expire_offsets()
    assert harness.broker.groups.names() == ["member"], "an hour since it became empty"
    now_ms[0] += 1
    harness.broker.groups.expire_offsets()
    assert harness.broker.groups.names() == []


@pytest.mark.parametrize("has_tail", [True, False])
def test_groups_of_an_adopted_folder_stay_in_their_partition_after_a_restore(
    harness, topic, tmp_path, has_tail
):
    """The folder of one of Kafka's brokers lacks the group's own partition."""
    harness.broker.close()
    for number in (1, 3):
        folder = harness.root / "data" / f"{TOPIC}-{number}"
        folder.mkdir()
        path_of(folder, 0, LOG).touch()
    harness.broker = harness.open()
    group = next(name for name in "abcdefgh" if partition_for_group(name, 4) == 0)
    commit(harness, group, t0=5)
    harness.offload(TOPIC)
    harness.claim()
    harness.broker.close()
    (harness.root / "data").rename(harness.root / "lost")
    tail = harness.root / "lost" if has_tail else None
    options = RestoreOptions(data_dir=harness.root / "data", gap=10, clock=lambda: 0, tail=tail)
    restore(open_store(f"file://{harness.root / 'bucket'}"), options)
    harness.broker = harness.open()
    assert offsets_of(harness, group) == {("t", 0): 5}
    commit(harness, group, t0=7)
    harness.restart()
    assert offsets_of(harness, group) == {("t", 0): 7}
    assert not TAKE_OVERS.path(harness.root / "data").exists()


@pytest.mark.parametrize("has_tail", [True, False])
def test_groups_are_reset_if_a_restore_finds_nothing_of_a_log(harness, tmp_path, has_tail):
    """Its offsets begin again at 0. With a tail, another log was truncated, and the groups had not
    followed yet.
    """
    for name in ("local", "cut"):
        harness.broker.create_topic(name, config={"remote.storage.enable": False})
        harness.produce(name, [b"x"] * 10)
    commit(harness, "g", local0=10, cut0=15)
    harness.offload(TOPIC)
    cut = format_topic_id_partition(harness.broker.topic("cut").record.topic_id, 0)
    harness.broker.close()
    data, lost = harness.root / "data", harness.root / "lost"
    data.rename(lost)
    TRUNCATIONS.write_document(lost, {cut: 10})
    shutil.rmtree(lost / "local-0")
    tail = lost if has_tail else None
    options = RestoreOptions(data_dir=data, gap=10, clock=lambda: 0, tail=tail)
    restore(open_store(f"file://{harness.root / 'bucket'}"), options)
    for _ in range(2):
        harness.broker = harness.open()
        harness.produce("local", [b"new"])
        assert offsets_of(harness, "g") == {("local", 0): 0, ("cut", 0): 10 if has_tail else 0}
        harness.broker.close()
    harness.broker = harness.open()


def test_commits_beyond_group_commits_max_are_throttled(harness, topic):
    harness.restart(group_commits_max=2)
    commit(harness, "g", t0=1, t1=1)
    commit(harness, "g", t0=2, t1=2)
    with pytest.raises(Throttled):
        commit(harness, "g", t2=1)
    harness.broker.groups.delete("g")
    commit(harness, "h", t2=1)


def test_concurrent_commits_match_the_log(harness, topic):
    def run(number):
        for step in range(30):
            commit(harness, f"g{number % 3}", t0=number * 1000 + step)
            if step % 10 == 9:
                with suppress(UnknownGroup):
                    harness.broker.groups.delete(f"g{number % 3}")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    before = list(harness.broker.groups.all_groups())
    harness.restart()
    assert list(harness.broker.groups.all_groups()) == before
