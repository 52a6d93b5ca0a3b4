"""Questions to a leader: newer than who asks, shared, and over one connection."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable

import pytest

from tierlog.api.http.fetch import leader_heads
from tierlog.api.http.fetch.leader_heads import LeaderHeads
from tierlog.record_format.errors import PeerUnavailable


class Leader:
    """Numbers its answers, each of which waits for `may_answer`."""

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.connections = 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.arrived = asyncio.Event()
        self.closes_after_each = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                self.asked.append(await reader.readuntil(b"\r\n\r\n"))
                self.arrived.set()
                await self.may_answer.wait()
                writer.write(b"HTTP/1.1 200 OK\r\nLog-Number: %d\r\n\r\n" % len(self.asked))
                if self.closes_after_each:
                    break
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


def run(test: Callable[[Leader, LeaderHeads], Awaitable[None]]) -> None:
    async def main() -> None:
        leader = Leader()
        async with await asyncio.start_server(leader.serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            heads = LeaderHeads(f"http://127.0.0.1:{port}", ssl.create_default_context())
            await test(leader, heads)
            heads.close()

    asyncio.run(main())


async def number_of(heads: LeaderHeads, path: bytes = b"/a") -> int:
    found = await heads.ask(b"HEAD %b HTTP/1.1" % path)
    assert found.status == 200
    return int(found.headers["log-number"])


def test_who_asks_while_a_question_is_on_its_way_shares_the_next_one() -> None:
    async def test(leader: Leader, heads: LeaderHeads) -> None:
        leader.may_answer.clear()
        first = asyncio.ensure_future(number_of(heads))
        await leader.arrived.wait()
        later = [asyncio.ensure_future(number_of(heads)) for _ in range(3)]
        other = asyncio.ensure_future(number_of(heads, b"/b"))
        await asyncio.sleep(0)
        later[0].cancel()
        leader.may_answer.set()
        assert await first == 1
        assert await asyncio.gather(*later[1:], other) == [2, 2, 3]
        assert await number_of(heads) == 4
        assert leader.connections == 1
        assert b"\r\nhost: 127.0.0.1:" in leader.asked[0]

    run(test)


def test_a_connection_that_was_closed_while_it_rested_is_opened_again() -> None:
    async def test(leader: Leader, heads: LeaderHeads) -> None:
        leader.closes_after_each = True
        assert [await number_of(heads) for _ in range(3)] == [1, 2, 3]
        assert leader.connections == 3

    run(test)


def test_nobody_waits_for_a_leader_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_heads, "ANSWER_TIMEOUT_S", 0.2)

    async def test(leader: Leader, heads: LeaderHeads) -> None:
        leader.may_answer.clear()
        asked = [number_of(heads, path) for path in (b"/a", b"/b", b"/c")]
        failed = await asyncio.gather(*asked, return_exceptions=True)
        assert [type(one) for one in failed] == [PeerUnavailable] * 3
        before = len(leader.asked)
        assert before <= leader.connections  # one question on each, which ends with its wait
        leader.may_answer.set()
        monkeypatch.setattr(leader_heads, "ANSWER_TIMEOUT_S", 10.0)
        assert await number_of(heads) > before  # over another connection

    run(test)


def test_a_leader_that_is_gone_is_unavailable() -> None:
    async def test() -> None:
        heads = LeaderHeads("http://127.0.0.1:1", ssl.create_default_context())
        with pytest.raises(PeerUnavailable, match=r"127\.0\.0\.1:1"):
            await heads.ask(b"HEAD / HTTP/1.1")

    asyncio.run(test())
