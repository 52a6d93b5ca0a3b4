"""The two clients over a scripted server: what they send, read, raise, and send again."""

import asyncio
import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from math import inf

import httpx
import pytest

import tierlog
from record_format import errors
from record_format.batch import iter_headers
from record_format.encode import encode_batch
from tierlog.client import AnswerLost, AppendedInPart, BrokerUnreachable, RetryPolicy, calls
from tierlog.client.calls import Limits, Sequenced
from tierlog.client.exchange import UNLIMITED_ATTEMPTS, Pause, exchange
from tierlog.client.group_calls import GroupProgress
from tierlog.client.problems import BrokerFault, UnexpectedAnswer
from tierlog.client.records import ConsumedRecord, decode_fetched, to_batches
from tierlog.client.wire import Response

QUICK = RetryPolicy(attempts=3, first_pause_s=0.0, max_pause_s=0.5)
PRODUCED = {
    "topic": "t",
    "results": [{"partition": 0, "base_offset": 5, "last_offset": 6, "records": 2}],
    "warnings": [],
}


class Script:
    """Answers in turn; the last one for ever. Remembers what was asked."""

    def __init__(self, *steps):
        self.steps, self.requests = list(steps), []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if isinstance(step, type) and issubclass(step, Exception):
            raise step("broken", request=request)
        return step() if callable(step) else step


def client(script: Script) -> tierlog.Client:
    return tierlog.Client(retries=QUICK, transport=httpx.MockTransport(script))


def problem(status: int, code: str, *, retry_after: str | None = None, **members) -> httpx.Response:
    fields = {"retry-after": retry_after} if retry_after else {}
    return httpx.Response(
        status, headers=fields, json={"code": code, "detail": f"about {code}", **members}
    )


def ok(document) -> httpx.Response:
    return httpx.Response(200, json=document)


def fetched(batches: bytes, *, next_offset: int, high_watermark: int, start: int = 0):
    return httpx.Response(
        200,
        content=batches,
        headers={
            "log-next-offset": str(next_offset),
            "log-start-offset": str(start),
            "log-high-watermark": str(high_watermark),
            "log-up-to-date": "true" if next_offset == high_watermark else "false",
            "log-tier": "hot",
            "log-topic-id": "Yh2uZyKKT5aFcGuNgd3XWA",
        },
    )


def test_produce_sends_text_as_strings_and_other_bytes_as_base64():
    script = Script(ok(PRODUCED))
    records = [
        "plain",
        tierlog.NewRecord(b"\xff", key="k", timestamp=7, headers=(("h", b"x"), ("n", None))),
        tierlog.NewRecord(tierlog.JsonSource(b'{"a": 1}'), partition=2),
        None,
    ]
    with client(script) as c:
        answer = c.produce("my topic", records)
    assert answer.results[0].base_offset == 5
    sent = script.requests[0]
    assert sent.url.raw_path == b"/v1/topics/my%20topic/records?acks=all"
    assert b'"value":{"a": 1}' in sent.content
    assert json.loads(sent.content)["records"] == [
        {"value": "plain"},
        {
            "value_base64": "/w==",
            "key": "k",
            "timestamp": 7,
            "headers": [{"name": "h", "value": "x"}, {"name": "n", "value": None}],
        },
        {"value": {"a": 1}, "partition": 2},
        {"value": None},
    ]


@pytest.mark.parametrize("one", ["hello", b"hello", tierlog.NewRecord("v", key="k"), {"a": 1}])
def test_one_record_alone_is_not_taken_apart(one):
    script = Script(ok(PRODUCED))
    with client(script) as c:
        with pytest.raises(TypeError, match="put it in a list"):
            c.produce("t", one)
        with pytest.raises(TypeError, match="put it in a list"):
            c.produce_encoded("t", one, partition=0)
    assert not script.requests


