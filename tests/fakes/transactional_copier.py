"""A transactional producer by the calls themselves, which goes on whatever fails: each call may be
repeated, so that in the end it knows of each transaction whether it was committed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from tests.fakes.kafka_caller import KafkaCaller
from tests.fakes.kafka_requests import batch_of, produce_request
from tests.fakes.waiting import until
from tierlog.api.kafka.error_codes import Code
from tierlog.record_format.kafka_messages import messages as m

PATIENCE_S = 60
DONE = {Code.NONE, Code.DUPLICATE_SEQUENCE_NUMBER}
COMES_AGAIN = {
    Code.COORDINATOR_NOT_AVAILABLE,
    Code.COORDINATOR_LOAD_IN_PROGRESS,
    Code.NOT_COORDINATOR,
    Code.CONCURRENT_TRANSACTIONS,
    Code.NOT_LEADER_OR_FOLLOWER,
    Code.NOT_ENOUGH_REPLICAS,
    Code.REQUEST_TIMED_OUT,
}
GROUP, TRANSACTION = 0, 1


class TransactionalCopier(threading.Thread):
    """Writes each number to every partition in a transaction of its own, with the offset behind it;
    aborts every fourth. Is both the transactional id and the group `copier`.
    """

    def __init__(self, ports: Sequence[int], topic: str, partitions: int) -> None:
        super().__init__(daemon=True)
        self._ports, self._topic, self._partitions = ports, topic, range(partitions)
        self._ends = threading.Event()
        self._id, self._epoch = -1, -1
        self.committed: list[int] = []
        self.failure: BaseException | None = None
        self.doing = ""

    def run(self) -> None:
        number = 0
        try:
            self._begin()
            while not self._ends.is_set():
                self._copy(number, commit=number % 4 != 3)
                number += 1
        except BaseException as error:
            self.failure = error
            raise

    def stop(self) -> None:
        self._ends.set()
        self.join(2 * PATIENCE_S)
        assert self.failure is None

    def wait_for_more(self, count: int = 5) -> None:
        least = len(self.committed) + count

        def is_done() -> bool:
            assert self.failure is None, self.failure
            return len(self.committed) >= least

        until(is_done, patience_s=2 * PATIENCE_S)

    def _begin(self) -> None:
        request = m.InitProducerIdRequest("copier", 600_000)
        answer = self._coordinated(TRANSACTION, request, 4, lambda it: [it.error_code])
        self._id, self._epoch = answer.producer_id, answer.producer_epoch

    def _copy(self, number: int, *, commit: bool) -> None:
        me = ("copier", self._id, self._epoch)
        added = [
            m.AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(self._topic, [*self._partitions])
        ]
        self._coordinated(
            TRANSACTION,
            m.AddPartitionsToTxnRequest([], *me, added),
            3,
            lambda it: [
                row.partition_error_code
                for topic in it.results_by_topic_v3_and_below
                for row in topic.results_by_partition
            ],
        )
        for partition in self._partitions:
            self._produce(number, partition)
        self._coordinated(
            TRANSACTION, m.AddOffsetsToTxnRequest(*me, "copier"), 3, lambda it: [it.error_code]
        )
        offsets = m.TxnOffsetCommitRequest
        rows = [offsets.TxnOffsetCommitRequestPartition(0, number + 1)]
        commits = offsets(
            "copier", "copier", self._id, self._epoch,
            topics=[offsets.TxnOffsetCommitRequestTopic(self._topic, rows)],
        )  # fmt: skip
        self._coordinated(
            GROUP,
            commits,
            3,
            lambda it: [row.error_code for topic in it.topics for row in topic.partitions],
        )
        end = m.EndTxnRequest(*me, commit)
        self._coordinated(TRANSACTION, end, 3, lambda it: [it.error_code])
        if commit:
            self.committed.append(number)

    def _produce(self, number: int, partition: int) -> None:
        batch = batch_of(
            b"%d" % number,
            producer_id=self._id,
            producer_epoch=self._epoch,
            base_sequence=number,
            transactional=True,
        )
        request = produce_request((self._topic, partition, batch))
        request.transactional_id = "copier"
        kind = m.MetadataRequest

        def leader(caller: KafkaCaller) -> int | None:
            asked = kind([kind.MetadataRequestTopic(name=self._topic)])
            found = caller.ask(asked, 12)
            ports = {node.node_id: node.port for node in found.brokers}
            parts = {one.partition_index: one for one in found.topics[0].partitions}
            return ports.get(parts[partition].leader_id)

        self._until_done(
            leader,
            request,
            9,
            lambda it: [
                row.error_code for topic in it.responses for row in topic.partition_responses
            ],
        )

    def _coordinated(
        self, of: int, request: Any, version: int, codes: Callable[[Any], list[int]]
    ) -> Any:
        def coordinator(caller: KafkaCaller) -> int | None:
            asked = m.FindCoordinatorRequest(key_type=of, coordinator_keys=["copier"])
            (found,) = caller.ask(asked, 4).coordinators
            return found.port if found.error_code == Code.NONE else None

        return self._until_done(coordinator, request, version, codes)

    def _until_done(
        self,
        find: Callable[[KafkaCaller], int | None],
        request: Any,
        version: int,
        codes: Callable[[Any], list[int]],
    ) -> Any:
        answers: list[Any] = []

        def is_done() -> bool:
            with suppress(OSError, AssertionError):  # a broker that is gone
                port = self._any(find)
                if port is None:
                    return False
                with KafkaCaller(port) as caller:
                    answers.append(caller.ask(request, version))
                found = {Code(code) for code in codes(answers[-1])}
                self.doing = f"{type(request).__name__}: {found}"
                if not found <= DONE | COMES_AGAIN:
                    raise RuntimeError(self.doing)
                return found <= DONE
            return False

        try:
            until(is_done, patience_s=PATIENCE_S)
        except AssertionError as error:
            raise RuntimeError(f"it goes on forever: {self.doing}") from error
        return answers[-1]

    def _any(self, find: Callable[[KafkaCaller], int | None]) -> int | None:
        for port in self._ports:
            with suppress(OSError), KafkaCaller(port) as caller:
                return find(caller)
        return None
