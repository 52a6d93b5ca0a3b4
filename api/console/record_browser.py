"""A page of records from either tier, for people to read. Records are hostile input.

* It begins at an offset, a keyword, or a time. A time without a UTC offset is taken as UTC: the API
  refuses it, but here the user sees how it was interpreted.
* `latest` shows the newest page, not the empty end. Offsets that a restore skipped are left out.
* A record's bytes become plain text, which the template escapes; nothing here creates markup.
* Characters that are invisible, reorder the text around them, or have no glyph (controls,
  bidirectional overrides, zero widths, tags, private use) are replaced by their code point.
* A key or value that begins with a schema's id is shown as what it says, and as it was sent.
* Everything is truncated: a page stays small whatever the records contain.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import chain
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta

from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.fetch.reading import (
    EARLIEST,
    KEYWORDS,
    LATEST,
    MakeDecoder,
    decoder_of,
    parse_position,
    resolve,
)
from tierlog.api.http.fetch.record_pages import LargeRecord, read_page
from tierlog.api.http.fetch.single import FetchQuery
from tierlog.api.http.settings import MIB
from tierlog.broker.partition.partition import Partition
from tierlog.broker.partition.segment_listing import first_time, last_time
from tierlog.broker.partition.tiered_reads import Fetched, Tier
from tierlog.broker.schema_registry.decoding import Decoded, DecodedBy
from tierlog.manifest.state import OffsetGap
from tierlog.record_format.units import in_utc

_PAGE: Final = FetchQuery(max_bytes=MIB)
MAX_DATE_MS: Final = 253_402_300_799_999  # the end of the year 9999
MAX_HEADER: Final = 2000  # characters


class RecordsQuery(msgspec.Struct, forbid_unknown_fields=True):
    by: Literal["offset", "timestamp"] = "offset"
    at: str = LATEST
    limit: Annotated[int, Meta(ge=1, le=200)] = 50


class HeaderLine(NamedTuple):
    name: str
    value: DisplayText


class ShownPart(NamedTuple):
    """A key or value: on one line, and opened. `schema`: that of the id that it begins with;
    `raw`: as it was sent, if that decoded it.
    """

    line: DisplayText
    opened: DisplayText
    schema: DecodedBy | None = None
    raw: DisplayText | None = None


class RecordLine(NamedTuple):
    """`size_bytes`: of key, value and headers, uncompressed."""

    offset: int
    timestamp: int
    size_bytes: int
    tier: Tier
    key: ShownPart
    value: ShownPart
    headers: list[HeaderLine]


class RecordPage(NamedTuple):
    """`previous_offset`, `next_offset`: where the adjacent pages begin; None if there is none."""

    lines: list[RecordLine]
    offset: int
    tier: Tier
    previous_offset: int | None
    next_offset: int | None


class TimeAxis(NamedTuple):
    """From the first segment's earliest record to the last one's latest."""

    first_ms: int
    last_ms: int


def time_axis(partition: Partition) -> TimeAxis | None:
    """None if its records have no times, or all the same one. May wait for the bucket."""
    last_ms = last_time(partition)
    if not 0 <= last_ms <= MAX_DATE_MS:
        return None
    first_ms = first_time(partition)
    if first_ms is None:  # not known without a look into the segment
        found = partition.offset_for_timestamp(0)
        first_ms = found[1] if found else last_ms
    return TimeAxis(first_ms, last_ms) if 0 <= first_ms < last_ms else None


class _Reader(NamedTuple):
    """Of a page's records."""

    context: Context
    partition: Partition
    decoder: MakeDecoder


async def record_page(
    context: Context, exchange: Exchange, partition: Partition, query: RecordsQuery
) -> RecordPage:
    """Raises InvalidRequest, OffsetTrimmed, OffsetPastEnd, StoreUnavailable, CorruptDataError."""
    reader = _Reader(context, partition, decoder_of(context, exchange))
    at = query.at.strip() or EARLIEST
    if query.by == "timestamp" and at not in KEYWORDS:
        position = parse_position(UNSET, in_utc(at), default=EARLIEST)
    else:
        position = parse_position(at, UNSET, default=EARLIEST)
    if position.keyword == LATEST:
        return await _newest_page(reader, limit=query.limit)
    offset = await resolve(context, partition, position, committed=False)
    return await _page_at(reader, offset, limit=query.limit)


