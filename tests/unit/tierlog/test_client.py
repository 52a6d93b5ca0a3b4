"""Both clients against scripted responses: what they send, parse, raise and retry."""

import asyncio
import json
import os
import pickle
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice, product
from math import inf, nan

import httpx2
import pytest

import tierlog
from tierlog.client import calls, problems, scheduling
from tierlog.client.calls import Sequenced
from tierlog.client.exchange import (
    UNLIMITED_ATTEMPTS,
    AnswerLost,
    BrokerUnreachable,
    Pause,
    RetryPolicy,
    exchange,
)
from tierlog.client.problems import AppendedInPart, BrokerFault, UnexpectedAnswer
from tierlog.client.progress import GroupProgress, PartitionCursor
from tierlog.client.records import ConsumedRecord, decode_fetched, to_batches
from tierlog.client.scheduling import FetchSchedule
from tierlog.client.wire import Limits, Response
from tierlog.record_format import errors
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.decode import Record
from tierlog.record_format.encode import encode_batch

QUICK = RetryPolicy(attempts=3, first_pause_s=0.0, max_pause_s=0.5)
PRODUCED = {
    "topic": "t",
    "results": [{"partition": 0, "base_offset": 5, "last_offset": 6, "records": 2}],
    "warnings": [],
}


class Script:
    """Returns or raises one step after another, the last one forever. Records the requests."""

    def __init__(self, *steps):
        self.steps, self.requests = list(steps), []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.requests.append(request)
        step = self.steps.pop(0) if len(self.steps) > 1 else self.steps[0]
        if isinstance(step, type) and issubclass(step, Exception):
            raise step("broken", request=request)
        return step() if callable(step) else step


def client(script: Script) -> tierlog.Client:
    return tierlog.Client(retries=QUICK, transport=httpx2.MockTransport(script))


def problem(
    status: int, code: str, *, retry_after: str | None = None, **members
) -> httpx2.Response:
    fields = {"retry-after": retry_after} if retry_after else {}
    return httpx2.Response(
        status, headers=fields, json={"code": code, "detail": f"about {code}", **members}
    )


def ok(document) -> httpx2.Response:
    return httpx2.Response(200, json=document)


def fetched(batches: bytes, *, next_offset: int, high_watermark: int, start: int = 0):
    return httpx2.Response(
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


class NumpyNumber:
    """Like numpy's: not an int, but compares as one, and `min` returns it unchanged."""

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


@pytest.mark.parametrize("timeout_s", [0, -1, inf, nan])
@pytest.mark.parametrize("client", [tierlog.Client, tierlog.AsyncClient])
def test_a_timeout_that_cannot_be_waited_is_refused_at_once(client, timeout_s):
    with pytest.raises(errors.SettingsError, match="timeout_s must be more than 0"):
        client("http://127.0.0.1:9", timeout_s=timeout_s)


def test_produce_sends_text_as_strings_and_other_bytes_as_base64():
    script = Script(ok(PRODUCED))
    records = [
        "plain",
        tierlog.NewRecord(b"\xff", key="k", timestamp=7, headers=(("h", b"x"), ("n", None))),
        tierlog.NewRecord(tierlog.JsonSource(b'{"a": 1}'), partition=2),
        tierlog.JsonSource(b'"text"'),
        tierlog.JsonSource(b"null"),
        None,
    ]
    with client(script) as c:
        response = c.produce("my topic", records)
    assert response.results[0].base_offset == 5
    sent = script.requests[0]
    assert sent.url.raw_path == b"/v1/topics/my%20topic/records?acks=all"
    assert json.loads(sent.content)["records"] == [
        {"value": "plain"},
        {
            "value_base64": "/w==",
            "key": "k",
            "timestamp": 7,
            "headers": [{"name": "h", "value": "x"}, {"name": "n", "value": None}],
        },
        {"value": '{"a": 1}', "partition": 2},
        {"value": '"text"'},
        {"value": "null"},
        {"value": None},
    ]


@pytest.mark.parametrize("record", ["hello", b"hello", tierlog.NewRecord("v", key="k"), {"a": 1}])
def test_a_single_record_in_place_of_a_list_is_refused(record):
    script = Script(ok(PRODUCED))
    with client(script) as c:
        with pytest.raises(TypeError, match="put it in a list"):
            c.produce("t", record)
        with pytest.raises(TypeError, match="put it in a list"):
            c.produce_encoded("t", record, partition=0)
    assert not script.requests


COMMIT = tierlog.OffsetCommit("t", 0, 5)


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (COMMIT, "not one OffsetCommit; put it in a list"),
        ("t:0=5", "not one str; put it in a list"),
        ({("t", 0): 5}, "not one dict; put it in a list"),
        ([COMMIT, ("t", 1, 5)], r"offsets\[1\]: expected an OffsetCommit, not tuple"),
        ([5], r"offsets\[0\]: expected an OffsetCommit, not int"),
    ],
)
def test_an_invalid_list_of_commits_is_refused_before_sending(offsets, message):
    script = Script()
    with client(script) as c, pytest.raises(TypeError, match=message):
        c.commit_offsets("g", offsets)
    assert not script.requests


