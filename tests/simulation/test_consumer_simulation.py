"""Seeded runs of `consume` by both clients against a log in memory that is appended to, trimmed and
compacted meanwhile, and whose responses are refused, lost or corrupt. For a group, it is one of two
members: the other, simulated, comes, reads for the group, and goes.

* A run returns increasing offsets of each partition, with the values of those offsets; a member may
  begin anew at a commit.
* A run without a group that ends returned every record that is still there, of those between the
  log's start and end when the run began, and none after that end.
* What a group has committed, one of its members has processed: at least once each record that is
  still there. A record on which the loop was left counts as not processed. No commit goes back.
* A last run of the group, without faults, reads to the end.

The seed is in the test's name; `TIERLOG_SEED` runs only that one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import aclosing
from random import Random
from typing import Any, NamedTuple

import httpx2
import pytest

import tierlog
from tests.fakes.tiny_broker import description, refused
from tests.simulation.steps import seeds
from tierlog.client import progress
from tierlog.client.exchange import RetryPolicy
from tierlog.client.membership import Member
from tierlog.client.records import ConsumedRecord
from tierlog.client.wire import Limits
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import TierlogError

PARTITIONS = 3
RUNS = 60
ALONE = tierlog.Membership(heartbeat_interval_ms=44_999)  # in no thread but the loop's
POLICY = RetryPolicy(attempts=3, first_pause_s=0.0, max_pause_s=0.0)
REFUSALS = {"throttled": 429, "starting": 503, "store-unavailable": 503, "": 502, "internal": 500}


class Batch(NamedTuple):
    base_offset: int
    next_offset: int
    encoded: bytes
    values: dict[int, bytes]


class Log:
    """One partition."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.start = self.end = 0
        self.first_asked_end: int | None = None  # the log's end when a run first fetched from it

    def append(self, random: Random) -> None:
        base, count = self.end, random.randint(1, 5)
        self.end += count
        values = {offset: b"v%d" % offset for offset in range(base, self.end)}
        is_control = count == 1 and random.random() < 0.5
        keys = [b"\0\0\0\1"] if is_control else None
        encoded = bytes(
            encode_batch(
                [b"\0\0\0\0\0\0"] if is_control else list(values.values()),
                keys=keys,
                timestamps=[1000] * count,
                base_offset=base,
                control=is_control,
            )
        )
        self.batches.append(Batch(base, self.end, encoded, {} if is_control else values))

    def trim(self, random: Random) -> None:
        self.start = random.randint(self.start, self.end)
        self.batches = [batch for batch in self.batches if batch.next_offset > self.start]

    def compact(self, random: Random) -> None:
        self.batches = [batch for batch in self.batches if random.random() < 0.8]

    @property
    def values(self) -> dict[int, bytes]:
        """What is there now, by offset."""
        found = {offset: v for batch in self.batches for offset, v in batch.values.items()}
        return {offset: v for offset, v in found.items() if offset >= self.start}

    def fetch(self, random: Random, query: httpx2.QueryParams, *, damage: bool) -> httpx2.Response:
        if self.first_asked_end is None:
            self.first_asked_end = self.end
        named = {"earliest": self.start, "latest": self.end}
        offset = named.get(query["offset"])
        offset = int(query["offset"]) if offset is None else offset
        if not self.start <= offset <= self.end:
            code = "offset-trimmed" if offset < self.start else "offset-past-end"
            return refused(410, code, log_start_offset=self.start, high_watermark=self.end)
        after = [batch for batch in self.batches if batch.next_offset > offset]
        sent = after[: random.randint(1, 4)]
        next_offset = self.end if len(sent) == len(after) else sent[-1].next_offset
        pieces = [bytearray(batch.encoded) for batch in sent]
        if pieces and damage and random.random() < 0.05:
            damaged = random.choice(pieces)
            # Not in the base offset, which no checksum covers.
            damaged[random.randrange(8, len(damaged))] ^= 1 << random.randrange(8)
        fields = {
            "log-next-offset": str(next_offset),
            "log-start-offset": str(self.start),
            "log-high-watermark": str(self.end),
            "log-up-to-date": "true" if next_offset == self.end else "false",
            "log-tier": "hot",
            "log-topic-id": "x",
        }
        return httpx2.Response(200, content=b"".join(pieces), headers=fields)


