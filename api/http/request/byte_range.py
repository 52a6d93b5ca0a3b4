"""Range and conditional requests for a segment (RFC 9110, 13 and 14). Pure.

* A single range is served; several get the whole segment, as RFC 9110 allows.
* HEAD gives the head of the GET, 206 too, as S3 and nginx do: RFC 9110 defines Range for GET only.
* A Range that is not a valid byte range is ignored; one outside the segment is refused.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from tierlog.api.http.http_errors import RangeNotSatisfiable

# More digits than any offset has, but limited: Python refuses to parse thousands. No two adjacent
# parts may match blanks: a long header with many would take minutes.
_RANGE: Final = re.compile(
    r"\s*bytes\s*=\s*(?:(\d{1,100})\s*)?-\s*(?:(\d{1,100})\s*)?\Z", re.ASCII | re.IGNORECASE
)
_TAG: Final = re.compile(r'(W/)?"[\x21\x23-\x7e\x80-\xff]*"')


class ByteRange(NamedTuple):
    """Bytes [start, end); `partial`: the response is 206."""

    start: int
    end: int
    partial: bool


def select_range(
    range_header: str | None, if_range: str | None, *, etag: str, size_bytes: int
) -> ByteRange:
    """Raises RangeNotSatisfiable."""
    whole = ByteRange(0, size_bytes, partial=False)
    if range_header is None or not _if_range_holds(if_range, etag):
        return whole
    match = _RANGE.match(range_header)
    if match is None or match.group(1) is match.group(2) is None:
        return whole
    first, last = match.groups()
    if first is None:  # a suffix range
        count = int(last)
        if count == 0 or size_bytes == 0:
            raise _outside(range_header, size_bytes)
        return ByteRange(max(0, size_bytes - count), size_bytes, partial=True)
    start = int(first)
    if last is not None and int(last) < start:
        return whole  # invalid: ignored
    if start >= size_bytes:
        raise _outside(range_header, size_bytes)
    end = size_bytes if last is None else min(int(last) + 1, size_bytes)
    return ByteRange(start, end, partial=True)


def matches(header: str | None, etag: str) -> bool:
    """Whether If-Match holds; False means 412. Strong comparison."""
    if header is None or header.strip() == "*":
        return True
    return etag in (match.group(0) for match in _TAG.finditer(header))


def none_match(header: str | None, etag: str) -> bool:
    """Whether If-None-Match holds; False means 304. Weak comparison."""
    if header is None:
        return True
    if header.strip() == "*":
        return False
    tags = (match.group(0).removeprefix("W/") for match in _TAG.finditer(header))
    return etag not in tags


def _if_range_holds(header: str | None, etag: str) -> bool:
    """Strong comparison. A date never matches, because no Last-Modified is sent."""
    return header is None or header.strip() == etag


def _outside(header: str, size_bytes: int) -> RangeNotSatisfiable:
    return RangeNotSatisfiable(
        f"Range {header[:100]!r} is outside the segment, which has {size_bytes} bytes",
        size_bytes=size_bytes,
    )
