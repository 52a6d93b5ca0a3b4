"""`consume(group=...)` as a member of its group: with others of its kind, and beside Kafka's."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from itertools import chain
from pathlib import Path

import pytest
from confluent_kafka import Consumer
from kafka import KafkaConsumer

import tierlog
from tests.fakes.broker_process import BrokerProcess
from tests.fakes.served_broker import Served, served_broker
from tests.fakes.waiting import until
from tierlog.api.kafka.settings import KafkaSettings

PARTITIONS = 6
QUICK = tierlog.Membership(session_timeout_ms=15_000, heartbeat_interval_ms=50)
SETTINGS = {"group_min_session_timeout_ms": 100, "group_consumer_heartbeat_interval_ms": 100}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with served_broker(tmp_path / "data", kafka=KafkaSettings(), **SETTINGS) as served:
        served.broker.create_topic("flights", partitions=PARTITIONS)
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[tierlog.Client]:
    with tierlog.Client(served.server.url) as client:
        yield client


class Reading(threading.Thread):
    """A loop over the records in a thread of its own; it holds each record until it may `go_on`."""

    def __init__(self, url: str, membership: tierlog.Membership = QUICK) -> None:
        super().__init__(daemon=True)
        self._url, self._membership = url, membership
        self.seen: list[tuple[int, int]] = []
        self.ends, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with tierlog.Client(self._url) as client:
                self._read(client)
        except tierlog.errors.TierlogError as error:
            self.error = error

    def _read(self, client: tierlog.Client) -> None:
        limits = tierlog.Limits(wait_ms=100)
        for record in client.consume(
            "flights", group="g", follow=True, membership=self._membership, limits=limits
        ):
            self.seen.append((record.partition, record.offset))
            self.go_on.wait()
            if self.ends.is_set():
                return


@contextmanager
def reading(
    served: Served, membership: tierlog.Membership = QUICK, count: int = 1
) -> Iterator[list[Reading]]:
    """Loops that end at their next record."""
    threads = [Reading(served.server.url, membership) for _ in range(count)]
    for one in threads:
        one.start()
    try:
        yield threads
    finally:
        for one in threads:
            one.ends.set()
            one.go_on.set()
        with tierlog.Client(served.server.url) as client:
            while any(one.is_alive() for one in threads):
                put(client, 1)
                threads[0].join(0.05)
        assert [one.error for one in threads] == [None] * count


def put(client: tierlog.Client, count: int = 10) -> None:
    """So many records to each partition."""
    records = [
        tierlog.NewRecord(b"%d" % number, partition=partition)
        for partition in range(PARTITIONS)
        for number in range(count)
    ]
    client.produce("flights", records)


def owners(client: tierlog.Client) -> list[list[int]]:
    """The partitions of each member, in a stable group."""
    try:
        group = client.group("g")
    except tierlog.errors.UnknownGroup:
        return []
    if group.state != "Stable":
        return []
    rows = [
        [one for row in member.assignment for one in row.partitions] for member in group.members
    ]
    return sorted(rows)


def committed(client: tierlog.Client) -> dict[int, int]:
    return {one.partition: one.offset for one in client.group("g").offsets}


def test_consumers_divide_the_partitions_and_read_each_record_once(
    served: Served, client: tierlog.Client
) -> None:
    put(client)
    with reading(served, count=2) as (one, two):
        until(lambda: list(map(len, owners(client))) == [3, 3])
        put(client)
        until(lambda: len(one.seen) + len(two.seen) >= PARTITIONS * 20)
        with reading(served) as (third,):
            until(lambda: list(map(len, owners(client))) == [2, 2, 2])
            put(client)
            until(lambda: third.seen)
            until(lambda: len({*one.seen, *two.seen, *third.seen}) == PARTITIONS * 30)
            # What a loop had in hand when partitions moved was committed before they did.
            assert set(Counter([*one.seen, *two.seen, *third.seen]).values()) == {1}
        until(lambda: list(map(len, owners(client))) == [3, 3])
    assert client.group("g").state == "Empty"


def test_what_is_processed_is_committed_before_a_partition_is_given_away(
    served: Served, client: tierlog.Client
) -> None:
    put(client)
    with reading(served) as (one,):
        until(lambda: len(one.seen) == PARTITIONS * 10)
        one.go_on.clear()
        put(client, 1)
        until(lambda: len(one.seen) == PARTITIONS * 10 + 1)
        with reading(served) as (two,):
            until(lambda: client.group("g").state == "PreparingRebalance")
            assert not two.seen  # it waits for the loop that has a record in hand
            one.go_on.set()
            until(lambda: len({*one.seen, *two.seen}) == PARTITIONS * 11)
            assert len(one.seen) + len(two.seen) == PARTITIONS * 11


def test_a_loop_joins_again_at_its_next_record_not_after_the_page(
    served: Served, client: tierlog.Client
) -> None:
    put(client)
    records = client.consume("flights", group="g", membership=QUICK)
    next(records)
    (progress,) = client._active_groups
    with reading(served):
        until(lambda: progress.member.must_join)  # a heartbeat was answered so
        next(records)
        assert list(map(len, owners(client))) == [3, 3]
        records.close()


def test_a_loop_that_takes_too_long_loses_its_partitions_and_goes_on_as_a_new_member(
    served: Served, client: tierlog.Client, caplog: pytest.LogCaptureFixture
) -> None:
    put(client)
    slow = QUICK._replace(max_poll_interval_ms=300)
    with reading(served, slow) as (one,):
        one.go_on.clear()
        until(lambda: len(one.seen) == 1)
        until(lambda: client.group("g").state == "Empty")
        assert "max_poll_interval_ms=300" in caplog.text
        with reading(served) as (two,):
            until(lambda: len(two.seen) == PARTITIONS * 10)  # also the record that is in hand
            one.go_on.set()
            until(lambda: list(map(len, owners(client))) == [3, 3])
        assert "will be read again" in caplog.text


def test_a_commit_of_an_earlier_generation_says_so_and_changes_nothing(
    served: Served, client: tierlog.Client
) -> None:
    put(client)
    records = client.consume(
        "flights", group="g", membership=QUICK._replace(heartbeat_interval_ms=900)
    )
    record = next(records)
    (member,) = client.group("g").members
    served.broker.groups.coordinator.leave("g", [_identity(member.member_id)])
    client.commit_offsets("g", [tierlog.OffsetCommit("flights", record.partition, 7)])
    with reading(served) as (other,):
        until(lambda: other.seen)
        with pytest.raises(tierlog.errors.GroupRefused, match="or no longer") as refused:
            client.commit_consumed(record)
        assert refused.value.reason == "UNKNOWN_MEMBER_ID"
        records.close()
        with pytest.raises(tierlog.errors.InvalidRequest):
            client.commit_consumed(record)
        assert committed(client).get(record.partition, 7) >= 7


def _identity(member_id: str):
    from tierlog.broker.group_coordinator.group_events import Identity

    return Identity(member_id, None)


def test_the_last_record_of_a_loop_is_committed_on_request(
    served: Served, client: tierlog.Client
) -> None:
    put(client)
    for record in client.consume("flights", group="g"):
        if record.offset == 4:
            client.commit_consumed(record)
            break
    assert committed(client) == {record.partition: 5}
    assert client.group("g").state == "Empty"

    async def run() -> None:
        async with (
            tierlog.AsyncClient(served.server.url) as client,
            aclosing(client.consume("flights", group="g")) as records,
        ):
            await client.commit_consumed(await anext(records))

    asyncio.run(run())
    assert committed(client) == {record.partition: 6}


def test_a_group_that_has_members_refuses_who_chose_its_partitions(
    served: Served, client: tierlog.Client
) -> None:
    put(client)
    with reading(served) as (one,):
        until(lambda: len(one.seen) == PARTITIONS * 10)
        with pytest.raises(tierlog.errors.GroupRefused, match="UNKNOWN_MEMBER_ID"):
            list(client.consume("flights", partitions=[0], group="g", offset=0))


def test_asynchronous_consumers_divide_the_partitions(
    served: Served, client: tierlog.Client
) -> None:
    put(client)
    seen: list[list[tuple[int, int]]] = [[], []]

    async def read(client: tierlog.AsyncClient, mine: list[tuple[int, int]]) -> None:
        limits = tierlog.Limits(wait_ms=100)
        found = client.consume("flights", group="g", follow=True, membership=QUICK, limits=limits)
        async with aclosing(found) as records:
            async for record in records:
                mine.append((record.partition, record.offset))

    async def run() -> None:
        async with tierlog.AsyncClient(served.server.url) as both:
            tasks = [asyncio.create_task(read(both, mine)) for mine in seen]
            await asyncio.to_thread(until, lambda: list(map(len, owners(client))) == [3, 3])
            await asyncio.to_thread(put, client)
            await asyncio.to_thread(until, lambda: sum(map(len, seen)) >= PARTITIONS * 20)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(run())
    assert set(Counter(seen[0] + seen[1]).values()) == {1}
    assert client.group("g").state == "Empty"
    assert committed(client).keys() == set(range(PARTITIONS))


def test_a_static_member_that_is_back_has_its_partitions_and_its_twin_is_told(
    served: Served, client: tierlog.Client
) -> None:
    put(client)
    static = QUICK._replace(instance_id="i", session_timeout_ms=30_000)
    records = client.consume("flights", group="g", membership=static, follow=True)
    assert next(records).offset == 0
    records.close()
    assert client.group("g").state == "Stable"
    first = client.group("g")
    twins = [client.consume("flights", group="g", membership=static, follow=True) for _ in "ab"]
    assert [next(one).offset for one in twins] == [0, 0]
    assert client.group("g").generation == first.generation
    with pytest.raises(tierlog.errors.GroupRefused, match="FENCED_INSTANCE_ID"):
        for _ in twins[0]:
            pass
    twins[1].close()


@contextmanager
def kafka_consumer(served: Served, seen: list[tuple[int, int]]) -> Iterator[KafkaConsumer]:
    consumer = KafkaConsumer(
        "flights",
        bootstrap_servers=f"127.0.0.1:{served.kafka_port}",
        group_id="g",
        auto_offset_reset="earliest",
        auto_commit_interval_ms=100,
        session_timeout_ms=30_000,  # on a busy machine its heartbeats may be late
        heartbeat_interval_ms=100,
    )
    stop = threading.Event()

    def poll() -> None:
        while not stop.is_set():
            for place, records in consumer.poll(200).items():
                seen.extend((place.partition, one.offset) for one in records)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield consumer
    finally:
        stop.set()
        thread.join()
        consumer.close()


def test_kafkas_consumers_are_in_the_same_group(served: Served, client: tierlog.Client) -> None:
    """As leader, and as one that another leads."""
    put(client)
    seen: list[tuple[int, int]] = []
    with reading(served, count=2) as (one, two):
        until(lambda: list(map(len, owners(client))) == [3, 3])
        with kafka_consumer(served, seen):
            until(lambda: list(map(len, owners(client))) == [2, 2, 2])
            put(client)
            until(lambda: len({*one.seen, *two.seen, *seen}) == PARTITIONS * 20)
            assert seen
        until(lambda: list(map(len, owners(client))) == [3, 3])
    with kafka_consumer(served, seen):
        until(lambda: list(map(len, owners(client))) == [6])
        with reading(served) as (one,):
            until(lambda: list(map(len, owners(client))) == [3, 3])
            put(client)
            until(lambda: one.seen)


def assigned(consumer: Consumer) -> list[int]:
    return sorted(place.partition for place in consumer.assignment())


@pytest.mark.parametrize("assignor", ["range", "roundrobin", "cooperative-sticky", "uniform"])
def test_the_assignor_is_one_that_kafkas_consumers_have(
    served: Served, client: tierlog.Client, assignor: str
) -> None:
    """First the broker assigns for a member over HTTP, then one of theirs leads; or with the
    newer protocol (KIP-848) the broker throughout.
    """
    settings = {
        "bootstrap.servers": f"127.0.0.1:{served.kafka_port}",
        "group.id": "g",
        **(
            {"group.protocol": "consumer", "group.remote.assignor": assignor}
            if assignor == "uniform"
            else {
                "partition.assignment.strategy": assignor,
                "session.timeout.ms": 6000,
                "heartbeat.interval.ms": 100,
            }
        ),
    }
    theirs: list[Consumer] = []

    def divided(*counts: int) -> bool:
        for one in theirs:
            one.poll(0.02)
        shares = owners(client)
        known = [assigned(one) for one in theirs]
        return sorted(map(len, shares)) == [*counts] and all(one in shares for one in known)

    def begin() -> None:
        theirs.append(Consumer(settings))
        theirs[-1].subscribe(["flights"])

    try:
        with reading(served):
            until(lambda: divided(6))
            begin()
            until(lambda: divided(3, 3))
            begin()
            until(lambda: divided(2, 2, 2))
            assert sorted(chain(*owners(client))) == list(range(PARTITIONS))
        until(lambda: divided(3, 3))
        with reading(served) as (one,):
            until(lambda: divided(2, 2, 2))
            put(client)
            until(lambda: one.seen)
    finally:
        for one in theirs:
            one.close()


LEFT_OPEN = """
import sys, tierlog
client = tierlog.Client(sys.argv[1])
records = client.consume("flights", group="g", follow=True)
next(records), next(records)
"""


def test_a_loop_that_nobody_closed_has_left_when_the_interpreter_ends(
    served: Served, client: tierlog.Client
) -> None:
    put(client)
    command = [sys.executable, "-c", LEFT_OPEN, served.server.url]
    done = subprocess.run(command, capture_output=True, check=True, timeout=60)
    assert done.stderr == b""
    assert client.group("g").state == "Empty"
    assert list(committed(client).values()) == [1]


READS_FOR_EVER = """
import sys, tierlog
quick = tierlog.Membership(session_timeout_ms=3000, heartbeat_interval_ms=50)
with tierlog.Client(sys.argv[1]) as client:
    for record in client.consume("flights", group="g", follow=True, membership=quick):
        print(record.partition, record.offset, flush=True)
