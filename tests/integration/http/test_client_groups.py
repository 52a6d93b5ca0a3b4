"""`tierlog.Client` and `AsyncClient` reading for a group, against a real broker."""

import asyncio
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from itertools import islice

import pytest

import tierlog
from tests.fakes.waiting import until_waiting
from tests.integration.http.conftest import Api
from tierlog.client import scheduling

QUICK = tierlog.Membership(heartbeat_interval_ms=50)


def client_of(api: Api) -> tierlog.Client:
    return tierlog.Client(str(api.base_url))


def offsets_of(client: tierlog.Client, group: str) -> dict[int, int]:
    return {commit.partition: commit.offset for commit in client.group(group).offsets}


def test_offsets_are_committed_listed_and_deleted(api: Api) -> None:
    topic = api.topic(partitions=2)
    with client_of(api) as client:
        client.commit_offsets("c/1", [tierlog.OffsetCommit(topic, 1, 5, "here")])
        (commit,) = client.group("c/1").offsets
        assert (commit.topic, commit.partition) == (topic, 1)
        assert (commit.offset, commit.metadata) == (5, "here")
        assert "c/1" in [found.group for found in client.groups()]
        client.commit_offsets("..", [tierlog.OffsetCommit(topic, 0, 1)])
        client.delete_group("..")
        client.delete_group("c/1")
        for name in ("c/1", ".."):
            with pytest.raises(tierlog.errors.UnknownGroup):
                client.group(name)
        with pytest.raises(tierlog.errors.UnknownTopic):
            client.commit_offsets("g", [tierlog.OffsetCommit("nowhere", 0, 0)])


def test_a_group_resumes_from_its_committed_offsets(api: Api) -> None:
    topic = api.topic(partitions=2)
    api.values(topic, "a", "b", "c")
    api.values(topic, "x", partition=1)
    with client_of(api) as client:
        assert len(list(client.consume(topic, group="on"))) == 4
        assert offsets_of(client, "on") == {0: 3, 1: 1}
        assert list(client.consume(topic, group="on")) == []
        api.values(topic, "d")
        assert [record.value for record in client.consume(topic, group="on")] == [b"d"]
        assert len(list(client.consume(topic))) == 5  # without a group, from the start


def test_records_past_the_end_offset_are_not_committed(api: Api) -> None:
    topic = api.topic()
    api.values(topic, "a" * 300)
    api.values(topic, "b")
    with client_of(api) as client:
        reading = client.consume(topic, group="late", limits=tierlog.Limits(max_bytes=400))
        assert next(reading).offset == 0
        api.values(topic, "c")  # fetched with b, but past the end fixed by the first response
        assert [record.value for record in reading] == [b"b"]
        assert offsets_of(client, "late") == {0: 2}
        assert [record.value for record in client.consume(topic, group="late")] == [b"c"]
        api.values(topic, *"defg")
        part = client.consume(topic, group="late", end_offset=5)
        assert [record.value for record in part] == [b"d", b"e"]
        assert offsets_of(client, "late") == {0: 5}


@pytest.mark.parametrize("group", [None, "growing"])
def test_following_a_topic_includes_added_partitions(api, monkeypatch, group) -> None:
    topic = api.topic()
    api.values(topic, "a")
    with client_of(api) as client:
        options = {"follow": True, "limits": tierlog.Limits(wait_ms=20)}
        some = client.consume(topic, partitions=[0], **options)
        reading = client.consume(topic, group=group, membership=QUICK, **options)
        assert next(some).value == next(reading).value == b"a"
        client.alter_topic(topic, partitions=3)
        api.values(topic, "c", "d", partition=2)
        monkeypatch.setattr(scheduling, "METADATA_MAX_AGE_MS", 50)
        added = next(reading)
        assert (added.partition, added.offset, added.value) == (2, 0, b"c")
        api.values(topic, "b")
        assert next(some).value == b"b"


