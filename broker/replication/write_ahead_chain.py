"""A write-ahead chain in the bucket: written by one life of one broker, closed and read by whoever
claims for the bucket. `write_ahead` has the rules.

    wal/<broker>/<life>/<20-digit number>.wal        docs/formats/write-ahead.md

* The writer repeats the same bytes under the same number until the store says what has it: nothing
  is decided by absence, nor by an error.
* It acknowledges in the order of the numbers. A number that something else has ends it (R12).
"""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from struct import Struct
from typing import Final, NamedTuple

import structlog

from tierlog.broker.replication.write_ahead import (
    IN_FLIGHT_MAX,
    Slice,
    collectable,
    next_fence,
    store_slices,
)
from tierlog.cold_tier.ranged_reader import read_range
from tierlog.cold_tier.write_ahead_object import (
    FENCE,
    Part,
    Place,
    StoredPart,
    pack_parts,
    read_parts,
)
from tierlog.host.retry import ChecksumMismatch, backoff_s, retry_on_checksum_mismatch
from tierlog.host.threads import Threads
from tierlog.object_store.ledger import WRITE_AHEAD_PREFIX
from tierlog.object_store.store import ObjectStat, ObjectStore
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import (
    CorruptObject,
    FencedError,
    MissingObject,
    ObjectExists,
    OutcomeUnknownError,
    ShuttingDown,
    TierlogError,
)

log = structlog.get_logger(__name__)

LIST_LIMIT: Final = 1000
READS_MAX: Final = 16
CLOSED_MAX: Final = 4
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 2.0
_NUMBER: Final = re.compile(r"([0-9]{20})\.wal")
_ROW: Final = Struct(">qiqqqqII")  # number, then what a `StoredPart` has beside its place


def chain_folder(chain: str) -> str:
    """`chain`: as sets of replicas name it, `<broker>/<life>`."""
    return f"{WRITE_AHEAD_PREFIX}{chain}/"


def _key(folder: str, number: int) -> str:
    return f"{folder}{number:020}.wal"


# --- writing --------------------------------------------------------------------------------------


