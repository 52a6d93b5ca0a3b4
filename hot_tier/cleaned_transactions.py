"""Which batches belong to aborted transactions, and which markers are no longer needed.

* It is given every batch of a part of the log, in order, and says whether its records can be
  discarded: those of a data batch in an aborted transaction can, and so can a marker if no batch of
  its transaction was seen.
* A marker stays until nothing is left of its transaction. An aborted transaction of which something
  is left goes into the new transaction index (Kafka's CleanedTransactionMetadata).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from tierlog.record_format.batch import BatchHeader, Buffer
from tierlog.record_format.control import ABORT, COMMIT, control_type
from tierlog.record_format.decode import decode_batch
from tierlog.record_format.index_layouts import AbortedTxn


class CleanedTransactions:
    def __init__(self) -> None:
        self._upcoming: list[tuple[int, AbortedTxn]] = []  # a heap by first offset
        self._known: set[AbortedTxn] = set()
        self._aborted: dict[int, AbortedTxn] = {}
        self._seen_aborted: set[int] = set()  # aborted, with at least one batch seen
        self._committed: set[int] = set()
        self.kept: list[AbortedTxn] = []

    def add_aborted(self, aborted: Iterable[AbortedTxn]) -> None:
        """Add aborted transactions of the batches to come; repeated ones are ignored."""
        for transaction in aborted:
            if transaction not in self._known:
                self._known.add(transaction)
                heapq.heappush(self._upcoming, (transaction.first_offset, transaction))

    def can_discard(self, buf: Buffer, header: BatchHeader) -> bool:
        """Whether the batch's records are no longer needed."""
        while self._upcoming and self._upcoming[0][0] <= header.last_offset:
            transaction = heapq.heappop(self._upcoming)[1]
            self._aborted.setdefault(transaction.producer_id, transaction)
        if header.is_control:
            return self._can_discard_marker(buf, header)
        if not header.is_transactional:
            return False
        if header.producer_id in self._aborted:
            self._seen_aborted.add(header.producer_id)
            return True
        self._committed.add(header.producer_id)
        return False

    def _can_discard_marker(self, buf: Buffer, header: BatchHeader) -> bool:
        records = decode_batch(buf, header)
        if not records:
            return True  # an earlier round emptied it
        kind, producer_id = control_type(records[0].key), header.producer_id
        if kind == ABORT:
            transaction = self._aborted.pop(producer_id, None)
            if transaction is None or producer_id not in self._seen_aborted:
                return True
            self._seen_aborted.discard(producer_id)
            self.kept.append(transaction)
            return False
        if kind == COMMIT:
            has_records = producer_id in self._committed
            self._committed.discard(producer_id)
            return not has_records
        return False
