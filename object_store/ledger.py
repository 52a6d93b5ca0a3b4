"""Counts requests and bytes by purpose, for metrics and to estimate the store's bill.

* Every attempt is counted, including failed ones: the store charges for them. An attempt that never
  reached the store counts as a failure but not as a request.
* The purpose follows from the operation and the key, so callers need not state it.
* Prices come from settings; the defaults are S3 Standard's list prices in us-east-1, and zero for
  stores other than `s3://`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tierlog.record_format.errors import MissingObject, ObjectExists, StoreUnreachable

Operation = Literal["put", "get", "head", "list", "delete"]
Purpose = Literal["offload", "cold_read", "manifest", "write_ahead", "list", "delete", "probe"]

PROBE_PREFIX = "probe/"
WRITE_AHEAD_PREFIX = "wal/"

Outcome = Literal["done", "missing", "exists", "failed", "unreachable"]


class StoreRequest(NamedTuple):
    """A finished request, as passed to `StoreLedger.watch`. `error` is empty unless it failed."""

    operation: Operation
    key: str
    outcome: Outcome
    took_s: float
    error: str = ""


class Usage(NamedTuple):
    requests: int = 0
    failures: int = 0
    sent_bytes: int = 0
    received_bytes: int = 0

    def __add__(self, other: object) -> Usage:
        assert isinstance(other, Usage)
        return Usage(*(mine + more for mine, more in zip(self, other, strict=True)))


@dataclass(frozen=True)
class PriceTable:
    """Prices in US dollars. On S3, deletes and transfer within a region are free."""

    put_per_1000: float = 0.005
    get_per_1000: float = 0.0004
    list_per_1000: float = 0.005
    received_per_gb: float = 0.0
    stored_per_gb_month: float = 0.023

    def cost(self, operation: Operation, usage: Usage) -> float:
        per_1000 = {"put": self.put_per_1000, "list": self.list_per_1000, "delete": 0.0}
        requests = usage.requests * per_1000.get(operation, self.get_per_1000) / 1000
        return requests + usage.received_bytes * self.received_per_gb / 1e9


FREE = PriceTable(0.0, 0.0, 0.0, 0.0, 0.0)


def default_prices(store_url: str | None) -> PriceTable:
    """Only S3 is billed: folders and memory cost nothing."""
    is_s3 = store_url is None or store_url.startswith("s3:")
    return PriceTable() if is_s3 else FREE


def purpose_of(operation: Operation, key: str) -> Purpose:
    """Reads of segment objects are cold reads; their writes, and HEADs of them, are offload."""
    if key.startswith(PROBE_PREFIX):
        return "probe"
    if operation in {"list", "delete"}:
        return "list" if operation == "list" else "delete"
    if key.startswith(WRITE_AHEAD_PREFIX):
        return "write_ahead"
    if "/segments/" not in key:
        return "manifest"
    return "cold_read" if operation == "get" else "offload"


class StoreLedger:
    """Counts since the store was opened. Thread-safe. `watch`, if set, is called after each
    request.
    """

    watch: Callable[[StoreRequest], None] | None = None

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._usage: dict[tuple[Purpose, Operation], Usage] = {}

    def count(
        self,
        operation: Operation,
        key: str,
        *,
        requests: int = 1,
        failures: int = 0,
        sent_bytes: int = 0,
        received_bytes: int = 0,
    ) -> None:
        line = (purpose_of(operation, key), operation)
        more = Usage(requests, failures, sent_bytes, received_bytes)
        with self._lock:
            self._usage[line] = self._usage.get(line, Usage()) + more

    @contextmanager
    def counted(self, operation: Operation, key: str, *, sent_bytes: int = 0) -> Iterator[None]:
        """Count one request. A missing or already existing object is an outcome, not a failure."""
        began_s, error = time.monotonic(), ""
        outcome: Outcome = "failed"
        try:
            yield
            outcome = "done"
        except MissingObject:
            outcome = "missing"
            raise
        except ObjectExists:
            outcome = "exists"
            raise
        except GeneratorExit:
            outcome = "done"  # the reader of a range needs no more of it
            raise
        except BaseException as fault:
            error = str(fault) or type(fault).__name__
            if isinstance(fault, StoreUnreachable):
                outcome = "unreachable"
            raise
        finally:
            was_sent = outcome != "unreachable"
            self.count(
                operation,
                key,
                requests=was_sent,
                failures=outcome in {"failed", "unreachable"},
                sent_bytes=sent_bytes * was_sent,
            )
            if self.watch is not None:
                took_s = time.monotonic() - began_s
                self.watch(StoreRequest(operation, key, outcome, took_s, error))

    def usage(self) -> Mapping[tuple[Purpose, Operation], Usage]:
        with self._lock:
            return dict(self._usage)

    @property
    def failures(self) -> int:
        return sum(usage.failures for usage in self.usage().values())

    def requests(self, purpose: Purpose | None = None) -> int:
        return sum(
            usage.requests for (line, _), usage in self.usage().items() if purpose in {None, line}
        )
