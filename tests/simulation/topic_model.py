"""What a partition must contain, given what was sent to it: each record has a unique number.

* A record that was acknowledged, or read below the high watermark, stays at its offset with its
  bytes until the log start passes it, or compaction replaces it by a newer one.
* The log start never moves back, and passes only records that were trimmed or may expire.
* A record that was refused or lost never appears again.
* A read_committed reader gets all records but the aborted, up to the last stable offset.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from tests.fakes.at_once import at_once
from tierlog.api.http.fetch.record_pages import is_aborted
from tierlog.broker.partition.partition import Partition
from tierlog.broker.partition.tiered_reads import Fetched
from tierlog.hot_tier.log_config import LogConfig
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.decode import decode_batch

FOREVER = 1 << 62
Numbered = tuple[tuple[str, bytes], ...]


class Wrong(AssertionError):
    """A record is lost, or a read returned a wrong one."""


class Line(NamedTuple):
    key: bytes | None
    value: bytes | None
    timestamp: int
    aborted: bool = False


class Shown(NamedTuple):
    """`number`: None for a control record."""

    offset: int
    number: int | None
    line: Line


def headers_of(number: int) -> Numbered:
    return (("n", b"%d" % number),)


@dataclass
class TopicModel:
    """`sent`: records by number. `placed`: numbers by offset, of the records that must exist.
    `gone`: numbers that must not appear any more. `compactable_end`: records below it may have been
    compacted.
    """

    config: LogConfig
    sent: dict[int, Line] = field(default_factory=dict)
    placed: dict[int, int] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    log_start: int = 0
    end: int = 0
    trimmed_before: int = 0
    compactable_end: int = 0
    least_retention_ms: int = FOREVER
    has_size_limit: bool = False
    latest_ms: int = 0

    def __post_init__(self) -> None:
        self.configured(self.config, end_offset=0)

    def configured(self, config: LogConfig, *, end_offset: int) -> None:
        if config.compacts:
            self.compactable_end = FOREVER
        elif self.compactable_end == FOREVER:
            self.compactable_end = end_offset
        if config.deletes and config.retention_ms >= 0:
            self.least_retention_ms = min(self.least_retention_ms, config.retention_ms)
        self.has_size_limit |= config.deletes and config.retention_bytes >= 0
        self.config = config

    def acknowledge(self, number: int, offset: int) -> None:
        if self.placed.setdefault(offset, number) != number:
            raise Wrong(f"offset {offset} is assigned to {number} and to {self.placed[offset]}")

    def begin_history(self, in_bucket_end: int, *, may_lack_replaced: bool = False) -> None:
        """Forget what was acknowledged above: it may exist only on the old disk.

        `may_lack_replaced`: some segments were compacted before they were first uploaded, in favour
        of records above.
        """
        lost = [
            self.placed.pop(offset) for offset in sorted(self.placed) if offset >= in_bucket_end
        ]
        self.gone.update(lost)
        if may_lack_replaced:
            keys = {self.sent[number].key for number in lost}
            for offset, number in list(self.placed.items()):
                if offset < self.compactable_end and self.sent[number].key in keys:
                    del self.placed[offset]

    def settle(self) -> None:
        """After a start: appends in progress that did not survive never appear."""
        known = set(self.placed.values())
        self.gone |= self.sent.keys() - known

    # --- checks -----------------------------------------------------------------------------------

    def check(self, partition: Partition, random: Random, *, now_ms: int) -> None:
        self.latest_ms = max(self.latest_ms, now_ms)
        now = partition.offsets()
        if not self.log_start <= now.log_start_offset <= now.high_watermark <= now.log_end_offset:
            raise Wrong(f"the log start was {self.log_start}: {now}")
        if now.high_watermark < self.end:
            raise Wrong(f"the log ended at {self.end}: {now}")
        shown = read(partition, now.high_watermark, random)
        self._check_start(now.log_start_offset)
        self.log_start, self.end = now.log_start_offset, now.high_watermark
        self._check_shown(shown)
        self._check_complete({record.offset for record in shown})
        self._check_committed(partition, shown, random)
        self._check_times(partition, shown, random)

    def _check_start(self, log_start: int) -> None:
        expired = self.latest_ms - self.least_retention_ms
        last = self._last_of_keys()
        for offset in sorted(self.placed):
            if offset >= log_start:
                break
            line = self.sent[self.placed[offset]]
            is_compacted = offset < self.compactable_end and offset != last.get(line.key)
            may_pass = line.timestamp <= expired or self.has_size_limit or is_compacted
            if offset >= self.trimmed_before and not may_pass:
                raise Wrong(f"the log start {log_start} passed offset {offset}")
            self.gone.add(self.placed.pop(offset))

    def _check_shown(self, shown: list[Shown]) -> None:
        offsets = [record.offset for record in shown]
        if offsets != sorted(set(offsets)):
            raise Wrong(f"offsets do not increase: {offsets}")
        places = {number: offset for offset, number in self.placed.items()}
        for offset, number, line in shown:
            if number is None:
                continue
            if number not in self.sent or line != self.sent[number]._replace(aborted=False):
                raise Wrong(f"offset {offset} is not what was sent as {number}: {line}")
            if number in self.gone:
                raise Wrong(f"offset {offset}: {number} was refused or lost, and is back")
            if places.get(number, offset) != offset:
                raise Wrong(f"{number} is at offset {offset}, and was at {places[number]}")
            self.acknowledge(number, offset)

    def _check_complete(self, found: set[int]) -> None:
        lost = sorted(self.placed.keys() - found)
        last = self._last_of_keys()
        for offset in lost:
            line = self.sent[self.placed[offset]]
            if offset >= self.compactable_end:
                raise Wrong(f"offset {offset} is lost: {line}")
            newest = last.get(line.key)
            if not line.aborted and offset == newest and line.value is not None:
                raise Wrong(f"offset {offset}, the last of its key, is lost: {line}")
        for offset in found & self.placed.keys() if lost else ():
            line = self.sent[self.placed[offset]]
            newest = last.get(line.key, offset)
            if offset < newest and newest not in found and not line.aborted:
                raise Wrong(f"offset {offset} of {line.key} came back: {newest} replaced it")

    def _last_of_keys(self) -> dict[bytes | None, int]:
        live = (at for at in sorted(self.placed) if not self.sent[self.placed[at]].aborted)
        return {self.sent[self.placed[offset]].key: offset for offset in live}

    def _check_committed(self, partition: Partition, shown: list[Shown], random: Random) -> None:
        # Not past what was shown: an append that nobody waits for may be flushed meanwhile.
        end = min(partition.offsets().last_stable_offset, self.end)
        wanted = [
            record.offset
            for record in shown
            if record.number is not None
            and record.offset < end
            and not self.sent[record.number].aborted
        ]
        found = [
            record.offset
            for record in read(partition, end, random, committed=True)
            if record.number is not None and record.offset < end
        ]
        if found != wanted:
            raise Wrong(f"committed up to {end}: {found}, and should be {wanted}")

    def _check_times(self, partition: Partition, shown: list[Shown], random: Random) -> None:
        for _ in range(2 if shown else 0):
            timestamp = random.choice(shown).line.timestamp + random.choice((0, 1))
            later = ((o, line.timestamp) for o, _, line in shown if line.timestamp >= timestamp)
            wanted, found = next(later, None), partition.offset_for_timestamp(timestamp)
            if found != wanted:
                raise Wrong(f"time {timestamp} is at {found}, and should be at {wanted}")


def read(
    partition: Partition, end_offset: int, random: Random, *, committed: bool = False
) -> list[Shown]:
    """Read from the log start on, in fetches of any size; control records too."""
    offset, found = partition.offsets().log_start_offset, []
    while offset < end_offset:
        limit = random.choice((1, 1000, 1 << 20, 1 << 20))
        fetched = at_once(partition.read, offset, max_bytes=limit, committed=committed)
        if fetched is None:
            fetched = partition.read(offset, max_bytes=limit, committed=committed)
        if fetched.next_offset <= offset:
            raise Wrong(f"a fetch of {offset} below {end_offset} does not advance")
        with closing(fetched):
            found += [record for record in _records(fetched) if record.offset >= offset]
        offset = fetched.next_offset
    return found


def _records(fetched: Fetched) -> Iterator[Shown]:
    data = b"".join(piece.read() for piece in fetched.slices)
    for header in iter_headers(data):
        if is_aborted(header, fetched.aborted) and not header.is_control:
            continue
        for record in decode_batch(data, header):
            number = None if header.is_control else int(record.headers[0][1])
            line = Line(record.key, record.value, record.timestamp)
            yield Shown(record.offset, number, line)
