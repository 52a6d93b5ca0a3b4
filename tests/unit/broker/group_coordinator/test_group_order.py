"""Offset commits take effect in the order of the log, in whatever order their waiters wake up."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from tierlog.broker.group_coordinator.group_configs import GroupConfigs
from tierlog.broker.group_coordinator.groups import Groups, NewOffset
from tierlog.broker.settings import BrokerSettings
from tierlog.hot_tier.log_config import LogConfig
from tierlog.hot_tier.log_writer import AppendResult
from tierlog.record_format.consumer_offsets import TOPIC
from tierlog.record_format.errors import (
    DiskFull,
    Forbidden,
    Starting,
    UnknownGroup,
    UnknownTopic,
    WatermarkUnknown,
)


class Log:
    """A partition whose appends complete when the test calls `flush`."""

    def __init__(self):
        self.config = LogConfig.parse({})
        self.gaps, self.number = (), 0
        self.appended = []
        self.append_called = threading.Semaphore(0)
        self.is_end_known = True

    def check_end_known(self):
        if not self.is_end_known:
            raise WatermarkUnknown("its leader is new")

    def append(self, batches, *, acks, verify):
        future = Future()
        self.appended.append(future)
        self.append_called.release()
        return future

    def flush(self, number):
        self.appended[number].set_result(AppendResult(number, number, None, False, 0))

    def check_leadership(self):
        """It is never lost."""

    confirm_leads = check_leadership

    def offsets(self):
        return SimpleNamespace(log_start_offset=0, high_watermark=0, log_end_offset=100)


class Topics:
    """The topic `t`, and the internal one once it is created."""

    def __init__(self):
        self.log = Log()
        self.by_name = {}
        self.create("t", {})
        truncations = SimpleNamespace(ends={}, forget=lambda done: None)
        settings = BrokerSettings(data_dir=Path(), group_commits_max=100)
        self.groups = Groups(
            self,
            truncations,
            GroupConfigs(self, settings, clock=lambda: 0),
            settings,
            clock=lambda: 0,
            call_after=lambda _delay_ms, _callback: None,
        )

    def create(self, name, _config):
        record = SimpleNamespace(topic_id="vXjwGcGzSnOCS3EL5WHZPQ", partitions=1)
        topic = SimpleNamespace(
            record=record,
            numbers=[0],
            partitions={0: self.log},
            damaged={},
            partition=lambda number: self.log,
            local_partitions=lambda: [self.log],
            check_number=lambda number: None,
            end_elsewhere=lambda number: None,
        )
        self.by_name[name] = topic
        return topic

    def find(self, name):
        if name not in self.by_name:
            raise UnknownTopic(name)
        return self.by_name[name]

    def ensure(self, wanted):
        return self.by_name.get(wanted.name) or self.create(wanted.name, wanted.config)

    def offset(self):
        (committed,) = self.groups.group("g")
        return committed.offset

    def start(self, call, *arguments):
        """Call it in a thread, and wait for its append."""
        thread = threading.Thread(target=call, args=arguments)
        thread.start()
        assert self.log.append_called.acquire(timeout=10)
        return thread


@pytest.fixture
def topics():
    return Topics()


def test_a_new_leader_does_not_answer_before_it_knows_what_was_committed(topics):
    topics.groups.log.ensure_topic()
    topics.log.is_end_known = False
    with pytest.raises(Starting):
        topics.groups.committed("g")
    topics.log.is_end_known = True
    assert topics.groups.committed("g") == {}


def test_a_commit_completed_late_does_not_overwrite_a_later_one(topics):
    first = topics.start(topics.groups.commit_offsets, "g", [NewOffset("t", 0, 1)])
    second = topics.start(topics.groups.commit_offsets, "g", [NewOffset("t", 0, 2)])
    topics.log.flush(1)
    second.join(0.2)
    topics.log.flush(0)
    for thread in (first, second):
        thread.join(10)
    assert topics.offset() == 2


def test_a_look_at_a_group_waits_for_what_was_accepted_before_it(topics):
    committing = topics.start(topics.groups.commit_offsets, "g", [NewOffset("t", 0, 1)])
    with ThreadPoolExecutor(1) as threads:
        looking = threads.submit(topics.groups.committed, "g")
        topics.log.flush(0)
        assert looking.result(10)["t", 0].offset == 1
    committing.join(10)


def test_a_refused_append_changes_nothing_and_later_ones_succeed(topics):
    refused = []

    def commit():
        try:
            topics.groups.commit_offsets("g", [NewOffset("t", 0, 1)])
        except DiskFull as error:
            refused.append(error)

    first = topics.start(commit)
    second = topics.start(topics.groups.commit_offsets, "g", [NewOffset("t", 0, 2)])
    topics.log.appended[0].set_exception(DiskFull("full"))
    topics.log.flush(1)
    for thread in (first, second):
        thread.join(10)
    assert len(refused) == 1
    assert topics.offset() == 2


def test_deleting_a_topic_deletes_a_commit_in_progress(topics):
    committing = topics.start(topics.groups.commit_offsets, "g", [NewOffset("t", 0, 1)])
    del topics.by_name["t"]
    forgetting = threading.Thread(target=topics.groups.forget_topic, args=("t",))
    forgetting.start()
    topics.log.flush(0)
    assert topics.log.append_called.acquire(timeout=10)  # the tombstone
    topics.log.flush(1)
    for thread in (committing, forgetting):
        thread.join(10)
    with pytest.raises(UnknownGroup):
        topics.groups.group("g")


def test_the_deletion_of_a_group_is_checked_with_a_commit_in_progress(topics):
    def check(names):
        raise Forbidden(", ".join(names))

    committing = topics.start(topics.groups.commit_offsets, "g", [NewOffset("t", 0, 1)])
    with ThreadPoolExecutor(1) as threads:
        deleting = threads.submit(topics.groups.delete, "g", check=check)
        topics.log.flush(0)
        with pytest.raises(Forbidden, match=r"^t$"):
            deleting.result(10)
    committing.join(10)
    assert topics.offset() == 1


def test_tombstones_that_failed_are_written_later(topics):
    committing = topics.start(topics.groups.commit_offsets, "g", [NewOffset("t", 0, 1)])
    topics.log.flush(0)
    committing.join(10)
    del topics.by_name["t"]
    forgetting = topics.start(topics.groups.forget_topic, "t")
    topics.log.appended[1].set_exception(DiskFull("full"))
    forgetting.join(10)
    with pytest.raises(UnknownGroup):
        topics.groups.group("g")
    round_ = topics.start(topics.groups.run_round)
    topics.log.flush(2)
    round_.join(10)
    topics.groups.run_round()
    assert len(topics.log.appended) == 3, "written tombstones are not repeated"
    assert TOPIC in topics.by_name