@pytest.mark.parametrize("isolation", ["read_uncommitted", "read_committed"])
def test_a_follower_of_several_partitions_waits_in_one_request(api: Api, isolation: str) -> None:
    topic = api.topic(partitions=3)
    api.values(topic, "first", partition=1)
    with ThreadPoolExecutor(1) as pool, client_of(api) as client:
        limits = tierlog.Limits(isolation=isolation)
        reading = client.consume(topic, follow=True, limits=limits)
        assert next(reading).value == b"first"
        for partition in (2, 0, 1):
            following = pool.submit(next, reading)
            until_waiting(lambda: api.get("/metrics").text)
            api.values(topic, "more", partition=partition)
            assert following.result(10).partition == partition, "long before its wait is over"


def test_an_interrupted_consumer_rereads_the_last_record(api: Api) -> None:
    topic = api.topic()
    api.values(topic, *"abcdef")
    with client_of(api) as client:
        reading = client.consume(topic, group="off")
        assert [record.value for record in islice(reading, 3)] == [b"a", b"b", b"c"]
        reading.close()
        assert offsets_of(client, "off") == {0: 2}
        assert next(client.consume(topic, group="off")).value == b"c"


def test_closing_the_client_commits_an_interrupted_consumer(api: Api) -> None:
    topic = api.topic()
    api.values(topic, *"abcdef")
    with client_of(api) as client:
        reading = client.consume(topic, group="closed")
        assert [record.value for record in islice(reading, 3)] == [b"a", b"b", b"c"]

    async def break_early() -> None:
        async with tierlog.AsyncClient(str(api.base_url)) as client:
            async for record in client.consume(topic, group="async closed"):
                if record.offset == 2:
                    break  # the generator is closed later, with the client

    asyncio.run(break_early())
    with client_of(api) as client:
        assert offsets_of(client, "closed") == offsets_of(client, "async closed") == {0: 2}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_parent_and_child_read_their_own_responses_after_a_fork(api: Api) -> None:
    topics = [api.topic(), api.topic()]
    api.values(topics[0], *"ab")

    def describes(client: tierlog.Client, topic: str) -> bool:
        return all(client.describe_topic(topic).name == topic for _ in range(50))

    with client_of(api) as client:
        reading = client.consume(topics[0], group="forked")
        assert next(reading).value == b"a"
        child = os.fork()
        if not child:
            try:
                is_right = describes(client, topics[1])
                reading.close()
                client.close()
                os._exit(0 if is_right else 7)
            finally:
                os._exit(8)
        assert describes(client, topics[0])
        assert os.waitpid(child, 0)[1] == 0
        # The child commits nothing of its parent's consumer, and does not end its membership.
        forked = client.group("forked")
        assert (forked.offsets, forked.state) == ((), "Stable")
        assert [record.value for record in reading] == [b"b"]
        assert client.group("forked").state == "Empty"


def test_long_polls_do_not_exhaust_connections(api: Api) -> None:
    topic = api.topic()

    async def poll_and_produce() -> list[int]:
        async with tierlog.AsyncClient(str(api.base_url)) as client:
            limits = tierlog.Limits(wait_ms=20_000)
            polls = [
                asyncio.create_task(client.fetch(topic, 0, offset="latest", limits=limits))
                for _ in range(120)
            ]
            await asyncio.to_thread(until_waiting, lambda: api.get("/metrics").text, least=120)
            async with asyncio.timeout(10):
                await client.produce(topic, ["a"])
                return [len((await poll).records) for poll in polls]

    assert set(asyncio.run(poll_and_produce())) == {1}


