"""What is known about a partition, from its topic's creation to the deletion, while many threads
write and read it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from tierlog.record_format.decode import Record
from tierlog.record_format.errors import OffsetTrimmed


class Written(Protocol):
    """A record as it was sent."""

    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...


class Page(Protocol):
    """The result of a read."""

    @property
    def records(self) -> Sequence[Record]: ...
    @property
    def next_offset(self) -> int: ...
    @property
    def high_watermark(self) -> int: ...


def idempotent_value(producer_id: int, number: int, padding: bytes) -> bytes:
    """The value of record number `number` of an idempotent producer."""
    return b"once %d %d " % (producer_id, number) + padding


class PartitionLife:
    """Values acknowledged, and values read, by offset. `compacts`: at least for some time."""

    def __init__(self, name: str, *, compacts: bool) -> None:
        self.name, self.compacts = name, compacts
        self.acknowledged: dict[int, bytes] = {}
        self.seen: dict[int, bytes] = {}
        self._keys: dict[int, bytes] = {}

    def acknowledge(self, base_offset: int, records: Iterable[Written]) -> None:
        for offset, record in enumerate(records, start=base_offset):
            self._keys[offset] = record.key
            value = self.acknowledged.setdefault(offset, record.value)
            assert value is record.value, f"{self.name}: {offset} was assigned twice"

    def see(self, offset: int, value: bytes) -> None:
        for known in (self.seen, self.acknowledged):
            before = known.get(offset, value)
            changed = f"{self.name} @{offset}: {before[:40]!r} became {value[:40]!r}"
            assert before == value, changed
        self.seen[offset] = value

    def see_all(self, records: Iterable[Record]) -> None:
        for record in records:
            self.see(record.offset, record.value)

    def check(self, log_start: Callable[[], int], read: Callable[[int], Page]) -> None:
        """During writes: each acknowledged record exists, or a later one of its key; and each
        idempotent producer's records are in order, each once.
        """
        wanted, read_offsets, newest = set(self.acknowledged), set(), {}
        counts: dict[bytes, int] = {}
        offset = start = log_start()
        end = max(wanted, default=-1) + 1
        while offset < end:
            try:
                page = read(offset)
            except OffsetTrimmed:
                offset = start = log_start()
                counts.clear()
                continue
            assert page.next_offset > offset, f"{self.name}: ends at {offset}"
            self.see_all(page.records)
            for record in page.records:
                read_offsets.add(record.offset)
                newest[record.key] = record.offset
                self._count(counts, record.value)
            offset = page.next_offset
            end = max(end, page.high_watermark)  # later records of a key may follow
        start = max(start, log_start())
        lost = sorted(
            offset
            for offset in wanted - read_offsets
            if offset >= start
            and not (self.compacts and newest.get(self._keys[offset], -1) > offset)
        )
        assert not lost, f"{self.name}: lost {lost[:9]}"

    def _count(self, counts: dict[bytes, int], value: bytes) -> None:
        """Numbers are consecutive from the oldest left; compaction removes some."""
        if not value.startswith(b"once "):
            return
        _, producer, number, _ = value.split(b" ", 3)
        expected = counts.get(producer, int(number))
        in_order = int(number) >= expected if self.compacts else int(number) == expected
        assert in_order, f"{self.name}: {value[:40]!r}, not {expected}"
        counts[producer] = int(number) + 1