async def _newest_page(reader: _Reader, *, limit: int) -> RecordPage:
    """Large records end a page before `limit`: then it begins closer to the end."""
    count, partition = limit, reader.partition
    while True:
        now = partition.offsets()
        before = page_before(now.high_watermark, _gaps(partition), limit=count)
        page = await _page_at(reader, max(now.log_start_offset, before), limit=limit)
        if page.next_offset is None or len(page.lines) >= count or count == 1:
            return page
        count //= 2


async def _page_at(reader: _Reader, offset: int, *, limit: int) -> RecordPage:
    context, partition, _ = reader
    fetched = await context.read_batches(partition, offset, _PAGE)
    with closing(fetched):
        async with context.decoding.for_page(MIB):
            # A schema may have to be looked for, in the bucket or at another broker.
            page = await context.read_cold(_page, reader, fetched, offset=offset, limit=limit)
    context.metrics.requests.fetched(
        fetched.tier, fetched.size_bytes, topic=partition.topic, records=len(page.lines)
    )
    return page


def _gaps(partition: Partition) -> Sequence[OffsetGap]:
    return partition.gaps


def page_before(offset: int, gaps: Sequence[OffsetGap], *, limit: int) -> int:
    """The first of the `limit` offsets before `offset`, or before a gap that ends at `offset`."""
    for gap in gaps:
        if gap.start_offset < offset <= gap.end_offset:
            offset = gap.start_offset
    return offset - limit


def _tier_of(lines: list[RecordLine]) -> Tier | None:
    tiers = {line.tier for line in lines}
    return "mixed" if len(tiers) > 1 else next(iter(tiers), None)


def _large_line(large: LargeRecord, local_start: int) -> RecordLine:
    """Only the beginnings of key and value, and none of the headers."""
    key, value = (_Beginning(*found) for found in large.prefixes(MAX_TEXT_BYTES + 1))
    offset, timestamp, *_ = large.head
    return RecordLine(
        offset=offset,
        timestamp=timestamp,
        size_bytes=large.head.size_bytes,
        tier="hot" if offset >= local_start else "cold",
        key=ShownPart(key.shown(summary), key.shown(full_text)),
        value=ShownPart(value.shown(summary), value.shown(full_text)),
        headers=[],
    )


class _Beginning(NamedTuple):
    data: bytes | None
    size_bytes: int

    def shown(self, show: Callable[[bytes | None], DisplayText]) -> DisplayText:
        text = show(self.data)
        if self.data is None or len(self.data) == self.size_bytes:
            return text
        return text._replace(size_bytes=self.size_bytes, cut=True)


def _page(reader: _Reader, fetched: Fetched, *, offset: int, limit: int) -> RecordPage:
    partition, decoder = reader.partition, reader.decoder()
    page = read_page(fetched, offset=offset, max_bytes=MIB, max_records=limit)
    local_start = partition.offsets().local_log_start_offset
    lines = [_large_line(page.large, local_start)] if page.large is not None else []
    lines += [
        RecordLine(
            offset=at,
            timestamp=timestamp,
            size_bytes=_size(key, value, *chain(*headers)),
            tier="hot" if at >= local_start else "cold",
            key=_shown(decoder.decode(key, "key"), key),
            value=_shown(decoder.decode(value, "value"), value),
            headers=[
                HeaderLine(visible(name), summary(content, max_text=MAX_HEADER))
                for name, content in headers
            ],
        )
        for columns in page.batches
        for at, timestamp, key, value, headers in zip(*columns, strict=True)
    ]
    start, before = fetched.log_start_offset, page_before(offset, _gaps(partition), limit=limit)
    return RecordPage(
        lines=lines,
        offset=offset,
        tier=_tier_of(lines) or fetched.tier,  # more may have been read than is shown
        previous_offset=max(start, before) if offset > start else None,
        next_offset=page.next_offset if page.next_offset < fetched.high_watermark else None,
    )


def _shown(decoded: Decoded | None, data: bytes | None) -> ShownPart:
    if decoded is None:
        return ShownPart(summary(data), full_text(data))
    if decoded.text is None:
        return ShownPart(summary(data), full_text(data), decoded.schema)
    text = decoded.text
    return ShownPart(summary(text), full_text(text), decoded.schema, full_text(data))


def _size(*parts: str | bytes | None) -> int:
    return sum(len(one.encode() if isinstance(one, str) else one or b"") for one in parts)


