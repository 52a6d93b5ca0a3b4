"""Writes the function that encodes one (message, version).

* What a version cannot carry is refused, unless it has its default or Kafka says that it may be
  ignored; so is null where the version does not admit it.
* A tagged field is written if it differs from its default, in the order of the tags, as Kafka does:
  bytes equal those of its own clients.
* `records` are bytes, which are copied, or slices of files (`HasSize`), which are not read here:
  they come out as parts between the encoded ones, in the order in which they are to be sent.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, Protocol

from tierlog.record_format.kafka_messages.definitions import Definition, Field, Struct, definition
from tierlog.record_format.kafka_messages.messages import struct_types
from tierlog.record_format.kafka_messages.source import FORMATS, Compiled, Source

NULL: Final = "it is null, which this version does not admit"


class HasSize(Protocol):
    """Bytes that somebody else sends, such as a FileSlice."""

    @property
    def size_bytes(self) -> int: ...


def compile_encoder(name: str, version: int) -> Compiled:
    """`call(value, out, parts)` appends to the bytearray `out`, and returns the one that is last.

    Where slices come between, `parts` gets what is before them and the slices; the returned bytes
    are sent after them.
    """
    return _Encoder(name, definition(name), version).compile()


def uvarint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def put_records(
    records: bytes | bytearray | memoryview | Sequence[HasSize],
    out: bytearray,
    parts: list[bytearray | HasSize],
) -> bytearray:
    """Append records. Returns the bytes to go on with."""
    if isinstance(records, bytes | bytearray | memoryview):
        out += records
        return out
    if not records:
        return out
    parts.append(out)
    parts.extend(records)
    return bytearray()


def size_of(records: bytes | bytearray | memoryview | Sequence[HasSize]) -> int:
    if isinstance(records, memoryview):
        return records.nbytes
    if isinstance(records, bytes | bytearray):
        return len(records)
    return sum([piece.size_bytes for piece in records])


class _Encoder:
    def __init__(self, name: str, of: Definition, version: int) -> None:
        self._of, self._version = of, version
        self._flexible = version in of.flexible
        self._types = struct_types(name)
        self._source = Source(name, version, verb="encode")
        self._run: list[tuple[str, str, str]] = []  # format, expression, path
        for function in uvarint, put_records, size_of:
            self._source.constant(function, function.__name__)
        self._source.constant(struct.pack, "pack")

    def compile(self) -> Compiled:
        with self._source.block("def encode(value, out, parts):"):
            self._struct(self._of.struct, "value", "")
            self._line("return out")
        return self._source.compile("encode")

    # --- lines ------------------------------------------------------------------------------------

    def _line(self, text: str, path: str = "") -> None:
        """A line that writes, after what is before it."""
        self._flush()
        self._source.line(text, path)

    def _evaluate(self, expression: str, path: str) -> str:
        """A variable with the value; nothing is written, so the run goes on."""
        variable = self._source.variable()
        self._source.line(f"{variable} = {expression}", path)
        return variable

    def _fixed(self, letters: str, expression: str, path: str) -> None:
        self._run.append((letters, expression, path))

    def _flush(self) -> None:
        run, self._run = self._run, []
        if run:
            self._source.line(f"out += {self._packed(run)}", _path(run))

    def _packed(self, run: list[tuple[str, str, str]]) -> str:
        formats = "".join(letters for letters, _, _ in run)
        if not formats.strip("x"):
            return repr(bytes(len(formats)))
        expressions = ", ".join(expression for _, expression, _ in run if expression)
        return f"{self._source.method(formats, 'pack')}({expressions})"

    def _uvarint(self, number: str, path: str) -> None:
        """A small number is packed together with what is before it."""
        run, self._run = self._run, []
        if not run:
            self._source.line(f"if {number} < 128: out.append({number})", path)
            self._source.line(f"else: out += uvarint({number})", path)
            return
        short, long = self._packed([*run, ("B", number, path)]), self._packed(run)
        text = f"out += {short} if {number} < 128 else {long} + uvarint({number})"
        self._source.line(text, _path([*run, ("B", number, path)]))

    def _length(self, letters: str, number: str, path: str, *, flexible: bool) -> None:
        if flexible:
            self._uvarint(number, path)
        else:
            self._fixed(letters, number, path)

    # --- values -----------------------------------------------------------------------------------

    def _struct(self, of: Struct, value: str, path: str) -> None:
        for field in of.fields:
            here = f"{path}{field.name}"
            if self._version not in field.versions:
                self._check_absent(field, f"{value}.{field.name}", here)
            elif self._version not in field.tagged:
                self._field(field, f"{value}.{field.name}", here)
        if self._flexible:
            self._tags(of, value, path)

    def _check_absent(self, field: Field, expression: str, path: str) -> None:
        if not field.ignorable:
            problem = f"this version cannot carry it, and it is not {field.default!r}"
            condition = self._differs(field, expression)
            self._source.line(f"if {condition}: raise Refused({problem!r})", path)

    def _differs(self, field: Field, expression: str) -> str:
        """The condition that the field does not have its default."""
        if field.default is None and not field.is_empty_default:
            return f"{expression} is not None"
        if field.is_array:
            return f"({expression} is None or len({expression}))"
        if field.struct is not None:
            return f"{expression} != {self._source.constant(self._types[field.type]())}"
        return f"{expression} != {field.default!r}"

    def _field(self, field: Field, expression: str, path: str) -> None:
        nullable = self._version in field.nullable
        if field.is_array:
            self._array(field, expression, path + "[]")
        elif field.struct is not None and nullable:
            null = 0 if self._version in field.tagged else 255
            self._nullable_struct(field.struct, expression, path, null=null)
        else:
            self._value(field, expression, path, nullable=nullable)

    def _value(self, field: Field, expression: str, path: str, *, nullable: bool) -> None:
        if field.struct is not None:
            self._struct(field.struct, self._evaluate(expression, path), path + ".")
        elif field.type == "uuid":
            uuid = self._evaluate(expression, path)
            self._source.line(f"if len({uuid}) != 16: raise Refused('an id has 16 bytes')", path)
            self._fixed("16s", uuid, path)
        elif field.type in FORMATS:
            self._fixed(FORMATS[field.type], expression, path)
        else:
            self._bytes(field, expression, path, nullable=nullable)

    def _nullable_struct(self, of: Struct, expression: str, path: str, *, null: int) -> None:
        self._flush()
        value = self._evaluate(expression, path)
        self._line(f"if {value} is None: out.append({null})", path)
        with self._source.block("else:", path):
            self._line("out.append(1)", path)
            self._struct(of, value, path + ".")
            self._flush()

    def _bytes(self, field: Field, expression: str, path: str, *, nullable: bool) -> None:
        flexible = field.is_flexible(self._version, struct_is=self._flexible)
        value = self._evaluate(expression, path)
        number = f"{value}n"
        null, more = ("0", " + 1") if flexible else ("-1", "")
        if field.type == "string":
            present = f"{value} = {value}.encode(); {number} = len({value}){more}"
        else:
            present = f"{number} = size_of({value}){more}"
        self._when_null(value, f"{number} = {null}; {value} = b''", path, nullable=nullable)
        self._source.line(f"else: {present}", path)
        self._length("h" if field.type == "string" else "i", number, path, flexible=flexible)
        if field.type == "records":
            self._line(f"out = put_records({value}, out, parts)", path)
        else:
            self._line(f"out += {value}", path)

    def _when_null(self, value: str, then: str, path: str, *, nullable: bool) -> None:
        then = then if nullable else f"raise Refused({NULL!r})"
        self._source.line(f"if {value} is None: {then}", path)

    def _array(self, field: Field, expression: str, path: str) -> None:
        value = self._evaluate(expression, path)
        number = f"{value}n"
        null, more = ("0", " + 1") if self._flexible else ("-1", "")
        nullable = self._version in field.nullable
        self._when_null(value, f"{number} = {null}; {value} = ()", path, nullable=nullable)
        self._source.line(f"else: {number} = len({value}){more}", path)
        self._length("i", number, path, flexible=self._flexible)
        if field.type in FORMATS and field.type != "uuid":
            packed = f"pack(f'>{{len({value})}}{FORMATS[field.type]}', *{value})"
            self._line(f"if {value}: out += {packed}", path)
            return
        self._flush()
        element = self._source.variable()
        with self._source.block(f"for {element} in {value}:", path):
            if field.struct is not None:
                self._struct(field.struct, element, path + ".")
            else:
                self._value(field, element, path, nullable=False)
            self._flush()

    # --- tags -------------------------------------------------------------------------------------

    def _tags(self, of: Struct, value: str, path: str) -> None:
        known = [field for field in of.fields if self._version in field.tagged]
        if not known:
            self._fixed("x", "", f"{path}tags")
            return
        count, section = self._evaluate("0", path), self._evaluate("b''", path)
        self._flush()
        for field in sorted(known, key=lambda field: field.tag):
            expression, here = f"{value}.{field.name}", f"{path}{field.name}"
            with self._source.block(f"if {self._differs(field, expression)}:", here):
                outside = self._evaluate("out", here)
                self._line("out = bytearray()", here)
                self._field(field, expression, here)
                self._line(f"{count} += 1", here)
                tag = f"uvarint({field.tag}) + uvarint(len(out)) + out"
                self._line(f"{section} += {tag}; out = {outside}", here)
        self._line(f"if {count}: out += uvarint({count}) + {section}", path)
        self._source.line("else: out.append(0)", path)


def _path(run: list[tuple[str, str, str]]) -> str:
    first, last = run[0][2], run[-1][2]
    return first if first == last else f"{first} to {last}"