COMMIT = tierlog.OffsetCommit("t", 0, 5)


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        (COMMIT, "not one OffsetCommit; put it in a list"),
        ("t:0=5", "not one str; put it in a list"),
        ({("t", 0): 5}, "not one dict; put it in a list"),
        ([COMMIT, ("t", 1, 5)], r"offsets\[1\]: expected an OffsetCommit, not tuple"),
        ([5], r"offsets\[0\]: expected an OffsetCommit, not int"),
    ],
)
def test_what_is_no_list_of_commits_is_told_before_anything_is_sent(offsets, said):
    script = Script()
    with client(script) as c, pytest.raises(TypeError, match=said):
        c.commit_offsets("g", offsets)
    assert not script.requests


def test_records_are_written_as_python_has_them():
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    given = [
        tierlog.NewRecord(bytearray(b"\xff"), key=memoryview(b"k"), headers={"a": "b", "n": None}),
        tierlog.NewRecord("v", timestamp=noon, headers=[("a", bytearray(b"b"))]),
        tierlog.NewRecord("v", timestamp="2026-01-01T13:00:00+01:00"),
    ]
    script = Script(ok(PRODUCED))
    with client(script) as c:
        c.produce("t", given)
    ms = int(noon.timestamp() * 1000)
    assert json.loads(script.requests[0].content)["records"] == [
        {
            "value_base64": "/w==",
            "key": "k",
            "headers": [{"name": "a", "value": "b"}, {"name": "n", "value": None}],
        },
        {"value": "v", "timestamp": ms, "headers": [{"name": "a", "value": "b"}]},
        {"value": "v", "timestamp": ms},
    ]
    decoded = decode_fetched(to_batches(given, now_ms=7)).records
    assert [record.value for record in decoded] == [b"\xff", b"v", b"v"]
    assert [record.timestamp for record in decoded] == [7, ms, ms]
    assert decoded[0].headers == (("a", b"b"), ("n", None))


@pytest.mark.parametrize(
    ("record", "named"),
    [
        (5, "value: .*int"),
        ({"a": 1}, "value: .*dict"),
        (tierlog.NewRecord("v", key=5), "key: .*int"),
        (tierlog.NewRecord("v", headers={"a": 5}), "headers 'a': .*int"),
        (tierlog.NewRecord("v", headers=[(b"a", b"b")]), "headers: a name"),
        (tierlog.NewRecord("v", timestamp=1.5), "a time must be .*float"),
    ],
)
def test_what_is_no_record_is_named(record, named):
    script = Script(ok(PRODUCED))
    with client(script) as c, pytest.raises(TypeError, match=named):
        c.produce("t", [record])
    with pytest.raises(TypeError, match=named):
        to_batches([record], now_ms=7)
    assert not script.requests


def test_a_time_that_no_record_has_is_refused_ahead_of_any_record():
    script = Script(ok(PRODUCED))
    for time in (-2, 2**63):
        record = tierlog.NewRecord("v", timestamp=time)
        with client(script) as c, pytest.raises(errors.InvalidRequest, match=f"not {time}"):
            c.produce("t", [record])
        with pytest.raises(errors.InvalidRequest, match=f"not {time}"):
            to_batches([record], now_ms=7)
    assert not script.requests


def test_a_plain_produce_is_not_repeated_after_a_broken_connection():
    script = Script(httpx.ReadError, ok(PRODUCED))
    with client(script) as c, pytest.raises(AnswerLost):
        c.produce("t", ["a"])
    assert len(script.requests) == 1


def test_a_produce_that_never_left_or_was_refused_is_repeated():
    script = Script(
        *(httpx.ConnectError, httpx.ProxyError),
        *(problem(503, "starting"), problem(429, "throttled"), problem(507, "disk-full")),
        ok(PRODUCED),
    )
    with tierlog.Client(
        retries=RetryPolicy(attempts=6, first_pause_s=0.0), transport=httpx.MockTransport(script)
    ) as c:
        assert c.produce("t", ["a"]).topic == "t"
    assert len(script.requests) == 6


