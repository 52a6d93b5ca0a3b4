"""What clients do in the world of `replica_world`, at whatever broker says that it leads: producers
that are idempotent, a reader, and somebody who trims.
"""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from tests.simulation.replica_node import Killed, Node
from tests.simulation.replica_truth import Wrong
from tierlog.broker.partition.partition import Partition
from tierlog.hot_tier.log_writer import Acks, AppendResult
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import TierlogError
from tierlog.record_format.produced import ProduceLimits, check_produced

if TYPE_CHECKING:
    from tests.simulation.replica_world import World


class Producer:
    """An idempotent one: it repeats a batch until it is acknowledged."""

    def __init__(self, producer_id: int) -> None:
        self.producer_id, self.sequence = producer_id, 0
        self.values: list[bytes] = []
        self.asked: Future[AppendResult] | None = None
        self.node: Node | None = None


class Clients:
    """Each step is at one broker. What was answered is noted in the world's truth."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._producers = [Producer(100 + n) for n in range(3)]
        self._loose = 0
        self._trims: list[tuple[Partition, Node]] = []

    def trim(self, node: Node) -> None:
        partition = node.partition
        if partition is None:
            return
        partition.check_leadership()
        start, end = partition.log_start_offset, partition.high_watermark
        before = self._world.random.randint(start, start + (end - start) // 3)
        if before > start:
            node.janitor.trim_partition(partition, before)
            self._trims.append((partition, node))

    def produce(self, node: Node) -> None:
        partition = node.partition
        if partition is None:
            return
        if self._world.random.random() < 0.2:
            self._loose += 1
            values = [b"loose %d" % self._loose]
            partition.append(self.encoded(values), acks=Acks.LEADER)
            return
        one = self._world.random.choice(self._producers)
        self._resolve(one)
        if one.asked is not None:
            return
        if not one.values:
            count = self._world.random.randint(1, 3)
            one.values = [
                b"%d %d " % (one.producer_id, one.sequence + n)
                + b"x" * self._world.random.choice((0, 100, 300))
                for n in range(count)
            ]
        encoded = self.encoded(one.values, producer_id=one.producer_id, sequence=one.sequence)
        one.node, one.asked = node, partition.append(encoded, acks=Acks.ALL)

    def encoded(self, values: list[bytes], *, producer_id: int = -1, sequence: int = -1) -> Any:
        body = encode_batch(
            values,
            keys=self._world.keys_for(values),
            timestamps=[self._world.now_ms] * len(values),
            producer_id=producer_id,
            producer_epoch=0 if producer_id >= 0 else -1,
            base_sequence=sequence,
        )
        return check_produced(
            body, ProduceLimits(max_message_bytes=1 << 20, now_ms=self._world.now_ms)
        )

    def resolve(self, node: Node) -> None:
        for one in self._producers:
            self._resolve(one)
        for partition, leader in list(self._trims):
            if leader.is_dead or leader.partition is not partition:
                self._trims.remove((partition, leader))
                continue
            with suppress(TierlogError):
                start = partition.log_start_offset
                partition.wait_for_trim(timeout_s=0)
                self._world.truth.trimmed = max(self._world.truth.trimmed, start)
                self._trims.remove((partition, leader))

    def _resolve(self, one: Producer) -> None:
        asked, node = one.asked, one.node
        if asked is None or node is None:
            return
        if node.is_dead or (not asked.done() and self._world.random.random() < 0.1):
            one.asked = None  # it asks again: nobody knows what became of it
            return
        if not asked.done():
            return
        one.asked = None
        error = asked.exception()
        if error is None:
            result = asked.result()
            self._world.truth.acknowledge(
                result.base_offset, result.last_offset + 1, (one.producer_id, one.sequence)
            )
            one.sequence, one.values = one.sequence + len(one.values), []
        elif not isinstance(error, TierlogError | Killed):
            raise Wrong(f"an append failed with {error!r}") from error

    def read(self, node: Node) -> None:
        """A consumer's fetch, of either tier."""
        partition = node.partition
        if partition is None or partition.log_start_offset >= partition.high_watermark:
            return
        self._world.check()  # it may show more than it did after the last step
        offset = self._world.random.randint(
            partition.log_start_offset, partition.high_watermark - 1
        )
        self.read_from(partition, offset)

    def read_from(self, partition: Partition, offset: int) -> int:
        with closing(
            partition.read(offset, max_bytes=self._world.random.choice((1, 1 << 20)))
        ) as found:
            body = b"".join(piece.read() for piece in found.slices)
        for header in iter_headers(body):
            data = body[header.position : header.end_position]
            self._world.truth.check_read(data, str(partition))
        if found.next_offset <= offset:
            raise Wrong(f"{partition} ends at {offset}, and shows {partition.high_watermark}")
        return found.next_offset