MAX_TEXT: Final = 32 << 10  # characters of one value on a page
MAX_TEXT_BYTES: Final = 4 * MAX_TEXT  # in UTF-8
MAX_PRETTY_BYTES: Final = 64 << 10  # larger JSON is not indented
MAX_PRETTY_DEPTH: Final = 64  # each level indents every line below it
MAX_HEX_BYTES: Final = 512
MAX_SUMMARY: Final = 200
_HEX_WIDTH: Final = 16
Kind = Literal["json", "text", "binary", "null"]


class DisplayText(NamedTuple):
    """`text` may be truncated; `size_bytes` is the full size."""

    kind: Kind
    text: str
    size_bytes: int
    cut: bool = False


class _Visible(dict[int, str]):
    """A table for `str.translate`."""

    def __missing__(self, code: int) -> int | str:
        hidden = unicodedata.category(chr(code)) in _HIDDEN
        return f"⟨U+{code:04X}⟩" if hidden else code


# Control, format, private use, unassigned, line and paragraph separator (Unicode, table 4-4).
_HIDDEN: Final = frozenset(("Cc", "Cf", "Co", "Cn", "Zl", "Zp"))
_VISIBLE: Final = _Visible(
    {code: chr(0x2400 + code) for code in range(0x20)}
    | {ord("\n"): "\n", ord("\t"): "\t", 0x7F: "\u2421"}
)
_BRACKETS: Final = re.compile(rb"[\[\]{}]")
_BLANKS: Final = re.compile(r"\s+")
_ANY_JSON: Final = msgspec.json.Decoder(msgspec.Raw)


def visible(text: str) -> str:
    return text.translate(_VISIBLE)


def full_text(data: bytes | None) -> DisplayText:
    """A whole value: JSON indented, other text unchanged, binary as a hex dump."""
    if data is None:
        return DisplayText("null", "", 0)
    text = _prefix(data)
    if text is None:
        return DisplayText(
            "binary", hex_dump(data[:MAX_HEX_BYTES]), len(data), len(data) > MAX_HEX_BYTES
        )
    pretty = pretty_json(data)
    kind: Kind = "text" if pretty is None else "json"
    text = text if pretty is None else pretty
    cut = len(text) > MAX_TEXT or len(data) > MAX_TEXT_BYTES
    return DisplayText(kind, visible(text[:MAX_TEXT]), len(data), cut)


def summary(data: bytes | None, *, max_text: int = MAX_SUMMARY) -> DisplayText:
    """A value on one line, for a list."""
    if data is None:
        return DisplayText("null", "", 0)
    text = _prefix(data)
    if text is None:
        most = max_text // 4
        return DisplayText("binary", data[:most].hex(" "), len(data), len(data) > most)
    line = visible(_BLANKS.sub(" ", text[: 2 * max_text]))
    cut = len(line) > max_text or len(text) > 2 * max_text
    return DisplayText("text", line[:max_text], len(data), cut)


def hex_dump(data: bytes) -> str:
    """Like xxd: position, bytes, characters."""
    lines = []
    for position in range(0, len(data), _HEX_WIDTH):
        row = data[position : position + _HEX_WIDTH]
        letters = "".join(chr(byte) if 0x20 <= byte < 0x7F else "·" for byte in row)
        lines.append(f"{position:08x}  {row.hex(' '):<47}  {letters}")
    return "\n".join(lines)


def _prefix(data: bytes) -> str | None:
    """The beginning as text, up to a whole character. None for binary: not UTF-8, or with a NUL (as
    git and grep decide), which an 8-byte integer often has.
    """
    head = data[:MAX_TEXT_BYTES]
    if b"\0" in head:
        return None
    try:
        return head.decode()
    except UnicodeDecodeError as error:
        if len(head) == len(data) or error.start < len(head) - 3:
            return None
        return head[: error.start].decode()


def pretty_json(data: bytes, *, max_bytes: int = MAX_PRETTY_BYTES) -> str | None:
    """Indented, with numbers as in the source; None if it is no object or array of JSON, or too
    large or too deep.
    """
    if len(data) > max_bytes or data[:1] not in (b"{", b"[", b" ", b"\n", b"\t", b"\r"):
        return None
    if _depth(data) > MAX_PRETTY_DEPTH:
        return None
    try:
        _ANY_JSON.decode(data)
        return msgspec.json.format(data, indent=2).decode()
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _depth(data: bytes) -> int:
    """An upper bound of the nesting: brackets inside strings count too."""
    depth = deepest = 0
    for match in _BRACKETS.finditer(data):
        depth += 1 if match.group() in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest
