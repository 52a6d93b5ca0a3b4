"""`tierlog.Client`: the broker from plain Python, one call at a time.

Only I/O happens here: `calls` defines requests and results, `exchange` retries, `scheduling` what
is fetched next. A client may be shared between threads; after a fork, parent and
child have connections of their own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self, TypeVar

import httpx2

from tierlog.client import calls, group_calls, responses
from tierlog.client.batching import Batching
from tierlog.client.calls import DEFAULT_LIMITS, Limits, Start
from tierlog.client.exchange import (
    NO_RETRIES,
    Call,
    Outcome,
    Pause,
    RetryPolicy,
    Steps,
    exchange,
    sync_method,
)
from tierlog.client.group_calls import GroupProgress
from tierlog.client.problems import UnexpectedAnswer
from tierlog.client.producer import Producer
from tierlog.client.records import ConsumedRecord, Time, to_ms
from tierlog.client.scheduling import FetchSchedule, PartitionCursor, schedule_fetches
from tierlog.client.transport import ConnectionConfig, to_outcome, to_response
from tierlog.client.wire import Request, Response
from tierlog.record_format.errors import RetriableError, TierlogError

T = TypeVar("T")


class Client:
    """A client of one broker; a context manager. Raises the errors of `tierlog.errors`.

    `server` is `http://HOST:PORT` or `https://HOST:PORT`; `ca_file` is the certificate authority,
    if the system does not trust the broker's. `token`, or the content of `token_file`, is sent with
    each request. Defaults are taken from TIERLOG_SERVER (else http://127.0.0.1:8640),
    TIERLOG_TOKEN, TIERLOG_TOKEN_FILE and TIERLOG_CA_FILE, as on the command line. `timeout_s`
    bounds each request; `retries` applies to reads, and to writes that were refused or not sent.
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
        transport: httpx2.BaseTransport | None = None,
    ) -> None:
        self._connection = ConnectionConfig(
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
        self._http, self._long_poll = self._connection.clients(httpx2.Client, self._transport)
        self._active_groups: set[GroupProgress] = set()
        self._process = os.getpid()  # last: until then the parent's connections are not ours

    def close(self) -> None:
        """Commit what was consumed for groups, and close the connections."""
        if self._process != os.getpid():
            return  # the parent's connections; their locks may be held by threads that are not here
        for progress in list(self._active_groups):
            with suppress(TierlogError):
                self._commit(progress)
        self._http.close()
        self._long_poll.close()

    def __repr__(self) -> str:
        return self._connection.describe(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- topics

    create_topic = sync_method(calls.create_topic)
    list_topics = sync_method(calls.list_topics)
    describe_topic = sync_method(calls.describe_topic)
    alter_topic = sync_method(calls.alter_topic)
    delete_topic = sync_method(calls.delete_topic)

    # --- produce

    produce = sync_method(calls.produce)
    produce_encoded = sync_method(calls.produce_encoded)
    produce_batches = sync_method(calls.produce_batches)
    init_producer = sync_method(calls.init_producer)

    def producer(self, batching: Batching | None = None) -> Producer:
        """A producer takes records one by one, batches them, and appends each exactly once."""
        return Producer(self, batching)

    # --- fetch

    fetch = sync_method(calls.fetch)
    fetch_batches = sync_method(calls.fetch_batches)

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
        """Iterate over the records of the partitions (default: all), in order in each partition.

        Ends at each partition's high watermark (with `read_committed`: last stable offset) as of
        its first fetch; with `end_offset`, there, once it is written; with `follow`, never. Without
        `follow`, partitions are read one after another. Following all partitions includes those
        that are added later, within five minutes.

        With `group`, reading continues from the group's committed offsets (`offset` is for
        partitions without one), and offsets are committed along the way and at the end: see
        `group_calls`. Partitions are not distributed among the consumers of a group: each reads all
        that it requests.
        """
        template = PartitionCursor(
            topic,
            timestamp=to_ms(timestamp),
            end_offset=end_offset,
            follow=follow,
            limits=limits,
        )
        steps = schedule_fetches(template, partitions, offset, group=group, retries=self.retries)
        schedule = self.run(steps)
        if schedule.progress is not None:
            yield from self._consume_for(schedule.progress, schedule)
            return
        while fetch := schedule.next_call(time.monotonic()):
            yield from fetch.to_records(self.run(fetch.steps))

    def _consume_for(
        self, progress: GroupProgress, schedule: FetchSchedule
    ) -> Generator[ConsumedRecord, None, None]:
        try:
            while fetch := schedule.next_call(time.monotonic()):
                records = fetch.to_records(self.run(fetch.steps))
                self._active_groups.add(progress)  # again: a fork may have come in between
                for record in records:
                    progress.consumed_before(record)
                    yield record
        except BaseException:
            with suppress(TierlogError):
                self._commit(progress)
            raise
        else:
            self._commit(progress)
        finally:
            self._active_groups.discard(progress)

    def _commit(self, progress: GroupProgress) -> None:
        if self._http.is_closed or self._process != os.getpid():
            return
        if progress not in self._active_groups:
            return  # after a fork it belongs to the other process
        if (commit := progress.commit()) is not None:
            self.call(commit)

    # --- groups

    commit_offsets = sync_method(group_calls.commit_offsets)
    group = sync_method(group_calls.group)
    groups = sync_method(group_calls.groups)
    delete_group = sync_method(group_calls.delete_group)

    # --- offsets, segments, storage

    offsets = sync_method(calls.offsets)
    offset_for_timestamp = sync_method(calls.offset_for_timestamp)
    manifest = sync_method(calls.manifest)
    storage_report = sync_method(calls.storage_report)
    metrics = sync_method(calls.metrics)
    verify = sync_method(calls.verify)
    offload = sync_method(calls.offload)
    trim = sync_method(calls.trim)

    def segments(
        self, topic: str, partition: int, *, from_offset: int | None = None
    ) -> Generator[responses.Segment, None, None]:
        """Iterate over the segments, oldest first."""
        while True:
            page = self.call(calls.segments_page(topic, partition, from_offset=from_offset))
            yield from page.segments
            if page.next_from_offset is None:
                return
            from_offset = page.next_from_offset

    # --- health

    def is_alive(self) -> bool:
        """Whether a broker responds. Not retried."""
        try:
            return self.run(exchange(calls.is_alive(), NO_RETRIES))
        except (RetriableError, UnexpectedAnswer):
            return False

    def readiness(self) -> responses.Readiness:
        """Whether every partition is served, and if not, why. Not retried."""
        return self.run(exchange(calls.readiness(), NO_RETRIES))

    # --- driving

    def call(self, call: Call[T]) -> T:
        """Make any call of `tierlog.client.calls`."""
        return self.run(exchange(call, self.retries))

    def run(self, steps: Steps[T]) -> T:
        """Perform the steps of an exchange, and return its result."""
        outcome: Outcome = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as done:
                result: T = done.value
                return result
            if isinstance(step, Pause):
                time.sleep(step.seconds)
                outcome = None
            else:
                outcome = self._transmit(step)

    def _transmit(self, request: Request) -> Response | Outcome:
        if self._process != os.getpid() and not self._http.is_closed:
            # On connections shared after a fork, one process would read the other's responses.
            self._connect()
        http = self._long_poll if request.extra_wait_s else self._http
        try:
            return to_response(http.request(**self._connection.http_arguments(request)))
        except httpx2.RequestError as error:
            return to_outcome(error)
