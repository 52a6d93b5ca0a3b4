"""`tierlog.Client`: the broker from plain Python, one call at a time.

Nothing is decided here: `calls` says what is sent and read, `exchange` when it is sent again,
`cursor` what is read next. This file sends and waits. One client may be shared between threads, and
after a fork each side has connections of its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

import httpx

from record_format.errors import RetriableError, TierlogError
from tierlog.client import answers, calls, group_calls
from tierlog.client.batching import Batching
from tierlog.client.calls import DEFAULT_LIMITS, Limits, Start
from tierlog.client.cursor import PartitionCursor
from tierlog.client.exchange import NO_RETRIES, Call, Outcome, Pause, RetryPolicy, Steps, exchange
from tierlog.client.follow import Turns, begin
from tierlog.client.group_calls import GroupPlace
from tierlog.client.methods import called
from tierlog.client.problems import UnexpectedAnswer
from tierlog.client.producer import Producer
from tierlog.client.records import ConsumedRecord
from tierlog.client.times import Time, to_ms
from tierlog.client.transport import Connection, to_outcome, to_reply
from tierlog.client.wire import Reply, Request

T = TypeVar("T")


class Client:
    """A connection to one broker; a context manager. Raises the errors of `tierlog.errors`.

    `server` is `http://HOST:PORT`, or `https://`; `ca_file` then names the authority, if the system
    does not know the broker's. `token`, or the content of `token_file`, goes with each call. What
    is not given is taken from TIERLOG_SERVER (by default http://127.0.0.1:8640), TIERLOG_TOKEN,
    TIERLOG_TOKEN_FILE and TIERLOG_CA_FILE, as on the command line. `timeout_s` bounds each request;
    reads, and writes that were refused or not sent, are retried by `retries`.
    """

    def __init__(
        self,
        server: str | None = None,
        *,
        token: str | None = None,
        token_file: str | Path | None = None,
        ca_file: str | Path | None = None,
        timeout_s: float = 30.0,
        retries: RetryPolicy | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._connection = Connection(
            server=server,
            token=token,
            token_file=token_file,
            ca_file=ca_file,
            timeout_s=timeout_s,
        )
        self.retries = retries or RetryPolicy()
        self._transport = transport
        self._connect()

    def _connect(self) -> None:
        self._http, self._waiting = self._connection.clients(httpx.Client, self._transport)
        self._reading_for: set[GroupPlace] = set()
        self._process = os.getpid()  # last: until then nobody here takes the other side's for ours

    def close(self) -> None:
        """Commit what groups have read here, and release the connections."""
        if self._process != os.getpid():
            return  # they are the other side's, whose threads may hold their lock for ever here
        for place in list(self._reading_for):
            with suppress(TierlogError):
                self._commit(place)
        self._http.close()
        self._waiting.close()

    def __repr__(self) -> str:
        return self._connection.shown(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- topics

    create_topic = called(calls.create_topic)
    list_topics = called(calls.list_topics)
    describe_topic = called(calls.describe_topic)
    alter_topic = called(calls.alter_topic)
    delete_topic = called(calls.delete_topic)

    # --- produce

    produce = called(calls.produce)
    produce_encoded = called(calls.produce_encoded)
    produce_batches = called(calls.produce_batches)
    init_producer = called(calls.init_producer)

    def producer(self, batching: Batching | None = None) -> Producer:
        """A producer: takes records one by one, sends them in batches, and appends each exactly
        once.
        """
        return Producer(self, batching)

    # --- fetch

    fetch = called(calls.fetch)
    fetch_batches = called(calls.fetch_batches)

    def consume(
        self,
        topic: str,
        *,
        partitions: Sequence[int] | None = None,
        offset: Start | Mapping[int, Start] = "earliest",
        end_offset: int | None = None,
        timestamp: Time | None = None,
        follow: bool = False,
        group: str | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> Generator[ConsumedRecord, None, None]:
        """The records of the partitions (all, by default), each partition's in order.

        Following all of them includes partitions that are added later, within five minutes.

        Ends where each partition's high watermark (under `read_committed`: last stable offset) was
        when its reading began; with `end_offset`, there, once that is written; with `follow`,
        never. Without `follow` the partitions come one after another.

        With `group`, reading continues from the group's commits (`offset` is for partitions without
        one), and progress is committed along the way and at the end: see `group_calls`. Two
        consumers of a group each read all that they ask for.
        """
        place = None
        if group is not None:
            place = GroupPlace(group, topic, timestamp=timestamp, now_s=time.monotonic())
        first = PartitionCursor(
            topic,
            timestamp=to_ms(timestamp),
            end_offset=end_offset,
            follow=follow,
            limits=limits,
        )
        steps = begin(first, partitions, offset, place=place, retries=self.retries)
        turns = self.run(steps)
        if place is not None:
            yield from self._consume_for(place, turns)
            return
        while turn := turns.next_turn(time.monotonic()):
            yield from turn.take(self.run(turn.steps))

    def _consume_for(
        self, place: GroupPlace, turns: Turns
    ) -> Generator[ConsumedRecord, None, None]:
        try:
            while turn := turns.next_turn(time.monotonic()):
                records = turn.take(self.run(turn.steps))
                self._reading_for.add(place)  # of the side of a fork that reads on
                for record in records:
                    place.hand_out(record)
                    yield record
                if turn.cursor is not None:
                    place.finish(turn.cursor)
                if (commit := place.due_commit(time.monotonic())) is not None:
                    self.run(exchange(commit, turns.policy))
        except BaseException:
            with suppress(TierlogError):
                self._commit(place)
            raise
        else:
            self._commit(place)
        finally:
            self._reading_for.discard(place)

    def _commit(self, place: GroupPlace) -> None:
        if self._http.is_closed or self._process != os.getpid() or place not in self._reading_for:
            return  # behind a fork it is the other side's place
        if (commit := place.commit()) is not None:
            self.call(commit)

    # --- groups

    commit_offsets = called(group_calls.commit_offsets)
    group = called(group_calls.group)
    groups = called(group_calls.groups)
    delete_group = called(group_calls.delete_group)

    # --- offsets, segments, storage

    offsets = called(calls.offsets)
    offset_for_timestamp = called(calls.offset_for_timestamp)
    manifest = called(calls.manifest)
    storage_report = called(calls.storage_report)
    metrics = called(calls.metrics)
    verify = called(calls.verify)
    offload = called(calls.offload)
    trim = called(calls.trim)

    def segments(
        self, topic: str, partition: int, *, from_offset: int | None = None
    ) -> Generator[answers.Segment, None, None]:
        """Oldest first, page by page."""
        while True:
            page = self.call(calls.segments_page(topic, partition, from_offset=from_offset))
            yield from page.segments
            if page.next_from_offset is None:
                return
            from_offset = page.next_from_offset

    # --- health

    def is_alive(self) -> bool:
        """Whether a broker answers; asks once."""
        try:
            return self.run(exchange(calls.is_alive(), NO_RETRIES))
        except (RetriableError, UnexpectedAnswer):
            return False

    def readiness(self) -> answers.Readiness:
        """Whether every partition is served, and if not, why; asks once."""
        return self.run(exchange(calls.readiness(), NO_RETRIES))

    # --- driving

    def call(self, call: Call[T]) -> T:
        """Make any call of `tierlog.client.calls`."""
        return self.run(exchange(call, self.retries))

    def run(self, steps: Steps[T]) -> T:
        """Do what a conversation asks for, step by step, until it has its answer."""
        outcome: Outcome = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as done:
                answer: T = done.value
                return answer
            if isinstance(step, Pause):
                time.sleep(step.seconds)
                outcome = None
            else:
                outcome = self._transmit(step)

    def _transmit(self, request: Request) -> Reply | Outcome:
        if self._process != os.getpid() and not self._http.is_closed:
            # On a connection that a fork shares, one side would read the other's answers.
            self._connect()
        http = self._waiting if request.extra_wait_s else self._http
        try:
            return to_reply(http.request(**self._connection.sent_as(request)))
        except httpx.RequestError as error:
            return to_outcome(error)