class FlakyBroker:
    """The HTTP API of one topic and one group, as a transport's handler."""

    def __init__(self, random: Random) -> None:
        self.random, self.fault_rate, self.changes = random, 0.0, True
        self.logs = [Log() for _ in range(PARTITIONS)]
        self.committed: dict[int, int] = {}
        self.processed: list[set[int]] = [set() for _ in range(PARTITIONS)]  # by the other member
        self.member, self.generation, self.assigned = "", 0, set(range(PARTITIONS))

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if self.changes and self.random.random() < 0.3:
            log = self.random.choice(self.logs)
            change = self.random.choice([Log.append] * 6 + [Log.trim, Log.compact])
            change(log, self.random)
        if self.random.random() < self.fault_rate:
            if self.random.random() < 0.5:
                raise httpx2.ReadError("gone", request=request)
            code = self.random.choice(list(REFUSALS))
            return refused(REFUSALS[code], code)
        return self._respond(request)

    def _respond(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path.split("/")
        if "partitions" in path:
            return self.logs[int(path[5])].fetch(
                self.random, request.url.params, damage=self.changes
            )
        if path[2] == "fetch":
            wanted = json.loads(request.content)["partitions"]
            return httpx2.Response(200, json={"partitions": [self._awaited(one) for one in wanted]})
        if path[-1] == "members":
            return self._join(json.loads(request.content)["member_id"])
        if path[-1] == "heartbeat":
            reason = "REBALANCE_IN_PROGRESS"
            is_kept = self.random.random() < 0.5
            return httpx2.Response(204) if is_kept else refused(409, "group-refused", reason=reason)
        if request.method == "DELETE":
            self.member = ""
            return httpx2.Response(204)
        if request.method == "PUT":
            return self._commit(json.loads(request.content))
        if path[2] == "groups":
            if not self.committed:
                return refused(404, "unknown-group")
            ends = {"log_end_offset": 0, "lag": 0}
            rows = [
                {"topic": "t", "partition": partition, "offset": offset, **ends}
                for partition, offset in self.committed.items()
            ]
            return httpx2.Response(200, json={"group": "g", "offsets": rows})
        return httpx2.Response(200, json=self._description())

    def _join(self, member_id: str) -> httpx2.Response:
        if member_id and member_id != self.member:
            return refused(409, "group-refused", reason="UNKNOWN_MEMBER_ID")
        self.generation += 1
        self.member = member_id or f"m{self.generation}"
        self._read_as_other(set(range(PARTITIONS)) - self.assigned)
        others = self.random.randrange(PARTITIONS) if self.changes else 0
        self.assigned = set(range(PARTITIONS)) - set(self.random.sample(range(PARTITIONS), others))
        rows = [{"topic": "t", "partitions": sorted(self.assigned)}]
        answer = {"member_id": self.member, "generation": self.generation, "assignment": rows}
        return httpx2.Response(200, json=answer)

    def _commit(self, body: dict[str, Any]) -> httpx2.Response:
        """Perhaps first the other member has got all partitions, reads some records, and leaves."""
        if self.changes and self.random.random() < 0.3:
            self.generation += 1
            self.member = self.random.choice([self.member, ""])
            self._read_as_other(set(range(PARTITIONS)))
        if body["member_id"] != self.member:
            return refused(409, "group-refused", reason="UNKNOWN_MEMBER_ID")
        if body["generation"] != self.generation:
            return refused(409, "group-refused", reason="ILLEGAL_GENERATION")
        for row in body["offsets"]:
            assert row["partition"] in self.assigned
            assert row["offset"] >= self.committed.get(row["partition"], 0)
            self.committed[row["partition"]] = row["offset"]
        return httpx2.Response(204)

    def _read_as_other(self, partitions: set[int]) -> None:
        for number in partitions:
            log = self.logs[number]
            offset = max(self.committed.get(number, 0), log.start)
            end = self.random.randint(offset, max(offset, log.end))
            self.processed[number] |= {one for one in log.values if offset <= one < end}
            self.committed[number] = end

    def _awaited(self, wanted: dict[str, Any]) -> dict[str, Any]:
        log = self.logs[wanted["partition"]]
        if not log.start <= wanted["offset"] <= log.end:
            return {"partition": wanted["partition"], "error": {"code": "offset-trimmed"}}
        return {"partition": wanted["partition"], "high_watermark": log.end}

    def _description(self) -> dict[str, object]:
        found = description(*range(PARTITIONS))
        for row, log in zip(found["partitions"], self.logs, strict=True):
            row["log_start_offset"] = log.start
        return found


class LeftTheLoop(Exception):
    """By the code that handles the records."""


class Run:
    """One loop over `consume`: what it is to do, and what it has processed."""

    def __init__(self, random: Random, broker: FlakyBroker, *, group: str | None) -> None:
        self.broker, self.group = broker, group
        self.follow = random.random() < 0.3
        self.left_after = random.choice([0, 1, 5, 20]) if self.follow else random.choice([3, 10**9])
        self.raises = random.random() < 0.5
        self.returned: list[ConsumedRecord] = []
        self.processed: list[ConsumedRecord] = []
        self.starts = [log.start for log in broker.logs]
        for log in broker.logs:
            log.first_asked_end = None

    @property
    def arguments(self) -> dict[str, Any]:
        group = {"group": self.group, "membership": ALONE}
        return {"topic": "t", **group, "follow": self.follow, "limits": Limits()}

    def next(self, record: ConsumedRecord) -> bool:
        """Take a record; whether the loop is to be left on it."""
        self.processed = list(self.returned)
        self.returned.append(record)
        if len(self.returned) <= self.left_after:
            return False
        if self.raises:
            raise LeftTheLoop
        return True

    def is_heartbeat_due(self) -> bool:
        return self.broker.changes and self.broker.random.random() < 0.1

    def check(self, *, ended: bool) -> None:
        for number, log in enumerate(self.broker.logs):
            offsets = [one.offset for one in self.returned if one.partition == number]
            if self.group is None:
                assert offsets == sorted(set(offsets))
            assert all(one.value == b"v%d" % one.offset for one in self.returned)
            if ended and self.group is None:
                end = log.first_asked_end or 0
                assert not [offset for offset in offsets if offset >= end]
                missed = {offset for offset in log.values if offset < end} - set(offsets)
                assert not {offset for offset in missed if offset >= self.starts[number]}


class World:
    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.broker = FlakyBroker(Random(seed + 1000))
        self.processed: list[set[int]] = [set() for _ in range(PARTITIONS)]

    def runs(self) -> Iterator[Run]:
        for _ in range(RUNS):
            self.broker.fault_rate = self.random.choice([0, 0, 0.1, 0.3])
            for log in self.broker.logs:
                log.append(self.broker.random)  # a follower waits for no more than that
            yield Run(self.random, self.broker, group=self.random.choice(["g", None]))
        self.broker.fault_rate, self.broker.changes = 0.0, False
        last = Run(self.random, self.broker, group="g")
        last.follow, last.left_after = False, 10**9
        yield last
        for number, log in enumerate(self.broker.logs):
            assert self.processed[number] | self.broker.processed[number] >= set(log.values)
            assert self.broker.committed.get(number, 0) in (0, log.end)

    def ended(self, run: Run, error: BaseException | None) -> None:
        ended = error is None and len(run.returned) <= run.left_after
        if ended or isinstance(error, TierlogError):  # raised when the next record was asked for
            run.processed = list(run.returned)
        run.check(ended=ended)
        if run.group is None:
            return
        for record in run.processed:
            self.processed[record.partition].add(record.offset)
        for number, offset in self.broker.committed.items():
            there = {one for one in self.broker.logs[number].values if one < offset}
            processed = self.processed[number] | self.broker.processed[number]
            assert there <= processed, "committed, but never processed"


def members_of(client: tierlog.Client | tierlog.AsyncClient) -> list[Member]:
    """Whose heartbeats the simulation sends, instead of a thread."""
    return [one.member for one in client._active_groups if one.member is not None]


@pytest.fixture(autouse=True)
def commits_between_all_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "COMMIT_INTERVAL_S", 0.0)


@pytest.mark.parametrize("seed", seeds(3))
def test_consume(seed: int) -> None:
    world = World(seed)
    for run in world.runs():
        error = None
        transport = httpx2.MockTransport(world.broker)
        with tierlog.Client(retries=POLICY, transport=transport) as client:
            try:
                for record in client.consume(**run.arguments):
                    if run.next(record):
                        break
            except (TierlogError, LeftTheLoop) as raised:
                error = raised
        world.ended(run, error)


@pytest.mark.parametrize("seed", seeds(3))
def test_asynchronous_consume(seed: int) -> None:
    async def consume(world: World, run: Run) -> BaseException | None:
        transport = httpx2.MockTransport(world.broker)
        async with tierlog.AsyncClient(retries=POLICY, transport=transport) as client:
            try:
                async with aclosing(client.consume(**run.arguments)) as records:
                    async for record in records:
                        for member in members_of(client) if run.is_heartbeat_due() else ():
                            await client.run(member.stay(0.0))
                        if run.next(record):
                            break
            except (TierlogError, LeftTheLoop) as raised:
                return raised
        return None

    world = World(seed)
    for run in world.runs():
        world.ended(run, asyncio.run(consume(world, run)))