def test_python_types_are_converted_to_records():
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
    decoded = decode_fetched(to_batches(given, now_ms=7), Record).records
    assert [record.value for record in decoded] == [b"\xff", b"v", b"v"]
    assert [record.timestamp for record in decoded] == [7, ms, ms]
    assert decoded[0].headers == (("a", b"b"), ("n", None))


class NumpyText(str):
    """Like numpy's: text, but JSON encoders refuse it."""


def test_numbers_and_text_of_numpy_are_accepted():
    five, script = (
        NumpyNumber(5),
        Script(ok(PRODUCED), ok({"log_start_offset": 5}), httpx2.Response(204)),
    )
    record = tierlog.NewRecord(NumpyText("v"), key=NumpyText("k"), timestamp=five, partition=five)
    with client(script) as c:
        c.produce("t", [record])
        c.trim("t", 0, before_offset=five)
        c.commit_offsets("g", [tierlog.OffsetCommit("t", 0, five)])
    produced, trimmed, committed = (json.loads(request.content) for request in script.requests)
    assert produced["records"] == [{"value": "v", "key": "k", "timestamp": 5, "partition": 5}]
    assert trimmed == {"before_offset": 5}
    assert committed["offsets"][0]["offset"] == 5
    assert [
        one.timestamp for one in decode_fetched(to_batches([record], now_ms=7), Record).records
    ] == [5]


def test_a_missing_partition_of_a_data_frame_is_not_any_partition():
    """pandas makes None a float, NaN, which JSON has as null."""
    with pytest.raises(TypeError):
        calls.produce("t", [tierlog.NewRecord("v", partition=nan)])


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (5, "value: .*int"),
        ({"a": 1}, "value: .*dict"),
        (tierlog.NewRecord("v", key=5), "key: .*int"),
        (tierlog.NewRecord("v", headers={"a": 5}), "headers 'a': .*int"),
        (tierlog.NewRecord("v", headers=[(b"a", b"b")]), "headers: a name"),
        (tierlog.NewRecord("v", timestamp=1.5), "a time must be .*float"),
    ],
)
def test_an_invalid_record_is_refused_with_its_field(record, message):
    script = Script(ok(PRODUCED))
    with client(script) as c, pytest.raises(TypeError, match=message):
        c.produce("t", [record])
    with pytest.raises(TypeError, match=message):
        to_batches([record], now_ms=7)
    assert not script.requests


def test_a_timestamp_out_of_range_is_refused_before_sending():
    script = Script(ok(PRODUCED))
    for time in (-2, 2**63):
        record = tierlog.NewRecord("v", timestamp=time)
        with client(script) as c, pytest.raises(errors.InvalidRequest, match=f"not {time}"):
            c.produce("t", [record])
        with pytest.raises(errors.InvalidRequest, match=f"not {time}"):
            to_batches([record], now_ms=7)
    assert not script.requests


def test_a_plain_produce_is_not_retried_after_a_broken_connection():
    script = Script(httpx2.ReadError, ok(PRODUCED))
    with client(script) as c, pytest.raises(AnswerLost):
        c.produce("t", ["a"])
    assert len(script.requests) == 1


def test_a_produce_that_was_not_sent_or_refused_is_retried():
    script = Script(
        *(httpx2.ConnectError, httpx2.ProxyError),
        *(problem(503, "starting"), problem(429, "throttled"), problem(507, "disk-full")),
        ok(PRODUCED),
    )
    with tierlog.Client(
        retries=RetryPolicy(attempts=6, first_pause_s=0.0), transport=httpx2.MockTransport(script)
    ) as c:
        assert c.produce("t", ["a"]).topic == "t"
    assert len(script.requests) == 6


