"""What of a read an Arrow filter can be true of, found by asking Arrow: it simplifies a filter
under a guarantee, such as `offset < 7`, and tells if nothing is left of it.

* Of alternatives, such as `offset = 1 or offset = 9`, the bounds are the outermost. Arrow applies a
  filter itself to every row, unless it is true of all rows within them.
* The keys of a filter are guessed from its text, and count only if Arrow finds it true of no other.
* No expression is taken apart here, so whatever Arrow can write, and simplify, narrows the read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
from pyarrow.fs import LocalFileSystem

from tierlog.record_format.arrow_schema import COLUMNS, SCHEMA
from tierlog.record_format.errors import InvalidOption
from tierlog.record_format.record_walk import I64_MAX, I64_MIN, RowFilter
from tierlog.spark_reader.splits import OffsetRange

_FORMAT: Final = ds.IpcFileFormat()
_FILES: Final = LocalFileSystem()
_BINARY: Final = re.compile(r'"((?:[0-9A-F]{2})*)"|^ *((?:[0-9A-F]{2})+),?$', re.MULTILINE)
KEYS_MAX: Final = 64  # a question to Arrow for each
_NEVER_NULL: Final = frozenset(("topic", "partition", "offset", "timestamp"))


def may_match(expression: pc.Expression, one: OffsetRange, schema: pa.Schema = SCHEMA) -> bool:
    """Whether the filter can be true of a row of this range."""
    return not _excludes(expression, _within(one), schema)


def must_match(
    expression: pc.Expression, one: OffsetRange, bounds: RowFilter, schema: pa.Schema = SCHEMA
) -> bool:
    """Whether the filter is known to be true of all rows of this range within the bounds."""
    if not _NEVER_NULL.issuperset(columns_of(expression, schema)):
        return False  # what is neither true nor false is not excluded by its opposite
    offset, time = pc.field("offset"), pc.field("timestamp")
    guarantee = _within(one) & (offset >= bounds.start_offset) & (offset <= bounds.end_offset - 1)
    if bounds.start_timestamp != I64_MIN:
        guarantee &= time >= _moment(bounds.start_timestamp)
    if bounds.last_timestamp != I64_MAX:
        guarantee &= time <= _moment(bounds.last_timestamp)
    return _excludes(~expression.cast(pa.bool_()), guarantee, schema)


def _within(one: OffsetRange) -> pc.Expression:
    offset = pc.field("offset")
    return (
        (pc.field("topic") == one.facts.topic)
        & (pc.field("partition") == pa.scalar(one.facts.partition, pa.int32()))
        & (offset >= one.start_offset)
        & (offset < one.end_offset)
    )


def _moment(milliseconds: int) -> pa.Scalar:
    return pa.scalar(milliseconds * 1000, SCHEMA.field("timestamp").type)


def bounds_of(expression: pc.Expression, schema: pa.Schema = SCHEMA) -> RowFilter:
    """The offsets and times outside of which the filter is true of no row."""
    used = columns_of(expression, schema)
    bounds = RowFilter()
    if "offset" in used:
        first, last = _span(expression, "offset", 0, I64_MAX, schema)
        end = last if last == I64_MAX else last + 1
        bounds = bounds._replace(start_offset=first, end_offset=end)
    if "timestamp" in used:  # in microseconds, and of whole milliseconds
        first, last = _span(expression, "timestamp", I64_MIN, I64_MAX, schema)
        bounds = bounds._replace(
            start_timestamp=first if first == I64_MIN else -(-first // 1000),
            last_timestamp=last if last == I64_MAX else last // 1000,
        )
    return bounds


def keys_of(expression: pc.Expression, schema: pa.Schema = SCHEMA) -> frozenset[bytes] | None:
    """The keys of which alone the filter can be true; None if it may be of any."""
    found = _BINARY.findall(str(expression))
    keys = sorted({bytes.fromhex(quoted or listed) for quoted, listed in found})
    if not 0 < len(keys) <= KEYS_MAX or "key" not in columns_of(expression, schema):
        return None
    key = pc.field("key")
    between = [(key > low) & (key < high) for low, high in pairwise(keys)]
    others = [key.is_null(), key < keys[0], *between, key > keys[-1]]
    return frozenset(keys) if all(_excludes(expression, one, schema) for one in others) else None


def columns_of(expression: pc.Expression, schema: pa.Schema = SCHEMA) -> list[str]:
    """The columns that an expression refers to: those without which Arrow cannot bind it. Raises
    InvalidOption if it names columns by position.
    """
    if "FieldPath(" in str(expression):
        raise InvalidOption(f"filter {expression}: name columns, rather than their positions")
    return [name for name in COLUMNS if not _binds(expression, schema, without=name)]


def _binds(expression: pc.Expression, schema: pa.Schema, *, without: str) -> bool:
    schema = schema.remove(schema.get_field_index(without))
    try:
        ds.Scanner.from_batches(iter(()), schema=schema, columns={"found": expression})
    except pa.ArrowInvalid:
        return False
    return True


def _span(
    expression: pc.Expression, column: str, lowest: int, highest: int, schema: pa.Schema
) -> tuple[int, int]:
    """The first and last value of [lowest, highest] that the filter does not exclude; the first
    above the last if it excludes all.
    """
    field, kind = pc.field(column), SCHEMA.field(column).type

    def is_below(value: int) -> bool:
        return _excludes(expression, field < pa.scalar(value, kind), schema)

    def is_above(value: int) -> bool:
        return _excludes(expression, field > pa.scalar(-value, kind), schema)

    def is_out(value: int) -> bool:
        try:
            return _excludes(expression, field == pa.scalar(value, kind), schema)
        except pa.ArrowInvalid:  # Arrow computes with the value, and that overflows
            return False

    first = _last_true(is_below, lowest, highest)
    last = -_last_true(is_above, -highest, -lowest)
    # To Arrow `offset < 7` may be true of a number between 6 and 7: it says 7.
    return (
        first + (lowest < first <= last and is_out(first)),
        last - (first <= last < highest and is_out(last)),
    )


def _last_true(is_true: Callable[[int], bool], low: int, high: int) -> int:
    """The last of [low, high] of which it is true, as it is of `low`, and not above."""
    while low < high:
        middle = (low + high + 1) // 2
        if is_true(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _excludes(expression: pc.Expression, guarantee: pc.Expression, schema: pa.Schema) -> bool:
    """Whether the filter is true of no row of which the guarantee is."""
    fragment = _FORMAT.make_fragment("rows", _FILES, partition_expression=guarantee)
    rows = ds.FileSystemDataset([fragment], schema, _FORMAT, _FILES)
    return not any(True for _ in rows.get_fragments(expression))
