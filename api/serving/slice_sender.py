"""Sends slices of files over a connection, with zero copy where that is possible. It knows no
protocol: a connection of any kind has one of these, and gives it heads and slices.

* There is one writer at a time: whatever the transport has buffered is written first, and nothing
  else is written while a slice is being sent.
* Only bytes in the page cache are sent on the event loop; a thread waits for the disk. Nothing is
  buffered here: what the socket does not accept stays in the file, however slow its peer is.
* The socket is used through a duplicate of its descriptor, since both asyncio and uvloop refuse
  `add_writer` on a transport's descriptor. Under TLS, and without a descriptor left, a thread reads
  the file, `TURN_BYTES` at a time, and the transport sends it.
* All large slices together may send `TURN_BYTES` per iteration of the loop, in FIFO order: the loop
  polls its sockets between iterations, so a small request waits for one such run of bytes, not for
  one of every large response in progress. Up to `SMALL_BYTES` do not wait for a turn.
* If a file is shorter than its slice, or a send fails, the connection is aborted: a peer may see a
  short response, never wrong bytes.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Final

import aiofiles.os

from tierlog.host import page_cache
from tierlog.host.file_slice import FileSlice
from tierlog.host.page_cache import HasFileno

SMALL_BYTES: Final = 64 << 10
TURN_BYTES: Final = 256 << 10
ALONE_TURN_BYTES: Final = 2 << 20
_MSG_MORE: Final[int] = getattr(socket, "MSG_MORE", 0)

SendTurn = Callable[[], int]
"""Sends the bytes of one turn. Returns how many were sent."""


class SendScheduler:
    """Whose turn it is to send. Belongs to the event loop of one server.

    A sender that waits for its socket or its disk is not in the queue; it calls `schedule` when it
    is ready.
    """

    __slots__ = ("_queue", "_scheduled")

    def __init__(self) -> None:
        self._queue: deque[SendTurn] = deque()
        self._scheduled = False

    @property
    def busy(self) -> bool:
        """Whether senders are waiting for their turn."""
        return bool(self._queue)

    def schedule(self, send: SendTurn, loop: asyncio.AbstractEventLoop) -> None:
        """Call `send` once, when it is its turn. It must not raise."""
        self._queue.append(send)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._run, loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        sent = 0
        while self._queue and sent < TURN_BYTES:
            sent += self._queue.popleft()()
        self._scheduled = bool(self._queue)
        if self._scheduled:
            loop.call_soon(self._run, loop)


class SliceSender:
    """The sending side of one connection, whose protocol forwards `pause_writing`, `resume_writing`
    and, when the connection is lost, `close`.

    `is_alone`: whether nobody else is being served, so that a turn may be longer.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        *,
        scheduler: SendScheduler,
        threads: Executor | None,
        is_alone: Callable[[], bool],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.scheduler, self.threads, self.is_alone = scheduler, threads, is_alone
        self._transport = transport
        socket_ = transport.get_extra_info("socket")
        # Not TLS: the socket may be used beside the transport.
        self.is_plain = socket_ is not None and transport.get_extra_info("sslcontext") is None
        self._sock: socket.socket | None = None  # a duplicate of the transport's
        self._writable = asyncio.Event()
        self._writable.set()
        self._transfer: _Transfer | None = None

    # --- the connection -------------------------------------------------------------------------

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def close(self) -> None:
        """The connection was lost."""
        self._writable.set()
        if self._transfer is not None:
            self._transfer.finish()
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def duplicate(self) -> socket.socket:
        """The plain connection's socket, not blocking. Raises OSError without a descriptor left."""
        if self._sock is None:
            raw = self._transport.get_extra_info("socket")
            self._sock = socket.socket(raw.family, raw.type, raw.proto, fileno=os.dup(raw.fileno()))
            self._sock.setblocking(False)
        return self._sock

    async def until_writable(self) -> None:
        """Return once the transport takes more, or the connection was lost."""
        if not self._writable.is_set():
            await self._writable.wait()

    # --- slices ---------------------------------------------------------------------------------

    def send_now(self, head: bytes, slices: Sequence[FileSlice]) -> tuple[FileSlice, ...] | None:
        """Send `head`, and of the slices what the socket accepts without waiting. Returns the rest;
        None, and nothing was sent, if a disk would have to be waited for. The transport has nothing
        buffered.
        """
        for piece in slices:
            if not page_cache.is_resident(piece.file.fd, piece.position, piece.size_bytes):
                return None
        head = self._send_head(head, more=True)
        if self._transport.is_closing():
            return ()
        if head:
            self._transport.write(head)
            return tuple(slices)
        out = self.duplicate().fileno()
        for index, (file, position, size_bytes) in enumerate(slices):
            try:
                sent = os.sendfile(out, file.fd, position, size_bytes)
            except OSError:  # the socket is full; any other error will be `send`'s to report
                sent = 0
            if sent < size_bytes:
                rest = FileSlice(file, position + sent, size_bytes - sent)
                return (rest, *slices[index + 1 :])
        return ()

    async def send(self, head: bytes, piece: FileSlice) -> None:
        """Send `head`, then the slice; nothing if the peer has disconnected.

        If the file is too short or the disk fails, aborts the connection and raises EOFError or
        OSError.
        """
        transport = self._transport
        if self.is_plain and not transport.get_write_buffer_size():
            head = self._send_head(head, more=piece.size_bytes > 0)
        if head or transport.get_write_buffer_size():
            await self._drain(head)
        if not piece.size_bytes or transport.is_closing():
            return
        try:
            await self._send_slice(piece)
        except ConnectionError:
            transport.abort()
        except (OSError, EOFError, asyncio.CancelledError):
            transport.abort()
            raise

    def _send_head(self, head: bytes, *, more: bool) -> bytes:
        """Send the head directly. Returns the part that the socket did not accept."""
        if not head:
            return head
        try:
            sock = self.duplicate()
        except OSError:  # no file descriptor left
            return head
        try:
            return head[sock.send(head, _MSG_MORE if more else 0) :]
        except BlockingIOError:
            return head
        except OSError:
            self._transport.abort()
            return b""

    async def _send_slice(self, piece: FileSlice) -> None:
        try:
            sock = self.duplicate() if self.is_plain else None
        except OSError:  # no file descriptor left
            sock = None
        if sock is None:
            await self._send_reads(piece)
            return
        self._transfer = _Transfer(self, sock, piece)
        try:
            await self._transfer.done
        finally:
            self._transfer.unwatch()
            self._transfer = None

    async def _send_reads(self, piece: FileSlice) -> None:
        file, position, size_bytes = piece
        end = position + size_bytes
        while position < end and not self._transport.is_closing():
            count = min(TURN_BYTES, end - position)
            data = await _read_at(file, count, position, executor=self.threads)
            if not data:
                raise _too_short()
            await self._drain(data)
            position += len(data)

    async def _drain(self, data: bytes) -> None:
        """Write `data` and wait until the transport has written everything it has buffered."""
        transport = self._transport
        transport.write(data)
        low, high = transport.get_write_buffer_limits()
        transport.set_write_buffer_limits(high=0)
        try:
            while transport.get_write_buffer_size() and not transport.is_closing():
                if not self._writable.is_set():
                    await self._writable.wait()
                else:
                    await asyncio.sleep(0)  # uvloop writes at the end of the iteration
        finally:
            transport.set_write_buffer_limits(high=high, low=low)