def test_an_idempotent_produce_is_retried_after_a_broken_connection():
    script = Script(httpx2.ReadError, ok(PRODUCED))
    identity = tierlog.ProducerIdentity(producer_id=2**40, producer_epoch=3)
    with client(script) as c:
        c.produce("t", ["a"], partition=0, sequenced=Sequenced(identity, 9))
    assert [r.headers["producer-sequence"] for r in script.requests] == ["9", "9"]
    assert script.requests[1].headers["producer-id"] == str(2**40)


@pytest.mark.parametrize(("producer_id", "attempts"), [(2**40, 2), (-1, 1)])
def test_batches_are_retried_after_a_broken_connection_if_they_have_a_producer(
    producer_id, attempts
):
    """Kafka's clients in Go number the batches of no producer, too."""
    batch = encode_batch([b"v"], timestamps=[1], producer_id=producer_id, base_sequence=0)
    script = Script(httpx2.ReadError, ok(PRODUCED))
    with client(script) as c, suppress(AnswerLost):
        c.produce_batches("t", bytes(batch), partition=0)
    assert len(script.requests) == attempts


@pytest.mark.parametrize(
    "code", ["shutting-down", "broker-unavailable", "leader-changed", "not-enough-replicas"]
)
def test_a_producers_batch_is_repeated_when_what_took_it_was_lost(code):
    batch = encode_batch([b"v"], timestamps=[1], producer_id=7, base_sequence=0)
    script = Script(problem(503, code, outcome="unknown"), ok(PRODUCED))
    with client(script) as c:
        c.produce_batches("t", bytes(batch), partition=0)
    assert len(script.requests) == 2


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        (problem(503, "store-unavailable", outcome="unknown"), errors.OutcomeUnknownError),
        (problem(503, "shutting-down", outcome="unknown"), errors.OutcomeUnknownError),
        (problem(503, "log-offline"), errors.LogOfflineError),
        (problem(503, "store-unavailable", results=[{"partition": 1}]), AppendedInPart),
        (problem(507, "disk-full", results=[{"partition": 1}]), AppendedInPart),
    ],
)
def test_a_write_with_an_unknown_outcome_is_never_retried(response, kind):
    script = Script(response)
    with client(script) as c, pytest.raises(kind):
        c.produce("t", ["a"])
    assert len(script.requests) == 1


def test_reads_are_retried_up_to_the_number_of_attempts():
    script = Script(httpx2.ReadError)
    with client(script) as c, pytest.raises(BrokerUnreachable, match="GET /v1/topics"):
        c.list_topics()
    assert len(script.requests) == 3


def test_reads_are_not_retried_past_the_deadline():
    script, now_s = Script(httpx2.ReadTimeout), iter(range(0, 1000, 20))
    policy = RetryPolicy(first_pause_s=0.0, clock=lambda: next(now_s))
    transport = httpx2.MockTransport(script)
    with tierlog.Client(retries=policy, transport=transport) as c, pytest.raises(BrokerUnreachable):
        c.list_topics()
    assert len(script.requests) == 2


def test_an_interrupted_long_poll_is_retried_even_after_the_deadline():
    batch = bytes(encode_batch([b"v"], timestamps=[1]))
    script = Script(httpx2.ReadError, fetched(batch, next_offset=1, high_watermark=1))
    now_s = iter((0.0, 45.0))
    policy = RetryPolicy(first_pause_s=0.0, clock=lambda: next(now_s))
    waiting = tierlog.Client(retries=policy, transport=httpx2.MockTransport(script))
    with waiting as c:
        found = c.fetch("t", 0, offset=0, limits=Limits(wait_ms=60_000))
    assert [record.value for record in found.records] == [b"v"]


def test_long_retries_are_logged_however_few_the_attempts(caplog):
    script, now_s = Script(problem(503, "store-unavailable")), iter((0.0, 4.0, 20.0, 24.0, 29.9))
    policy = RetryPolicy(attempts=4, first_pause_s=0.0, clock=lambda: next(now_s))
    waiting = tierlog.Client(retries=policy, transport=httpx2.MockTransport(script))
    with waiting as c, pytest.raises(errors.StoreUnavailable):
        c.offsets("t", 0)
    messages = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert messages == ["still retrying after 20 s"]


def test_a_retry_after_past_the_deadline_ends_the_retries():
    script = Script(problem(503, "store-unavailable", retry_after="60"))
    with client(script) as c, pytest.raises(errors.StoreUnavailable) as caught:
        c.offsets("t", 0)
    assert len(script.requests) == 1
    assert caught.value.retry_after_s == 60


