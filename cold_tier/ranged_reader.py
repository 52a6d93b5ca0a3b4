"""One chunk from the bucket, whole and checked, or an error that names the object.

* Not a byte is passed on before length and CRC-32C of the whole chunk have been checked.
* This is the one layer that retries a ranged GET, by the policy that the store was opened with:
  rounds with one deadline over all of them, each one GET and at most one more if the first is late
  (hedging). Hedges are limited to a twentieth of the requests, so that a store that is slow
  throughout does not get twice as many.
* Bytes that fail their CRC are fetched once more, since the network may be at fault; then it is
  CorruptObject. A fault of one chunk does not affect the others.
* Memory is one piece (256 KiB) per thread of the pool, which keeps it: pages that were touched
  before cost a fraction of fresh ones. The pool bounds the requests in flight.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from crc32c import crc32c as crc32c_of

from cold_tier.object_store import PIECE_BYTES, ObjectStore, Piece
from cold_tier.retry import ChecksumMismatch, RetryPolicy, retry_on_checksum_mismatch
from record_format.errors import StoreUnavailable, TierlogError, disk_full_error

T = TypeVar("T")

HEDGE_SHARE = 0.05
HEDGE_BURST = 2.0
HEDGE_AFTER_MEDIANS = 1.75  # so that a late GET takes less than three times the median in all
LEAST_HEDGE_DELAY_S = 0.02
MIN_SAMPLES = 8
SAMPLES = 64


ChunkKey = tuple[str, int]


class ChunkRef(NamedTuple):
    """A chunk of a `.log` object. `key`: what no chunk of another object shares, fit for the names
    of a folder and of a file in it; its number in the object comes second.
    """

    log_key: str
    key: ChunkKey
    position: int
    size_bytes: int
    crc32c: int

    @property
    def number(self) -> int:
        return self.key[1]

    @property
    def end_position(self) -> int:
        return self.position + self.size_bytes


class _Cancelled(TierlogError):
    """The other GET of the round was faster."""


def read_chunk(
    store: ObjectStore,
    chunk: ChunkRef,
    *,
    room: memoryview | None = None,
    policy: RetryPolicy | None = None,
) -> memoryview:
    """The chunk's bytes, checked, in memory: for readers without a cache, as Spark's executors.

    They are put in `room`, of at least the chunk's size, if it is given: pages that were touched
    before cost a fraction of fresh ones. Raises CorruptObject, MissingObject, StoreUnavailable,
    ConfigurationError.
    """
    whole = memoryview(bytearray(chunk.size_bytes)) if room is None else room
    body, into = whole[: chunk.size_bytes], memoryview(bytearray(PIECE_BYTES))
    assert len(body) == chunk.size_bytes

    def attempt() -> memoryview:
        size = crc = 0
        for piece in store.get_range(chunk.log_key, chunk.position, chunk.end_position, into=into):
            body[size : size + len(piece)] = piece
            size += len(piece)
            crc = crc32c_of(piece, crc)
        _check(chunk, size_bytes=size, crc=crc)
        return body

    chosen = policy or store.read_policy
    return retry_on_checksum_mismatch(
        lambda: chosen.run(attempt), file=chunk.log_key, position=chunk.position
    )


def read_range(
    store: ObjectStore, key: str, start: int, end: int, *, policy: RetryPolicy | None = None
) -> bytes:
    """Bytes [start, end) of an object, as the store has them: the caller has to check them. Raises
    CorruptObject, MissingObject, StoreUnavailable, ConfigurationError.
    """
    return (policy or store.read_policy).run(lambda: b"".join(store.get_range(key, start, end)))


class Hedging:
    """When a GET counts as late, and whether there is budget for another; how many were `spent`.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._durations_s: deque[float] = deque(maxlen=SAMPLES)
        self._budget = HEDGE_BURST
        self.spent = 0

    def delay_s(self) -> float | None:
        """How long to wait for the first GET; None as long as too little is known."""
        with self._lock:
            if len(self._durations_s) < MIN_SAMPLES:
                return None
            median = statistics.median(self._durations_s)
        return max(LEAST_HEDGE_DELAY_S, HEDGE_AFTER_MEDIANS * median)

    def record(self, duration_s: float) -> None:
        """Note how long a GET took that was not hedged."""
        with self._lock:
            self._durations_s.append(duration_s)

    def earn(self) -> None:
        with self._lock:
            self._budget = min(HEDGE_BURST, self._budget + HEDGE_SHARE)

    def spend(self) -> bool:
        with self._lock:
            if self._budget < 1:
                return False
            self._budget -= 1
            self.spent += 1
            return True