class _Transfer:
    """A range of a file on its way to the socket, turn by turn.

    `done` is a ConnectionError if the peer has disconnected, another OSError if the disk fails, an
    EOFError if the file is too short.
    """

    def __init__(self, sender: SliceSender, sock: socket.socket, piece: FileSlice) -> None:
        self._sender, self._loop, self._sock = sender, sender.loop, sock
        self._file, self._position, self._left = piece
        self._watching = self._queued = False
        self.done: asyncio.Future[None] = self._loop.create_future()
        if sender.scheduler.busy and self._left > SMALL_BYTES:
            self._on_writable()
        else:
            self._send_turn()  # immediately, with the head

    def finish(self, error: BaseException | None = None) -> None:
        """All was sent, or no more can be."""
        self.unwatch()
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)

    def unwatch(self) -> None:
        if self._watching:
            self._watching = False
            self._loop.remove_writer(self._sock.fileno())

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            self._loop.add_writer(self._sock.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        """Called in each iteration of the loop in which the socket is writable."""
        if not self._queued:
            self._queued = True
            self._sender.scheduler.schedule(self._send_turn, self._loop)

    def _send_turn(self) -> int:
        """Send one window, after loading it if necessary. Returns how many bytes were sent now."""
        self._queued = False
        if self.done.done():
            return 0
        window = min(self._left, ALONE_TURN_BYTES if self._sender.is_alone() else TURN_BYTES)
        try:
            resident = page_cache.is_resident(self._file.fileno(), self._position, window)
        except OSError as error:
            self.finish(error)
            return 0
        if resident:
            return self._send(window)
        self._load(window)
        return 0

    def _send(self, window: int) -> int:
        try:
            sent = os.sendfile(self._sock.fileno(), self._file.fileno(), self._position, window)
        except BlockingIOError:
            self._watch()
            return 0
        except OSError as error:
            # Otherwise the error is the socket's: the bytes are in memory.
            is_disk = error.errno == errno.EIO
            self.finish(error if is_disk else ConnectionResetError(str(error)))
            return 0
        self._position += sent
        self._left -= sent
        if not self._left:
            self.finish()
        elif not sent:
            self.finish(_too_short())
        else:
            self._watch()
        return sent

    def _load(self, window: int) -> None:
        """Load the window in a thread, then send it without checking again."""
        self.unwatch()
        waiting = self._loop.run_in_executor(
            self._sender.threads, page_cache.prefetch, self._file, self._position, window
        )

        def loaded(_: asyncio.Future[None]) -> None:
            error = None if waiting.cancelled() else waiting.exception()
            if self.done.done():
                return
            if error is None:
                self._send(window)
            else:
                self.finish(error)

        waiting.add_done_callback(loaded)


@aiofiles.os.wrap  # type: ignore[untyped-decorator]
def _read_at(file: HasFileno, size_bytes: int, position: int) -> bytes:
    """In a thread, which keeps the file open."""
    return os.pread(file.fileno(), size_bytes, position)


def _too_short() -> EOFError:
    return EOFError("the file is shorter than the announced range")