@pytest.mark.parametrize(
    ("response", "kind", "members"),
    [
        (problem(404, "unknown-topic"), errors.UnknownTopic, {"topic": "t"}),
        (problem(404, "unknown-partition"), errors.UnknownPartition, {"partition": 4}),
        (
            problem(410, "offset-trimmed", log_start_offset=3, high_watermark=9),
            errors.OffsetTrimmed,
            {"log_start_offset": 3, "high_watermark": 9},
        ),
        (problem(416, "offset-past-end"), errors.OffsetPastEnd, {}),
        (
            problem(502, "cold-object-corrupt", object_key="k"),
            errors.CorruptObject,
            {"file": "k"},
        ),
        (
            problem(500, "corrupt-log", file="t-0/0.log", position=7, detail="t-0/0.log: bad"),
            errors.CorruptDataError,
            {"file": "t-0/0.log", "position": 7, "args": ("t-0/0.log: bad",)},
        ),
        (problem(409, "leadership-lost"), errors.FencedError, {}),
        (problem(500, "internal", request_id="r1"), BrokerFault, {"request_id": "r1"}),
        (problem(418, "teapot"), errors.RequestError, {}),
        (httpx2.Response(502, text="<html>"), UnexpectedAnswer, {}),
    ],
)
def test_problem_documents_become_typed_errors(response, kind, members):
    with client(Script(response)) as c, pytest.raises(kind) as caught:
        c.offsets("t", 4)
    for name, value in members.items():
        assert getattr(caught.value, name) == value


@pytest.mark.parametrize("code", [*problems._BY_CODE, "teapot"])
def test_errors_pass_between_processes(code):
    """As from a worker of multiprocessing, which hangs if an error cannot be unpickled."""
    members = {"results": [{"partition": 1}]} if code == "store-unavailable" else {}
    response = problem(503, code, retry_after="3600", object_key="k", position=7, **members)
    with client(Script(response)) as c, pytest.raises(errors.TierlogError) as caught:
        c.offsets("t", 4)
    error = caught.value
    received = pickle.loads(pickle.dumps(error))
    assert (type(received), str(received)) == (type(error), str(error))
    assert (received.args, vars(received)) == (error.args, vars(error))


@pytest.mark.parametrize("status", [200, 302, 307])
def test_a_proxys_page_is_not_a_success(status):
    page = httpx2.Response(status, headers={"location": "/login"}, text="<html>")
    with client(Script(page)) as c:
        with pytest.raises(UnexpectedAnswer, match=f"status {status}"):
            c.commit_offsets("g", [tierlog.OffsetCommit("t", 0, 5)])
        with pytest.raises(UnexpectedAnswer) as unexpected:
            c.delete_topic("t")
        assert ("redirecting to /login" in str(unexpected.value)) == (status != 200)
        with pytest.raises(UnexpectedAnswer):
            c.offsets("t", 0)