def test_an_idempotent_produce_is_repeated_after_a_broken_connection():
    script = Script(httpx.ReadError, ok(PRODUCED))
    identity = tierlog.client.ProducerIdentity(producer_id=2**40, producer_epoch=3)
    with client(script) as c:
        c.produce("t", ["a"], partition=0, sequenced=Sequenced(identity, 9))
    assert [r.headers["producer-sequence"] for r in script.requests] == ["9", "9"]
    assert script.requests[1].headers["producer-id"] == str(2**40)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (problem(503, "store-unavailable", outcome="unknown"), errors.OutcomeUnknownError),
        (problem(503, "shutting-down", outcome="unknown"), errors.OutcomeUnknownError),
        (problem(503, "log-offline"), errors.LogOfflineError),
        (problem(503, "store-unavailable", results=[{"partition": 1}]), AppendedInPart),
        (problem(507, "disk-full", results=[{"partition": 1}]), AppendedInPart),
    ],
)
def test_a_write_that_may_have_landed_is_never_repeated(answer, kind):
    script = Script(answer)
    with client(script) as c, pytest.raises(kind):
        c.produce("t", ["a"])
    assert len(script.requests) == 1


def test_reads_are_repeated_until_the_attempts_are_used_up():
    script = Script(httpx.ReadError)
    with client(script) as c, pytest.raises(BrokerUnreachable, match="GET /v1/topics"):
        c.list_topics()
    assert len(script.requests) == 3


def test_reads_are_not_repeated_behind_the_deadline():
    script, now_s = Script(httpx.ReadTimeout), iter(range(0, 1000, 20))
    policy = RetryPolicy(first_pause_s=0.0, clock=lambda: next(now_s))
    transport = httpx.MockTransport(script)
    with tierlog.Client(retries=policy, transport=transport) as c, pytest.raises(BrokerUnreachable):
        c.list_topics()
    assert len(script.requests) == 2


def test_a_long_poll_that_breaks_off_is_repeated_whatever_it_was_to_wait_for():
    batch = bytes(encode_batch([b"v"], timestamps=[1]))
    script = Script(httpx.ReadError, fetched(batch, next_offset=1, high_watermark=1))
    now_s = iter((0.0, 45.0))
    policy = RetryPolicy(first_pause_s=0.0, clock=lambda: next(now_s))
    waiting = tierlog.Client(retries=policy, transport=httpx.MockTransport(script))
    with waiting as c:
        found = c.fetch("t", 0, offset=0, limits=Limits(wait_ms=60_000))
    assert [record.value for record in found.records] == [b"v"]


def test_who_waits_long_is_told_of_it_however_few_the_attempts(caplog):
    script, now_s = Script(problem(503, "store-unavailable")), iter((0.0, 4.0, 20.0, 24.0, 29.9))
    policy = RetryPolicy(attempts=4, first_pause_s=0.0, clock=lambda: next(now_s))
    waiting = tierlog.Client(retries=policy, transport=httpx.MockTransport(script))
    with waiting as c, pytest.raises(errors.StoreUnavailable):
        c.offsets("t", 0)
    told = [one.getMessage().partition(":")[0] for one in caplog.records]
    assert told == ["still trying after 20 s"]


def test_a_retry_after_longer_than_the_patience_ends_the_attempts():
    script = Script(problem(503, "store-unavailable", retry_after="60"))
    with client(script) as c, pytest.raises(errors.StoreUnavailable) as caught:
        c.offsets("t", 0)
    assert len(script.requests) == 1
    assert caught.value.retry_after_s == 60


