"""Fetches one chunk from the bucket: complete and verified, or an error that names the object.

* No byte is passed on before the length and CRC-32C of the whole chunk have been verified.
* Only this layer retries ranged GETs, by the store's retry policy: rounds within one deadline, each
  of one GET, and one more if the first is late (hedging). Hedges are limited to a twentieth of the
  requests, so that a uniformly slow store does not receive twice as many.
* Bytes that fail their CRC are fetched once more, since the network may be at fault; then it is
  CorruptObject. An error in one chunk does not affect others.
* Each thread of the pool reuses one buffer of a piece (256 KiB), since touching fresh pages costs
  several times more. The pool bounds the requests in flight.
"""

from __future__ import annotations

import os
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from tierlog.host.retry import ChecksumMismatch, retry_on_checksum_mismatch
from tierlog.host.threads import Threads
from tierlog.object_store.store import PIECE_BYTES, ObjectStore, Piece
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import StoreUnavailable, TierlogError, disk_full_error

T = TypeVar("T")

HEDGE_SHARE = 0.05
HEDGE_BURST = 2.0
HEDGE_AFTER_MEDIANS = 1.75  # so that a late GET takes less than three times the median in all
MIN_HEDGE_DELAY_S = 0.02
MIN_SAMPLES = 8
SAMPLES = 64


ChunkKey = tuple[str, int]


class ChunkRef(NamedTuple):
    """A chunk of a `.log` object. `key` is unique among all chunks: a valid name of a folder, and
    the chunk's number in the object.
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
    """The round's other GET finished first."""


def read_chunk(
    store: ObjectStore, chunk: ChunkRef, *, buffer: memoryview | None = None
) -> memoryview:
    """The chunk's verified bytes, for readers without a cache, such as Spark's executors.

    `buffer`, of at least the chunk's size, receives them if it is given; reusing one saves page
    faults. Raises CorruptObject, MissingObject, StoreUnavailable, ConfigurationError.
    """
    target = memoryview(bytearray(chunk.size_bytes)) if buffer is None else buffer
    body, into = target[: chunk.size_bytes], memoryview(bytearray(PIECE_BYTES))
    assert len(body) == chunk.size_bytes

    def attempt() -> memoryview:
        size = crc = 0
        for piece in store.get_range(chunk.log_key, chunk.position, chunk.end_position, into=into):
            body[size : size + len(piece)] = piece
            size += len(piece)
            crc = crc32c_of(piece, crc)
        _check(chunk, size_bytes=size, crc=crc)
        return body

    return retry_on_checksum_mismatch(
        lambda: store.read_policy.call_with_retries(attempt),
        file=chunk.log_key,
        position=chunk.position,
    )


WHOLE_PIECE_BYTES: Final = 8 << 20


def piece_ranges(size_bytes: int) -> Iterator[tuple[int, int]]:
    """The ranges in which an object is read that is read as a whole: of each, as much as is to be
    in memory.
    """
    for start in range(0, size_bytes, WHOLE_PIECE_BYTES):
        yield start, min(start + WHOLE_PIECE_BYTES, size_bytes)


def read_range(store: ObjectStore, key: str, start: int, end: int) -> bytes:
    """Bytes [start, end) of an object, which the caller has to verify. Raises CorruptObject,
    MissingObject, StoreUnavailable, ConfigurationError.
    """
    return store.read_policy.call_with_retries(lambda: b"".join(store.get_range(key, start, end)))