def test_an_undecodable_response_is_a_broken_connection():
    def garbled(_: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-encoding": "gzip"}, content=b"cut")

    with client(garbled) as c:
        with pytest.raises(BrokerUnreachable, match="decompressing"):
            c.list_topics()
        with pytest.raises(AnswerLost, match="decompressing"):
            c.produce("t", ["a"])


def test_an_offset_mismatch_has_both_offsets():
    batch = bytes(encode_batch([b"v"], timestamps=[1]))
    script = Script(problem(412, "offset-mismatch", log_end_offset=12))
    with client(script) as c, pytest.raises(errors.OffsetMismatch) as caught:
        c.produce_batches("t", batch, partition=0, expected_offset=10)
    assert (caught.value.expected_offset, caught.value.log_end_offset) == (10, 12)
    assert script.requests[0].headers["if-offset-match"] == "10"


def test_field_errors_are_part_of_the_message():
    response = problem(
        400, "invalid-record", errors=[{"loc": "records[3].key_base64", "msg": "bad"}]
    )
    with client(Script(response)) as c, pytest.raises(errors.InvalidRecord) as caught:
        c.produce("t", ["a"])
    assert str(caught.value) == "about invalid-record (records[3].key_base64: bad)"
    assert caught.value.problems[0].loc == "records[3].key_base64"


def test_fetch_starts_at_its_offset_or_timestamp_and_verifies_checksums():
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


def test_a_batch_whose_offset_or_length_is_corrupt_is_refused_like_its_records():
    """No checksum covers them: records would be given other offsets, or be left out."""
    bases = [0, 2, 4, 10, 12]  # compaction removed a batch
    batches = [bytes(encode_batch([b"a", b"b"], timestamps=[1, 1], base_offset=b)) for b in bases]
    whole = [offset for base in bases for offset in (base, base + 1)]
    assert [
        r.offset for r in decode_fetched(b"".join(batches), Record, next_offset=14).records
    ] == whole
    for number, wrong_byte in product(range(5), range(12)):
        damaged = bytearray(batches[number])
        damaged[wrong_byte] ^= 64
        sent = b"".join([*batches[:number], damaged, *batches[number + 1 :]])
        if number == 0:
            with pytest.raises(errors.CorruptBatch, match="t-0: offset 0: "):
                decode_fetched(sent, Record, of="t-0", next_offset=14)
            continue
        records, corrupt_from = decode_fetched(sent, Record, next_offset=14)
        assert [record.offset for record in records] == whole[: 2 * number]
        assert corrupt_from == bases[number - 1] + 2


@pytest.mark.parametrize("number", [NumpyNumber, str])
def test_an_offset_may_be_any_integer_type_or_text(number):
    batch = encode_batch([b"a", b"b", b"c"], timestamps=[10, 30, 20], base_offset=4)
    script = Script(fetched(bytes(batch), next_offset=7, high_watermark=7))
    with client(script) as c:
        assert [r.value for r in c.fetch("t", 0, offset=number(5)).records] == [b"b", b"c"]
        for offset in (number(5), {0: number(5)}):
            records = c.consume("t", partitions=[0], offset=offset, end_offset=NumpyNumber(6))
            assert [r.value for r in records] == [b"b"]
        with pytest.raises(TypeError):
            c.fetch("t", 0, offset=5.0)


def test_offsets_by_partition_need_numbers():
    """Text, as from JSON, would not be found, and everything be read from the beginning."""
    script = Script(fetched(b"", next_offset=7, high_watermark=7))
    with client(script) as c:
        with pytest.raises(TypeError, match=r"offset: expected partitions as in .*, not '0'"):
            list(c.consume("t", partitions=[0], offset={"0": 5}))
        assert not script.requests
        list(c.consume("t", partitions=[0], offset={NumpyNumber(0): 5}))
    assert script.requests[0].url.params["offset"] == "5"


def test_consume_ends_at_the_high_watermark_of_its_start():
    batches = [bytes(encode_batch([b"%d" % n], timestamps=[n], base_offset=n)) for n in range(4)]
    script = Script(
        fetched(batches[0] + batches[1], next_offset=2, high_watermark=3),
        fetched(batches[2] + batches[3], next_offset=4, high_watermark=9),
    )
    with client(script) as c:
        records = list(c.consume("t", partitions=[0, 0]))
    assert [r.offset for r in records] == [0, 1, 2]
    assert [r.url.params["offset"] for r in script.requests] == ["earliest", "2"]


def test_an_interrupted_commit_is_repeated():
    """As by a cancelled task: otherwise its offsets would never be committed."""
    progress = GroupProgress("g", PartitionCursor("t"), None)
    progress.hand_out(ConsumedRecord("t", 0, 5, 0, None, b"v", ()), 0.0)
    interrupted = progress.commit_consumed()
    repeated = progress.commit_consumed()
    assert repeated is not None
    assert repeated.request == interrupted.request
    repeated.read(Response(204, {}, b""))
    assert progress.commit_consumed() is None


def test_an_up_to_date_follower_long_polls():
    empty = fetched(b"", next_offset=0, high_watermark=0)
    news = fetched(bytes(encode_batch([b"v"], timestamps=[1])), next_offset=1, high_watermark=1)
    script = Script(empty, news)
    with client(script) as c:
        record = next(c.consume("t", partitions=[0], follow=True))
    assert record.value == b"v"
    assert [r.url.params.get("wait_ms") for r in script.requests] == [None, "10000"]


def test_an_up_to_date_follower_of_several_partitions_awaits_any_of_them():
    def awaited(*high_watermarks):
        parts = [{"partition": n, "high_watermark": end} for n, end in enumerate(high_watermarks)]
        return ok({"partitions": [*parts, {"partition": 2, "error": {"code": "corrupt-log"}}]})

    empty = fetched(b"", next_offset=0, high_watermark=0)
    news = fetched(bytes(encode_batch([b"v"], timestamps=[1])), next_offset=1, high_watermark=1)
    script = Script(empty, empty, empty, awaited(0, 1), news, problem(503, "corrupt-log"))
    with client(script) as c:
        records = c.consume("t", partitions=[0, 1, 2], follow=True)
        record = next(records)
        with pytest.raises(errors.CorruptDataError):
            next(records)
    assert (record.partition, record.value) == (1, b"v")
    paths = [r.url.path.removeprefix("/v1/topics/t/partitions/") for r in script.requests]
    fetches = [f"{number}/records" for number in (0, 1, 2, 1, 2)]
    assert paths == [*fetches[:3], "/v1/fetch", *fetches[3:]]
    body = json.loads(script.requests[3].content)
    assert body["partitions"] == [{"topic": "t", "partition": n, "offset": 0} for n in range(3)]
    assert (body["wait_ms"], body["max_bytes"]) == (10_000, 1)
    assert all("wait_ms" not in r.url.params for r in script.requests)


def test_partitions_without_news_take_one_request_while_another_is_behind():
    ends, paths = {0: 20, 1: 0, 2: 0}, []

    def respond(request: httpx2.Request) -> httpx2.Response:
        paths.append(request.url.path.removeprefix("/v1/topics/t/partitions/"))
        if request.url.path == "/v1/fetch":
            body = json.loads(request.content)
            assert body["wait_ms"] == 0
            numbers = [one["partition"] for one in body["partitions"]]
            return ok(
                {"partitions": [{"partition": n, "high_watermark": ends[n]} for n in numbers]}
            )
        end, offset = ends[int(request.url.path.split("/")[5])], request.url.params["offset"]
        base = 0 if offset == "earliest" else int(offset)
        if base == end:
            return fetched(b"", next_offset=end, high_watermark=end)
        batch = bytes(encode_batch([b"v"], timestamps=[1], base_offset=base))
        return fetched(batch, next_offset=base + 1, high_watermark=end)

    with client(respond) as c:
        records = c.consume("t", partitions=range(3), follow=True)
        assert [next(records).offset for _ in range(6)] == list(range(6))
        fetches = [f"{number}/records" for number in (0, 1, 2)]
        assert paths == [*fetches, fetches[0], *["/v1/fetch", fetches[0]] * 4]
        ends[2] = 1
        found = [(record.partition, record.offset) for record in islice(records, 3)]
    assert found == [(0, 6), (2, 0), (0, 7)]


@pytest.mark.parametrize(("given_ms", "wait_ms"), [(0, 500), (20, 20), (10_000, 500)])
def test_partitions_that_are_awaited_in_turn_wait_only_briefly(monkeypatch, given_ms, wait_ms):
    monkeypatch.setattr(scheduling, "AWAITED_MAX", 1)
    template = PartitionCursor("t", follow=True, at_end=True, limits=Limits(wait_ms=given_ms))
    schedule = FetchSchedule(template, 5, QUICK, whole_topic=False, progress=None)
    schedule.read_from(range(2), 5)
    requests = [next(schedule.next_call(0.0).steps) for _ in range(2)]
    bodies = [json.loads(request.body) for request in requests]
    assert [body["partitions"][0]["partition"] for body in bodies] == [0, 1]
    assert {body["wait_ms"] for body in bodies} == {wait_ms}


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_follower_for_a_group_waits_no_longer_than_until_its_next_commit(partitions):
    template = PartitionCursor("t", follow=True, at_end=True)
    progress = GroupProgress("g", template, None)
    schedule = FetchSchedule(template, 5, QUICK, whole_topic=False, progress=progress)
    schedule.read_from(range(partitions), 5)

    def next_wait_ms(now_s: float) -> int:
        request = next(schedule.next_call(now_s).steps)
        return round(request.extra_wait_s * 1000)

    assert next_wait_ms(1.0) == 10_000
    progress.consumed_all(replace(template, next_offset=5))
    assert next_wait_ms(4.0) == 2000
    commit = schedule.next_call(60.0).steps
    assert next(commit).path == "/v1/groups/g/offsets"
    with pytest.raises(StopIteration):
        commit.send(Response(204, {}, b""))
    assert next_wait_ms(61.0) == 10_000


def test_a_follower_with_an_end_is_refused():
    script = Script(problem(404, "unknown-topic"))
    with client(script) as c, pytest.raises(errors.InvalidRequest, match="follow or end_offset"):
        next(c.consume("t", partitions=[0], follow=True, end_offset=9))
    assert not script.requests


def test_a_wait_in_the_broker_extends_only_the_time_for_its_response():
    script = Script(ok({"ok": True}))
    with client(script) as c:
        c.verify("t")
    assert script.requests[0].extensions["timeout"] == {
        "connect": 30.0,
        "read": 30.0 + calls.VERIFY_WAIT_S,
        "write": 30.0,
        "pool": None,
    }


def test_a_follower_retries_without_limit_only_after_a_first_response():
    batch = bytes(encode_batch([b"v"], timestamps=[1]))
    first = fetched(b"", next_offset=0, high_watermark=0)
    gone = [httpx2.ConnectError] * 1500 + [httpx2.Response(502), problem(503, "starting")]
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
    """The pauses, within an hour, of a call to which a gateway always returns the same response."""
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
    ("policy", "retry_after", "waited"),
    [
        (RetryPolicy(), "10", []),
        (RetryPolicy(attempts=UNLIMITED_ATTEMPTS, deadline_s=25), "10", [10, 10, 5]),
        (RetryPolicy(attempts=UNLIMITED_ATTEMPTS, deadline_s=25), "3600", [25]),
        (RetryPolicy(attempts=UNLIMITED_ATTEMPTS, deadline_s=inf), "600", [600] * 6),
        (RetryPolicy(attempts=UNLIMITED_ATTEMPTS, deadline_s=inf), "9" * 400, [86_400]),
    ],
)
def test_a_gateways_retry_after_is_honored_up_to_the_deadline(policy, retry_after, waited, caplog):
    now_s = [0.0]
    policy = replace(policy, clock=lambda: now_s[0])
    assert pauses(policy, retry_after=retry_after, now_s=now_s) == waited
    assert len(caplog.records) == len(waited), "each pause is logged"


