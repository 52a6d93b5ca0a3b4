"""Commits end as the log has them, in whatever order those who wait for them wake up."""

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from broker.groups.groups import Groups
from broker.groups.requests import NewOffset
from hot_tier.append import AppendResult
from hot_tier.log_config import LogConfig
from record_format.consumer_offsets import TOPIC
from record_format.errors import DiskFull, UnknownGroup, UnknownTopic


class Log:
    """A partition whose appends are flushed when the test says so."""

    def __init__(self):
        self.log = SimpleNamespace(config=LogConfig.parse({}))
        self.cold = None
        self.appended = []
        self.came = threading.Semaphore(0)

    def append(self, batches, *, acks):
        future = Future()
        self.appended.append(future)
        self.came.release()
        return future

    def flush(self, number):
        self.appended[number].set_result(AppendResult(number, number, None, False, 0))

    def check_leadership(self):
        """It is never lost here."""

    def offsets(self):
        return SimpleNamespace(log_start_offset=0, high_watermark=0, log_end_offset=100)


class Shelf:
    """The topics that there are: `t`, and the internal one once it is made."""

    def __init__(self):
        self.log = Log()
        self.topics = {}
        self.make("t", {})
        truncations = SimpleNamespace(ends={}, forget=lambda done: None)
        self.groups = Groups(
            find_topic=self.find,
            ensure_topic=self.find_or_make,
            clock=lambda: 0,
            commits_max=100,
            truncations=truncations,
        )

    def make(self, name, _config):
        record = SimpleNamespace(topic_id="vXjwGcGzSnOCS3EL5WHZPQ", partitions=1)
        topic = SimpleNamespace(
            record=record,
            numbers=[0],
            damaged={},
            partition=lambda number: self.log,
            all_partitions=lambda: [self.log],
        )
        self.topics[name] = topic
        return topic

    def find(self, name):
        if name not in self.topics:
            raise UnknownTopic(name)
        return self.topics[name]

    def find_or_make(self, name, config):
        return self.topics.get(name) or self.make(name, config)

    def offset(self):
        (one,) = self.groups.group("g")
        return one.offset

    def start(self, call, *arguments):
        """In a thread, until its append is under way."""
        thread = threading.Thread(target=call, args=arguments)
        thread.start()
        assert self.log.came.acquire(timeout=10)
        return thread


@pytest.fixture
def shelf():
    return Shelf()


def test_a_commit_that_wakes_up_late_does_not_undo_a_later_one(shelf):
    first = shelf.start(shelf.groups.commit, "g", [NewOffset("t", 0, 1)])
    second = shelf.start(shelf.groups.commit, "g", [NewOffset("t", 0, 2)])
    shelf.log.flush(1)
    second.join(0.2)
    shelf.log.flush(0)
    for thread in (first, second):
        thread.join(10)
    assert shelf.offset() == 2


def test_who_was_answered_sees_what_was_committed_before(shelf):
    first = shelf.start(shelf.groups.commit, "g", [NewOffset("t", 0, 1)])
    second = shelf.start(shelf.groups.commit, "h", [NewOffset("t", 0, 2)])
    shelf.log.flush(0)
    first.join(10)
    assert shelf.offset() == 1
    with pytest.raises(UnknownGroup):
        shelf.groups.group("h")
    shelf.log.flush(1)
    second.join(10)
    assert shelf.groups.group("h")[0].offset == 2


def test_a_refused_append_changes_nothing_and_later_ones_go_on(shelf):
    refused = []

    def commit():
        try:
            shelf.groups.commit("g", [NewOffset("t", 0, 1)])
        except DiskFull as error:
            refused.append(error)

    first = shelf.start(commit)
    second = shelf.start(shelf.groups.commit, "g", [NewOffset("t", 0, 2)])
    shelf.log.appended[0].set_exception(DiskFull("full"))
    shelf.log.flush(1)
    for thread in (first, second):
        thread.join(10)
    assert len(refused) == 1
    assert shelf.offset() == 2


def test_a_topic_deleted_under_a_commit_takes_it_along(shelf):
    committing = shelf.start(shelf.groups.commit, "g", [NewOffset("t", 0, 1)])
    del shelf.topics["t"]
    forgetting = threading.Thread(target=shelf.groups.forget_topic, args=("t",))
    forgetting.start()
    shelf.log.flush(0)
    assert shelf.log.came.acquire(timeout=10)  # the tombstone
    shelf.log.flush(1)
    for thread in (committing, forgetting):
        thread.join(10)
    with pytest.raises(UnknownGroup):
        shelf.groups.group("g")


def test_tombstones_that_could_not_be_written_are_written_later(shelf):
    committing = shelf.start(shelf.groups.commit, "g", [NewOffset("t", 0, 1)])
    shelf.log.flush(0)
    committing.join(10)
    del shelf.topics["t"]
    forgetting = shelf.start(shelf.groups.forget_topic, "t")
    shelf.log.appended[1].set_exception(DiskFull("full"))
    forgetting.join(10)
    with pytest.raises(UnknownGroup):
        shelf.groups.group("g")
    round_ = shelf.start(shelf.groups.run_round)
    shelf.log.flush(2)
    round_.join(10)
    shelf.groups.run_round()
    assert len(shelf.log.appended) == 3, "what was written is owed no more"
    assert TOPIC in shelf.topics