"""


def test_who_takes_over_from_a_killed_consumer_reads_what_it_had_not_committed(
    served: Served, client: tierlog.Client
) -> None:
    put(client)
    command = [sys.executable, "-c", READS_FOR_EVER, served.server.url]
    dying = subprocess.Popen(command, stdout=subprocess.PIPE)
    highest: dict[int, int] = {}

    def follow_commits() -> None:
        for partition, offset in committed(client).items():
            assert offset >= highest.get(partition, 0), "a committed offset went back"
            highest[partition] = offset

    try:
        for _ in range(PARTITIONS * 10):
            assert dying.stdout.readline()
        with reading(served) as (living,):
            until(lambda: list(map(len, owners(client))) == [3, 3])
            put(client)
            until(lambda: len(living.seen) >= 3 * 10)
            for _ in range(3 * 10):
                assert dying.stdout.readline()
            theirs = set(range(PARTITIONS)) - {place for place, _ in living.seen}
            expected = {(place, offset) for place in theirs for offset in range(10, 30)}
            dying.kill()  # what it read last was not committed
            put(client)

            def has_all() -> bool:
                follow_commits()
                return {*living.seen} >= expected

            until(has_all)
    finally:
        dying.kill()
        dying.wait()
        dying.stdout.close()
    follow_commits()
    assert all(offset >= 30 for offset in highest.values())


def test_a_group_outlives_a_restart_of_its_broker(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path).start()
    limits = tierlog.Limits(wait_ms=100)
    try:
        with tierlog.Client(broker.url) as client:
            client.create_topic("flights", partitions=PARTITIONS)
            put(client)
            records = client.consume("flights", group="g", follow=True, limits=limits)
            seen = [next(records) for _ in range(PARTITIONS * 10)]
            before = client.group("g")
            for end in (broker.kill, broker.stop):
                end()
                broker.start()
                put(client, 1)
                seen += [next(records) for _ in range(PARTITIONS)]
            after = client.group("g")
            assert after.members == before.members
            assert after.generation == before.generation
            records.close()
            assert client.group("g").state == "Empty"
        assert len({(one.partition, one.offset) for one in seen}) == len(seen)
    finally:
        broker.kill()