def test_the_attempt_at_the_deadline_does_not_depend_on_rounding():
    now_s = [0.05]  # soon after the machine's start
    policy = RetryPolicy(attempts=UNLIMITED_ATTEMPTS, deadline_s=25, clock=lambda: now_s[0])
    steps = exchange(calls.list_topics(), policy)
    next(steps)
    now_s[0] += 2.3
    assert now_s[0] + (25.05 - now_s[0]) > 25.05
    assert steps.send(Response(503, {"retry-after": "60"}, b"<html>")) == Pause(25.05 - now_s[0])


@pytest.mark.parametrize("status", [502, 503, 504])
def test_a_gateway_error_counts_as_a_broken_connection(status):
    script = Script(httpx2.Response(status, text="<html>"), ok(PRODUCED))
    with client(script) as c, pytest.raises(AnswerLost, match=f"{status} from a gateway"):
        c.produce("t", ["a"])
    identity = tierlog.ProducerIdentity(producer_id=2**40, producer_epoch=3)
    script = Script(httpx2.Response(status, text="<html>"), ok(PRODUCED))
    with client(script) as c:
        assert c.produce("t", ["a"], partition=0, sequenced=Sequenced(identity, 9)).topic == "t"


def test_a_gateways_rate_limit_is_retried_as_the_brokers_is():
    script = Script(httpx2.Response(429, text="<html>"), ok(PRODUCED))
    with client(script) as c:
        assert c.produce("t", ["a"]).topic == "t", "nothing was forwarded, so nothing is sent twice"
    limited = httpx2.Response(429, text="<html>", headers={"retry-after": "3600"})
    with client(Script(limited)) as c, pytest.raises(errors.Throttled) as caught:
        c.produce("t", ["a"])
    assert "status 429 from an unnamed server" in str(caught.value)
    assert caught.value.retry_after_s == 3600


