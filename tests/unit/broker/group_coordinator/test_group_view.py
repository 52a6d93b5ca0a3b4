from pathlib import Path

from tests.fakes.records import iter_records
from tierlog.broker.group_coordinator.classic_group import ClassicGroup
from tierlog.broker.group_coordinator.consumer_group_records import encode_key as encode_group_key
from tierlog.broker.group_coordinator.group_events import Limits, RecordKey, RecordKind
from tierlog.broker.group_coordinator.offset_log import GroupView
from tierlog.record_format.checkpoint_files import parse_topic_id
from tierlog.record_format.consumer_offsets import (
    Commit,
    CommitKey,
    decode_key,
    decode_value,
    encode_key,
    encode_value,
)
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.kafka_messages import codec
from tierlog.record_format.kafka_messages.messages import GroupMetadataValue

ABORTED, COMMITTED = 0, 1
FIXTURES = Path(__file__).parents[3] / "fixtures" / "kafka-groups"


class Log:
    """Batches with increasing offsets, as Kafka's group coordinator writes them."""

    def __init__(self):
        self.data, self.offset = b"", 0

    def _add(self, keys, values, **fields):
        batch = encode_batch(
            values,
            keys=keys,
            timestamps=[0] * len(values),
            base_offset=self.offset,
            **fields,
        )
        self.offset += len(values)
        self.data += bytes(batch)

    def commit(self, group, offset, *, producer_id=-1):
        in_transaction = {"transactional": True, "producer_id": producer_id}
        value = None if offset is None else encode_value(Commit(offset))
        fields = in_transaction if producer_id >= 0 else {}
        self._add([encode_key(CommitKey(group, "t", 0))], [value], **fields)

    def end(self, producer_id, kind):
        key = b"\0\0" + kind.to_bytes(2, "big")
        self._add([key], [bytes(6)], control=True, transactional=True, producer_id=producer_id)

    def view(self):
        view = GroupView()
        view.apply(self.data)
        return {group: offsets["t", 0].commit.offset for group, offsets in view.groups.items()}


def test_the_last_commit_wins_and_a_tombstone_removes_it():
    log = Log()
    log.commit("a", 1)
    log.commit("b", 1)
    log.commit("a", 2)
    log.commit("b", None)
    log.commit("never", None)
    assert log.view() == {"a": 2}


def test_transactional_commits_take_effect_when_the_transaction_commits():
    log = Log()
    log.commit("a", 1)
    log.commit("b", 1)
    log.commit("a", 50, producer_id=7)
    log.commit("b", 50, producer_id=8)
    log.commit("c", 50, producer_id=9)
    assert log.view() == {"a": 1, "b": 1}
    log.end(7, COMMITTED)
    log.end(8, ABORTED)
    assert log.view() == {"a": 50, "b": 1}


def test_a_later_commit_outside_the_transaction_wins():
    log = Log()
    log.commit("a", 50, producer_id=7)
    log.commit("a", 60)
    log.end(7, COMMITTED)
    assert log.view() == {"a": 60}


def test_a_producer_can_commit_after_an_abort():
    log = Log()
    log.commit("a", 50, producer_id=7)
    log.end(7, ABORTED)
    log.commit("a", 51, producer_id=7)
    log.end(7, COMMITTED)
    assert log.view() == {"a": 51}


def test_an_end_marker_without_a_transaction_changes_nothing():
    log = Log()
    log.end(7, COMMITTED)
    log.commit("a", 1)
    assert log.view() == {"a": 1}


def test_commits_are_counted_once_per_partition():
    log, view = Log(), GroupView()
    for offset in (1, 2, None, None, 3):
        log.commit("a", offset)
    view.apply(log.data)
    assert view.count == 1
    assert list(view.commits()) == [(CommitKey("a", "t", 0), Commit(3))]


def test_a_log_written_by_kafka_is_read():
    """A console consumer read two of three records; another group's offset was reset to 1."""
    view = GroupView()
    view.apply((FIXTURES / "00000000000000000000.log").read_bytes())
    partition = ("flights", 0)
    found = {group: offsets[partition].commit for group, offsets in view.groups.items()}
    topic_id = parse_topic_id("vXjwGcGzSnOCS3EL5WHZPQ")
    assert found == {
        "real-group": Commit(2, "", 1795232811107, -1, topic_id),
        "set-group": Commit(1, "", 1795232816143, -1, topic_id),
    }
    assert view.unreadable == 0


def test_encoding_kafkas_commits_gives_kafkas_bytes():
    data = (FIXTURES / "00000000000000000000.log").read_bytes()
    commits = 0
    for record in iter_records(data):
        key = decode_key(record.key)
        if key is not None:
            commits += 1
            assert encode_key(key) == record.key
            assert encode_value(decode_value(record.value)) == record.value
    assert commits


def test_the_members_of_kafkas_groups_are_read_and_written_as_kafka_does():
    """Each of its records, through the state machine and back."""
    data = (FIXTURES / "00000000000000000000.log").read_bytes()
    rows = [one for one in iter_records(data) if codec.record_type(one.key) == 2]
    states = []
    for record in rows:
        assert encode_group_key("real-group", RecordKey(RecordKind.CLASSIC)) == record.key
        value = codec.decode_versioned(GroupMetadataValue, record.value)
        group = ClassicGroup("real-group", Limits(10, 0))
        group.load(value, 0)
        states.append((str(group.state), group.generation, len(group.members)))
        again = group.record(group.assignments())
        again.current_state_timestamp = value.current_state_timestamp
        assert codec.encode_versioned(again, 3) == record.value
    assert states == [("Empty", 0, 0), ("Stable", 1, 1), ("Empty", 2, 0)]
    view = GroupView()
    view.apply(data)
    assert view.metadata == {"real-group": {rows[-1].key: rows[-1].value}}
