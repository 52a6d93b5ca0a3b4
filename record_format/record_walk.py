"""Checks all records of a batch in one pass, and finds where their fields are.

Rules that keep it honest:

* There are two implementations, the plain one here and the compiled one in `record_kernel`. For
  every input, valid or not, both return the same `Walk`; a test feeds them the same bytes.
* Which one is in use is set once per process, by `native.load`.
* No length is used before it is checked against its enclosing record, and no record before it is
  checked against the body.

A record (Kafka's DefaultRecord; every length and delta a zig-zag varint):

    length, attributes i8, timestamp delta, offset delta, key length, key, value length, value,
    header count, then for each header: key length, key, value length, value
    (a length of -1 is null; a header's key is never null)
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Final, NamedTuple

from tierlog.record_format.batch import Buffer
from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.varint import read_varint, read_varlong

I64_MIN: Final = -(2**63)
I64_MAX: Final = 2**63 - 1
HEAD_BYTES: Final = 5  # of a value: a zero byte, and the id of its schema in four
NO_VALUE: Final = -1  # all values are null
NO_HEAD: Final = -2  # they differ, or one is shorter


class Problem(StrEnum):
    """What is wrong with a record, in words; empty if nothing is."""

    NONE = ""
    VARINT = "a varint is truncated or too long"
    RECORD_LENGTH = "the record's length does not fit the batch"
    TIMESTAMP = "the timestamp does not fit 64 bits"
    OFFSET_DELTA = "the offset delta is out of order or out of range"
    KEY_LENGTH = "the key's length does not fit the record"
    VALUE_LENGTH = "the value's length does not fit the record"
    HEADERS = "the headers do not fit the record"
    RECORD_END = "the fields do not fill the record's length"
    TRAILING = "there are bytes after the last record"


class WalkRequest(NamedTuple):
    """The batch header's facts about the records. `dense`: offset deltas must be 0, 1, 2, ...

    With columns, the fields are those of at most `columns_max` records, from the first one at or
    after `from_delta`: those of a million records take 200 MB. `with_head`: the head that all
    values have is found.
    """

    record_count: int
    base_timestamp: int
    last_offset_delta: int
    dense: bool
    with_columns: bool
    from_delta: int = 0
    columns_max: int = I64_MAX
    with_head: bool = False


class Fields(NamedTuple):
    """The positions of each record's fields, by column; a start of -1 is null, or no headers."""

    timestamps: list[int]
    offset_deltas: list[int]
    key_starts: list[int]
    key_ends: list[int]
    value_starts: list[int]
    value_ends: list[int]
    header_starts: list[int]


NO_FIELDS: Final = Fields([], [], [], [], [], [], [])


class Walk(NamedTuple):
    """`record` and `position` (in the decompressed records) locate a problem.

    Timestamps are base + delta, and undefined if there is a problem or no record. The fields are
    empty if they were not asked for. `head`: the first HEAD_BYTES of all values that are not null,
    as a number, or NO_VALUE, or NO_HEAD.
    """

    problem: Problem
    record: int
    position: int
    min_timestamp: int = 0
    max_timestamp: int = 0
    fields: Fields = NO_FIELDS
    head: int = NO_VALUE

    def describe(self) -> str:
        """The problem in words."""
        return f"record {self.record}, byte {self.position} of the records: {self.problem}"


Walker = Callable[[Buffer, WalkRequest], Walk]


def walk(records: Buffer, request: WalkRequest) -> Walk:
    """Walk all records of a batch; `records` is its whole decompressed body."""
    return _in_use[0](records, request)