def test_a_timestamp_past_the_end_offset_returns_no_older_records():
    batch = encode_batch([b"a", b"b", b"c"], timestamps=[10, 20, 30])
    with client(Script(fetched(bytes(batch), next_offset=3, high_watermark=3))) as c:
        assert list(c.consume("t", partitions=[0], timestamp=30, end_offset=2)) == []
        (record,) = c.consume("t", partitions=[0], timestamp=20, end_offset=2)
    assert record.value == b"b"


def test_a_timestamp_is_in_place_of_an_offset_as_in_a_fetch():
    batches = [bytes(encode_batch([b"a", b"b"], timestamps=[9, 9], base_offset=n)) for n in (0, 2)]
    script = Script(
        fetched(batches[0], next_offset=2, high_watermark=4),
        fetched(batches[1], next_offset=4, high_watermark=4),
    )
    with client(script) as c:
        records = list(c.consume("t", partitions=[0], offset=2, timestamp=9))
    assert [record.offset for record in records] == [0, 1, 2, 3]
    assert [r.url.params.get("timestamp") for r in script.requests] == ["9", None]


def test_consume_long_polls_for_an_end_offset_not_written_yet():
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
def test_at_the_last_stable_offset_a_follower_long_polls(follow):
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
    topic_lookup = [None]  # which the script refuses as well
    followed = [None, None, "10000", "10000", *topic_lookup]
    assert waits == (followed if follow else [None, None])