@pytest.mark.parametrize(
    ("answer", "kind", "members"),
    [
        (problem(404, "unknown-topic"), errors.UnknownTopic, {"topic": "t"}),
        (problem(404, "unknown-partition"), errors.UnknownPartition, {"partition": 4}),
        (
            problem(410, "offset-trimmed", log_start_offset=3, high_watermark=9),
            errors.OffsetTrimmed,
            {"log_start_offset": 3, "high_watermark": 9},
        ),
        (problem(416, "offset-past-end"), errors.OffsetPastEnd, {}),
        (problem(502, "cold-object-corrupt", object_key="k"), errors.CorruptObject, {"file": "k"}),
        (
            problem(500, "corrupt-log", file="t-0/0.log", position=7, detail="t-0/0.log: bad"),
            errors.CorruptDataError,
            {"file": "t-0/0.log", "position": 7, "args": ("t-0/0.log: bad",)},
        ),
        (problem(409, "leadership-lost"), errors.FencedError, {}),
        (problem(500, "internal", request_id="r1"), BrokerFault, {"request_id": "r1"}),
        (problem(418, "teapot"), errors.RequestError, {}),
        (httpx.Response(502, text="<html>"), UnexpectedAnswer, {}),
    ],
)
def test_problem_documents_become_the_errors_they_were(answer, kind, members):
    with client(Script(answer)) as c, pytest.raises(kind) as caught:
        c.offsets("t", 4)
    for name, value in members.items():
        assert getattr(caught.value, name) == value


@pytest.mark.parametrize("status", [200, 302, 307])
def test_the_page_of_a_proxy_is_no_commit(status):
    page = httpx.Response(status, headers={"location": "/login"}, text="<html>")
    with client(Script(page)) as c:
        with pytest.raises(UnexpectedAnswer, match=f"status {status}"):
            c.commit_offsets("g", [tierlog.OffsetCommit("t", 0, 5)])
        with pytest.raises(UnexpectedAnswer) as told:
            c.delete_topic("t")
        assert ("redirecting to /login" in str(told.value)) == (status != 200)
        with pytest.raises(UnexpectedAnswer):
            c.offsets("t", 0)


