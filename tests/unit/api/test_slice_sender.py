"""Slices over a protocol that is not HTTP: a frame's length, then its bytes."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvloop

from tierlog.api.serving.slice_sender import SendScheduler, SliceSender
from tierlog.host import page_cache
from tierlog.host.file_slice import FileSlice, OpenFile

SIZE = 5_000_001


class Frames(asyncio.Protocol):
    """Answers anything with the slices, as one frame."""

    def __init__(self, slices: tuple[FileSlice, ...], threads: ThreadPoolExecutor) -> None:
        self.slices, self.threads = slices, threads
        self.failures: list[BaseException] = []
        self.lost = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self.sender = SliceSender(
            transport, scheduler=SendScheduler(), threads=self.threads, is_alone=lambda: False
        )

    def pause_writing(self) -> None:
        self.sender.pause_writing()

    def resume_writing(self) -> None:
        self.sender.resume_writing()

    def connection_lost(self, _: Exception | None) -> None:
        self.sender.close()
        self.lost.set()

    def data_received(self, _: bytes) -> None:
        self.answering = asyncio.get_running_loop().create_task(self.answer())

    async def answer(self) -> None:
        head = sum(piece.size_bytes for piece in self.slices).to_bytes(4, "big")
        try:
            for piece in self.slices:
                await self.sender.send(head, piece)
                head = b""
        except EOFError as error:
            self.failures.append(error)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(SIZE))
    return path


async def frames(protocol: Frames, count: int) -> list[bytes]:
    """What a client reads that asks `count` times."""
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: protocol, "127.0.0.1", 0) as server:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        found = []
        try:
            for _ in range(count):
                writer.write(b"?")
                size = int.from_bytes(await reader.readexactly(4), "big")
                found.append(await reader.readexactly(size))
        finally:
            writer.close()
            await protocol.lost.wait()
    return found


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("resident", [True, False])
def test_slices_arrive_whole_whatever_the_protocol(
    path: Path, monkeypatch: pytest.MonkeyPatch, new_loop: Any, resident: bool
) -> None:
    if not resident:
        monkeypatch.setattr(page_cache, "is_resident", lambda *_: False)
    file, data = OpenFile(path), path.read_bytes()
    slices = (FileSlice(file, 7, 100), FileSlice(file, 0, SIZE), FileSlice(file, SIZE - 1, 1))
    with ThreadPoolExecutor(1) as threads, asyncio.Runner(loop_factory=new_loop) as runner:
        found = runner.run(frames(Frames(slices, threads), 2))
    assert found == [data[7:107] + data + data[-1:]] * 2


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_file_that_is_too_short_aborts_the_connection(path: Path, new_loop: Any) -> None:
    with ThreadPoolExecutor(1) as threads, asyncio.Runner(loop_factory=new_loop) as runner:
        protocol = Frames((FileSlice(OpenFile(path), 0, SIZE + 1),), threads)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            runner.run(frames(protocol, 1))
    assert [type(error) for error in protocol.failures] == [EOFError]
