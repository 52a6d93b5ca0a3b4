"""One connection of a Kafka client: frames in, answers out, in order.

* A frame is received straight into the buffer that its records stay in until they are in the log;
  what is small comes through one buffer that all connections share, since the event loop reads one
  at a time. A connection at rest holds no buffer.
* One request at a time, as Kafka's broker: while one is being answered, no more than the next one
  is read, so that a client that leaves is seen. Only a Produce may follow a Produce whose append is
  queued, so that one flush serves several.
* Bytes that are no request end the connection, with a line in the log: what follows them cannot be
  found. So does whatever a handler raises.
* What a client does not read stays in its file, or in the transport's buffer up to its limit; until
  it reads on, none of its requests begins.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec
import structlog

from tierlog.api.kafka.calls import Answer, Call, EndConnection, Later, Row, Session
from tierlog.api.kafka.error_codes import names_of_errors
from tierlog.api.kafka.versions import unsupported_version
from tierlog.api.serving.deadline import Deadline
from tierlog.api.serving.slice_sender import SMALL_BYTES, SliceSender
from tierlog.host.file_slice import FileSlice
from tierlog.host.page_cache import pread_nowait
from tierlog.host.waiting import WouldBlock
from tierlog.record_format.kafka_messages import codec
from tierlog.record_format.kafka_messages.codec import Part, RequestHead, UnsupportedVersion
from tierlog.record_format.kafka_messages.source import MessageError

if TYPE_CHECKING:
    from tierlog.api.kafka.listener import KafkaListener

log = structlog.get_logger(__name__)

SCRATCH_BYTES: Final = 64 << 10
_PIPELINE_MAX: Final = 5  # max.in.flight.requests.per.connection of an idempotent producer
_FRAME_MIN_BYTES: Final = 8


class _Begun:
    """A request that was begun and is not answered yet."""

    __slots__ = (
        "answer",
        "awaited",
        "head",
        "is_done",
        "is_ordered",
        "row",
        "size_bytes",
        "throttle_ms",
    )

    def __init__(self, head: RequestHead, row: Row | None, size_bytes: int) -> None:
        self.head, self.row, self.size_bytes = head, row, size_bytes
        self.awaited: asyncio.Future[Any] | None = None
        self.answer: Answer = None
        self.throttle_ms = 0
        self.is_done = self.is_ordered = False  # ordered: the next one may begin behind it


class KafkaConnection(asyncio.BufferedProtocol):
    def __init__(self, listener: KafkaListener) -> None:
        self._listener = listener
        self._context = listener.context
        self._loop = asyncio.get_running_loop()
        self._deadline = Deadline(self._loop, self._expired)
        self._rest = b""  # what came behind the frames that were taken, or a part of a size
        self._frame: bytearray | None = None  # is arriving
        self._filled = 0
        self._refused: tuple[int, bytes] | None = None  # a frame that waits for memory
        self._frames: deque[bytearray] = deque()  # whole, and not begun
        self._begun: deque[_Begun] = deque()
        self._unsent: deque[list[Part]] = deque()
        self._sending: asyncio.Task[None] | None = None
        self._is_paused = self._is_full = self._is_ending = False
        self._awaits_tokens = self._is_muted = False
        self._unmute_timer: asyncio.TimerHandle | None = None

    # --- the connection -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.sender = SliceSender(
            self.transport,
            scheduler=self._listener.scheduler,
            threads=self._context.workers.readers,
            is_alone=self._listener.is_alone,
        )
        self.session = Session(
            address=_address(transport.get_extra_info("peername"))[0],
            local=_address(transport.get_extra_info("sockname")),
            is_tls=transport.get_extra_info("sslcontext") is not None,
        )
        self._context.access.judge(self.session)
        if not self._listener.add_connection(self):
            self.transport.abort()
            return
        self._watch()

    def connection_lost(self, _: Exception | None) -> None:
        self._listener.remove_connection(self)
        self._deadline.stop()
        if self._unmute_timer is not None:
            self._unmute_timer.cancel()
        memory = self._context.memory
        memory.give_up(self)
        memory.release(sum(map(len, self._frames)) + (len(self._frame) if self._frame else 0))
        self._frames.clear()
        self._frame = self._refused = None
        for begun in self._begun:
            self._abandon(begun)
        self.sender.close()
        self._drop_unsent()
        for call in self.session.on_close:
            call()
        self.session.on_close.clear()

    def pause_writing(self) -> None:
        self._is_full = True
        self.sender.pause_writing()

    def resume_writing(self) -> None:
        self._is_full = False
        self.sender.resume_writing()
        self._proceed()

    def eof_received(self) -> bool:
        return False

    def end(self) -> None:
        """The server stops: answer what was begun, then close."""
        self._is_ending = True
        self._close_if_done()

    def abort(self) -> None:
        self.transport.abort()

    def _watch(self) -> None:
        """Limit how long the client may leave a frame half sent, and how long it may be idle."""
        settings = self._context.settings
        if self._begun or self._unsent or self._refused:
            self._deadline.clear()
        elif self._frame is not None or self._rest:
            self._deadline.set(settings.request_idle_timeout_ms / 1000)
        else:
            self._deadline.set(settings.connections_max_idle_ms / 1000)

    def _expired(self) -> None:
        self.transport.abort()

    def _refuse(self, error: str) -> None:
        log.warning("not a Kafka request", client=self.session.address, error=error)
        self.transport.abort()

    # --- input ----------------------------------------------------------------------------------

    def get_buffer(self, _sizehint: int) -> memoryview:
        if self._frame is not None:
            return memoryview(self._frame)[self._filled :]
        return self._listener.scratch

    def buffer_updated(self, nbytes: int) -> None:
        if self.transport.is_closing():  # TLS may bring more after a close
            return
        if self._frame is None:
            self._split(self._listener.scratch[:nbytes])
        else:
            self._filled += nbytes
            if self._filled == len(self._frame):
                self._frames.append(self._frame)
                self._frame = None
        self._proceed()

    def _split(self, data: memoryview) -> None:
        """Take frames from `data`, whole ones and the beginning of the last, as many as may begin
        at once.
        """
        if self._rest:
            data = memoryview(self._rest + bytes(data))
            self._rest = b""
        while len(data) >= codec.SIZE_BYTES and len(self._frames) < _PIPELINE_MAX:
            size = int.from_bytes(data[: codec.SIZE_BYTES], "big", signed=True)
            limit = self._listener.frame_max_bytes(self.session)
            if not _FRAME_MIN_BYTES <= size <= limit:
                self._refuse(f"a frame of {size} bytes; {_FRAME_MIN_BYTES} to {limit} are accepted")
                return
            part = data[codec.SIZE_BYTES : codec.SIZE_BYTES + size]
            data = data[codec.SIZE_BYTES + len(part) :]
            if len(part) == size:
                self._context.memory.force(size)
                self._frames.append(bytearray(part))
            else:
                self._begin_frame(size, bytes(part))
        self._rest = bytes(data)

    def _begin_frame(self, size: int, part: bytes) -> None:
        self._refused = (size, part)
        if self._context.memory.acquire(size, who=self, when_free=self._admit):
            self._admit()

    def _admit(self) -> None:
        """There is memory for the frame: receive the rest of it."""
        assert self._refused is not None, "it waited"
        (size, part), self._refused = self._refused, None
        self._frame, self._filled = bytearray(size), len(part)
        self._frame[: len(part)] = part
        self._regulate()
        self._watch()

    def _regulate(self) -> None:
        """Read on, unless something waits already."""
        if self.transport.is_closing():
            return
        is_full = self._is_full or self._is_muted
        pause = bool(is_full or self._frames or self._refused)
        if pause is not self._is_paused:
            self._is_paused = pause
            (self.transport.pause_reading if pause else self.transport.resume_reading)()

    def _is_pipelined(self) -> bool:
        return all(begun.row is not None and begun.row.is_pipelined for begun in self._begun)

    # --- requests -------------------------------------------------------------------------------

    def _proceed(self) -> None:
        if self.transport.is_closing():
            return
        while self._has_frame() and not self.transport.is_closing() and self._may_begin():
            if not self._context.access.is_current():
                self._await_tokens()
                break
            self._begin(self._frames.popleft())
        self._regulate()
        self._watch()

    def _has_frame(self) -> bool:
        if not self._frames and self._rest and self._frame is None and self._refused is None:
            self._split(memoryview(b""))
        return bool(self._frames)

    def _await_tokens(self) -> None:
        if not self._awaits_tokens:
            self._awaits_tokens = True
            self._context.access.call_when_current(self._tokens_read)

    def _tokens_read(self) -> None:
        self._awaits_tokens = False
        self._proceed()

    def _may_begin(self) -> bool:
        if self._is_full or self._is_muted or self._unsent or self._is_ending:
            return False
        if not self._begun:
            return True
        if len(self._begun) >= _PIPELINE_MAX or not self._is_pipelined():
            return False
        row = self._listener.row_of(self._frames[0])
        return row is self._begun[0].row and all(begun.is_ordered for begun in self._begun)

    def _begin(self, frame: bytearray) -> None:
        self._context.counts.received_bytes += codec.SIZE_BYTES + len(frame)
        try:
            head = codec.read_request_head(frame)
            row = self._listener.calls.get(head.api.name)
            if row is None:
                raise MessageError("not served", message=f"{head.api.name}Request", version=0)
            if refusal := self._context.access.refusal(self.session, row):
                self._context.memory.release(len(frame))
                self._refuse(f"{head.api.name}: {refusal}")
                return
            request = codec.decode_request(row.request, head, frame)
        except UnsupportedVersion as error:
            self._begin_unsupported(error, len(frame))
            return
        except MessageError as error:
            self._context.memory.release(len(frame))
            self._refuse(str(error))
            return
        begun = _Begun(head, row, len(frame))
        begun.throttle_ms = self._context.access.throttle_ms(self.session)
        self._begun.append(begun)
        try:
            answer = row.handle(Call(self._context, self.session, head), request)
        except Exception as error:  # noqa: BLE001  reported, and the connection ends
            self._fail(begun, error)
            return
        if isinstance(answer, msgspec.Struct) or answer is None:
            self._answered(begun, answer)
        else:
            self._await(begun, answer)

    def _begin_unsupported(self, error: UnsupportedVersion, size_bytes: int) -> None:
        """A newer client's ApiVersions is told what is served; any other request ends here."""
        self._context.memory.release(size_bytes)
        answer = unsupported_version(error, self._listener.calls)
        if answer is None:
            self._refuse(str(error))
            return
        head = RequestHead(error.api, 0, error.correlation_id, None, 0)
        self._begun.append(begun := _Begun(head, None, 0))
        self._answered(begun, answer)

    def _await(self, begun: _Begun, answer: Later | Coroutine[Any, Any, Answer | Later]) -> None:
        begun.is_ordered = isinstance(answer, asyncio.Future)
        awaited: asyncio.Future[Any] = (
            answer if isinstance(answer, asyncio.Future) else self._loop.create_task(answer)
        )
        begun.awaited = awaited
        awaited.add_done_callback(partial(self._awaited, begun))

    def _abandon(self, begun: _Begun) -> None:
        """The client is gone. What is pipelined ends by itself: its frame is in use until then."""
        is_pipelined = begun.row is not None and begun.row.is_pipelined
        if begun.awaited is not None and not is_pipelined:
            begun.awaited.cancel()

    def _awaited(self, begun: _Begun, future: asyncio.Future[Any]) -> None:
        begun.awaited = None
        if future.cancelled():
            self._context.memory.release(begun.size_bytes)
            self.transport.abort()
        elif (error := future.exception()) is not None:
            self._fail(begun, error)
        elif isinstance(answer := future.result(), asyncio.Future):
            self._await(begun, answer)
            if self.transport.is_closing():
                self._abandon(begun)
            self._proceed()
        else:
            self._answered(begun, answer)
            self._proceed()

    def _fail(self, begun: _Begun, error: BaseException) -> None:
        self._context.memory.release(begun.size_bytes)
        head = begun.head
        if isinstance(error, EndConnection):
            log.warning(
                "Kafka connection ended",
                client=self.session.address,
                client_id=head.client_id,
                api=head.api.name,
                reason=str(error),
            )
        else:
            _log_exception(head, error)
        self.transport.abort()

    def _answered(self, begun: _Begun, answer: Answer) -> None:
        self._context.memory.release(begun.size_bytes)
        begun.answer, begun.is_done = answer, True
        while self._begun and self._begun[0].is_done:
            first = self._begun.popleft()
            if not self._put_out(first):
                return
        self._is_ending = self._is_ending or self.session.is_refused
        if self.transport.is_closing():
            self._drop_unsent()
        else:
            self._send()

    def _put_out(self, begun: _Begun) -> bool:
        """Whether the answer could be written."""
        answer, head, counts = begun.answer, begun.head, self._context.counts
        for error in names_of_errors(answer):
            counts.answered(head.api.name, error)
        if begun.throttle_ms:
            counts.throttled_requests += 1
            self._mute(begun.throttle_ms)
        if answer is None:
            return True
        if begun.throttle_ms and hasattr(answer, "throttle_time_ms"):
            answer.throttle_time_ms = begun.throttle_ms
        try:
            parts = codec.response_frame(answer, head)
        except MessageError as error:
            _log_exception(head, error)
            self.transport.abort()
            return False
        counts.sent_bytes += codec.size_of_parts(parts)
        self._unsent.append(parts)
        return True

    def _mute(self, throttle_ms: int) -> None:
        """Read nothing more for so long: Kafka's quotas."""
        self._is_muted = True
        if self._unmute_timer is not None:
            self._unmute_timer.cancel()
        self._unmute_timer = self._loop.call_later(throttle_ms / 1000, self._unmute)

    def _unmute(self) -> None:
        self._is_muted, self._unmute_timer = False, None
        self._proceed()

    # --- answers --------------------------------------------------------------------------------

    def _send(self) -> None:
        """Send all that is small and in memory; a task goes on where it would have to wait."""
        if self._sending is not None:
            return
        out = bytearray()
        while self._unsent:
            parts = self._unsent[0]
            if (data := _in_memory(parts)) is None:
                self._sending = self._loop.create_task(self._send_parts())
                self._sending.add_done_callback(self._sent)
                break
            del self._unsent[0]
            out += data
        if out:
            self.transport.write(out)
        self._close_if_done()

    async def _send_parts(self) -> None:
        while self._unsent:
            parts = self._unsent[0]
            data = bytearray()
            try:
                for part in parts:
                    if isinstance(part, FileSlice):
                        await self.sender.send(bytes(data), part)
                        data.clear()
                    else:
                        data += cast(bytearray, part)
                if not self.transport.is_closing():
                    self.transport.write(data)
                    await self.sender.until_writable()
            finally:
                _close(parts)
                if self._unsent:
                    self._unsent.popleft()

    def _sent(self, task: asyncio.Task[None]) -> None:
        self._sending = None
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("exception while sending", client=self.session.address, exc_info=error)
            self.transport.abort()
        if self.transport.is_closing():
            self._drop_unsent()
            return
        self._send()  # what was answered since the task looked last
        self._proceed()

    def _drop_unsent(self) -> None:
        if self._sending is not None:
            return  # it closes them itself
        for parts in self._unsent:
            _close(parts)
        self._unsent.clear()

    def _close_if_done(self) -> None:
        if self._is_ending and not (self._begun or self._unsent or self._sending):
            self.transport.close()


