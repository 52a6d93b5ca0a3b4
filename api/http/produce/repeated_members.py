"""A record with a repeated member is refused: whichever the parser kept, the other would be lost.

msgspec silently keeps the last one, and a parser that reports it would cost more than all the rest
of a produce request. So what was kept is compared with what came:

* By length, if there are no blanks between members: the kept keys and values account for the whole
  body; anything lost makes it longer.
* Else by colons: each member has one, besides those in its text; anything lost adds more.

Neither comparison passes if something was lost. If both fail, the records are read slowly, one by
one, until one is found with a repeated member.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import UNSET

from api.http import strict_json
from api.http.strict_json import REPEATED, Members

Lines = Sequence[tuple[int, bytes]]


# Read slowly, a record takes about a hundred times its size: in a larger one no member is named.
_READ_SLOWLY_MAX: Final = 1 << 20


class Kept(NamedTuple):
    """What the parser kept of `records` records: the source texts of `keys` and `values`, and the
    columns of `others`, the other members that any record has; UNSET if one lacks it.
    """

    records: int
    keys: Sequence[msgspec.Raw]
    values: Sequence[msgspec.Raw]
    others: Sequence[Sequence[object]]

    def size_bytes(self) -> int | None:
        """The size of the records without blanks, each with a comma; None if it cannot be known."""
        if len(self.values) < self.records or self.others:
            return None
        texts = sum(map(len, self.values)) + sum(map(len, self.keys))
        return texts + self.records * len('{"value":},') + len(self.keys) * len('"key":,')

    def colons(self) -> int:
        members = len(self.keys) + len(self.values)
        texts = _colons(b"".join(self.keys)) + _colons(b"".join(self.values))
        return members + texts + sum([_in_member(x) for column in self.others for x in column])


class _Sources(msgspec.Struct):
    records: list[msgspec.Raw]


_SOURCES: Final = msgspec.json.Decoder(_Sources)


def refuse_in_object(body: bytes | bytearray, kept: Kept, of_one: Callable[[bytes], Kept]) -> None:
    """`{"records": […]}`. `of_one` parses one record. Raises InvalidRequest naming the member."""
    framing = len('{"records":[]}') - len(",")
    if _is_whole(body, kept, size_bytes=len(body) - framing, colons_around=1):
        return
    sources = map(bytes, _SOURCES.decode(body).records)
    _read_each(((f"records[{i}]", source) for i, source in enumerate(sources)), of_one)
    if _colons(body) > kept.colons() + 1:
        strict_json.refuse_field("records", REPEATED)


def refuse_in_lines(
    body: bytes | bytearray, lines: Lines, kept: Kept, of_one: Callable[[bytes], Kept]
) -> None:
    """One record per line of the body."""
    size = sum([len(line) for _, line in lines]) + len(lines)
    if not _is_whole(body, kept, size_bytes=size, colons_around=0):
        _read_each(((f"line {number}", line) for number, line in lines), of_one)


def _is_whole(
    source: bytes | bytearray, kept: Kept, *, size_bytes: int, colons_around: int
) -> bool:
    """Whether nothing was lost: True is certain, False is not."""
    if size_bytes == kept.size_bytes():
        return True
    # A decoded text may have colons that its source does not have.
    if kept.others and (b"\\u003a" in source or b"\\u003A" in source):
        return False
    return _colons(source) == kept.colons() + colons_around


def _read_each(sources: Iterable[tuple[str, bytes]], of_one: Callable[[bytes], Kept]) -> None:
    for place, source in sources:
        kept = of_one(source)
        if _is_whole(source, kept, size_bytes=len(source) + len(","), colons_around=0):
            continue
        if len(source) <= _READ_SLOWLY_MAX:
            _read_slowly(source, place)
        elif _colons(source) > kept.colons():
            strict_json.refuse_field(place, f"a member is {REPEATED}")


def _read_slowly(source: bytes, place: str) -> None:
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


def _colons(text: bytes | bytearray) -> int:
    return len(text) - len(text.replace(b":", b""))  # uses memchr: several times as fast as count


def _in_member(member: object) -> int:
    """The colons of a member other than key and value, including its own."""
    if member is UNSET:
        return 0
    if isinstance(member, str):
        return 1 + member.count(":")
    if isinstance(member, dict):
        names: int = sum([name.count(":") for name in member])
        return 1 + names + sum(map(_in_member, member.values()))
    if isinstance(member, list):
        return 1 + sum(map(_in_header, member))
    return 1  # a number, null, or what was base64


def _in_header(header: Any) -> int:
    found: int = 1 + header.name.count(":")
    if header.value_base64 is not UNSET:
        found += 1
    if header.value is not UNSET:
        found += _in_member(header.value)
    return found
