"""Converts a record's bytes to text for a page. Records are hostile input.

* The result is plain text, which the template escapes; nothing here creates markup.
* Characters that are invisible, reorder the text around them, or have no glyph (controls,
  bidirectional overrides, zero widths, tags, private use) are replaced by their code point.
* Everything is truncated: a page stays small whatever the records contain.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final, Literal, NamedTuple

import msgspec

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
    pretty = _pretty(data)
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


def _pretty(data: bytes) -> str | None:
    """Indented, with numbers as in the source; None if it is not JSON, or too large or too deep."""
    if len(data) > MAX_PRETTY_BYTES or data[:1] not in (b"{", b"[", b" ", b"\n", b"\t", b"\r"):
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
