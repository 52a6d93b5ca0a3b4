"""Content-Type, Accept and Content-Encoding (RFC 9110, 8.3, 8.4 and 12.5).

Media types are compared without their parameters, except that a charset other than UTF-8 is
refused for text: all text of this API is UTF-8. Of bytes it says nothing.

--- byte_range: Range and conditional requests for a segment (RFC 9110, 13 and 14). Pure.

* A single range is served; several get the whole segment, as RFC 9110 allows.
* HEAD gives the head of the GET, 206 too, as S3 and nginx do: RFC 9110 defines Range for GET only.
* A Range that is not a valid byte range is ignored; one outside the segment is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from tierlog.api.http.problems import NotAcceptable, RangeNotSatisfiable, UnsupportedMediaType

JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"
REGISTRY_JSON: Final = "application/vnd.schemaregistry.v1+json"
OCTETS: Final = "application/octet-stream"
BATCHES: Final = "application/vnd.apache.kafka.recordbatch.v2"
REPLICA_FETCH: Final = "application/vnd.tierlog.replica-fetch"
EVENTS: Final = "text/event-stream"
ENCODINGS: Final = ("gzip", "zstd")
_TEXT: Final = (JSON, NDJSON, REGISTRY_JSON)

# RFC 9110, 5.6.4; may hold "," and ";". Ends with the header if it is not closed: looking for the
# end from each quote in turn would take a minute for a long header.
_QUOTED: Final = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)')


def content_type(header: str | None, *, accepted: Sequence[str]) -> str:
    """The body's media type, one of `accepted`; the first of them if the header is missing.

    Raises UnsupportedMediaType.
    """
    if header is None:
        return accepted[0]
    if header in accepted:
        return header
    media_type, _, parameters = header.partition(";")
    media_type = media_type.strip().lower()
    if media_type not in accepted:
        raise UnsupportedMediaType(
            f"Content-Type {header[:200]!r} is not supported here; send one of `accepted`",
            accepted=accepted,
        )
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        value = value.strip().strip('"').lower()
        is_charset = media_type in _TEXT and name.strip().lower() == "charset"
        if is_charset and value not in ("utf-8", "utf8", "us-ascii"):
            raise UnsupportedMediaType(
                f"charset {value!r} is not supported; send UTF-8", accepted=accepted
            )
    return media_type


def preferred(accept: str | None, *, offered: Sequence[str]) -> str:
    """The offered type with the highest quality; among equals, the first.

    Raises NotAcceptable if it accepts none.
    """
    if accept is None or accept == "*/*":
        return offered[0]
    if accept in offered:
        return accept
    ranges = _ranges(accept)
    best, best_quality = "", 0.0
    for media_type in offered:
        quality = _quality(media_type, ranges)
        if quality > best_quality:
            best, best_quality = media_type, quality
    if not best:
        raise NotAcceptable(accept[:200], offered=offered)
    return best


def _ranges(accept: str) -> list[tuple[str, float]]:
    found = []
    for part in _QUOTED.sub("", accept).split(","):
        media_range, *parameters = part.split(";")
        quality = 1.0
        for parameter in parameters:
            name, _, value = parameter.partition("=")
            if name.strip().lower() == "q":
                quality = _parse_quality(value.strip())
        if media_range.strip():
            found.append((media_range.strip().lower(), quality))
    return found or [("*/*", 1.0)]


def _parse_quality(text: str) -> float:
    try:
        quality = float(text)
    except ValueError:
        return 0.0
    return quality if 0.0 <= quality <= 1.0 else 0.0


def _quality(media_type: str, ranges: Sequence[tuple[str, float]]) -> float:
    """The quality of the most specific media range that matches."""
    whole = media_type.split("/", 1)[0] + "/*"
    for wanted in (media_type, whole, "*/*"):
        matching = [quality for media_range, quality in ranges if media_range == wanted]
        if matching:
            return max(matching)
    return 0.0


def content_encoding(header: str | None) -> str:
    """One of ENCODINGS, or an empty string. Raises UnsupportedMediaType."""
    names = [name.strip(" \t").lower() for name in (header or "").split(",")]
    names = ["gzip" if name == "x-gzip" else name for name in names if name not in ("", "identity")]
    if not names:
        return ""
    if len(names) == 1 and names[0] in ENCODINGS:
        return names[0]
    raise UnsupportedMediaType(
        f"Content-Encoding {', '.join(names)[:64]!r} is not supported; send one of `accepted`",
        accepted=ENCODINGS,
    )


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
