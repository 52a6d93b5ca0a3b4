"""Which records `tierlog consume` reads: from where to where, the last ones, those that match.

* An end is exclusive, and never beyond what was readable at the start. A time as an end is that of
  the first record at or after it, in each partition.
* The last records are read by partition, from the end backwards in growing steps: compaction, a
  restore's gap and filters leave fewer records than offsets. Of several partitions the newest by
  timestamp are kept, in that order.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import typer

from tierlog.cli.times import is_number, parse_time

if TYPE_CHECKING:
    from tierlog.client.client import Client
    from tierlog.client.records import ConsumedRecord
    from tierlog.client.wire import Limits

LAST_MAX: Final = 1_000_000  # records kept in memory, and of each partition while it is read
_GROWTH: Final = 8  # of the steps backwards
_KEYWORDS: Final = ("earliest", "latest", "earliest-local")

Matches = Callable[["ConsumedRecord"], bool]
Records = Generator["ConsumedRecord", None, None]


class Range(NamedTuple):
    """`timestamp` and `until_ms`, in milliseconds, instead of `offset` and `until_offset`."""

    offset: Any = "earliest"
    timestamp: int | None = None
    until_offset: int | None = None
    until_ms: int | None = None
    last: int | None = None

    @property
    def has_end(self) -> bool:
        return self.until_offset is not None or self.until_ms is not None


def parse_range(
    *, offset: str | None, since: str | None, until: str | None, last: int | None, now_ms: int
) -> Range:
    """Raises BadParameter."""
    given = [
        name
        for name, value in (("--offset", offset), ("--since", since), ("--last", last))
        if value is not None
    ]
    if len(given) > 1:
        raise typer.BadParameter(f"give either {' or '.join(given)}")
    timestamp = None if since is None else parse_time("--since", since, now_ms=now_ms)
    start = Range(parse_offset(offset or "earliest"), timestamp, last=last)
    if until is None:
        return start
    if is_number(until):
        return start._replace(until_offset=int(until))
    return start._replace(until_ms=parse_time("--until", until, now_ms=now_ms))


def parse_offset(text: str) -> Any:
    """A number or a keyword. Raises BadParameter."""
    if text in _KEYWORDS:
        return text
    if not is_number(text):
        raise typer.BadParameter(
            f"--offset must be a number, {', '.join(_KEYWORDS[:-1])} or {_KEYWORDS[-1]}, "
            f"not {text!r}"
        )
    return int(text)


def parse_filter(pattern: str | None) -> Matches | None:
    """Records whose value has the pattern. Raises BadParameter."""
    if pattern is None:
        return None
    try:
        search = re.compile(pattern.encode(errors="surrogateescape")).search
    except re.error as error:
        raise typer.BadParameter(f"--grep: not a regular expression: {error}") from error
    return lambda record: search(record.value or b"") is not None


class Reader:
    """Reads what matches in one partition, or in all of them."""

    def __init__(
        self,
        client: Client,
        topic: str,
        partition: int | None,
        limits: Limits,
        *,
        group: str | None = None,
        matches: Matches | None = None,
    ) -> None:
        self._client, self._topic, self._limits = client, topic, limits
        self._partitions = None if partition is None else [partition]
        self._group, self._matches = group, matches

    def read_range(self, of: Range, *, follow: bool) -> Records:
        """To be closed, if it is not read to its end: it commits for the group."""
        if of.last is not None:
            yield from self._read_last(of, of.last, follow=follow)
        elif of.has_end:
            yield from self._consume(self._partitions, of, end_offset=self._ends(of))
        else:
            yield from self._consume(self._partitions, of, follow=follow)

    def _consume(self, partitions: Sequence[int] | None, of: Range, **more: Any) -> Records:
        found = self._client.consume(
            self._topic,
            partitions=partitions,
            offset=of.offset,
            timestamp=of.timestamp,
            group=self._group,
            limits=self._limits,
            **more,
        )
        if self._matches is None:
            yield from found
            return
        with closing(found):
            yield from filter(self._matches, found)

    def _ends(self, of: Range) -> dict[int, int]:
        """The end of each partition."""
        numbers = self._partitions or self._client.describe_topic(self._topic).read_order
        return {number: self._end(number, of) for number in numbers}

    def _end(self, partition: int, of: Range) -> int:
        now = self._client.offsets(self._topic, partition)
        committed = self._limits.isolation == "read_committed"
        end = now.last_stable_offset if committed else now.high_watermark
        if of.until_offset is not None:
            return min(end, of.until_offset)
        if of.until_ms is None:
            return end
        found = self._client.offset_for_timestamp(self._topic, partition, of.until_ms)
        return end if found is None else min(end, found.offset)

    def _read_last(self, of: Range, count: int, *, follow: bool) -> Records:
        ends = self._ends(of)
        newest: list[ConsumedRecord] = []
        for number, end in ends.items():
            newest += self._last_of(number, end, count)
            if len(ends) > 1:
                newest = sorted(newest, key=lambda record: record.timestamp)[-count:]
        yield from newest
        if follow:
            yield from self._consume(self._partitions, Range(ends), follow=True)

    def _last_of(self, partition: int, end: int, count: int) -> Sequence[ConsumedRecord]:
        first = self._client.offsets(self._topic, partition).log_start_offset
        size = count
        while True:
            start = max(first, end - size)
            last = deque(self._consume([partition], Range(start), end_offset=end), maxlen=count)
            if len(last) == count or start == first:
                return last
            size *= _GROWTH
