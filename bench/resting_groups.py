"""Consumers of groups that have nothing to read, in a process of their own: `resting_groups PORT`.

* They ask as Java's consumer does with its defaults. Each has a connection to its coordinator (a
  heartbeat every 3 s, a commit of its position every 5 s), and one to the leader: a fetch that
  waits for 500 ms, in an incremental session.
* "resting" is printed once all are members.
"""

from __future__ import annotations

import asyncio
import struct
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from bench.children import START_TIMEOUT_S, running
from bench.kafka_frames import FETCH_VERSION, MIB, answer_of, fetch_request, frame_of
from tierlog.record_format.kafka_messages.messages import (
    FindCoordinatorRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    OffsetCommitRequest,
    SyncGroupRequest,
)

TOPIC: Final = "resting"
GROUPS: Final = 50
MEMBERS: Final = 10  # of each group, with a partition each
HEARTBEAT_S: Final = 3
COMMIT_S: Final = 5


@contextmanager
def resting(port: int, *, log: Path) -> Iterator[None]:
    with running([sys.executable, "-m", "bench.resting_groups", str(port)], log=log) as child:
        deadline = time.monotonic() + START_TIMEOUT_S
        while b"resting" not in log.read_bytes():
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the consumers did not join: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield


class Link:
    """A connection on which one request waits for its answer."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, port: int) -> Link:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def ask(self, request: msgspec.Struct, version: int) -> Any:
        self._writer.write(frame_of(request, version))
        (size,) = struct.unpack(">i", await self._reader.readexactly(4))
        return answer_of(request, version, await self._reader.readexactly(size))


class Consumer:
    def __init__(self, port: int, number: int) -> None:
        self._port, self._partition = port, number % MEMBERS
        self._group = f"group-{number // MEMBERS}"
        self._member, self._generation = "", -1
        self.has_joined = asyncio.Event()

    async def coordinate(self) -> None:
        link = await Link.open(self._port)
        error = await self._join(link)
        for second in range(self._partition, sys.maxsize):
            await asyncio.sleep(1)
            if error:
                error = await self._join(link)
            elif second % HEARTBEAT_S == 0:
                beat = HeartbeatRequest(self._group, self._generation, self._member)
                error = (await link.ask(beat, 3)).error_code
            elif second % COMMIT_S == 0:
                await link.ask(self._commit(), 7)

    async def _join(self, link: Link) -> int:
        # Kafka creates the topic of offsets when it is first asked for a coordinator.
        found: int = (await link.ask(FindCoordinatorRequest(self._group), 2)).error_code
        if found:
            return found
        protocols = [JoinGroupRequest.JoinGroupRequestProtocol("range", b"")]
        join = JoinGroupRequest(
            self._group, 45_000, 300_000, self._member, None, "consumer", protocols
        )
        joined = await link.ask(join, 3)
        self._member, self._generation = joined.member_id, joined.generation_id
        everyone = [
            SyncGroupRequest.SyncGroupRequestAssignment(one.member_id, b"")
            for one in joined.members
        ]
        sync = SyncGroupRequest(self._group, self._generation, self._member, assignments=everyone)
        error: int = (await link.ask(sync, 2)).error_code
        if not error:
            self.has_joined.set()
        return error

    def _commit(self) -> OffsetCommitRequest:
        position = OffsetCommitRequest.OffsetCommitRequestPartition(
            self._partition, 0, committed_metadata=""
        )
        topics = [OffsetCommitRequest.OffsetCommitRequestTopic(TOPIC, partitions=[position])]
        return OffsetCommitRequest(self._group, self._generation, self._member, topics=topics)

    async def fetch(self) -> None:
        await self.has_joined.wait()
        link, session, epoch = await Link.open(self._port), 0, 0
        offsets = {self._partition: 0}
        while True:
            fields = {"max_wait_ms": 500, "session_id": session, "session_epoch": epoch}
            request = fetch_request(TOPIC, offsets, max_bytes=MIB, **fields)
            answer = await link.ask(request, FETCH_VERSION)
            assert answer.session_id, "the broker keeps no session"
            session, epoch, offsets = answer.session_id, epoch + 1, {}


async def main(port: int) -> None:
    consumers = [Consumer(port, number) for number in range(GROUPS * MEMBERS)]
    async with asyncio.TaskGroup() as tasks:
        for one in consumers:
            tasks.create_task(one.coordinate())
            tasks.create_task(one.fetch())
        for one in consumers:
            await one.has_joined.wait()
        print("resting", flush=True)


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
