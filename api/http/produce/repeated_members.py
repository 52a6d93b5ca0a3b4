"""Refuses records with a repeated member, one of whose values would be lost.

msgspec silently keeps the last value, and a parser that reports repeated members would cost more
than the rest of a produce request. So what was decoded is encoded again, and compared with its
source:

* By length: it is never longer than its source, so if it is as long, nothing was lost.
* Otherwise, as with whitespace, by colons: each member has one, besides those in its text.

Only a record that lacks some is parsed with the standard library, for the member's name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from operator import methodcaller
from typing import Final

import msgspec

from tierlog.api.http import strict_json
from tierlog.api.http.strict_json import REPEATED, Members

# The standard library takes about a hundred times a record's size in memory: in a larger record the
# repeated member is not named.
_FIND_REPEATED_MAX_BYTES: Final = 1 << 20


class _Sources(msgspec.Struct):
    records: list[msgspec.Raw]


_SOURCES: Final = msgspec.json.Decoder(_Sources)
_ENCODER: Final = msgspec.json.Encoder()


def refuse_repeated_in_object(
    body: bytes | bytearray, decoded: msgspec.Struct, records: Sequence[object]
) -> None:
    """For `{"records": […]}`. Raises InvalidRequest. `records` are those of `decoded`."""
    if _is_whole(body, _ENCODER.encode(decoded)):
        return
    sources = _SOURCES.decode(body).records
    for index, (source, record) in enumerate(zip(sources, records, strict=True)):
        _check_record(bytes(source), record, f"records[{index}]")
    strict_json.refuse_field("records", REPEATED)


def refuse_repeated_in_lines(body: bytes | bytearray, records: Sequence[object]) -> None:
    """For one record per line. Raises InvalidRequest."""
    if _is_whole(body, _ENCODER.encode_lines(records)):
        return
    for (number, line), record in zip(nonblank_lines(body), records, strict=True):
        _check_record(line, record, f"line {number}")


_without_blanks: Final = methodcaller("strip", b" \t\r")  # JSON's whitespace within a line


def nonblank_lines(body: bytes | bytearray) -> Iterator[tuple[int, bytes]]:
    """The number from 1 of each line, and the line without whitespace around it."""
    for number, line in enumerate(map(_without_blanks, bytes(body).split(b"\n")), 1):
        if line:
            yield number, line


def _check_record(source: bytes, record: object, place: str) -> None:
    if _is_whole(source, _ENCODER.encode(record)):
        return
    if len(source) > _FIND_REPEATED_MAX_BYTES:
        strict_json.refuse_field(place, f"a member is {REPEATED}")
    try:
        members = json.loads(source, object_pairs_hook=Members, parse_int=str, parse_float=str)
    except RecursionError as error:
        strict_json.refuse(error, within=place)
    for index, (name, _) in enumerate(members):
        if name in ("key", "value"):  # within these, any JSON is kept as it is
            members[index] = (name, None)
    found = strict_json.find_repeated(members)
    assert found is not None, "a colon is missing"
    strict_json.refuse_field(strict_json.join(place, found), REPEATED)


def _is_whole(source: bytes | bytearray, again: bytes) -> bool:
    if len(again) >= len(source):
        return True
    missing = count_byte(source, b":") - count_byte(again, b":")
    if b"\\" in source and rb"\u003" in source:  # encoded again, it may be plain
        missing += _escaped_colons(source) - _escaped_colons(again)
    return not missing


def _escaped_colons(text: bytes | bytearray) -> int:
    escapes = bytes(text).replace(rb"\\", b"")  # an escaped backslash begins none
    return escapes.count(rb"\u003a") + escapes.count(rb"\u003A")


def count_byte(text: bytes | bytearray, byte: bytes) -> int:
    """As `text.count(byte)`, which compares byte by byte: `replace` uses memchr, and takes a tenth
    of the time or less.
    """
    return len(text) - len(text.replace(byte, b""))
