"""Fetches that wait, both tiers, and what is held meanwhile. A comparison with Kafka's answers is
in `tests/integration/kafka`.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaConsumer, TopicPartition

from tests.fakes.faulty_object_store import FaultyObjectStore, Slow
from tests.fakes.kafka_caller import KafkaCaller
from tests.fakes.kafka_folder import KafkaFolder
from tests.fakes.kafka_requests import (
    batch_of,
    fetch_request,
    partitions_of,
    produce_request,
    values_in,
)
from tests.fakes.produce_requests import NOW_MS
from tests.fakes.served_broker import Served, served_broker
from tests.fakes.waiting import until
from tierlog.api.kafka.error_codes import Code
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.broker.partition.partition import Partition
from tierlog.hot_tier.log_writer import Acks
from tierlog.object_store.open import open_store
from tierlog.record_format.produced import build_produced

VERSION = 12
LONG_MS = 25_000


def append(served: Served, topic: str, *values: bytes, partition: int = 0) -> None:
    batches = build_produced(
        list(values), timestamps=[NOW_MS] * len(values), max_message_bytes=9 << 20
    )
    served.broker.partition(topic, partition).append(batches, acks=Acks.ALL).result(20)


def until_it_waits(served: Served, least: int = 1) -> None:
    until(lambda: served.app.context.waiting.count >= least)


def values_of(answer: Any) -> list[list[bytes | None]]:
    return [values_in(one.records) for one in partitions_of(answer)]


def test_a_fetch_waits_for_records(served: Served, caller: KafkaCaller) -> None:
    served.broker.create_topic("a", partitions=2)
    request = fetch_request(("a", 0, 0), ("a", 1, 0), max_wait_ms=LONG_MS)
    caller.send(request, VERSION)
    until_it_waits(served)
    append(served, "a", b"1", partition=1)
    assert values_of(caller.answer(request, VERSION)) == [[], [b"1"]]
    assert served.app.context.waiting.count == 0


def test_a_fetch_waits_for_as_many_bytes_as_it_wants(served: Served, caller: KafkaCaller) -> None:
    served.broker.create_topic("a")
    append(served, "a", b"1")
    request = fetch_request(("a", 0, 0), max_wait_ms=LONG_MS, min_bytes=5000)
    caller.send(request, VERSION)
    until_it_waits(served)
    append(served, "a", b"2")
    append(served, "a", b"3" * 5000)
    assert values_of(caller.answer(request, VERSION)) == [[b"1", b"2", b"3" * 5000]]


def test_a_fetch_that_waits_in_vain_has_what_there_is(served: Served, caller: KafkaCaller) -> None:
    served.broker.create_topic("a")
    append(served, "a", b"1")
    request = fetch_request(("a", 0, 0), max_wait_ms=50, min_bytes=5000)
    assert values_of(caller.ask(request, VERSION)) == [[b"1"]]


def test_a_server_that_stops_answers_those_that_wait(tmp_path: Path) -> None:
    with served_broker(tmp_path / "data", kafka=KafkaSettings()) as served:
        served.broker.create_topic("a")
        caller = KafkaCaller(served.kafka_port)
        request = fetch_request(("a", 0, 0), max_wait_ms=LONG_MS)
        caller.send(request, VERSION)
        until_it_waits(served)
    assert values_of(caller.answer(request, VERSION)) == [[]]
    caller.close()


def test_a_topic_that_is_deleted_ends_the_wait(served: Served, caller: KafkaCaller) -> None:
    served.broker.create_topic("a")
    request = fetch_request(("a", 0, 0), max_wait_ms=LONG_MS)
    caller.send(request, VERSION)
    until_it_waits(served)
    served.broker.delete_topic("a")
    (found,) = partitions_of(caller.answer(request, VERSION))
    assert found.error_code == Code.UNKNOWN_TOPIC_OR_PARTITION


def test_what_is_not_flushed_yet_is_no_error_and_not_shown(
    served: Served, caller: KafkaCaller
) -> None:
    """A client may seek to the end that an append with acks=1 told it."""
    served.broker.create_topic("a", config={"flush.ms": 3_600_000})
    produced = caller.ask(produce_request(("a", 0, batch_of(b"1", b"2")), acks=1), 9)
    assert partitions_of(produced)[0].error_code == Code.NONE
    for offset in 0, 1, 2:
        (found,) = partitions_of(caller.ask(fetch_request(("a", 0, offset)), VERSION))
        assert (found.error_code, found.high_watermark, values_in(found.records)) == (0, 0, [])
    (found,) = partitions_of(caller.ask(fetch_request(("a", 0, 3)), VERSION))
    assert found.error_code == Code.OFFSET_OUT_OF_RANGE


def test_a_leader_of_before_a_restart_is_fenced(tmp_path: Path) -> None:
    for epoch in 1, 2:
        with served_broker(tmp_path / "data", kafka=KafkaSettings()) as served:
            if epoch == 1:
                served.broker.create_topic("a")
            append(served, "a", b"x")
            with KafkaCaller(served.kafka_port) as caller:
                codes = [
                    partitions_of(
                        caller.ask(fetch_request(("a", 0, 0), current_leader_epoch=known), VERSION)
                    )[0].error_code
                    for known in (epoch - 1, epoch, epoch + 1)
                ]
        assert codes == [Code.FENCED_LEADER_EPOCH, Code.NONE, Code.UNKNOWN_LEADER_EPOCH]


# --- what is held ---------------------------------------------------------------------------------


def deleted_files_that_are_open(folder: Path) -> list[str]:
    """Of logs in the folder: other tests of this process may have left theirs."""
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(str(fd.readlink()))
    return [
        name
        for name in found
        if name.startswith(f"{folder}/") and name.endswith("(deleted)") and ".log" in name
    ]


def test_slices_are_closed_whatever_becomes_of_the_client(
    served: Served, callers: Callable[[], KafkaCaller]
) -> None:
    """A segment that was deleted stays open for as long as a slice of it is held."""
    served.broker.create_topic("a", config={"segment.bytes": 1 << 20, "retention.ms": -1})
    for _ in range(24):
        append(served, "a", os.urandom(900_000))
    all_bytes = {"partition_max_bytes": 50 << 20}
    everything = fetch_request(("a", 0, 0), **all_bytes)
    for _ in range(3):
        slow = callers()
        slow.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.send(everything, VERSION)
        slow.sock.recv(1)
        slow.close()  # in the middle of the answer
    callers().ask(fetch_request(("a", 0, 0), ("none", 0, 0), **all_bytes), VERSION)
    gone = callers()
    wants_more = fetch_request(("a", 0, 0), min_bytes=40 << 20, max_wait_ms=200, **all_bytes)
    gone.send(wants_more, VERSION)
    until_it_waits(served)
    gone.close()
    until(lambda: served.app.context.waiting.count == 0)
    log = served.broker.partition("a", 0)._log
    served.broker.trim("a", 0, 24)
    log.delete_local(24)
    log.reap(at_once=True)
    folder = served.broker.settings.data_dir
    until(lambda: not deleted_files_that_are_open(folder))


# --- both tiers -----------------------------------------------------------------------------------


@pytest.fixture
def faulty(tmp_path: Path) -> FaultyObjectStore:
    return FaultyObjectStore(open_store(f"file://{tmp_path / 'bucket'}"))


@pytest.fixture
def tiered(tmp_path: Path, faulty: FaultyObjectStore) -> Iterator[Served]:
    settings = KafkaSettings(remote_fetch_max_wait_ms=100)
    small = {"segment.bytes": 16384, "local.retention.bytes": 16384, "retention.ms": -1}
    with served_broker(
        tmp_path / "data", store=faulty, kafka=settings, cache_bytes=64 << 20
    ) as served:
        served.broker.create_topic("cold", config=small)
        served.broker.create_topic("hot")
        for number in range(50):
            append(served, "cold", b"%04d" % number * 500)
        served.broker.offload("cold", wait_ms=20_000)
        append(served, "hot", b"hot")
        yield served


def test_a_slow_bucket_holds_up_nothing_else(tiered: Served, faulty: FaultyObjectStore) -> None:
    assert tiered.broker.partition("cold", 0).offsets().local_log_start_offset > 10
    gate = threading.Event()
    faulty.fail("get_range", Slow(gate), times=10**6)
    with KafkaCaller(tiered.kafka_port) as caller:
        both = fetch_request(("cold", 0, 3), ("hot", 0, 0), max_wait_ms=50)
        answer = caller.ask(both, VERSION)
        assert sorted(values_of(answer)) == [[], [b"hot"]]
        assert {one.error_code for one in partitions_of(answer)} == {Code.NONE}
        gate.set()
        patient = fetch_request(("cold", 0, 3), max_wait_ms=LONG_MS)
        assert values_of(caller.ask(patient, VERSION))[0][0] == b"0003" * 500


def test_a_bucket_that_is_down_is_a_storage_error(
    tiered: Served, faulty: FaultyObjectStore
) -> None:
    faulty.go_down()
    with KafkaCaller(tiered.kafka_port) as caller:
        both = fetch_request(("cold", 0, 3), ("hot", 0, 0), max_wait_ms=LONG_MS)
        found = {
            one.error_code: values_in(one.records)
            for one in partitions_of(caller.ask(both, VERSION))
        }
    assert found == {Code.KAFKA_STORAGE_ERROR: [], Code.NONE: [b"hot"]}


@pytest.mark.parametrize("tier", ["hot", "cold"])
def test_a_committed_read_leaves_out_what_was_aborted(tmp_path: Path, tier: str) -> None:
    folder = KafkaFolder(tmp_path / "data" / "txn-0")
    folder.roll()
    folder.put(b"plain")
    folder.put(b"aborted", producer_id=1)
    folder.put(b"committed", producer_id=2)
    folder.end(1, committed=False)
    folder.end(2, committed=True)
    folder.roll()
    folder.put(b"open", producer_id=3)
    store = open_store(f"file://{tmp_path / 'bucket'}")
    with served_broker(
        tmp_path / "data", store=store, kafka=KafkaSettings(), cache_bytes=64 << 20
    ) as served:
        if tier == "cold":
            served.broker.alter_topic("txn", config={"local.retention.ms": 0})
            served.broker.offload("txn", wait_ms=20_000)
            assert served.broker.partition("txn", 0).offsets().local_log_start_offset >= 5
        with KafkaCaller(served.kafka_port) as caller:
            committed = fetch_request(("txn", 0, 0), isolation_level=1, max_wait_ms=500)
            (found,) = partitions_of(caller.ask(committed, VERSION))
            assert (found.last_stable_offset, found.high_watermark) == (5, 6)
            aborted = [(one.producer_id, one.first_offset) for one in found.aborted_transactions]
            assert aborted == [(1, 1)]
        read = {}
        for level in "read_committed", "read_uncommitted":
            consumer = KafkaConsumer(
                bootstrap_servers=f"127.0.0.1:{served.kafka_port}",
                isolation_level=level,
                consumer_timeout_ms=1000,
            )
            place = TopicPartition("txn", 0)
            consumer.assign([place])
            consumer.seek(place, 0)
            read[level] = [record.value for record in consumer]
            consumer.close()
    assert read["read_committed"] == [b"plain", b"committed"]
    assert read["read_uncommitted"] == [b"plain", b"aborted", b"committed", b"open"]


# --- sessions -------------------------------------------------------------------------------------


def test_a_session_touches_only_what_has_advanced(
    served: Served, caller: KafkaCaller, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.broker.create_topic("a", partitions=100)
    full = fetch_request(*(("a", number, 0) for number in range(100)), session=(0, 0))
    first = caller.ask(full, VERSION)
    assert len(partitions_of(first)) == 100
    looked_at: list[int] = []
    offsets = Partition.offsets

    def counted(partition: Partition) -> Any:
        looked_at.append(partition.number)
        return offsets(partition)

    monkeypatch.setattr(Partition, "offsets", counted)
    news: list[tuple[str, int, int]] = []
    for epoch, (number, offset) in enumerate([(7, 0), (42, 0), (7, 1)], 1):
        request = fetch_request(*news, session=(first.session_id, epoch), max_wait_ms=LONG_MS)
        caller.send(request, VERSION)
        until_it_waits(served)
        append(served, "a", b"%d" % epoch, partition=number)
        (found,) = partitions_of(caller.answer(request, VERSION))
        assert (found.partition_index, values_in(found.records)) == (number, [b"%d" % epoch])
        news = [("a", number, offset + 1)]
    assert set(looked_at) == {7, 42}


def test_a_client_that_reconnects_ends_its_earlier_wait(
    served: Served, callers: Callable[[], KafkaCaller]
) -> None:
    served.broker.create_topic("a")
    before, after = callers(), callers()
    mine = before.ask(fetch_request(("a", 0, 0), session=(0, 0)), VERSION).session_id
    waits = fetch_request(session=(mine, 1), max_wait_ms=LONG_MS)
    before.send(waits, VERSION)
    until_it_waits(served)
    again = fetch_request(session=(mine, 2), max_wait_ms=LONG_MS)
    after.send(again, VERSION)
    assert before.answer(waits, VERSION).error_code == Code.INVALID_FETCH_SESSION_EPOCH
    append(served, "a", b"1")
    assert values_of(after.answer(again, VERSION)) == [[b"1"]]


def test_a_client_may_ask_on_before_the_sender_has_looked_up(
    served: Served, caller: KafkaCaller
) -> None:
    """The end of an answer arrives before the task that sent it has ended."""
    served.broker.create_topic("a")
    append(served, "a", bytes(100_000))
    request = fetch_request(("a", 0, 0))
    for _ in range(1000):
        (found,) = partitions_of(caller.ask(request, VERSION))
        assert len(found.records) > 100_000