def test_a_group_below_the_log_start_is_reset_to_it_with_a_warning(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    topic = api.topic()
    api.values(topic, *"abcd")
    with client_of(api) as client:
        client.commit_offsets("late", [tierlog.OffsetCommit(topic, 0, 1)])
        client.trim(topic, 0, before_offset=3)
        assert [record.value for record in client.consume(topic, group="late")] == [b"d"]
        unread = f"group late never read offsets 1 to 2 of {topic}-0: they are deleted"
        assert caplog.messages == [unread]
        assert list(client.consume(topic, group="late")) == []
        assert caplog.messages == [unread]
        with pytest.raises(tierlog.errors.InvalidRequest):
            next(client.consume(topic, group="late", timestamp=0))


def test_the_async_client_consumes_for_a_group(api: Api) -> None:
    topic = api.topic()
    api.values(topic, *"abcd")

    async def run() -> None:
        async with tierlog.AsyncClient(str(api.base_url)) as client:
            async with aclosing(client.consume(topic, group="async")) as records:
                async for record in records:
                    if record.value == b"c":
                        break
            (commit,) = (await client.group("async")).offsets
            assert commit.offset == 2
            rest = [record.value async for record in client.consume(topic, group="async")]
            assert rest == [b"c", b"d"]
            assert "async" in [found.group for found in await client.groups()]
            await client.commit_offsets("async", [tierlog.OffsetCommit(topic, 0, 0)])
            await client.delete_group("async")

    asyncio.run(run())


def test_a_consumer_of_a_re_created_topic_fails_and_commits_nothing(api: Api) -> None:
    with client_of(api) as client:
        for options in ({}, {"end_offset": 20}, {"follow": True}, {"partitions": [0]}):
            topic = api.topic()
            api.values(topic, *"abcdefgh")
            reading = client.consume(
                topic, group="mail", limits=tierlog.Limits(max_bytes=1), **options
            )
            assert [record.value for record in islice(reading, 3)] == [b"a", b"b", b"c"]
            client.delete_topic(topic)
            client.create_topic(topic)
            api.values(topic, *"0123456789" * 3)
            with pytest.raises(tierlog.errors.UnknownTopic, match="deleted and re-created"):
                list(reading)
            assert len(list(client.consume(topic, group="mail"))) == 30


@pytest.mark.parametrize("values", [1, 10])
def test_a_consumer_of_named_partitions_detects_a_re_created_topic(api: Api, values: int) -> None:
    """Explicit partitions need no describe; the new topic may be shorter than what was read."""
    topic = api.topic(partitions=2)
    for partition in (0, 1):
        api.values(topic, *"abc", partition=partition)
    limits = tierlog.Limits(max_bytes=1)
    with client_of(api) as client:
        reading = client.consume(topic, partitions=[0, 1], follow=True, limits=limits)
        assert [next(reading).value for _ in range(4)]
        client.delete_topic(topic)
        client.create_topic(topic, partitions=2)
        for partition in (0, 1):
            api.values(topic, *"0123456789"[:values], partition=partition)
        with pytest.raises(tierlog.errors.UnknownTopic, match="deleted and re-created"):
            deque(reading)
        once = client.consume(topic, partitions=[0, 1], limits=limits)
        assert next(once).partition == 0
        client.delete_topic(topic)
        client.create_topic(topic, partitions=2)
        api.values(topic, "new", partition=1)
        with pytest.raises(tierlog.errors.UnknownTopic, match="deleted and re-created"):
            list(once)


def test_a_commit_for_a_re_created_topic_is_refused(api: Api) -> None:
    topic = api.topic()
    old = api.get(f"/v1/topics/{topic}").json()["topic_id"]
    with client_of(api) as client:
        client.commit_offsets("g", [tierlog.OffsetCommit(topic, 0, 1, None, old)])
        client.delete_topic(topic)
        client.create_topic(topic)
        with pytest.raises(tierlog.errors.UnknownTopic, match="deleted and re-created"):
            client.commit_offsets("g", [tierlog.OffsetCommit(topic, 0, 2, None, old)])
        with pytest.raises(tierlog.errors.UnknownGroup):
            client.group("g")


def test_an_async_consumer_of_a_re_created_topic_fails_and_commits_nothing(api: Api) -> None:
    topic = api.topic()
    api.values(topic, *"abcdefgh")

    async def run() -> None:
        async with tierlog.AsyncClient(str(api.base_url)) as client:
            limits = tierlog.Limits(max_bytes=1)
            async with aclosing(client.consume(topic, group="a", limits=limits)) as records:
                assert (await anext(records)).value == b"a"
                await client.delete_topic(topic)
                await client.create_topic(topic)
                await client.produce(topic, ["new"] * 20)
                with pytest.raises(tierlog.errors.UnknownTopic, match="deleted and re-created"):
                    async for _ in records:
                        pass
            assert (await client.group("a")).offsets == ()

    asyncio.run(run())
