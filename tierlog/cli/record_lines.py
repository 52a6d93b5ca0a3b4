"""How `tierlog consume` prints a record.

* A format is a list of parts: bytes that are the same for each record, and functions of a record.
* A value that was decoded is JSON (`decoded_values`): a member of its line as it is, not as text.
* Records are untrusted: on a terminal their control characters are escaped, those of the format are
  not.
* Letters of a template are those of `kcat -f`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import typer

from tierlog.cli.output import format_time
from tierlog.client.records import json_member
from tierlog.record_format.errors import did_you_mean

if TYPE_CHECKING:
    from tierlog.client.records import ConsumedRecord

Part = bytes | Callable[["ConsumedRecord"], bytes]


def _value(record: ConsumedRecord) -> bytes:
    return record.value or b""


def _key(record: ConsumedRecord) -> bytes:
    return record.key or b""


def _headers(record: ConsumedRecord) -> bytes:
    return b",".join(name.encode() + b"=" + (value or b"") for name, value in record.headers)


def _time(record: ConsumedRecord) -> bytes:
    return format_time(record.timestamp, timespec="milliseconds").encode()


def _length(field: str) -> Callable[[ConsumedRecord], bytes]:
    """-1 for null, as kcat has it."""

    def length(record: ConsumedRecord) -> bytes:
        content = getattr(record, field)
        return str(-1 if content is None else len(content)).encode()

    return length


def _binary_length(record: ConsumedRecord) -> bytes:
    length = -1 if record.value is None else len(record.value)
    return length.to_bytes(4, "big", signed=True)


FIELDS: Final[dict[str, Part]] = {
    "topic": lambda record: record.topic.encode(),
    "partition": lambda record: str(record.partition).encode(),
    "offset": lambda record: str(record.offset).encode(),
    "timestamp": _time,
    "key": _key,
    "headers": _headers,
    "value": _value,
}
_LETTERS: Final[dict[str, Part]] = {
    "s": _value,
    "S": _length("value"),
    "R": _binary_length,
    "k": _key,
    "K": _length("key"),
    "T": lambda record: str(record.timestamp).encode(),
    "h": _headers,
    "t": FIELDS["topic"],
    "p": FIELDS["partition"],
    "o": FIELDS["offset"],
    "%": b"%",
}
_ESCAPES: Final = {"n": b"\n", "r": b"\r", "t": b"\t", "\\": b"\\"}
_TOKEN: Final = re.compile(r"%(.?)|\\(?:x([0-9a-fA-F]{2})|(.?))|([^%\\]+)", re.DOTALL)


def _member(name: str, content: bytes | None) -> dict[str, object]:
    schema_id = getattr(content, "schema_id", None)  # of what is decoded
    if schema_id is None or content is None:
        return json_member(name, content)
    return {name: msgspec.Raw(content), f"{name}_schema_id": schema_id}


def json_line(record: ConsumedRecord) -> bytes:
    return msgspec.json.encode(
        {
            "partition": record.partition,
            "offset": record.offset,
            "timestamp": record.timestamp,
            **_member("key", record.key),
            **_member("value", record.value),
            "headers": [
                {"name": name, **json_member("value", content)} for name, content in record.headers
            ],
        }
    )


VALUE_LINE: Final[Sequence[Part]] = (_value, b"\n")
JSON_LINE: Final[Sequence[Part]] = (json_line, b"\n")


def shown_fields(names: str) -> list[Part]:
    """The fields, between tabs, and then the value, unless it is one of them. Raises
    BadParameter.
    """
    wanted = [name.strip() for name in names.split(",")]
    for name in wanted:
        if name not in FIELDS:
            hint = did_you_mean(name, FIELDS) or f"; fields are {', '.join(FIELDS)}"
            raise typer.BadParameter(f"--show: no field {name!r}{hint}")
    if "value" not in wanted:
        wanted.append("value")
    parts: list[Part] = []
    for name in wanted:
        parts += (FIELDS[name], b"\t")
    return [*parts[:-1], b"\n"]


def parse_template(text: str) -> list[Part]:
    """A template as of `kcat -f`; it ends lines itself. Raises BadParameter."""
    parts: list[Part] = []
    for match in _TOKEN.finditer(text):
        letter, code, escape, plain = match.groups()
        if plain is not None:
            parts.append(plain.encode(errors="surrogateescape"))
        elif code is not None:
            parts.append(bytes([int(code, 16)]))
        elif letter is not None and letter in _LETTERS:
            parts.append(_LETTERS[letter])
        elif escape is not None and escape in _ESCAPES:
            parts.append(_ESCAPES[escape])
        else:
            raise typer.BadParameter(f"--template: {match[0]!r} stands for nothing; {_known()}")
    return parts


def _known() -> str:
    letters = " ".join(f"%{letter}" for letter in _LETTERS)
    return rf"it takes {letters} \n \r \t \\ \xXX"


def line_of(
    parts: Iterable[Part], safe: Callable[[bytes], bytes]
) -> Callable[[ConsumedRecord], bytes]:
    """What turns a record into bytes; `safe` filters what is the record's."""
    fixed = tuple(parts)
    if fixed == tuple(VALUE_LINE):  # three times as fast, for what is printed most
        return lambda record: safe(record.value or b"") + b"\n"

    def line(record: ConsumedRecord) -> bytes:
        return b"".join([one if isinstance(one, bytes) else safe(one(record)) for one in fixed])

    return line
