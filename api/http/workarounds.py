"""What stands here because a library has a fault, and goes when the library mends it.

| of           | what                       | waits for                                            |
|--------------|----------------------------|------------------------------------------------------|
| msgspec 0.22 | `read_message`, `with_key` | #264: what a ValidationError is about, and where, as |
|              |                            | attributes. No version has them so far: they are     |
|              |                            | read from its message.                               |
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec

_MESSAGE: Final = re.compile(
    r"(?:Object (?P<what>contains unknown|missing required) field `(?P<name>.*?)`|(?P<text>.*?))"
    r"(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?\Z",
    re.DOTALL,
)
_IN_MAP: Final = re.compile(r" - at `\$\.(?P<map>\w+)\[\.\.\.\]`\Z")
# A member's name may be as long as the body: a message is shortened in the middle.
_MESSAGE_CHARS: Final = 500
# msgspec's message both for JSON that ends too early and for half of a surrogate pair.
_TRUNCATED: Final = "Input data was truncated"
_TRUNCATED_OR_SURROGATE: Final = "JSON ends too early, or an escape has half of a surrogate pair"
_parts_of: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Message(NamedTuple):
    """`path` is that of the object or value; of an object, `unknown` and `missing` are members."""

    path: str
    text: str
    unknown: str | None = None
    missing: str | None = None


def read_message(error: Exception) -> Message:
    text = str(error)
    if len(text) > 2 * _MESSAGE_CHARS:
        text = f"{text[:_MESSAGE_CHARS]}…{text[-_MESSAGE_CHARS:]}"
    found = _MESSAGE.match(text)
    assert found is not None, "the pattern matches any text"
    path, name = found["path"] or "", found["name"]
    if name is None:
        text = _TRUNCATED_OR_SURROGATE if found["text"] == _TRUNCATED else found["text"]
        return Message(path, text)
    if found["what"] == "missing required":
        return Message(path, "missing", missing=name)
    return Message(path, "unknown member", unknown=name)


def with_key(
    error: msgspec.ValidationError, body: bytes | bytearray, decoder: msgspec.json.Decoder[Any]
) -> Exception:
    """Replace msgspec's `$.config[...]` by the key, found by decoding each member alone."""
    match = _IN_MAP.search(str(error))
    if match is None:
        return error
    # The rest of the body may be malformed: the decoder has not read it yet.
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        name = match["map"]
        for key, value in _parts_of(_parts_of(body)[name]).items():
            alone = msgspec.json.encode({name: {key: value}})
            try:
                decoder.decode(alone)
            except msgspec.ValidationError as found:
                if _IN_MAP.search(str(found)):
                    return msgspec.ValidationError(str(found).replace("[...]", f".{key}"))
    return error