class RangedReader:
    """Fetches chunks into files. `requests_max` GETs are in flight, whoever asks."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        requests_max: int = 32,
        policy: RetryPolicy | None = None,
        hedging: Hedging | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._monotonic = store, monotonic
        self._policy = policy or store.read_policy
        self._hedging = hedging or Hedging()
        self._requests = ThreadPoolExecutor(requests_max, thread_name_prefix="cold-get")
        self._own = threading.local()

    def fetch(self, chunk: ChunkRef, new_temp_path: Callable[[], Path]) -> Path:
        """A new file that holds exactly the chunk's bytes; nothing else is left behind.

        Raises CorruptObject, MissingObject, StoreUnavailable, ConfigurationError, DiskFull.
        """
        deadline = self._monotonic() + self._policy.deadline_s

        def one_round() -> Path:
            return self._round(chunk, new_temp_path, deadline=deadline)

        return retry_on_checksum_mismatch(
            lambda: self._policy.run(one_round), file=chunk.log_key, position=chunk.position
        )

    def fetch_into(self, chunk: ChunkRef, room: memoryview) -> None:
        """The chunk's bytes, checked, into memory of its size, on the caller's thread."""
        read_chunk(self._store, chunk, room=room, policy=self._policy)

    def close(self) -> None:
        self._requests.shutdown(wait=True, cancel_futures=True)

    def _round(
        self, chunk: ChunkRef, new_temp_path: Callable[[], Path], *, deadline: float
    ) -> Path:
        """One GET, or two where the first is late; the first that is right wins."""
        self._hedging.earn()
        began = self._monotonic()
        stop = threading.Event()
        get = partial(self._get, chunk, new_temp_path, stop, deadline=deadline)
        first = self._requests.submit(get)
        gets, done = [first], set[Future[Path]]()
        try:
            done, _ = wait(gets, timeout=self._hedging.delay_s())
            if not done and self._hedging.spend():
                gets.append(self._requests.submit(get))
            path = _first_right(gets, stop)
            if len(gets) == 1:
                self._hedging.record(self._monotonic() - began)
            return path
        finally:
            # An error that holds its own future keeps alive what its frames hold: open files.
            del first, gets, done

    def _get(
        self,
        chunk: ChunkRef,
        new_temp_path: Callable[[], Path],
        stop: threading.Event,
        *,
        deadline: float,
    ) -> Path:
        if stop.is_set():
            raise _Cancelled
        temp = new_temp_path()
        try:
            self._stream(chunk, temp, stop, deadline=deadline)
            if stop.is_set():
                raise _Cancelled
        except BaseException:
            temp.unlink(missing_ok=True)
            raise
        return temp

    def _stream(
        self, chunk: ChunkRef, temp: Path, stop: threading.Event, *, deadline: float
    ) -> None:
        received = crc = 0
        try:
            fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise disk_full_error(f"chunk cache {temp.parent}", error) from error
        try:
            _set_aside(fd, chunk.size_bytes, temp)
            pieces = self._store.get_range(
                chunk.log_key,
                chunk.position,
                chunk.end_position,
                into=self._buffer(),
            )
            with closing(pieces):  # type: ignore[type-var]  # stores answer with generators
                for piece in pieces:
                    if stop.is_set():
                        raise _Cancelled
                    if self._monotonic() > deadline:
                        raise StoreUnavailable(f"{chunk.log_key}: the response is too slow")
                    crc = crc32c_of(piece, crc)
                    received += len(piece)
                    _write_all(fd, piece, temp)
        finally:
            os.close(fd)
        _check(chunk, size_bytes=received, crc=crc)

    def _buffer(self) -> memoryview:
        """Kept by each thread, for one answer at a time."""
        kept: memoryview | None = getattr(self._own, "buffer", None)
        if kept is None:
            kept = self._own.buffer = memoryview(bytearray(PIECE_BYTES))
        return kept


def _first_right(gets: list[Future[Path]], stop: threading.Event) -> Path:
    """The first path; the other GET is told to stop, and cleans up after itself."""
    waiting, last = set(gets), gets[0]
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        right = [future for future in done if future.exception() is None]
        if right:
            stop.set()
            for late in [*right[1:], *waiting]:
                late.add_done_callback(_remove_result)
            return right[0].result()
        last = next(iter(done))
    try:
        return last.result()  # it failed, and so did all the others
    finally:
        del last, gets, waiting, done


def _remove_result(late: Future[Path]) -> None:
    if not late.cancelled() and late.exception() is None:
        late.result().unlink(missing_ok=True)


def _check(chunk: ChunkRef, *, size_bytes: int, crc: int) -> None:
    if size_bytes != chunk.size_bytes:
        raise StoreUnavailable(
            f"{chunk.log_key}: chunk {chunk.number} came with {size_bytes} of "
            f"{chunk.size_bytes} bytes"
        )
    if crc != chunk.crc32c:
        raise ChecksumMismatch(
            f"chunk {chunk.number} came with CRC-32C {crc:08x}, the chunk table says "
            f"{chunk.crc32c:08x}"
        )


def _set_aside(fd: int, size_bytes: int, path: Path) -> None:
    """Blocks for the whole file at once: half the kernel's work, and a full disk is known now."""
    if hasattr(os, "posix_fallocate"):  # macOS has none, and needs none
        try:
            os.posix_fallocate(fd, 0, size_bytes)
        except OSError as error:
            raise disk_full_error(f"chunk cache {path.parent}", error) from error


def _write_all(fd: int, piece: Piece, path: Path) -> None:
    rest = memoryview(piece)
    try:
        while rest:
            rest = rest[os.write(fd, rest) :]
    except OSError as error:
        raise disk_full_error(f"chunk cache {path.parent}", error) from error
