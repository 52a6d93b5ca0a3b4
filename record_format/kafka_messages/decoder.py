"""Writes the function that reads one (message, version).

* Every count and length is compared with the bytes that are left before anything is allocated for
  it; an element takes at least a byte, so a frame of n bytes makes at most n objects.
* Neighbouring fields of a fixed size, and the length or the count after them, are one unpacking.
* Null is read only where the version admits it; a negative length is null, as in Kafka.
* A tag's value must be exactly as long as its tag says; tags not known here are skipped.
* `records` are a slice of the frame, not a copy.
"""

from __future__ import annotations

import struct
from typing import Final

from tierlog.record_format.kafka_messages.definitions import Definition, Field, Struct, definition
from tierlog.record_format.kafka_messages.messages import struct_types
from tierlog.record_format.kafka_messages.source import FORMATS, INT_MAX, Compiled, Refused, Source

SHORT: Final = "the frame ends inside it"
NULL: Final = "it is null, which this version does not admit"


def compile_decoder(name: str, version: int) -> Compiled:
    """`call(frame, position)` returns the message and where it ends; `frame` is a memoryview."""
    return _Decoder(name, definition(name), version).compile()


def read_uvarint(frame: memoryview, first: int, position: int) -> tuple[int, int]:
    """The number whose first byte, `first`, was more than 127, and the position after it."""
    value, shift = first & 0x7F, 7
    while True:
        byte = frame[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 128:
            break
        shift += 7
        if shift > 28:
            raise Refused("its length is longer than five bytes")
    if value > INT_MAX:
        raise Refused(f"its length is {value}, more than {INT_MAX}")
    return value, position


def skip_tags(frame: memoryview, count: int, position: int) -> int:
    """The position after a section of tags, none of which is known here."""
    if count > 127:
        count, position = read_uvarint(frame, count, position)
    end = len(frame)
    if count * 2 > end - position:
        raise Refused(SHORT)
    for _ in range(count):
        for what in "tag", "size":
            size, position = frame[position], position + 1
            if size > 127:
                size, position = read_uvarint(frame, size, position)
            if what == "size":
                position += size
        if position > end:
            raise Refused(SHORT)
    return position


class _Decoder:
    def __init__(self, name: str, of: Definition, version: int) -> None:
        self._of, self._version = of, version
        self._flexible = version in of.flexible
        self._types = struct_types(name)
        self._source = Source(name, version, verb="decode")
        self._run: list[tuple[str, str, str]] = []  # format, variable, path
        for function in read_uvarint, skip_tags:
            self._source.constant(function, function.__name__)
        self._source.constant(struct.unpack_from, "unpack_from")

    def compile(self) -> Compiled:
        with self._source.block("def decode(frame, p):"):
            self._line("end = len(frame)")
            value = self._struct(self._of.struct, "")
            self._line(f"return {value}, p")
        return self._source.compile("decode")

    # --- lines ------------------------------------------------------------------------------------

    def _line(self, text: str, path: str = "") -> None:
        self._flush()
        self._source.line(text, path)

    def _refuse_if(self, condition: str, problem: str, path: str) -> None:
        self._line(f"if {condition}: raise Refused({problem!r})", path)

    def _fixed(self, letters: str, path: str) -> str:
        """A variable for what the next bytes hold; it has its value after the next line."""
        variable = self._source.variable()
        self._run.append((letters, variable, path))
        return variable

    def _flush(self) -> None:
        run, self._run = self._run, []
        if not run:
            return
        variables = ", ".join(variable for _, variable, _ in run)
        path = run[0][2] if run[0][2] == run[-1][2] else f"{run[0][2]} to {run[-1][2]}"
        if run[0][0] == "B" and len(run) == 1:
            self._source.line(f"{variables} = frame[p]; p += 1", path)
            return
        formats = "".join(letters for letters, _, _ in run)
        unpack = self._source.method(formats, "unpack_from")
        size = struct.calcsize(f">{formats}")
        self._source.line(f"{variables}, = {unpack}(frame, p); p += {size}", path)

    def _uvarint(self, path: str) -> str:
        number = self._fixed("B", path)
        self._line(f"if {number} > 127: {number}, p = read_uvarint(frame, {number}, p)", path)
        return number

    def _length(self, letters: str, path: str, *, flexible: bool) -> str:
        """A variable for a length or a count; less than 0 is null."""
        if not flexible:
            return self._fixed(letters, path)
        number = self._uvarint(path)
        self._line(f"{number} -= 1", path)
        return number

    # --- values -----------------------------------------------------------------------------------

    def _struct(self, of: Struct, path: str) -> str:
        """Lines that read the fields. Returns the expression that makes the struct."""
        version, values = self._version, {}
        for field in of.fields:
            if version in field.versions and version not in field.tagged:
                values[field.name] = self._field(field, f"{path}{field.name}")
            else:
                values[field.name] = self._default(field)
        if self._flexible:
            self._tags(of, values, path)
        self._flush()
        made = self._source.constant(self._types[of.name], f"T_{of.name}")
        return f"{made}({', '.join(values[field.name] for field in of.fields)})"

    def _default(self, field: Field) -> str:
        if field.is_array and field.default == ():
            return "[]"
        if field.struct is not None and field.is_empty_default:
            return self._source.constant(self._types[field.struct.name], f"T_{field.type}") + "()"
        return repr(field.default)

    def _field(self, field: Field, path: str) -> str:
        if field.is_array:
            return self._array(field, path + "[]")
        return self._value(field, path, nullable=self._version in field.nullable)

    def _value(self, field: Field, path: str, *, nullable: bool) -> str:
        if field.struct is not None:
            return (
                self._nullable_struct(field, field.struct, path)
                if nullable
                else (self._bound(self._struct(field.struct, path + "."), path))
            )
        if field.type in FORMATS:
            return self._fixed(FORMATS[field.type], path)
        return self._bytes(field, path, nullable=nullable)

    def _bound(self, expression: str, path: str) -> str:
        variable = self._source.variable()
        self._line(f"{variable} = {expression}", path)
        return variable

    def _nullable_struct(self, field: Field, of: Struct, path: str) -> str:
        """A byte says whether there is one: less than 0 is null, in a tag section also 0."""
        mark = self._fixed("b", path)
        value = self._bound("None", path)
        least = 1 if self._version in field.tagged else 0
        with self._source.block(f"if {mark} >= {least}:", path):
            self._line(f"{value} = {self._struct(of, path + '.')}", path)
        return value

    def _bytes(self, field: Field, path: str, *, nullable: bool) -> str:
        flexible = field.is_flexible(self._version, struct_is=self._flexible)
        length = self._length("h" if field.type == "string" else "i", path, flexible=flexible)
        stop, value = f"{length}e", self._source.variable()
        self._line(f"{stop} = p + {length}", path)
        self._refuse_if(f"{stop} > end", SHORT, path)
        taken = f"frame[p:{stop}]"
        made = {"string": f"str({taken}, 'utf-8')", "bytes": f"bytes({taken})"}.get(
            field.type, taken
        )
        if nullable:
            self._line(f"if {length} < 0: {value} = None", path)
            self._line(f"else: {value} = {made}; p = {stop}", path)
        else:
            self._refuse_if(f"{length} < 0", NULL, path)
            self._line(f"{value} = {made}; p = {stop}", path)
        return value

    def _array(self, field: Field, path: str) -> str:
        least = least_size(field, self._version, flexible=self._flexible)
        assert least > 0, f"{path}: its elements may be empty, so a count says nothing"
        count = self._length("i", path, flexible=self._flexible)
        value = self._source.variable()
        self._refuse_if(f"{count} * {least} > end - p", SHORT, path)
        nullable = self._version in field.nullable
        if not nullable:
            self._refuse_if(f"{count} < 0", NULL, path)
        if nullable:
            self._line(f"if {count} < 0: {value} = None", path)
        with self._source.block("else:" if nullable else "if True:", path):
            if field.type in FORMATS and field.type != "uuid":
                unpacked = f"unpack_from(f'>{{{count}}}{FORMATS[field.type]}', frame, p)"
                self._line(f"{value} = [*{unpacked}]; p += {count} * {least}", path)
            else:
                self._elements(field, count, value, path)
        return value

    def _elements(self, field: Field, count: str, value: str, path: str) -> None:
        self._line(f"{value} = []", path)
        with self._source.block(f"for _ in range({count}):", path):
            if field.struct is not None:
                element = self._struct(field.struct, f"{path}.")
            else:
                element = self._value(field, path, nullable=False)
            self._line(f"{value}.append({element})", path)

    # --- tags -------------------------------------------------------------------------------------

    def _tags(self, of: Struct, values: dict[str, str], path: str) -> None:
        count = self._fixed("B", f"{path}tags")
        known = [field for field in of.fields if self._version in field.tagged]
        if not known:
            self._line(f"if {count}: p = skip_tags(frame, {count}, p)", f"{path}tags")
            return
        for field in known:
            values[field.name] = self._bound(self._default(field), path)
        with self._source.block(f"if {count}:"):
            self._line(f"if {count} > 127: {count}, p = read_uvarint(frame, {count}, p)")
            self._refuse_if(f"{count} * 2 > end - p", SHORT, f"{path}tags")
            with self._source.block(f"for _ in range({count}):"):
                self._tag(known, values, path)

    def _tag(self, known: list[Field], values: dict[str, str], path: str) -> None:
        tag, size = self._uvarint(f"{path}tags"), self._uvarint(f"{path}tags")
        stop = f"{size}e"
        self._line(f"{stop} = p + {size}", f"{path}tags")
        self._refuse_if(f"{stop} > end", SHORT, f"{path}tags")
        for number, field in enumerate(known):
            with self._source.block(f"{'elif' if number else 'if'} {tag} == {field.tag}:"):
                value = self._field(field, f"{path}{field.name}")
                self._line(f"{values[field.name]} = {value}", f"{path}{field.name}")
                self._refuse_if(f"p != {stop}", "its tag gives another size", path + field.name)
        self._line(f"else: p = {stop}", path)


def least_size(field: Field, version: int, *, flexible: bool) -> int:
    """The fewest bytes that one element of `field` takes in `version`."""
    if field.struct is not None:
        inside = (
            least_size_of_field(one, version, flexible=flexible)
            for one in field.struct.fields
            if version in one.versions and version not in one.tagged
        )
        return sum(inside) + flexible
    if field.type in FORMATS:
        return struct.calcsize(f">{FORMATS[field.type]}")
    if field.is_flexible(version, struct_is=flexible):
        return 1
    return 2 if field.type == "string" else 4


def least_size_of_field(field: Field, version: int, *, flexible: bool) -> int:
    if field.is_array:
        return 1 if flexible else 4
    if field.struct is not None and version in field.nullable:
        return 1
    return least_size(field, version, flexible=flexible)
