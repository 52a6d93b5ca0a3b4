"""Any store, with faults on demand: those of a network and of a careless server.

    store = FaultyObjectStore(MemoryStore())
    store.fail("get_range", ShortRead(100))            the next call
    store.fail("put", FailsAfter(), times=3)           the next three
    store.fail("get_range", Slow(gate), when=lambda key: key.endswith(".log"))

A fault is used up by the calls it hits; `calls` lists all calls, in order.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tierlog.object_store.store import ObjectStore
from tierlog.record_format.errors import (
    CorruptObject,
    ObjectExists,
    OutcomeUnknownError,
    StoreUnavailable,
)


@dataclass
class FailsBefore:
    """Nothing is done."""

    error: Callable[[str], Exception] = lambda key: StoreUnavailable(f"{key}: down")


@dataclass
class FailsAfter:
    """The call is done, but its response is lost."""

    error: Callable[[str], Exception] = lambda key: OutcomeUnknownError(f"{key}: lost")


@dataclass
class Conflict:
    """Another writer is first: its bytes are there."""

    body: bytes = b"somebody else's"


@dataclass
class ShortRead:
    """The connection breaks after this many bytes."""

    size_bytes: int


@dataclass
class SilentShortRead:
    """The response ends early, without an error."""

    size_bytes: int


@dataclass
class WrongRange:
    """Bytes of another range, of the right length."""

    shift: int = 1


@dataclass
class WrongBytes:
    """The right range with one byte flipped."""

    position: int = 0


def fails_its_checksum(key: str) -> CorruptObject:
    """For FailsBefore: the error of a store with checksums for a corrupt object."""
    return CorruptObject("came with another CRC-32C than the store's", file=key)


@dataclass
class Slow:
    """The response begins when the gate opens."""

    gate: threading.Event = field(default_factory=threading.Event)


class FaultyObjectStore:
    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._faults: list = []
        self.calls: list[tuple[str, str]] = []
        self.before_call: Callable[[str, str], None] = lambda call, key: None

    def __getattr__(self, name: str):
        return getattr(self._store, name)

    def fail(self, call: str, fault, *, times: int = 1, when=lambda key: True) -> None:
        self._faults.append([call, fault, times, when])

    def go_down(self) -> None:
        """Every call fails, until `heal`."""
        for call in ("put", "put_file", "get", "get_range", "head", "list", "delete"):
            self.fail(call, FailsBefore(), times=10**9)

    def heal(self) -> None:
        """Remove all planned faults."""
        with self._lock:
            self._faults.clear()

    @contextmanager
    def faultless(self) -> Iterator[None]:
        """Suspend the planned faults."""
        planned, self._faults = self._faults, []
        try:
            yield
        finally:
            self._faults = planned

    def put(self, key, body, **options):
        fault = self._next("put", key)
        if isinstance(fault, FailsBefore):
            raise fault.error(key)
        if isinstance(fault, Conflict):
            self._store.put(key, fault.body)
            raise ObjectExists(key)
        if isinstance(fault, Slow):
            assert fault.gate.wait(30), "the gate was not opened"
        stat = self._store.put(key, body, **options)
        if isinstance(fault, FailsAfter):
            raise fault.error(key)
        if isinstance(fault, WrongBytes):
            return self._store.put(key, _flipped(bytes(body), fault.position))
        return stat

    def put_file(self, key, path, **options):
        fault = self._next("put_file", key)
        if isinstance(fault, FailsBefore):
            raise fault.error(key)
        stat = self._store.put_file(key, path, **options)
        if isinstance(fault, FailsAfter):
            raise fault.error(key)
        if isinstance(fault, WrongBytes):
            body = self._store.get(key, max_bytes=1 << 40)
            return self._store.put(key, _flipped(body, fault.position))
        if isinstance(fault, ShortRead):
            return self._store.put(key, self._store.get(key, max_bytes=1 << 40)[: fault.size_bytes])
        return stat

    def get(self, key, *, max_bytes):
        fault = self._next("get", key)
        if isinstance(fault, FailsBefore):
            raise fault.error(key)
        body = self._store.get(key, max_bytes=max_bytes)
        return _flipped(body, fault.position) if isinstance(fault, WrongBytes) else body

    def get_range(self, key: str, start: int, end: int, *, into=None) -> Iterator[bytes]:
        fault = self._next("get_range", key)
        return self._ranged(fault, key, start, end)

    def _ranged(self, fault, key: str, start: int, end: int) -> Iterator[bytes]:
        if isinstance(fault, FailsBefore):
            raise fault.error(key)
        if isinstance(fault, Slow):
            assert fault.gate.wait(30), "the gate was not opened"
        if isinstance(fault, WrongRange):
            start, end = start + fault.shift, end + fault.shift
        body = b"".join(self._store.get_range(key, start, end))
        if isinstance(fault, ShortRead):
            yield body[: fault.size_bytes]
            raise StoreUnavailable(f"{key}: broke off")
        if isinstance(fault, SilentShortRead):
            body = body[: fault.size_bytes]
        if isinstance(fault, WrongBytes):
            body = _flipped(body, fault.position)
        for position in range(0, len(body), 256 * 1024):
            yield body[position : position + 256 * 1024]

    def head(self, key):
        fault = self._next("head", key)
        if isinstance(fault, FailsBefore):
            raise fault.error(key)
        return self._store.head(key)

    def list(self, prefix, **options):
        fault = self._next("list", prefix)
        if isinstance(fault, FailsBefore):
            raise fault.error(prefix)
        return self._store.list(prefix, **options)

    def folders(self, prefix, **options):
        fault = self._next("list", prefix)
        if isinstance(fault, FailsBefore):
            raise fault.error(prefix)
        return self._store.folders(prefix, **options)

    def delete(self, keys):
        for key in keys:
            fault = self._next("delete", key)
            if isinstance(fault, FailsBefore):
                raise fault.error(key)
            self._store.delete([key])

    def _next(self, call: str, key: str):
        self.before_call(call, key)
        with self._lock:
            self.calls.append((call, key))
            for planned in self._faults:
                wanted, fault, times, when = planned
                if wanted == call and when(key):
                    planned[2] = times - 1
                    if planned[2] == 0:
                        self._faults.remove(planned)
                    return fault
        return None


def _flipped(body: bytes, position: int) -> bytes:
    return body[:position] + bytes([body[position] ^ 0xFF]) + body[position + 1 :]