def test_readiness_returns_the_reasons_of_a_broker_that_is_not_ready():
    with client(Script(httpx2.Response(503, json={"reasons": ["t-0: starting"]}))) as c:
        assert c.readiness() == (False, ("t-0: starting",), ())


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_a_topic_name_that_is_a_path_segment_is_refused_before_sending(name):
    script = Script(ok({}))
    with client(script) as c, pytest.raises(errors.InvalidTopicName):
        c.delete_topic(name)
    assert script.requests == []


def test_the_asynchronous_client_makes_the_same_calls():
    script = Script(
        problem(503, "starting"),
        fetched(bytes(encode_batch([b"v"], timestamps=[1])), next_offset=1, high_watermark=1),
    )

    async def read() -> list[bytes | None]:
        async with tierlog.AsyncClient(retries=QUICK, transport=httpx2.MockTransport(script)) as c:
            return [record.value async for record in c.consume("t", partitions=[0])]

    assert asyncio.run(read()) == [b"v"]


def test_an_asynchronous_client_belongs_to_one_event_loop():
    """Its connections and locks belong to the first loop, which may have been closed."""
    c = tierlog.AsyncClient(transport=httpx2.MockTransport(Script(ok({"topics": []}))))
    assert asyncio.run(c.list_topics()) == ()
    with pytest.raises(RuntimeError, match="another event loop: create one client per"):
        asyncio.run(c.list_topics())


@pytest.mark.parametrize("status", [None, 502, 200])
def test_is_alive_is_true_only_for_a_response_of_the_broker(status):
    def respond(request: httpx2.Request) -> httpx2.Response:
        if status is None:
            raise httpx2.ConnectError("refused", request=request)
        return httpx2.Response(status, json={})

    async def is_alive() -> bool:
        async with tierlog.AsyncClient(transport=httpx2.MockTransport(respond)) as client:
            return await client.is_alive()

    with tierlog.Client(transport=httpx2.MockTransport(respond)) as client:
        assert client.is_alive() is (status == 200)
    assert asyncio.run(is_alive()) is (status == 200)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork_the_parents_connections_are_neither_used_nor_closed(tmp_path):
    class ParentsTransport(httpx2.MockTransport):
        def close(self):
            if os.getpid() != parent_pid:
                os._exit(7)

    def send() -> None:
        c.list_topics()
        if os.getpid() != parent_pid:
            os._exit(8)

    parent_pid, token_file = os.getpid(), tmp_path / "token"
    token_file.write_text("secret")
    transport = ParentsTransport(Script(ok({"topics": []})))
    with tierlog.Client(token_file=token_file, transport=transport) as c:
        child = os.fork()
        if not child:
            try:
                token_file.unlink()  # so that the child cannot connect
                for _ in range(2):
                    with pytest.raises(errors.ConfigurationError):
                        send()
                c.close()
                os._exit(0)
            finally:
                os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_empty_list_of_records_is_refused():
    with tierlog.Client() as client, pytest.raises(errors.InvalidRecord, match="has no records"):
        client.produce_encoded("t", [], partition=0)


def test_client_side_batches_respect_the_size_limit():
    batches = to_batches([b"x" * 600] * 10, now_ms=1, max_bytes=2000)
    assert len(batches) > 6000
    with pytest.raises(errors.RecordTooLarge):
        to_batches([b"x" * 3000], now_ms=1, max_bytes=2000)


def test_encoded_records_respect_the_topics_message_limit():
    records = [b"x" * (1 << 20)] * 3
    with pytest.raises(errors.RecordTooLarge):
        calls.produce_encoded("t", records, partition=0)
    body = calls.produce_encoded("t", records, partition=0, max_message_bytes=4 << 20).request.body
    assert [header.record_count for header in iter_headers(body)] == [3]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda client: client.produce("t", [], partion=1), "'partion'; did you mean 'partition'?"),
        (lambda client: client.consume("t", ofset=1), "'ofset'; did you mean 'offset'?"),
        (lambda client: type(client)(tokn="x"), "'tokn'; did you mean 'token'?"),
        (lambda client: client.fetch("t", 0, zzz=1), "keyword argument 'zzz'"),
    ],
)
def test_an_unknown_argument_names_the_nearest(call, said):
    with tierlog.Client() as client, pytest.raises(TypeError) as raised:
        call(client)
    assert str(raised.value).endswith(said)
