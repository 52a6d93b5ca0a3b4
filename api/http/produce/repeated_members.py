"""Refuses records with a repeated member, one of whose values would be lost.

msgspec silently keeps the last value, and a parser that reports repeated members would cost more
than the rest of a produce request. So the parsed members are compared with the source:

* By length, if there is no whitespace between members: the parsed keys and values account for the
  whole body, and a lost member makes it longer.
* Otherwise by colons: each member has one, besides those in its text, and a lost member has more.

Neither comparison holds if a member was lost. If both fail, the records are parsed one by one with
the standard library until a repeated member is found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import methodcaller
from typing import Final, NamedTuple

import msgspec
from msgspec import UNSET

from tierlog.api.http import strict_json
from tierlog.api.http.strict_json import REPEATED, Members

# The standard library takes about a hundred times a record's size in memory: in a larger record the
# repeated member is not named.
_FIND_REPEATED_MAX_BYTES: Final = 1 << 20


class ParsedMembers(NamedTuple):
    """The parsed members of `records` records: the source texts of `keys` and `values`, and
    `others`, a column for each other member that any record has, with UNSET for records without it.
    """

    records: int
    keys: Sequence[msgspec.Raw]
    values: Sequence[msgspec.Raw]
    others: Sequence[Sequence[object]]

    def size_bytes(self) -> int | None:
        """The size of the records without whitespace, each with a comma; None if not known."""
        if len(self.values) < self.records or self.others:
            return None
        texts = sum(map(len, self.values)) + sum(map(len, self.keys))
        return texts + self.records * len('{"value":},') + len(self.keys) * len('"key":,')

    def colons(self) -> int:
        members = len(self.keys) + len(self.values)
        texts = _colons(b"".join(self.keys)) + _colons(b"".join(self.values))
        return members + texts + sum(map(_in_column, self.others))

    def all_colons(self) -> int:
        """With the escaped ones, which `others` has only decoded."""
        return self.colons() + sum(map(_escaped_colons, (*self.keys, *self.values)))


class _Sources(msgspec.Struct):
    records: list[msgspec.Raw]


_SOURCES: Final = msgspec.json.Decoder(_Sources)


def refuse_repeated_in_object(
    body: bytes | bytearray, parsed: ParsedMembers, parse_one: Callable[[bytes], ParsedMembers]
) -> None:
    """For `{"records": […]}`. Raises InvalidRequest. `parse_one` parses a single record."""
    framing = len('{"records":[]}') - len(",")
    if _is_complete(body, parsed, size_bytes=len(body) - framing, colons_around=1):
        return
    sources = _SOURCES.decode(body).records
    _check_each(((f"records[{i}]", bytes(one)) for i, one in enumerate(sources)), parse_one)
    if _colons(body) > sum([_colons(bytes(one)) for one in sources]) + 1:
        strict_json.refuse_field("records", REPEATED)


def refuse_repeated_in_lines(
    body: bytes | bytearray, parsed: ParsedMembers, parse_one: Callable[[bytes], ParsedMembers]
) -> None:
    """For one record per line. Raises InvalidRequest."""
    size_bytes = len(body) + (not body.endswith(b"\n"))
    if not _is_complete(body, parsed, size_bytes=size_bytes, colons_around=0):
        lines = nonblank_lines(body)
        _check_each(((f"line {number}", line) for number, line in lines), parse_one)


_without_blanks: Final = methodcaller("strip", b" \t\r")  # JSON's whitespace within a line


def nonblank_lines(body: bytes | bytearray) -> Iterator[tuple[int, bytes]]:
    """The number from 1 of each line, and the line without whitespace around it."""
    for number, line in enumerate(map(_without_blanks, bytes(body).split(b"\n")), 1):
        if line:
            yield number, line


def _is_complete(
    source: bytes | bytearray, parsed: ParsedMembers, *, size_bytes: int, colons_around: int
) -> bool:
    """True if certainly no member was lost."""
    if size_bytes == parsed.size_bytes():
        return True
    # Decoded text may have colons that its source has not, as \\u003a.
    if parsed.others and (b"\\u003a" in source or b"\\u003A" in source):
        return False
    return _colons(source) == parsed.colons() + colons_around


def _check_each(
    sources: Iterable[tuple[str, bytes]], parse_one: Callable[[bytes], ParsedMembers]
) -> None:
    for place, source in sources:
        parsed = parse_one(source)
        if _is_complete(source, parsed, size_bytes=len(source) + len(","), colons_around=0):
            continue
        if len(source) <= _FIND_REPEATED_MAX_BYTES:
            _find_repeated(source, place)
        elif _colons(source) + _escaped_colons(source) > parsed.all_colons():
            strict_json.refuse_field(place, f"a member is {REPEATED}")


def _find_repeated(source: bytes, place: str) -> None:
    try:
        record = json.loads(source, object_pairs_hook=Members, parse_int=str, parse_float=str)
    except RecursionError as error:
        strict_json.refuse(error, within=place)
    record.refuse_repeated(place)
    headers = dict(record).get("headers")
    if isinstance(headers, Members):
        headers.refuse_repeated(f"{place}.headers")
    elif isinstance(headers, list):
        for index, header in enumerate(headers):
            header.refuse_repeated(f"{place}.headers[{index}]")


# --- counting -----------------------------------------------------------------------------------


def count_byte(text: bytes | bytearray, byte: bytes) -> int:
    """As `text.count(byte)`, which compares byte by byte: `replace` uses memchr, and takes a tenth
    of the time or less.
    """
    return len(text) - len(text.replace(byte, b""))


def _colons(text: bytes | bytearray) -> int:
    return count_byte(text, b":")


def _escaped_colons(text: bytes | bytearray | msgspec.Raw) -> int:
    escapes = bytes(text).replace(rb"\\", b"")  # an escaped backslash begins none
    return escapes.count(rb"\u003a") + escapes.count(rb"\u003A")


def _in_column(column: Sequence[object]) -> int:
    """The number of colons of a member other than key and value, in all records that have it,
    including its own: each is encoded again, for which JSON escapes no colon.
    """
    given = [member for member in column if member is not UNSET]
    return len(given) + _colons(msgspec.json.encode(given))
