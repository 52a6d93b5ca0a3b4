"""A store in a dict that tests may change by hand, with faults on demand.

* Exact: conditional create is atomic, LIST is in key order, everything is safe from any thread.
* `faults(call, key)` chooses a fault for each call; None means that the call succeeds.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum, auto

from tierlog.object_store.memory import MemoryStore
from tierlog.object_store.store import IncompleteUpload, ObjectStat
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import (
    ConfigurationError,
    MissingObject,
    ObjectExists,
    OutcomeUnknownError,
    StoreUnavailable,
)


class Fault(Enum):
    """What goes wrong with one call."""

    UNAVAILABLE = auto()  # nothing is changed, and the store reports it
    LOST_BEFORE = auto()  # the request never arrives, with an unknown outcome
    LOST_AFTER = auto()  # it is done, but the response is lost
    CONFLICT = auto()  # 412 although there is no object
    CUT = auto()  # the first half of the body is kept, the connection breaks
    REFUSED = auto()  # this key may not be deleted
    DELAYED = auto()  # no response; the request arrives when `deliver_delayed` is called


Faults = Callable[[str, str], Fault | None]


class PlainStore(MemoryStore):
    def __init__(
        self, *, clock: Callable[[], int] = lambda: 0, faults: Faults | None = None
    ) -> None:
        super().__init__()
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.calls: Counter[str] = Counter()
        self.overwritten: list[str] = []
        self.uploads: list[IncompleteUpload] = []
        self.faults: Faults = faults or (lambda call, key: None)
        self._clock = clock
        self._reentrant = threading.RLock()
        self._delayed: list[tuple[str, bytes]] = []

    def incomplete_uploads(self, prefix: str, *, limit: int) -> list[IncompleteUpload]:
        return [upload for upload in self.uploads if upload.key.startswith(prefix)][:limit]

    def abort_upload(self, upload: IncompleteUpload) -> None:
        self.uploads.remove(upload)

    def put(
        self,
        key: str,
        body: bytes | memoryview,
        *,
        if_absent: bool = False,
        crc32c: int | None = None,
    ) -> ObjectStat:
        fault = self._begin("put", key)
        body = bytes(body)
        with self._reentrant:
            if fault is Fault.CONFLICT:
                raise ObjectExists(key)
            if fault is Fault.DELAYED:
                self._delayed.append((key, body))
            if fault in (Fault.LOST_BEFORE, Fault.DELAYED):
                self._raise_no_response(key, if_absent=if_absent)
            if fault is Fault.CUT:
                self._store(key, body[: len(body) // 2], if_absent=if_absent)
                self._raise_no_response(key, if_absent=if_absent)
            stat = self._store(key, body, if_absent=if_absent)
            if fault is Fault.LOST_AFTER:
                self._raise_no_response(key, if_absent=if_absent)
            return stat

    def _store(self, key: str, body: bytes, *, if_absent: bool) -> ObjectStat:
        if key in self.objects:
            if if_absent:
                raise ObjectExists(key)
            self.overwritten.append(key)
        self.objects[key] = (body, self._clock())
        return self._stat(key)

    def _raise_no_response(self, key: str, *, if_absent: bool) -> None:
        error = OutcomeUnknownError if if_absent else StoreUnavailable
        raise error(f"{key}: no response")

    def deliver_delayed(self) -> None:
        """Delayed requests arrive now; their senders have given up on them."""
        with self._reentrant:
            for key, body in self._delayed:
                if key not in self.objects:
                    self.objects[key] = (body, self._clock())
            self._delayed.clear()

    def get(self, key: str, *, max_bytes: int) -> bytes:
        self._begin("get", key)
        with self._reentrant:
            if key not in self.objects:
                raise MissingObject("no such object", file=key)
            body = self.objects[key][0]
        assert len(body) <= max_bytes
        return body

    def head(self, key: str) -> ObjectStat | None:
        self._begin("head", key)
        with self._reentrant:
            return self._stat(key) if key in self.objects else None

    def list(self, prefix: str, *, start_after: str = "", limit: int = 1000) -> list[ObjectStat]:
        self._begin("list", prefix)
        assert limit <= 1000
        with self._reentrant:
            keys = sorted(k for k in self.objects if k.startswith(prefix) and k > start_after)
            return [self._stat(key) for key in keys[:limit]]

    def folders(self, prefix: str, *, limit: int) -> Sequence[str]:
        self._begin("list", prefix)
        with self._reentrant:
            inside = [key[len(prefix) :] for key in self.objects if key.startswith(prefix)]
        return sorted({rest.partition("/")[0] for rest in inside if "/" in rest})[:limit]

    def delete(self, keys: Sequence[str]) -> None:
        refused = [key for key in keys if self._begin("delete", key) is Fault.REFUSED]
        with self._reentrant:
            for key in set(keys).difference(refused):
                self.objects.pop(key, None)
        if refused:
            raise ConfigurationError(f"no permission to delete {refused[0]}")

    def _stat(self, key: str) -> ObjectStat:
        body, modified_ms = self.objects[key]
        return ObjectStat(key, len(body), crc32c_of(body), modified_ms)

    def _begin(self, call: str, key: str) -> Fault | None:
        with self._reentrant:
            self.calls[call] += 1
        fault = self.faults(call, key)
        if fault is Fault.UNAVAILABLE:
            raise StoreUnavailable(f"{call} {key}: the store is down")
        return fault