class ChainWriter:
    """Thread-safe; `close` ends its threads."""

    def __init__(
        self,
        store: ObjectStore,
        folder: str,
        *,
        threads: Executor | None = None,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.folder = folder
        self._store, self._pause = store, pause
        self._threads = threads or Threads(IN_FLIGHT_MAX, name="write-ahead")
        self._lock = threading.Lock()
        self._next = 0
        self._sent: deque[Future[None]] = deque()  # in the order of their numbers
        self._landed: set[Future[None]] = set()
        self._end: Exception | None = None  # why nothing is written any more

    @property
    def has_room(self) -> bool:
        with self._lock:
            return len(self._sent) < IN_FLIGHT_MAX

    def send(self, parts: Sequence[Part]) -> Future[None]:
        """Write the next object; there has to be room. Does not wait. The future completes once it
        and all before it are in the bucket; it raises FencedError, and ShuttingDown after `close`:
        then it may be there, or not.
        """
        body, done = pack_parts(parts), Future[None]()
        assert parts, "without one it is a fence"
        with self._lock:
            assert len(self._sent) < IN_FLIGHT_MAX, "readers rely on it"
            if self._end is not None:
                done.set_exception(self._end)
                return done
            number, self._next = self._next, self._next + 1
            self._sent.append(done)
            self._threads.submit(self._write, _key(self.folder, number), body, done)
        return done

    def close(self, *, wait: bool = True) -> None:
        self._give_up(ShuttingDown("the broker stops"))
        self._threads.shutdown(wait=wait)

    def _write(self, key: str, body: bytes, done: Future[None]) -> None:
        failures = 0
        while self._end is None:
            try:
                is_ours = self._try_write(key, body)
            except TierlogError as error:  # it may have landed, or land later
                failures += 1
                log.warning("a write-ahead object is not known to be stored", error=str(error))
                self._pause(backoff_s(failures, first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S))
                continue
            if is_ours:
                self._acknowledge(done)
            else:
                self._give_up(FencedError(f"{key} is another's: a fence, or cut short"))
            return

    def _try_write(self, key: str, body: bytes) -> bool:
        """Whether the number is ours. Raises what tells nothing."""
        try:
            self._store.put(key, body, if_absent=True)
        except ObjectExists:
            try:
                return self._store.get(key, max_bytes=len(body)) == body
            except MissingObject as gone:  # it was ours, and collected: it may be there again
                raise OutcomeUnknownError(key) from gone
            except CorruptObject:  # larger than ours
                return False
        return True

    def _acknowledge(self, done: Future[None]) -> None:
        with self._lock:
            self._landed.add(done)
            ready = []
            while self._sent and self._sent[0] in self._landed:
                self._landed.discard(self._sent[0])
                ready.append(self._sent.popleft())
        for one in ready:
            one.set_result(None)

    def _give_up(self, error: Exception) -> None:
        with self._lock:
            if self._end is not None:
                return
            self._end = error
            waiting = list(self._sent)
            self._sent.clear()
        for one in waiting:
            one.set_exception(error)


# --- closing, reading -----------------------------------------------------------------------------


class ClosedChain:
    """A chain that nothing is acknowledged in any more."""

    def __init__(self, store: ObjectStore, folder: str) -> None:
        """Close it (`write_ahead`), and read the heads of its objects. Raises CorruptObject,
        StoreUnavailable.
        """
        self._store, self._folder = store, folder
        self._rows: defaultdict[Place, bytearray] = defaultdict(bytearray)  # there may be millions
        objects = close_chain(store, folder)
        with Threads(READS_MAX, name="write-ahead-heads") as threads:
            heads = threads.map(partial(_read_head, store, folder), objects, objects.values())
            for number, parts in zip(objects, heads, strict=True):
                for part in parts:
                    self._rows[part.place] += _ROW.pack(number, *part[1:])

    def parts(self, place: Place, *, epoch: int, end_offset: int) -> list[tuple[int, StoredPart]]:
        """Numbers and parts that continue a partition's manifest, which ends at `end_offset` and
        was read after this was made; `epoch`: of the version that names the chain.
        """
        rows = _ROW.iter_unpack(self._rows.get(place, b""))
        known = {number: StoredPart(place, *rest) for number, *rest in rows}
        slices = [Slice(n, p.epoch, p.base_offset, p.end_offset) for n, p in known.items()]
        wanted = store_slices(slices, epoch=epoch, end_offset=end_offset)
        return [(one.number, known[one.number]) for one in wanted]

    def read(self, number: int, part: StoredPart) -> bytes:
        """Its batches, verified. Raises CorruptObject, MissingObject, StoreUnavailable."""
        key, end = _key(self._folder, number), part.position + part.size_bytes

        def fetch() -> bytes:
            data = read_range(self._store, key, part.position, end)
            if crc32c_of(data) != part.crc32c:
                raise ChecksumMismatch(f"the part at {part.position} fails its CRC-32C")
            return data

        return retry_on_checksum_mismatch(fetch, file=key, position=part.position)


class ClosedChains:
    """The last that were closed here: who claims a thousand partitions closes their chain once.
    Thread-safe.
    """

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._closing = threading.Lock()
        self._closed: OrderedDict[str, ClosedChain] = OrderedDict()

    def close(self, chain: str) -> ClosedChain:
        """Raises what `ClosedChain` does."""
        with self._closing:
            if chain not in self._closed:
                self._closed[chain] = ClosedChain(self._store, chain_folder(chain))
                if len(self._closed) > CLOSED_MAX:
                    self._closed.popitem(last=False)
            return self._closed[chain]


def _read_head(store: ObjectStore, folder: str, number: int, stat: ObjectStat) -> list[StoredPart]:
    """The parts of an object that was listed. None if it was collected since: every manifest
    reaches above it, and a fence may have its number.
    """
    key = _key(folder, number)

    def read(start: int, end: int) -> bytes:
        return read_range(store, key, start, end)

    try:
        return read_parts(read, size_bytes=stat.size_bytes, file=key)
    except MissingObject:
        return []
    except CorruptObject:
        if store.get(key, max_bytes=stat.size_bytes) == FENCE:
            return []
        raise


def close_chain(store: ObjectStore, folder: str) -> dict[int, ObjectStat]:
    """Fence it until it is closed. Its objects, without fences. Raises StoreUnavailable."""
    while True:
        listed = _list(store, folder)
        fences = _fences(store, folder, listed)
        number = next_fence({n: n in fences for n in listed})
        if number is None:
            return {n: stat for n, stat in listed.items() if n not in fences}
        with suppress(ObjectExists, OutcomeUnknownError):  # the next LIST tells
            store.put(_key(folder, number), FENCE, if_absent=True)


def _list(store: ObjectStore, folder: str) -> dict[int, ObjectStat]:
    found: dict[int, ObjectStat] = {}
    after = ""
    while True:
        page = store.list(folder, start_after=after, limit=LIST_LIMIT)
        for stat in page:
            if (match := _NUMBER.fullmatch(stat.key.removeprefix(folder))) is not None:
                found[int(match[1])] = stat
        if len(page) < LIST_LIMIT:
            return found
        after = page[-1].key


def _fences(store: ObjectStore, folder: str, listed: Mapping[int, ObjectStat]) -> set[int]:
    """Those of these objects that are; what an interrupted PUT left may have a fence's size."""
    return {
        number
        for number, stat in listed.items()
        if stat.size_bytes == len(FENCE)
        and store.get(_key(folder, number), max_bytes=len(FENCE)) == FENCE
    }


# --- collecting -----------------------------------------------------------------------------------


def chains_of(store: ObjectStore, folder: str = "") -> Iterator[str]:
    """The chains that have objects, or fences; of one broker's folder, or of all."""
    prefix = after = f"{WRITE_AHEAD_PREFIX}{folder}/" if folder else WRITE_AHEAD_PREFIX
    while page := store.list(prefix, start_after=after, limit=1):
        broker, life, _ = page[0].key.removeprefix(WRITE_AHEAD_PREFIX).split("/")
        yield f"{broker}/{life}"
        after = chain_folder(f"{broker}/{life}") + "~"  # above each number


def collect(
    store: ObjectStore, folder: str, is_covered: Callable[[Collection[StoredPart]], bool]
) -> int:
    """Delete what the manifests cover, from the chain's beginning up to the first object that they
    do not; how many. `is_covered`: whether they reach above all of these parts. Raises
    CorruptObject, StoreUnavailable.
    """
    listed = _list(store, folder)
    fences, covered = _fences(store, folder, listed), dict.fromkeys(listed, False)
    for number in sorted(listed.keys() - fences):
        covered[number] = is_covered(_read_head(store, folder, number, listed[number]))
        if not covered[number]:
            break
    gone = collectable({n: n in fences for n in listed}, covered)
    for start in range(0, len(gone), LIST_LIMIT):
        store.delete([_key(folder, number) for number in gone[start : start + LIST_LIMIT]])
    return len(gone)


class Remaining(NamedTuple):
    """An object that is not collected. `is_newest`: kept as long as its chain is not closed."""

    key: str
    is_fence: bool
    is_newest: bool
    parts: list[StoredPart]


def remaining(store: ObjectStore, chain: str) -> Iterator[Remaining]:
    """What there is of a chain. Raises CorruptObject, StoreUnavailable."""
    folder = chain_folder(chain)
    listed = _list(store, folder)
    fences = _fences(store, folder, listed)
    is_open = next_fence({n: n in fences for n in listed}) is not None
    newest = max(listed.keys() - fences, default=-1) if is_open else -1
    for number, stat in sorted(listed.items()):
        parts = [] if number in fences else _read_head(store, folder, number, stat)
        yield Remaining(_key(folder, number), number in fences, number == newest, parts)