def walk_plain(records: Buffer, request: WalkRequest) -> Walk:  # noqa: C901, PLR0912, PLR0915
    """`walk` in plain Python.

    One long function for speed: a call per field would take three times as long. One-byte varints,
    the common case, are decoded inline.
    """
    data = bytes(records)
    fields = Fields([], [], [], [], [], [], [])
    last_offset_delta, base_timestamp = request.last_offset_delta, request.base_timestamp
    # The greatest allowed increase of an offset delta.
    step = 1 if request.dense else last_offset_delta + 1
    from_delta = request.from_delta
    columns_left = request.columns_max if request.with_columns else 0
    length = len(data)
    minimum, maximum = I64_MAX, I64_MIN
    head, with_head = NO_VALUE, request.with_head
    offset_delta, position, record = -1, 0, 0
    try:
        for record in range(request.record_count):
            start = position
            if (byte := data[position]) < 0x80:
                size = byte >> 1 ^ -(byte & 1)
                position += 1
            else:
                size, position = read_varint(data, position)
            if not 0 < size <= length - position:
                return Walk(Problem.RECORD_LENGTH, record, start)
            end = position + size
            position += 1  # attributes: all bits are unused

            before = position
            if (byte := data[position]) < 0x80:
                timestamp = base_timestamp + (byte >> 1 ^ -(byte & 1))
                position += 1
            else:
                timestamp, position = read_varlong(data, position)
                timestamp += base_timestamp
            if timestamp < minimum:  # noqa: PLR1730  (min() costs a call)
                minimum = timestamp
            if timestamp > maximum:  # noqa: PLR1730
                maximum = timestamp
            if minimum < I64_MIN or maximum > I64_MAX:
                return Walk(Problem.TIMESTAMP, record, before)

            before, least = position, offset_delta
            if (byte := data[position]) < 0x80:
                offset_delta = byte >> 1 ^ -(byte & 1)
                position += 1
            else:
                offset_delta, position = read_varint(data, position)
            if not least < offset_delta <= min(least + step, last_offset_delta):
                return Walk(Problem.OFFSET_DELTA, record, before)

            before = position
            if (byte := data[position]) < 0x80:
                size = byte >> 1 ^ -(byte & 1)
                position += 1
            else:
                size, position = read_varint(data, position)
            if not -1 <= size <= end - position:
                return Walk(Problem.KEY_LENGTH, record, before)
            key_start = -1 if size < 0 else position
            if size > 0:
                position += size
            key_end = position

            before = position
            if (byte := data[position]) < 0x80:
                size = byte >> 1 ^ -(byte & 1)
                position += 1
            else:
                size, position = read_varint(data, position)
            if not -1 <= size <= end - position:
                return Walk(Problem.VALUE_LENGTH, record, before)
            value_start = -1 if size < 0 else position
            if with_head and size >= 0:
                own = int.from_bytes(data[position : position + HEAD_BYTES])
                head = own if size >= HEAD_BYTES and head in (own, NO_VALUE) else NO_HEAD
            if size > 0:
                position += size
            value_end = header_start = position

            if data[position]:
                position = _skip_headers(data, position, end)
                if position < 0:
                    return Walk(Problem.HEADERS, record, header_start)
            else:
                header_start = -1
                position += 1
            if position != end:
                return Walk(Problem.RECORD_END, record, start)
            if columns_left and offset_delta >= from_delta:
                columns_left -= 1
                fields.timestamps.append(timestamp)
                fields.offset_deltas.append(offset_delta)
                fields.key_starts.append(key_start)
                fields.key_ends.append(key_end)
                fields.value_starts.append(value_start)
                fields.value_ends.append(value_end)
                fields.header_starts.append(header_start)
    except (IndexError, CorruptBatch):
        return Walk(Problem.VARINT, record, position)
    if position != length:
        return Walk(Problem.TRAILING, request.record_count, position)
    return Walk(Problem.NONE, request.record_count, position, minimum, maximum, fields, head)


def _skip_headers(data: bytes, position: int, end: int) -> int:
    """The position after the headers, or -1 if they are invalid."""
    try:
        count, position = read_varint(data, position)
        if not 0 <= count <= (end - position) // 2:
            return -1
        for _ in range(count):
            size, position = read_varint(data, position)
            if not 0 <= size <= end - position:
                return -1
            size, position = read_varint(data, position + size)
            if not -1 <= size <= end - position:
                return -1
            position += max(size, 0)
    except CorruptBatch:
        return -1
    return position


_in_use: Final[list[Walker]] = [walk_plain]


def use(walker: Walker) -> None:
    _in_use[0] = walker


class RowFilter(NamedTuple):
    """A range of offsets and of timestamps (ms).

    `last_timestamp` is inclusive, so that the default includes every timestamp.
    """

    start_offset: int = 0
    end_offset: int = I64_MAX
    start_timestamp: int = I64_MIN
    last_timestamp: int = I64_MAX

    def may_match(self, min_timestamp: int | None, max_timestamp: int | None) -> bool:
        """Whether records with these timestamp bounds can match; None is an unknown bound."""
        is_too_new = min_timestamp is not None and min_timestamp > self.last_timestamp
        is_too_old = max_timestamp is not None and max_timestamp < self.start_timestamp
        return not is_too_new and not is_too_old

    def holds(self, min_timestamp: int | None, max_timestamp: int | None) -> bool:
        """Whether all records with these timestamp bounds match, if their offsets do."""
        after_start = min_timestamp is not None and min_timestamp >= self.start_timestamp
        until_last = max_timestamp is not None and max_timestamp <= self.last_timestamp
        return (after_start or self.start_timestamp == I64_MIN) and (
            until_last or self.last_timestamp == I64_MAX
        )

    def may_match_range(
        self,
        first_offset: int,
        last_offset: int,
        min_timestamp: int | None,
        max_timestamp: int | None,
    ) -> bool:
        """Whether records of this range, with these bounds of timestamps, may match."""
        return (
            first_offset < self.end_offset
            and last_offset >= self.start_offset
            and self.may_match(min_timestamp, max_timestamp)
        )

    def holds_range(
        self,
        first_offset: int,
        last_offset: int,
        min_timestamp: int | None,
        max_timestamp: int | None,
    ) -> bool:
        """Whether all of them match."""
        return (
            first_offset >= self.start_offset
            and last_offset < self.end_offset
            and self.holds(min_timestamp, max_timestamp)
        )

    def within(self, start_offset: int, end_offset: int) -> RowFilter:
        """The same, of these offsets alone."""
        return self._replace(
            start_offset=max(start_offset, self.start_offset),
            end_offset=min(end_offset, self.end_offset),
        )
