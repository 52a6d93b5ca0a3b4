"""Seeded steps on both producers against a broker in memory that refuses requests, loses them, or
appends them and loses the response, and that handles some of them only later, out of turn. It
recognises repeated batches, and refuses gaps, by the rules of the real log.

* Every record's future is resolved, once, and its callback called once.
* A record that was acknowledged is in the log exactly once, at its offset.
* A record whose error says that nothing was changed is not in the log; no record is there twice.
* The acknowledged records of a partition are in the order in which they were sent, and so are all,
  but for requests that were handled late.
* No sequence leaves a gap. Nothing remains buffered.

The seed is in the test's name; `TIERLOG_SEED` runs only that one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from itertools import count
from random import Random
from typing import Any

import httpx2
import pytest

import tierlog
from tests.fakes.tiny_broker import description, refused
from tests.simulation.steps import seeds
from tierlog.client.async_producer import AsyncProducer
from tierlog.client.batching import Batching
from tierlog.client.exchange import RetryPolicy
from tierlog.client.producer import Producer as SyncProducer
from tierlog.hot_tier.producer_state import Producer, after_batch, check_sequence
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.decode import decode_batch
from tierlog.record_format.errors import (
    OutOfOrderSequence,
    ProducerFenced,
    RequestError,
    RetriableError,
)

PARTITIONS = 3
STEPS = 120
POLICY = RetryPolicy(attempts=3, first_pause_s=0.0, max_pause_s=0.0)
BATCHING = Batching(linger_ms=600_000, batch_bytes=400, buffer_bytes=1 << 20)

# How a produce request ends. `None`: normally.
REFUSALS = {
    "throttled": 429,
    "starting": 503,
    "shutting-down": 503,
    "disk-full": 507,
    "forbidden": 403,
    "unauthorized": 401,
    "unknown-topic": 404,
    "leadership-lost": 409,
}
UNKNOWN = {"shutting-down": 503, "log-offline": 503, "internal": 500, "": 502}
FAULTS: list[tuple[str, str]] = [
    *[("refused", code) for code in REFUSALS],
    *[(how, code) for code in UNKNOWN for how in ("appended", "dropped")],
    *[("not sent", ""), ("lost before", ""), ("lost after", ""), ("delayed", "")] * 3,
]


class FlakyBroker:
    """The HTTP API of one topic, as a transport's handler. Called by one thread at a time."""

    def __init__(self, random: Random) -> None:
        self.random, self.fault_rate, self.limit_bytes = random, 0.0, 1 << 20
        self.logs: list[list[bytes]] = [[] for _ in range(PARTITIONS)]
        self.late: set[bytes] = set()  # values of requests that were handled late
        self.gaps = 0  # refused sequences, but for those of requests that were handled late
        self._delayed: list[tuple[int, bytes]] = []
        self._producers: list[dict[int, Producer]] = [{} for _ in range(PARTITIONS)]
        self._identities = 0

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "GET":
            return httpx2.Response(200, json=description(*range(PARTITIONS)))
        if self.random.random() < self.fault_rate / 4:
            self._handle_delayed()
        if request.url.path == "/v1/producers":
            if self.random.random() < self.fault_rate:
                raise httpx2.ReadError("gone", request=request)
            self._identities += 1
            identity = {"producer_id": 2**33 + self._identities, "producer_epoch": 0}
            return httpx2.Response(200, json=identity)
        if self.random.random() < self.fault_rate:
            return self._fail(request, *self.random.choice(FAULTS))
        return self._append(*_batch(request))

    def _fail(self, request: httpx2.Request, how: str, code: str) -> httpx2.Response:
        match how:
            case "refused":
                return refused(REFUSALS[code], code)
            case "not sent":
                raise httpx2.ConnectError("refused", request=request)
            case "delayed":
                self._delayed.append(_batch(request))
                raise httpx2.ReadTimeout("timed out", request=request)
            case "appended" | "lost after":
                self._append(*_batch(request))
        if how.startswith("lost"):
            raise httpx2.ReadError("gone", request=request)
        members = {} if code == "internal" else {"outcome": "unknown"}
        return refused(UNKNOWN[code], code, **members)

    def _handle_delayed(self) -> None:
        self.random.shuffle(self._delayed)
        for partition, batch in self._delayed:
            before, gaps = len(self.logs[partition]), self.gaps
            self._append(partition, batch)
            self.gaps = gaps
            self.late.update(self.logs[partition][before:])
        self._delayed.clear()

    def forget_producers(self) -> None:
        """Their ids expire. Not while a copy of their batches is on its way: it would be new."""
        self._handle_delayed()
        self._producers = [{} for _ in range(PARTITIONS)]

    def _append(self, partition: int, batch: bytes) -> httpx2.Response:
        (header,) = iter_headers(batch)
        log, known = self.logs[partition], self._producers[partition].get(header.producer_id)
        if len(batch) > self.limit_bytes:
            sizes = {"limit_bytes": self.limit_bytes, "size_bytes": len(batch)}
            return refused(413, "record-too-large", **sizes)
        try:
            copy = check_sequence(known, header)
        except (OutOfOrderSequence, ProducerFenced):
            self.gaps += 1
            return refused(409, "out-of-order-sequence")
        base = len(log) if copy is None else copy.first_offset
        if copy is None:
            stored = header._replace(base_offset=base)
            self._producers[partition][header.producer_id] = after_batch(known, stored)
            log.extend(record.value or b"" for record in decode_batch(batch, header))
        last = base + header.record_count - 1
        result = {"partition": partition, "base_offset": base, "last_offset": last}
        result |= {"records": header.record_count, "duplicate": copy is not None}
        return httpx2.Response(200, json={"topic": "t", "results": [result]})


