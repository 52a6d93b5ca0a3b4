"""Which batches belong to aborted transactions, and which markers outlived theirs.

* Given every batch of a part of the log, in order, it says of each whether its records may go: a
  data batch of an aborted transaction may, and so may a marker if nothing of its transaction was
  met.
* A marker stays until nothing is left of its transaction; an aborted transaction of which something
  is left goes into the new transaction index (Kafka's CleanedTransactionMetadata).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from record_format.batch import BatchHeader, Buffer
from record_format.control import ABORT, COMMIT, control_type
from record_format.decode import decode_batch
from record_format.index_layouts import AbortedTxn


class CleanedTransactions:
    def __init__(self) -> None:
        self._coming: list[tuple[int, AbortedTxn]] = []  # a heap by first offset
        self._known: set[AbortedTxn] = set()
        self._aborted: dict[int, AbortedTxn] = {}
        self._met: set[int] = set()  # aborted transactions of which a batch was met
        self._committed: set[int] = set()
        self.kept: list[AbortedTxn] = []

    def expect(self, aborted: Iterable[AbortedTxn]) -> None:
        """Take in aborted transactions of what comes next; the same one more than once is fine."""
        for transaction in aborted:
            if transaction not in self._known:
                self._known.add(transaction)
                heapq.heappush(self._coming, (transaction.first_offset, transaction))

    def may_go(self, buf: Buffer, header: BatchHeader) -> bool:
        """Whether the batch's records are no longer needed."""
        while self._coming and self._coming[0][0] <= header.last_offset:
            transaction = heapq.heappop(self._coming)[1]
            self._aborted.setdefault(transaction.producer_id, transaction)
        if header.is_control:
            return self._marker_may_go(buf, header)
        if not header.is_transactional:
            return False
        if header.producer_id in self._aborted:
            self._met.add(header.producer_id)
            return True
        self._committed.add(header.producer_id)
        return False

    def _marker_may_go(self, buf: Buffer, header: BatchHeader) -> bool:
        records = decode_batch(buf, header)
        if not records:
            return True  # it was emptied already
        kind, producer_id = control_type(records[0].key), header.producer_id
        if kind == ABORT:
            transaction = self._aborted.pop(producer_id, None)
            if transaction is None or producer_id not in self._met:
                return True
            self._met.discard(producer_id)
            self.kept.append(transaction)
            return False
        if kind == COMMIT:
            met = producer_id in self._committed
            self._committed.discard(producer_id)
            return not met
        return False
