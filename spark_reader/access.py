"""How to reach the bucket and the broker: picklable, sent to the executors with the plan. And
how to wait for many of their answers at once, as planning a read does.

* Reprs contain no secrets, so that no plan, log line or error can show them.
* Clients are opened once per process and kept until it exits: an executor's Python worker serves
  many tasks.
"""

from __future__ import annotations

import atexit
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from tierlog.cold_tier.segment_lookup import SegmentIndexes
from tierlog.host.retry import OUTAGE_POLICY
from tierlog.manifest.codec import PageCache
from tierlog.manifest.registrations import Registrations
from tierlog.object_store.open import open_store
from tierlog.object_store.s3_connection import S3Options
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.errors import InvalidOption

if TYPE_CHECKING:
    from tierlog.client.client import Client


@dataclass(frozen=True, kw_only=True)
class Access:
    """The URLs of the bucket (`store`) and the broker (`server`), of which one may be missing, and
    the credentials for them. Without `server`, the brokers that are registered in the bucket are
    asked: those of a cluster.
    """

    store: str | None = None
    server: str | None = None
    s3: S3Options = field(default_factory=S3Options)
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None
    ca_file: str | None = None


INDEXES_BYTES: Final = 64 << 20  # chunk tables of about a terabyte
INDEX_LOADS: Final = 32  # concurrently, however many partitions are planned together


class _Bucket(NamedTuple):
    store: ObjectStore
    indexes: SegmentIndexes
    pages: PageCache


class _Clients:
    """The stores and brokers that this process talks to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._buckets: dict[Access, _Bucket] = {}
        self._brokers: dict[Access, Client] = {}

    def bucket(self, access: Access) -> _Bucket:
        assert access.store is not None
        with self._lock:
            if access not in self._buckets:
                store = open_store(access.store, access.s3, must_exist=True, policy=OUTAGE_POLICY)
                indexes = SegmentIndexes(store, limit_bytes=INDEXES_BYTES, loads_max=INDEX_LOADS)
                self._buckets[access] = _Bucket(store, indexes, PageCache())
            return self._buckets[access]

    def broker(self, access: Access) -> Client:
        # Imported here, since reads from the bucket alone do not need it.
        from tierlog.client.client import Client

        if access in self._brokers:
            return self._brokers[access]
        servers = access.server or registered_servers(self.bucket(access).store)
        with self._lock:
            if access not in self._brokers:
                self._brokers[access] = Client(
                    servers,
                    token=access.token,
                    token_file=access.token_file,
                    ca_file=access.ca_file,
                )
            return self._brokers[access]

    def close(self) -> None:
        with self._lock:
            for bucket in self._buckets.values():
                bucket.store.close()
            for broker in self._brokers.values():
                broker.close()
            self._buckets.clear()
            self._brokers.clear()


def registered_servers(store: ObjectStore) -> list[str]:
    """The URLs of a cluster's brokers, those first that should run. Raises InvalidOption."""
    found = [
        one.registration
        for one in Registrations(store).load_registrations().values()
        if one.registration is not None and one.registration.state != "removed"
    ]
    if not found:
        raise InvalidOption(
            f"option server: required, since no broker is registered in {store.url}, as those of a "
            "cluster are; or set tier=cold to read only what is in the bucket"
        )
    found.sort(key=lambda one: (one.state == "stopped", one.node_id))
    return [one.url for one in found]


# Per process, as connections are.
_clients: Final = _Clients()
atexit.register(_clients.close)


@dataclass(frozen=True)
class Connections:
    """Clients for the store and the broker of `access`, opened on first use."""

    access: Access

    @property
    def has_store(self) -> bool:
        return self.access.store is not None

    @cached_property
    def store(self) -> ObjectStore:
        return _clients.bucket(self.access).store

    @cached_property
    def indexes(self) -> SegmentIndexes:
        """The process's cache of segment indexes, which never change."""
        return _clients.bucket(self.access).indexes

    @cached_property
    def pages(self) -> PageCache:
        """The process's cache of manifest pages, which never change either."""
        return _clients.bucket(self.access).pages

    @cached_property
    def broker(self) -> Client:
        return _clients.broker(self.access)

    def broker_over_restarts(self) -> Client:
        """The broker, for callers that know that it was up, and so will be back: from now on, this
        process waits for its restart.
        """
        from tierlog.client.exchange import RETRY_OVER_RESTART

        self.broker.retries = RETRY_OVER_RESTART
        return self.broker


PARALLELISM: Final = 16

T = TypeVar("T")
R = TypeVar("R")


def map_ahead(work: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
    """Results of `work` in the order of `items`, with up to `PARALLELISM` calls in flight. Nested
    calls use threads of their own. An error is raised where its result would be.
    """
    with ThreadPoolExecutor(PARALLELISM, thread_name_prefix="tierlog-plan") as pool:
        pending: deque[Future[R]] = deque()
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) == PARALLELISM:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def parallel_map(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """As `map_ahead`, but returns a list, and starts no thread for a single item."""
    listed = list(items)
    return list(map(work, listed) if len(listed) < 2 else map_ahead(work, listed))