class Hedging:
    """Decides when a GET is late, and whether the budget allows another. Thread-safe.

    `spent` counts the hedges.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._durations_s: deque[float] = deque(maxlen=SAMPLES)
        self._budget = HEDGE_BURST
        self.spent = 0

    def delay_s(self) -> float | None:
        """How long to wait for the first GET; None while there are too few samples."""
        with self._lock:
            if len(self._durations_s) < MIN_SAMPLES:
                return None
            median = statistics.median(self._durations_s)
        return max(MIN_HEDGE_DELAY_S, HEDGE_AFTER_MEDIANS * median)

    def record(self, duration_s: float) -> None:
        """Record the duration of a GET that was not hedged."""
        with self._lock:
            self._durations_s.append(duration_s)

    def refill(self) -> None:
        with self._lock:
            self._budget = min(HEDGE_BURST, self._budget + HEDGE_SHARE)

    def maybe_spend(self) -> bool:
        with self._lock:
            if self._budget < 1:
                return False
            self._budget -= 1
            self.spent += 1
            return True


class RangedReader:
    """Fetches chunks into files, with at most `requests_max` GETs in flight."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        requests_max: int = 32,
        hedging: Hedging | None = None,
    ) -> None:
        self._store, self._policy = store, store.read_policy
        self._hedging = hedging or Hedging()
        self._requests = Threads(requests_max, name="cold-get")
        self._thread_local = threading.local()

    def fetch_chunk(self, chunk: ChunkRef, new_temp_path: Callable[[], Path]) -> Path:
        """A new file that holds exactly the chunk's bytes. On error no file remains.

        Raises CorruptObject, MissingObject, StoreUnavailable, ConfigurationError, DiskFull.
        """
        deadline = self._policy.monotonic() + self._policy.deadline_s

        def one_round() -> Path:
            return self._round(chunk, new_temp_path, deadline=deadline)

        return retry_on_checksum_mismatch(
            lambda: self._policy.call_with_retries(one_round),
            file=chunk.log_key,
            position=chunk.position,
        )

    def fetch_into(self, chunk: ChunkRef, buffer: memoryview) -> None:
        """Fetch the chunk's verified bytes into `buffer` on the calling thread."""
        read_chunk(self._store, chunk, buffer=buffer)

    def close(self) -> None:
        self._requests.shutdown(wait=True, cancel_futures=True)

    def _round(
        self, chunk: ChunkRef, new_temp_path: Callable[[], Path], *, deadline: float
    ) -> Path:
        """One GET, or two if the first is late; the first to succeed wins."""
        self._hedging.refill()
        began = self._policy.monotonic()
        stop = threading.Event()
        winner, temps = None, list[Path]()

        def new_path() -> Path:
            path = new_temp_path()
            temps.append(path)
            return path

        get = partial(self._get, chunk, new_path, stop, deadline=deadline)
        gets = [self._requests.submit(get)]
        try:
            is_late = bool(wait(gets, timeout=self._hedging.delay_s()).not_done)
            if is_late and self._hedging.maybe_spend():
                gets.append(self._requests.submit(get))
            winner = _first_success(gets)
            if len(gets) == 1:
                self._hedging.record(self._policy.monotonic() - began)
            return winner
        finally:
            stop.set()  # a GET that is still running removes its file itself
            for temp in temps:
                if temp != winner:
                    maybe_unlink(temp)
            # An error that refers to its own future keeps its frames alive, and so open files.
            del gets

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
            maybe_unlink(temp)
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
            _preallocate(fd, chunk.size_bytes, temp)
            pieces = self._store.get_range(
                chunk.log_key,
                chunk.position,
                chunk.end_position,
                into=self._buffer(),
            )
            with closing(pieces):  # type: ignore[type-var]  # stores return generators
                for piece in pieces:
                    if stop.is_set():
                        raise _Cancelled
                    if self._policy.monotonic() > deadline:
                        raise StoreUnavailable(f"{chunk.log_key}: the response is too slow")
                    crc = crc32c_of(piece, crc)
                    received += len(piece)
                    _write_all(fd, piece, temp)
        finally:
            os.close(fd)
        _check(chunk, size_bytes=received, crc=crc)

    def _buffer(self) -> memoryview:
        """The thread's own buffer."""
        buffer: memoryview | None = getattr(self._thread_local, "buffer", None)
        if buffer is None:
            buffer = self._thread_local.buffer = memoryview(bytearray(PIECE_BYTES))
        return buffer


def _first_success(gets: list[Future[Path]]) -> Path:
    """The path of the first GET to succeed."""
    waiting, last = set(gets), gets[0]
    while waiting:
        done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        for future in done:
            if future.exception() is None:
                return future.result()
            last = future
    try:
        return last.result()  # it failed, and so did all the others
    finally:
        del last, gets, waiting, done, future


def maybe_unlink(path: Path) -> None:
    """Unlink a file of the cache. It stays if its disk fails or is read-only: reads go on."""
    with suppress(OSError):
        path.unlink()


def _check(chunk: ChunkRef, *, size_bytes: int, crc: int) -> None:
    if size_bytes != chunk.size_bytes:
        raise StoreUnavailable(
            f"{chunk.log_key}: chunk {chunk.number}: received {size_bytes} of "
            f"{chunk.size_bytes} bytes"
        )
    if crc != chunk.crc32c:
        raise ChecksumMismatch(
            f"chunk {chunk.number} has CRC-32C {crc:08x}, but its chunk table has "
            f"{chunk.crc32c:08x}"
        )


def _preallocate(fd: int, size_bytes: int, path: Path) -> None:
    """Allocate the whole file at once: half the kernel's work, and a full disk fails early."""
    if hasattr(os, "posix_fallocate"):  # macOS has none, and does not need it
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