def _batch(request: httpx2.Request) -> tuple[int, bytes]:
    return int(request.url.path.split("/")[5]), request.content


class Sent:
    """The records of one producer, in order, with their futures."""

    def __init__(self) -> None:
        self.futures: dict[bytes, Any] = {}
        self.callbacks: Counter[bytes] = Counter()

    def add(self, value: bytes, future: Any) -> None:
        self.futures[value] = future
        future.add_done_callback(lambda _: self.callbacks.update([value]))

    def check(self, broker: FlakyBroker) -> None:
        assert broker.gaps == 0
        assert set(self.callbacks.values()) <= {1}
        assert len(self.callbacks) == len(self.futures)
        in_log = Counter(value for log in broker.logs for value in log)
        assert not in_log - Counter(in_log.keys()), "a record is in the log twice"
        acknowledged = set()
        for value, future in self.futures.items():
            if (error := future.exception()) is None:
                placed = future.result()
                assert broker.logs[placed.partition][placed.offset] == value
                acknowledged.add(value)
            elif isinstance(error, (RequestError, RetriableError)):
                assert value not in in_log, f"{value!r} is in the log, in spite of {error!r}"
        assert acknowledged
        for log in broker.logs:
            in_order = [value for value in log if value in acknowledged or value not in broker.late]
            assert in_order == sorted(in_order, key=_number)


def _number(value: bytes) -> int:
    return int(value.split(b".")[0])


def _steps(random: Random, broker: FlakyBroker) -> Iterator[dict[str, Any] | None]:
    """What to send next; None: flush. Changes the broker along the way."""
    numbers = count()
    for _ in range(STEPS):
        broker.fault_rate = random.choice([0, 0, 0.2, 0.6, 0.95])
        broker.limit_bytes = random.choice([1 << 20, 1 << 20, 300, 150])
        for _ in range(random.choice([1, 1, 3, 20])):
            value = b"%d.%s" % (next(numbers), b"x" * random.choice([0, 0, 10, 90, 500]))
            to = random.choice([{"partition": random.randrange(PARTITIONS)}, {"key": b"k"}, {}])
            yield {"topic": "t", "value": value, **to}
        if random.random() < 0.5:
            yield None
        if random.random() < 0.05:
            yield None  # nor while a batch is sent again, whose response was lost
            broker.forget_producers()


@pytest.mark.parametrize("seed", seeds(3))
def test_producer(seed: int) -> None:
    random, sent = Random(seed), Sent()
    broker = FlakyBroker(Random(seed + 1000))
    with tierlog.Client(retries=POLICY, transport=httpx2.MockTransport(broker)) as client:
        producer = SyncProducer(client, BATCHING)
        for record in _steps(random, broker):
            if record is None:
                assert producer.flush(60)
            else:
                sent.add(record["value"], producer.send(**record))
        producer.close()
    sent.check(broker)
    assert producer._accumulator.buffered_bytes == 0


@pytest.mark.parametrize("seed", seeds(3))
def test_asynchronous_producer(seed: int) -> None:
    random, sent = Random(seed), Sent()
    broker = FlakyBroker(Random(seed + 1000))

    async def send_all() -> None:
        transport = httpx2.MockTransport(broker)
        async with tierlog.AsyncClient(retries=POLICY, transport=transport) as client:
            producer = AsyncProducer(client, BATCHING, clock=lambda: next(calls) // 100)
            async with producer:
                for record in _steps(random, broker):
                    if record is None:
                        await producer.flush()
                    else:
                        sent.add(record["value"], await producer.send(**record))
            assert producer._accumulator.buffered_bytes == 0

    calls = count()
    asyncio.run(send_all())
    sent.check(broker)
