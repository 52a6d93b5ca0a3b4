"""What is known about a replicated partition that its leader compacts, and what must hold then.

All of `replica_truth`; but of a batch that is committed a replica may lack records, and only those
of which a later one with the same key is committed. Which records a batch has is compared, and not
its bytes: a batch without any takes the place of what is gone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.simulation.replica_truth import Batch, Shown, Truth, Wrong
from tierlog.record_format.batch import parse_header
from tierlog.record_format.decode import decode_batch

KEYS = 5


class Keyed(NamedTuple):
    key: bytes | None
    value: bytes | None


def records_in(body: bytes) -> dict[int, Keyed]:
    records = decode_batch(body, parse_header(body))
    return {one.offset: Keyed(one.key, one.value) for one in records}


class CompactedTruth(Truth):
    """`records`: all that were ever committed, by offset; `latest`: of each key."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.records: dict[int, Keyed] = {}
        self.latest: dict[bytes | None, int] = {}
        self._appended: dict[tuple[int, int], Keyed] = {}

    def note_same(self, it: Shown, batch: Batch) -> None:
        for offset, record in records_in(batch.body).items():
            if self._appended.setdefault((offset, batch.epoch), record) != record:
                raise Wrong(f"{it.name}: offset {offset} of epoch {batch.epoch} differs")

    def commit(self, batch: Batch) -> None:
        super().commit(batch)
        for offset, record in records_in(batch.body).items():
            self.records[offset] = record
            self.latest[record.key] = offset

    def check_against(self, it: Shown, end: int) -> None:
        for batch in it.batches:
            for offset, record in records_in(batch.body).items():
                there = self.records.get(offset)
                if offset < end and there not in (None, record):
                    raise Wrong(f"{it.name} has {record} at {offset}, and {there} is committed")

    def check_has_all(self, it: Shown) -> None:
        found = {offset for batch in it.batches for offset in records_in(batch.body)}
        for key, offset in self.latest.items():
            if offset >= it.first_local_offset and offset not in found:
                raise Wrong(f"{it.name} is in sync without {key!r}, of offset {offset}")

    def check_read(self, body: bytes, name: str) -> None:
        for offset, record in records_in(body).items():
            if self.records.get(offset) != record:
                raise Wrong(f"{name} was read at {offset}: {record} is not there")
            self.read.add(offset)

    def check_was_read(self, log_start_offset: int) -> None:
        if lost := set(self.latest.values()) - self.read:
            raise Wrong(f"offsets {sorted(lost)} were not read")