def _log_exception(head: RequestHead, error: BaseException) -> None:
    log.error(
        "exception in a Kafka request", api=head.api.name, version=head.version, exc_info=error
    )


def _address(name: object) -> tuple[str, int]:
    """Host and port; of a client that came over IPv4 to a socket of both, its IPv4 address."""
    if not isinstance(name, tuple):
        return "", 0
    return str(name[0]).removeprefix("::ffff:"), int(name[1])


def _slices(parts: list[Part]) -> Iterator[FileSlice]:
    return (part for part in parts if isinstance(part, FileSlice))


def _close(parts: list[Part]) -> None:
    for piece in _slices(parts):
        piece.close()


def _in_memory(parts: list[Part]) -> bytearray | None:
    """The parts' bytes, with those of slices if they are few and in the page cache; their files are
    closed. None if a task has to send them.
    """
    if len(parts) == 1:
        return cast(bytearray, parts[0])  # the last is bytes
    if sum(piece.size_bytes for piece in _slices(parts)) > SMALL_BYTES:
        return None
    out = bytearray()
    for part in parts:
        if isinstance(part, FileSlice):
            try:
                data = pread_nowait(part.file.fd, part.size_bytes, part.position)
            except (WouldBlock, OSError):
                return None  # the sender waits for the disk, or reports what is wrong with it
            if len(data) < part.size_bytes:
                return None  # a file that is too short: the sender ends the connection
            out += data
        else:
            out += cast(bytearray, part)
    _close(parts)
    return out
