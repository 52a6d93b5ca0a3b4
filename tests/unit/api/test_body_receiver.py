"""Receiving a body from a socket: how it ends, and that it leaves nothing in the event loop."""

import asyncio
import socket
from collections.abc import Callable

import pytest

from tierlog.api.protocol.body_receiver import BodyReceiver


def receive(
    act: Callable[[BodyReceiver, socket.socket], None],
    *,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> bytes:
    """A buffer of 10 bytes, after `act` was called with its receiver."""

    async def run() -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.setblocking(False)
            theirs.sendall(b"12345")
            loop, body = asyncio.get_running_loop(), bytearray(10)
            receiving = BodyReceiver(loop, ours, memoryview(body), idle_s=0.05, on_bytes=on_bytes)
            loop.call_soon(act, receiving, theirs)
            try:
                await receiving.receive_all()
            finally:
                assert not loop.remove_reader(ours.fileno()), "the loop was left watching"
            return bytes(body)

    return asyncio.run(run())


def test_returns_when_the_buffer_is_full_and_reads_no_further() -> None:
    def act(_: BodyReceiver, theirs: socket.socket) -> None:
        theirs.sendall(b"67890NEXT")

    assert receive(act) == b"1234567890"


def test_raises_when_its_connection_is_closed() -> None:
    with pytest.raises(ConnectionAbortedError):
        receive(lambda receiving, _: receiving.stop())


def test_raises_when_the_client_disconnects() -> None:
    with pytest.raises(ConnectionResetError):
        receive(lambda _, theirs: theirs.shutdown(socket.SHUT_WR))


def test_raises_when_nothing_arrives() -> None:
    with pytest.raises(TimeoutError):
        receive(lambda *_: None)


def test_raises_when_the_body_arrives_too_slowly() -> None:
    def refuse(came: int) -> None:
        raise ValueError(came)

    with pytest.raises(ValueError, match="5"):
        receive(lambda *_: None, on_bytes=refuse)
