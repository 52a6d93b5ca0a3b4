# ruff: noqa: PT012  what a block does that raises is the test
"""`client.transaction()` against a broker, directly and through connections that break."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.fakes.served_broker import Served, served_broker
from tests.fakes.waiting import until
from tierlog.client.batching import Batching
from tierlog.client.client import AsyncClient, Client
from tierlog.client.exchange import AnswerLost, BrokerUnreachable, RetryPolicy
from tierlog.client.group_calls import OffsetCommit
from tierlog.client.records import NewRecord
from tierlog.client.wire import Limits
from tierlog.record_format.errors import ProducerFenced, RecordTooLarge

COMMITTED = Limits(isolation="read_committed")
AT_ONCE = RetryPolicy(first_pause_s=0.001, max_pause_s=0.01)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with served_broker(tmp_path / "data") as served:
        served.broker.create_topic("out", partitions=3)
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.server.url) as client:
        yield client


def committed(client: Client, topic: str = "out") -> list[bytes | None]:
    return sorted(one.value or b"" for one in client.consume(topic, limits=COMMITTED))


class Losing(httpx2.HTTPTransport):
    """Loses the first answers to requests whose path ends so; the broker has handled them."""

    def __init__(self, *ends: str, times: int = 1) -> None:
        super().__init__()
        self.ends, self.left, self.lost = ends, times, 0

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        response = super().handle_request(request)
        if self.left and request.url.path.endswith(self.ends):
            self.left -= 1
            self.lost += 1
            response.read()
            raise httpx2.ReadError("cut", request=request)
        return response


def test_a_block_commits_its_records_and_offsets_or_none(client: Client) -> None:
    tx = client.transaction("etl")
    with tx:
        where = tx.produce("out", ["a", NewRecord("b", key="k")])
        tx.send("out", "c", partition=2)
        tx.commit_offsets("copied", [OffsetCommit("out", 0, 7)])
        assert committed(client) == []
    assert [one.topic for one in where] == ["out", "out"]
    assert committed(client) == [b"a", b"b", b"c"]
    assert client.group("copied").offsets[0].offset == 7
    with pytest.raises(ZeroDivisionError), tx:
        tx.produce("out", ["gone"])
        tx.commit_offsets("copied", [OffsetCommit("out", 0, 9)])
        raise ZeroDivisionError
    assert committed(client) == [b"a", b"b", b"c"]
    assert client.group("copied").offsets[0].offset == 7
    with tx:
        tx.produce("out", ["d"])
    with tx:
        pass  # nothing to commit
    assert committed(client) == [b"a", b"b", b"c", b"d"]


def test_many_batches_of_many_partitions_are_one_transaction(client: Client) -> None:
    batching = Batching(batch_bytes=1000, max_in_flight=3, compression="gzip")
    tx = client.transaction("bulk", batching=batching)
    for turn in range(3):
        with tx:
            for number in range(500):
                tx.send("out", f"{turn}-{number}", key=str(number))
    wanted = sorted(b"%d-%d" % (turn, number) for turn in range(3) for number in range(500))
    assert committed(client) == wanted


@pytest.mark.parametrize("end", ["/transactions", "/records", "/offsets", "/commit"])
def test_a_lost_answer_is_asked_for_again_and_nothing_is_doubled(
    served: Served, client: Client, end: str
) -> None:
    losing = Losing(end, times=2)
    with Client(served.server.url, transport=losing, retries=AT_ONCE) as unlucky:
        tx = unlucky.transaction("unlucky")
        for number in range(2):
            with tx:
                tx.produce("out", [f"{number}"])
                tx.commit_offsets("copied", [OffsetCommit("out", 0, number)])
    assert losing.lost == 2
    assert committed(client) == [b"0", b"1"]
    assert client.group("copied").offsets[0].offset == 1


def test_an_abort_whose_answer_is_lost_is_asked_for_again(served: Served, client: Client) -> None:
    losing = Losing("/abort")
    with Client(served.server.url, transport=losing, retries=AT_ONCE) as unlucky:
        tx = unlucky.transaction("unlucky")
        with pytest.raises(ZeroDivisionError), tx:
            tx.produce("out", ["gone"])
            raise ZeroDivisionError
        with tx:
            tx.produce("out", ["kept"])
    assert losing.lost == 1
    assert committed(client) == [b"kept"]


def test_who_is_fenced_is_told_so_and_stays_fenced(client: Client) -> None:
    zombie, heir = client.transaction("one"), client.transaction("one")
    with pytest.raises(ProducerFenced, match="another producer has begun with this id"), zombie:
        zombie.produce("out", ["of a zombie"])
        with heir:
            heir.produce("out", ["of its heir"])
    with pytest.raises(ProducerFenced), zombie:
        raise AssertionError("it must not begin again: it would fence its heir")
    with heir:
        heir.produce("out", ["still"])
    assert committed(client) == [b"of its heir", b"still"]


def test_a_transaction_that_took_too_long_was_aborted(client: Client) -> None:
    slow = client.transaction("slow", timeout_ms=200)
    with pytest.raises(ProducerFenced, match="took longer than its time-out"), slow:
        slow.produce("out", ["late"])
        until(lambda: client.describe_transaction("slow").state == "CompleteAbort")
    assert committed(client) == []


def test_after_a_record_that_failed_it_can_only_be_aborted(client: Client) -> None:
    """Also if its error was not looked at, or swallowed."""
    tx = client.transaction("strict")
    with pytest.raises(RecordTooLarge), tx:
        tx.produce("out", ["small"], partition=0)
        tx.send("out", b"x" * (2 << 20), partition=0)
    with pytest.raises(RecordTooLarge), tx:
        with pytest.raises(RecordTooLarge):
            tx.produce("out", [b"x" * (2 << 20)], partition=1)
        with pytest.raises(RecordTooLarge):
            tx.produce("out", ["after it"], partition=2)
    assert committed(client) == []
    with tx:
        tx.produce("out", ["kept"])
    assert committed(client) == [b"kept"]


def test_offsets_that_are_refused_abort_it(client: Client) -> None:
    tx = client.transaction("refused")
    with pytest.raises(Exception, match="no partition 9"), tx:
        tx.produce("out", ["gone"])
        with pytest.raises(Exception, match="no partition 9"):
            tx.commit_offsets("copied", [OffsetCommit("out", 9, 1)])
    assert committed(client) == []


def test_an_end_that_remains_unknown_says_so_and_its_beginning_finds_out(
    served: Served, client: Client
) -> None:
    losing = Losing("/commit", times=1000)
    once = RetryPolicy(attempts=1)
    with Client(served.server.url, transport=losing, retries=once) as unlucky:
        tx = unlucky.transaction("unknown")
        with pytest.raises(BrokerUnreachable) as unknown, tx:
            tx.produce("out", ["landed"])
        assert isinstance(unknown.value.__cause__, AnswerLost)
        with pytest.raises(RuntimeError, match="create a new one"), tx:
            pass
    with client.transaction("unknown"):
        assert committed(client) == [b"landed"]


def test_it_is_used_in_a_block_alone(client: Client) -> None:
    tx = client.transaction("block")
    with pytest.raises(RuntimeError, match="no transaction is in progress"):
        tx.produce("out", ["x"])
    with tx:
        with pytest.raises(RuntimeError, match="in progress"), tx:
            pass
        tx.produce("out", ["x"])
    with pytest.raises(RuntimeError, match="no transaction is in progress"):
        tx.commit_offsets("g", [])


def test_an_asynchronous_client_has_the_same(served: Served, client: Client) -> None:
    async def work() -> None:
        async with AsyncClient(served.server.url) as asynchronous:
            tx = asynchronous.transaction("async")
            async with tx:
                where = await tx.produce("out", ["a", "b"])
                assert len(where) == 2
                await (await tx.send("out", "c", partition=1))
                await tx.commit_offsets("copied", [OffsetCommit("out", 0, 3)])
            with pytest.raises(ZeroDivisionError):
                async with tx:
                    await tx.produce("out", ["gone"])
                    raise ZeroDivisionError
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2), tx:
                    await tx.produce("out", ["cancelled"])
                    await asyncio.sleep(60)
            async with tx:
                await tx.produce("out", ["d"])
            async with asynchronous.transaction("async") as heir:
                await heir.produce("out", ["e"])
            with pytest.raises(ProducerFenced):
                async with tx:
                    await tx.produce("out", ["fenced"])
            with pytest.raises(ProducerFenced):
                async with tx:
                    raise AssertionError("it must not begin again")

    asyncio.run(work())
    assert committed(client) == [b"a", b"b", b"c", b"d", b"e"]
    assert client.group("copied").offsets[0].offset == 3


def test_ids_are_listed_page_by_page_and_described(client: Client) -> None:
    with client.transaction("a/b") as tx:
        tx.produce("out", ["x"], partition=1)
        found = client.describe_transaction("a/b")
        assert (found.state, found.timeout_ms) == ("Ongoing", 60_000)
        assert [(one.topic, one.partitions) for one in found.partitions] == [("out", (1,))]
        (listed,) = client.list_transactions(state="Ongoing").transactions
        assert listed.transactional_id == "a/b"
    page = client.list_transactions()
    assert [one.state for one in page.transactions] == ["CompleteCommit"]
    assert page.next_after is None
    assert client.list_transactions(after="a/b").transactions == ()


def test_a_copier_that_is_broken_off_anywhere_copies_each_record_once(
    served: Served, client: Client
) -> None:
    """What issue 43 calls an exactly-once copy: offsets in the transaction of the records."""
    client.create_topic("in")
    client.produce("in", [str(number) for number in range(40)])

    def copy_some(broken: int) -> bool:
        try:
            start = client.group("copier").offsets[0].offset
        except Exception:  # the group does not exist yet
            start = 0
        got = client.fetch("in", 0, offset=start, limits=Limits(max_records=5)).records
        with client.transaction("copier") as tx:
            tx.produce("out", [one.value for one in got], partition=0)
            if broken == 1:
                raise ConnectionAbortedError
            tx.commit_offsets("copier", [OffsetCommit("in", 0, start + len(got))])
            if broken == 2:
                raise ConnectionAbortedError
        return start + len(got) >= 40

    turn, done = 0, False
    while not done:
        turn += 1
        try:
            done = copy_some(turn % 3)
        except ConnectionAbortedError:
            continue
    copied = [one.value for one in client.consume("out", partitions=[0], limits=COMMITTED)]
    assert copied == [b"%d" % number for number in range(40)]