def test_an_answer_that_cannot_be_expanded_is_a_broken_one():
    def garbled(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-encoding": "gzip"}, content=b"cut")

    with client(garbled) as c:
        with pytest.raises(BrokerUnreachable, match="decompressing"):
            c.list_topics()
        with pytest.raises(AnswerLost, match="decompressing"):
            c.produce("t", ["a"])


def test_a_conditional_append_tells_both_offsets():
    batch = bytes(encode_batch([b"v"], timestamps=[1]))
    script = Script(problem(412, "offset-mismatch", log_end_offset=12))
    with client(script) as c, pytest.raises(errors.OffsetMismatch) as caught:
        c.produce_batches("t", batch, partition=0, expected_offset=10)
    assert (caught.value.expected_offset, caught.value.log_end_offset) == (10, 12)
    assert script.requests[0].headers["if-offset-match"] == "10"


def test_every_field_error_of_a_refusal_is_in_the_message():
    answer = problem(400, "invalid-record", errors=[{"loc": "records[3].key_base64", "msg": "bad"}])
    with client(Script(answer)) as c, pytest.raises(errors.InvalidRecord) as caught:
        c.produce("t", ["a"])
    assert str(caught.value) == "about invalid-record (records[3].key_base64: bad)"
    assert caught.value.problems[0].loc == "records[3].key_base64"


def test_fetch_leaves_out_what_lies_before_the_offset_and_checks_the_bytes():
    batch = encode_batch([b"a", b"b", b"c"], timestamps=[10, 30, 20], base_offset=4)
    page = fetched(bytes(batch), next_offset=7, high_watermark=7)
    with client(Script(page)) as c:
        assert [r.value for r in c.fetch("t", 0, offset=5).records] == [b"b", b"c"]
        assert [r.value for r in c.fetch("t", 0, timestamp=20).records] == [b"b", b"c"]
        few = c.fetch("t", 0, limits=Limits(max_records=1))
        assert ([r.value for r in few.records], few.next_offset, few.up_to_date) == (
            [b"a"],
            5,
            False,
        )
    batch[-1] ^= 1
    bad = Script(fetched(bytes(batch), next_offset=7, high_watermark=7))
    with client(bad) as c, pytest.raises(errors.CorruptBatch):
        c.fetch("t", 0)


class NumpyNumber:
    """As numpy's are: no int, compared as one, and `min` hands them on."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number

    def __str__(self) -> str:
        return str(self.number)

    def __lt__(self, other: int) -> bool:
        return self.number < other

    def __gt__(self, other: int) -> bool:
        return self.number > other


@pytest.mark.parametrize("number", [NumpyNumber, str])
def test_an_offset_is_a_number_of_whatever_kind(number):
    batch = encode_batch([b"a", b"b", b"c"], timestamps=[10, 30, 20], base_offset=4)
    script = Script(fetched(bytes(batch), next_offset=7, high_watermark=7))
    with client(script) as c:
        assert [r.value for r in c.fetch("t", 0, offset=number(5)).records] == [b"b", b"c"]
        for offset in (number(5), {0: number(5)}):
            asked = c.consume("t", partitions=[0], offset=offset, end_offset=NumpyNumber(6))
            assert [r.value for r in asked] == [b"b"]
        with pytest.raises(TypeError):
            c.fetch("t", 0, offset=5.0)


def test_consume_ends_where_the_high_watermark_was_when_it_began():
    batches = [bytes(encode_batch([b"%d" % n], timestamps=[n], base_offset=n)) for n in range(4)]
    script = Script(
        fetched(batches[0] + batches[1], next_offset=2, high_watermark=3),
        fetched(batches[2] + batches[3], next_offset=4, high_watermark=9),
    )
    with client(script) as c:
        records = list(c.consume("t", partitions=[0]))
    assert [r.offset for r in records] == [0, 1, 2]
    assert [r.url.params["offset"] for r in script.requests] == ["earliest", "2"]


def test_a_commit_that_was_broken_off_is_made_once_more():
    """As by a task that is cancelled while it commits: what it had read was never said again."""
    progress = GroupProgress("g", "t", timestamp=None, now_s=0.0)
    progress.consumed_before(ConsumedRecord("t", 0, 5, 0, None, b"v", ()))
    broken_off = progress.commit()
    made = progress.commit()
    assert made is not None
    assert made.request == broken_off.request
    made.read(Response(204, {}, b""))
    assert progress.commit() is None


def test_a_follower_that_is_up_to_date_waits_in_the_broker():
    empty = fetched(b"", next_offset=0, high_watermark=0)
    news = fetched(bytes(encode_batch([b"v"], timestamps=[1])), next_offset=1, high_watermark=1)
    script = Script(empty, news)
    with client(script) as c:
        record = next(c.consume("t", partitions=[0], follow=True))
    assert record.value == b"v"
    assert [r.url.params.get("wait_ms") for r in script.requests] == [None, "10000"]


def test_a_follower_that_was_answered_asks_on_and_another_does_not():
    batch = bytes(encode_batch([b"v"], timestamps=[1]))
    first = fetched(b"", next_offset=0, high_watermark=0)
    gone = [httpx.ConnectError] * 1500 + [httpx.Response(502), problem(503, "starting")]
    for steps, patient in (([first, *gone], True), (gone, False)):
        script = Script(*steps, fetched(batch, next_offset=1, high_watermark=1))
        with client(script) as c:
            records = c.consume("t", partitions=[0], follow=True)
            if patient:
                assert next(records).value == b"v"
            else:
                with pytest.raises(BrokerUnreachable):
                    next(records)


def pauses(policy: RetryPolicy, *, retry_after: str, now_s: list[float]) -> list[float]:
    """Of a call to which a gateway gives one answer for ever, or for an hour at least."""
    page = Response(503, {"retry-after": retry_after}, b"<html>maintenance")
    steps, outcome, found = exchange(calls.list_topics(), policy), None, []
    try:
        while now_s[0] < 3600:
            step = steps.send(outcome)
            outcome = None if isinstance(step, Pause) else page
            if isinstance(step, Pause):
                found.append(step.seconds)
                now_s[0] += step.seconds
    except UnexpectedAnswer:
        pass
    return found


@pytest.mark.parametrize(
    ("policy", "told", "waited"),
    [
        (RetryPolicy(), "10", []),
        (RetryPolicy(attempts=UNLIMITED_ATTEMPTS, deadline_s=25), "10", [10, 10, 5]),
        (RetryPolicy(attempts=UNLIMITED_ATTEMPTS, deadline_s=25), "3600", [25]),
        (RetryPolicy(attempts=UNLIMITED_ATTEMPTS, deadline_s=inf), "600", [600] * 6),
        (RetryPolicy(attempts=UNLIMITED_ATTEMPTS, deadline_s=inf), "9" * 400, [86_400]),
    ],
)
def test_who_asks_on_waits_as_long_as_a_gateway_says_and_not_beyond_its_deadline(
    policy, told, waited, caplog
):
    now_s = [0.0]
    policy = replace(policy, clock=lambda: now_s[0])
    assert pauses(policy, retry_after=told, now_s=now_s) == waited
    assert len(caplog.records) == len(waited), "and says so"


@pytest.mark.parametrize("status", [502, 503, 504])
def test_what_a_gateway_says_is_a_broken_connection(status):
    script = Script(httpx.Response(status, text="<html>"), ok(PRODUCED))
    with client(script) as c, pytest.raises(AnswerLost, match=f"{status} from a gateway"):
        c.produce("t", ["a"])
    identity = tierlog.client.ProducerIdentity(producer_id=2**40, producer_epoch=3)
    script = Script(httpx.Response(status, text="<html>"), ok(PRODUCED))
    with client(script) as c:
        assert c.produce("t", ["a"], partition=0, sequenced=Sequenced(identity, 9)).topic == "t"


def test_a_time_behind_the_end_gives_nothing_that_is_older():
    batch = encode_batch([b"a", b"b", b"c"], timestamps=[10, 20, 30])
    with client(Script(fetched(bytes(batch), next_offset=3, high_watermark=3))) as c:
        assert list(c.consume("t", partitions=[0], timestamp=30, end_offset=2)) == []
        (record,) = c.consume("t", partitions=[0], timestamp=20, end_offset=2)
    assert record.value == b"b"


def test_an_end_that_is_not_written_yet_is_waited_for_in_the_broker():
    batches = [bytes(encode_batch([b"%d" % n], timestamps=[n], base_offset=n)) for n in range(3)]
    script = Script(
        fetched(batches[0], next_offset=1, high_watermark=1),
        fetched(b"".join(batches[1:]), next_offset=3, high_watermark=3),
    )
    with client(script) as c:
        records = list(c.consume("t", partitions=[0], end_offset=2))
    assert [r.offset for r in records] == [0, 1]
    assert [r.url.params.get("wait_ms") for r in script.requests] == [None, "10000"]


@pytest.mark.parametrize("follow", [False, True])
def test_behind_the_last_stable_offset_nobody_asks_without_waiting(follow):
    batch = bytes(encode_batch([b"v"], timestamps=[1]))
    script = Script(
        fetched(batch, next_offset=1, high_watermark=5),
        fetched(b"", next_offset=1, high_watermark=5),
        fetched(b"", next_offset=1, high_watermark=6),
        problem(410, "offset-trimmed"),
    )
    limits = Limits(isolation="read_committed")
    with client(script) as c:
        records = c.consume("t", partitions=[0], follow=follow, limits=limits)
        assert next(records).value == b"v"
        with pytest.raises(errors.OffsetTrimmed if follow else StopIteration):
            next(records)
    waits = [r.url.params.get("wait_ms") for r in script.requests]
    asks_whose_it_is = [None]  # which the script refuses as well
    followed = [None, None, "10000", "10000", *asks_whose_it_is]
    assert waits == (followed if follow else [None, None])


def test_readiness_is_an_answer_also_when_it_is_no():
    with client(Script(httpx.Response(503, json={"reasons": ["t-0: starting"]}))) as c:
        assert c.readiness() == (False, ("t-0: starting",), ())


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_name_that_a_path_would_swallow_is_refused_before_it_is_sent(name):
    script = Script(ok({}))
    with client(script) as c, pytest.raises(errors.InvalidTopicName):
        c.delete_topic(name)
    assert script.requests == []


def test_the_asynchronous_client_speaks_the_same_calls():
    script = Script(
        problem(503, "starting"),
        fetched(bytes(encode_batch([b"v"], timestamps=[1])), next_offset=1, high_watermark=1),
    )

    async def read() -> list[bytes | None]:
        async with tierlog.AsyncClient(retries=QUICK, transport=httpx.MockTransport(script)) as c:
            return [record.value async for record in c.consume("t", partitions=[0])]

    assert asyncio.run(read()) == [b"v"]


def test_an_asynchronous_client_is_of_one_event_loop():
    """Another would find connections, and locks, that belong to one that may be gone."""
    c = tierlog.AsyncClient(transport=httpx.MockTransport(Script(ok({"topics": []}))))
    assert asyncio.run(c.list_topics()) == ()
    with pytest.raises(RuntimeError, match="another event loop: create one client per"):
        asyncio.run(c.list_topics())


def test_of_many_tasks_a_few_have_a_request_under_way():
    """httpx's pool takes time in proportion to all that wait for it, at each answer."""
    under_way, most = [], []

    async def answer(request: httpx.Request) -> httpx.Response:
        under_way.append(request)
        most.append(len(under_way))
        await asyncio.sleep(0)
        under_way.remove(request)
        return httpx.Response(200, json={"topics": []})

    async def ask() -> None:
        async with tierlog.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            await asyncio.gather(*(client.list_topics() for _ in range(500)))

    asyncio.run(ask())
    assert (len(most), max(most)) == (500, 32)


@pytest.mark.parametrize("status", [None, 502, 200])
def test_whether_a_broker_is_alive_is_an_answer(status):
    def answer(request: httpx.Request) -> httpx.Response:
        if status is None:
            raise httpx.ConnectError("refused", request=request)
        return httpx.Response(status, json={})

    async def ask() -> bool:
        async with tierlog.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            return await client.is_alive()

    with tierlog.Client(transport=httpx.MockTransport(answer)) as client:
        assert client.is_alive() is (status == 200)
    assert asyncio.run(ask()) is (status == 200)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_behind_a_fork_nothing_of_the_other_side_is_used_or_closed(tmp_path):
    class Theirs(httpx.MockTransport):
        def close(self):
            if os.getpid() != made_by:
                os._exit(7)

    def send() -> None:
        c.list_topics()
        if os.getpid() != made_by:
            os._exit(8)

    made_by, file = os.getpid(), tmp_path / "token"
    file.write_text("secret")
    transport = Theirs(Script(ok({"topics": []})))
    with tierlog.Client(token_file=file, transport=transport) as c:
        child = os.fork()
        if not child:
            try:
                file.unlink()  # so that it cannot connect
                for _ in range(2):
                    with pytest.raises(errors.ConfigurationError):
                        send()
                c.close()
                os._exit(0)
            finally:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_no_records_are_no_batches():
    with tierlog.Client() as client, pytest.raises(errors.InvalidRecord, match="has no records"):
        client.produce_encoded("t", [], partition=0)


def test_batches_made_here_are_cut_at_the_limit():
    batches = to_batches([b"x" * 600] * 10, now_ms=1, max_bytes=2000)
    assert len(batches) > 6000
    with pytest.raises(errors.RecordTooLarge):
        to_batches([b"x" * 3000], now_ms=1, max_bytes=2000)


def test_encoded_records_are_cut_as_the_topic_takes_them():
    records = [b"x" * (1 << 20)] * 3
    with pytest.raises(errors.RecordTooLarge):
        calls.produce_encoded("t", records, partition=0)
    body = calls.produce_encoded("t", records, partition=0, max_message_bytes=4 << 20).request.body
    assert [header.record_count for header in iter_headers(body)] == [3]
