"""The text of .proto files, parsed into Protobuf's own description of a file. Pure.

* The grammar is the language's: proto2, proto3 and editions. What names stand for, and most of what
  a file may not say, is found by the library when the description is linked (`protobuf_schema`);
  here is what it takes for granted.
* A custom option keeps its words, uninterpreted, as protoc's parser leaves them.
* Comments are not kept.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple, NoReturn

from google.protobuf import descriptor_pb2, text_encoding, text_format

from tierlog.record_format.schema_records import Malformed

NUMBER_MAX: Final = 2**29 - 1  # of a field
DEPTH_MAX: Final = 32  # of messages within messages, as protoc has it
_INT32_MAX: Final = 2**31 - 1
_OWN: Final = range(19000, 20000)  # numbers that are Protobuf's

_FIELD: Final[Any] = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final[Mapping[str, int]] = {
    name.removeprefix("TYPE_").lower(): number
    for name, number in _FIELD.Type.items()
    if name not in ("TYPE_GROUP", "TYPE_MESSAGE", "TYPE_ENUM")
}
_LABELS: Final[Mapping[str, int]] = {
    name.removeprefix("LABEL_").lower(): number for name, number in _FIELD.Label.items()
}
_TOKEN: Final = re.compile(
    r"""(?P<skip>\s+|//[^\n]*|/\*.*?\*/)
    |(?P<string>"(?:[^"\\\n]|\\[abfnrtv?\\'"0-7xXuU])*"|'(?:[^'\\\n]|\\[abfnrtv?\\'"0-7xXuU])*')
    |(?P<number>0[xX][0-9a-fA-F]+|(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?f?)
    |(?P<name>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<symbol>[;{}()\[\]=,.<>:+/-])""",
    re.VERBOSE | re.DOTALL,
)
_NUMBER_THEN_NAME: Final = re.compile(r"[A-Za-z_]")


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def parse_proto(text: str) -> Any:
    """A FileDescriptorProto without a name, its types not resolved. Raises Malformed."""
    return _Parser(list(_tokens(text))).file()


def _tokens(text: str) -> Iterator[_Token]:
    position, line = (1 if text.startswith("\ufeff") else 0), 1
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise Malformed(f"line {line}: {text[position : position + 20]!r} is not expected")
        kind, position = str(found.lastgroup), found.end()
        if kind == "number" and _NUMBER_THEN_NAME.match(text, position):
            raise Malformed(f"line {line}: {found.group()!r} needs space after it")
        if kind != "skip":
            yield _Token(kind, found.group(), line)
        line += found.group().count("\n")
    yield _Token("end", "the end", line)


class _Parser:
    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens, self._next = tokens, 0
        self._syntax = "proto2"
        self._depth = 0

    # --- tokens -----------------------------------------------------------------------------------

    @property
    def _token(self) -> _Token:
        return self._tokens[self._next]

    def _after(self, count: int) -> _Token:
        return self._tokens[min(self._next + count, len(self._tokens) - 1)]

    def _refuse(self, problem: str) -> NoReturn:
        raise Malformed(f"line {self._token.line}: {problem}")

    def _take(self, kind: str, wanted: str = "") -> str:
        token = self._token
        if token.kind != kind or wanted not in ("", token.text):
            self._refuse(f"{wanted or f'a {kind}'} is expected, not {token.text[:40]}")
        self._next += 1
        return token.text

    def _sees(self, *words: str) -> bool:
        return self._token.text in words and self._token.kind in ("name", "symbol")

    def _took(self, word: str) -> bool:
        if self._sees(word):
            self._next += 1
            return True
        return False

    def _symbol(self, wanted: str) -> None:
        self._take("symbol", wanted)

    def _name(self) -> str:
        return self._take("name")

    def _full_name(self) -> str:
        """Dotted, with or without a dot before it."""
        parts = ["." if self._took(".") else ""]
        parts.append(self._name())
        while self._took("."):
            parts += [".", self._name()]
        return "".join(parts)

    def _bytes(self) -> bytes:
        found: bytes = b""
        while True:
            try:
                found += text_encoding.CUnescape(self._take("string")[1:-1])
            except ValueError as error:
                self._refuse(str(error))
            if self._token.kind != "string":
                return found

    def _string(self) -> str:
        try:
            return self._bytes().decode()
        except UnicodeDecodeError:
            self._refuse("a string is not UTF-8")

    def _integer(self, *, maximum: int = _INT32_MAX, minimum: int = 0) -> int:
        sign = -1 if minimum < 0 and self._took("-") else 1
        text = self._take("number")
        if not re.fullmatch(r"0[xX][0-9a-fA-F]+|[0-9]{1,20}", text):
            self._refuse(f"{text[:40]} is no whole number")
        value = sign * _whole(text)
        if not minimum <= value <= maximum:
            self._refuse(f"{value} is not from {minimum} to {maximum}")
        return value

    def _number(self) -> int:
        """Of a field."""
        value = self._integer(maximum=NUMBER_MAX, minimum=1)
        if value in _OWN:
            self._refuse(f"the numbers {_OWN[0]} to {_OWN[-1]} are Protobuf's own")
        return value

    def _block(self, statement: Callable[[], None]) -> None:
        self._symbol("{")
        while not self._took("}"):
            if not self._took(";"):
                statement()

    # --- files ------------------------------------------------------------------------------------

    def file(self) -> Any:
        file = descriptor_pb2.FileDescriptorProto()
        if self._sees("syntax", "edition"):
            self._head(file)
        while self._token.kind != "end":
            if not self._took(";"):
                self._file_statement(file)
        return file

    def _head(self, file: Any) -> None:
        word = self._name()
        self._symbol("=")
        said = self._string()
        self._symbol(";")
        if word == "syntax":
            if said not in ("proto2", "proto3"):
                self._refuse(f"the syntax is proto2 or proto3, not {said[:40]!r}")
            self._syntax = said
            if said == "proto3":
                file.syntax = said
            return
        self._syntax = file.syntax = "editions"
        if not re.fullmatch("20[0-9]{2}", said) or f"EDITION_{said}" not in _editions():
            self._refuse(f"there is no edition {said[:40]!r} here")
        file.edition = _editions()[f"EDITION_{said}"]

    def _file_statement(self, file: Any) -> None:
        if self._took("message"):
            self._message(file.message_type.add())
        elif self._took("enum"):
            self._enum(file.enum_type.add())
        elif self._took("option"):
            self._option_statement(file.options)
        elif self._took("import"):
            self._import(file)
        elif self._took("extend"):
            self._extend(file.extension, file.message_type)
        elif self._took("service"):
            self._service(file.service.add())
        elif self._took("package"):
            if file.package:
                self._refuse("there are two packages")
            file.package = self._full_name()
            self._symbol(";")
        else:
            self._refuse(f"{self._token.text[:40]} is not expected")

    def _import(self, file: Any) -> None:
        index = len(file.dependency)
        if self._took("public"):
            file.public_dependency.append(index)
        elif self._took("weak"):
            file.weak_dependency.append(index)
        file.dependency.append(self._string())
        self._symbol(";")

    def _service(self, service: Any) -> None:
        service.name = self._name()

        def statement() -> None:
            if self._took("option"):
                self._option_statement(service.options)
            else:
                self._take("name", "rpc")
                self._method(service.method.add())

        self._block(statement)

    def _method(self, method: Any) -> None:
        method.name = self._name()
        streams, method.input_type = self._message_of_method()
        if streams:
            method.client_streaming = True
        self._take("name", "returns")
        streams, method.output_type = self._message_of_method()
        if streams:
            method.server_streaming = True
        if self._sees("{"):
            self._block(lambda: self._options_alone(method.options))
        else:
            self._symbol(";")

    def _message_of_method(self) -> tuple[bool, str]:
        self._symbol("(")
        streams = self._sees("stream") and self._after(1).text != ")"
        if streams:
            self._next += 1
        found = self._full_name()
        self._symbol(")")
        return streams, found

    def _options_alone(self, options: Any) -> None:
        self._take("name", "option")
        self._option_statement(options)

    # --- messages ---------------------------------------------------------------------------------

    def _message(self, message: Any) -> None:
        message.name = self._name()
        self._message_body(message)

    def _message_body(self, message: Any) -> None:
        self._depth += 1
        if self._depth > DEPTH_MAX:
            self._refuse(f"messages are nested more than {DEPTH_MAX} times")
        optional: list[Any] = []  # of proto3: each is a oneof of its own
        self._block(lambda: self._message_statement(message, optional))
        taken = {one.name for one in message.field}
        for field in optional:
            name = f"_{field.name}"
            while name in taken:
                name = f"X{name}"
            taken.add(name)
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=name)
        self._check_reserved(message)
        self._depth -= 1

    def _message_statement(self, message: Any, optional: list[Any]) -> None:
        if self._took("message"):
            self._message(message.nested_type.add())
        elif self._took("enum"):
            self._enum(message.enum_type.add())
        elif self._took("oneof"):
            self._oneof(message)
        elif self._took("extend"):
            self._extend(message.extension, message.nested_type)
        elif self._took("option"):
            self._option_statement(message.options)
        elif self._took("reserved"):
            self._reserved(message, beyond=1, maximum=NUMBER_MAX)
        elif self._took("extensions"):
            self._extensions(message)
        else:
            field = message.field.add()
            self._field(field, message.nested_type)
            if field.proto3_optional:
                optional.append(field)

    def _field(self, field: Any, nested: Any) -> None:
        """`nested`: where what a map or a group is goes."""
        if self._sees("map") and self._after(1).text == "<":
            self._map(field, nested)
            return
        label = self._label()
        if self._sees("group") and self._after(2).text == "=":
            self._next += 1
            field.label = _LABELS[label or "optional"]
            self._group(field, nested)
            return
        if not label and self._syntax == "proto2":
            self._refuse("a field of proto2 is optional, required or repeated")
        field.label = _LABELS[label or "optional"]
        if label == "optional" and self._syntax == "proto3":
            field.proto3_optional = True
        self._rest_of_field(field)

    def _label(self) -> str:
        """Empty: there is none."""
        after = self._after(1)
        if self._token.text in _LABELS and (after.kind == "name" or after.text == "."):
            self._next += 1
            return self._tokens[self._next - 1].text
        return ""

    def _type(self, field: Any) -> None:
        name = self._full_name()
        scalar = _SCALARS.get(name)
        if scalar is None:
            field.type_name = name
        else:
            field.type = scalar

    def _rest_of_field(self, field: Any) -> None:
        self._type(field)
        field.name = self._name()
        self._symbol("=")
        field.number = self._number()
        self._field_options(field)
        self._symbol(";")

    def _map(self, field: Any, nested: Any) -> None:
        self._next += 2
        entry = nested.add()
        key = entry.field.add(name="key", number=1, label=_LABELS["optional"])
        self._type(key)
        if key.type_name or key.type in map(_SCALARS.get, ("float", "double", "bytes")):
            self._refuse("the keys of a map are whole numbers, booleans or strings")
        self._symbol(",")
        self._type(entry.field.add(name="value", number=2, label=_LABELS["optional"]))
        self._symbol(">")
        field.name = self._name()
        words = (one[:1].upper() + one[1:] for one in field.name.split("_"))
        entry.name = field.type_name = "".join(words) + "Entry"
        entry.options.map_entry = True
        field.label, field.type = _LABELS["repeated"], _FIELD.TYPE_MESSAGE
        self._symbol("=")
        field.number = self._number()
        self._field_options(field)
        self._symbol(";")

    def _group(self, field: Any, nested: Any) -> None:
        group = nested.add(name=self._name())
        field.name, field.type_name, field.type = group.name.lower(), group.name, _FIELD.TYPE_GROUP
        self._symbol("=")
        field.number = self._number()
        self._field_options(field)
        self._message_body(group)

    def _oneof(self, message: Any) -> None:
        index = len(message.oneof_decl)
        oneof = message.oneof_decl.add(name=self._name())

        def statement() -> None:
            if self._took("option"):
                self._option_statement(oneof.options)
                return
            field = message.field.add(label=_LABELS["optional"], oneof_index=index)
            if self._sees("group") and self._after(2).text == "=":
                self._next += 1
                self._group(field, message.nested_type)
            else:
                self._rest_of_field(field)

        self._block(statement)

    def _extend(self, fields: Any, nested: Any) -> None:
        extendee = self._full_name()

        def statement() -> None:
            field = fields.add(extendee=extendee)
            self._field(field, nested)

        self._block(statement)

    def _ranges(self, *, maximum: int, minimum: int) -> Iterator[tuple[int, int]]:
        """Both inclusive."""
        while True:
            start = end = self._integer(maximum=maximum, minimum=minimum)
            if self._took("to"):
                end = (
                    maximum
                    if self._took("max")
                    else self._integer(maximum=maximum, minimum=minimum)
                )
            if end < start:
                self._refuse(f"{start} to {end} is no range")
            yield start, end
            if not self._took(","):
                return

    def _reserved(self, owner: Any, *, beyond: int, maximum: int) -> None:
        """`beyond`: what a range's end is kept as, past the last."""
        if self._token.kind in ("string", "name"):
            while True:
                is_string = self._token.kind == "string"
                owner.reserved_name.append(self._string() if is_string else self._name())
                if not self._took(","):
                    break
        else:
            minimum = 1 if beyond else -_INT32_MAX - 1
            for start, end in self._ranges(maximum=maximum, minimum=minimum):
                owner.reserved_range.add(start=start, end=end + beyond)
        self._symbol(";")

    def _extensions(self, message: Any) -> None:
        added = [
            message.extension_range.add(start=start, end=end + 1)
            for start, end in self._ranges(maximum=NUMBER_MAX, minimum=1)
        ]
        options = descriptor_pb2.ExtensionRangeOptions()
        if self._sees("["):
            self._option_list(lambda: self._option(options))
            for one in added:
                one.options.CopyFrom(options)
        self._symbol(";")

    def _check_reserved(self, message: Any) -> None:
        names = set(message.reserved_name)
        for field in message.field:
            if field.name in names:
                self._refuse(f"{message.name}: the name {field.name!r} is reserved")
            if any(one.start <= field.number < one.end for one in message.reserved_range):
                self._refuse(f"{message.name}.{field.name}: the number {field.number} is reserved")

    def _enum(self, enum: Any) -> None:
        enum.name = self._name()

        def statement() -> None:
            if self._took("option"):
                self._option_statement(enum.options)
            elif self._took("reserved"):
                self._reserved(enum, beyond=0, maximum=_INT32_MAX)
            else:
                self._constant(enum.value.add())

        self._block(statement)
        numbers = [one.number for one in enum.value]
        if len(set(numbers)) < len(numbers) and not enum.options.allow_alias:
            self._refuse(f"{enum.name}: two constants have one number, without allow_alias")
        for one in enum.value:
            ranges = enum.reserved_range
            if one.name in enum.reserved_name or any(
                reserved.start <= one.number <= reserved.end for reserved in ranges
            ):
                self._refuse(f"{enum.name}: {one.name} = {one.number} is reserved")

    def _constant(self, constant: Any) -> None:
        constant.name = self._name()
        self._symbol("=")
        constant.number = self._integer(minimum=-_INT32_MAX - 1)
        if self._sees("["):
            self._option_list(lambda: self._option(constant.options))
        self._symbol(";")

    # --- options ----------------------------------------------------------------------------------

    def _option_statement(self, options: Any) -> None:
        self._option(options)
        self._symbol(";")

    def _option_list(self, option: Callable[[], None]) -> None:
        self._symbol("[")
        option()
        while self._took(","):
            option()
        self._symbol("]")

    def _field_options(self, field: Any) -> None:
        if self._sees("["):
            self._option_list(lambda: self._field_option(field))

    def _field_option(self, field: Any) -> None:
        if self._sees("default", "json_name") and self._after(1).text == "=":
            word = self._name()
            self._symbol("=")
            if word == "json_name":
                field.json_name = self._string()
            else:
                field.default_value = self._default(field)
        else:
            self._option(field.options)

    def _default(self, field: Any) -> str:
        """As descriptors have it: words, numbers without what does not count, escaped bytes."""
        if field.type == _FIELD.TYPE_STRING:
            return self._string()
        if field.type == _FIELD.TYPE_BYTES:
            return str(text_encoding.CEscape(self._bytes(), as_utf8=False))
        sign = "-" if self._took("-") else ""
        if self._token.kind == "name":
            return sign + self._name()
        text = self._take("number")
        if field.type in (_FIELD.TYPE_FLOAT, _FIELD.TYPE_DOUBLE):
            value = float(_whole(text)) if _is_hex(text) else float(text.rstrip("fF"))
            return sign + repr(value).removesuffix(".0")
        if not re.fullmatch(r"0[xX][0-9a-fA-F]+|[0-9]+", text):
            self._refuse(f"{text[:40]} is no whole number")
        return sign + str(_whole(text))

    def _option(self, options: Any) -> None:
        names = [self._option_name()]
        while self._took("."):
            names.append(self._option_name())
        self._symbol("=")
        start = self._next
        if not names[0][1] and names[0][0] != "uninterpreted_option":
            self._standard_option(options, [name for name, _ in names])
            return
        found = options.uninterpreted_option.add()
        for name, is_extension in names:
            found.name.add(name_part=name, is_extension=is_extension)
        self._next = start
        self._uninterpreted(found)

    def _option_name(self) -> tuple[str, bool]:
        if self._took("("):
            name = self._full_name()
            self._symbol(")")
            return name, True
        return self._name(), False

    def _standard_option(self, options: Any, names: list[str]) -> None:
        for name in names[:-1]:
            field = options.DESCRIPTOR.fields_by_name.get(name)
            if field is None or field.message_type is None or field.is_repeated:
                self._refuse(f"there is no option {'.'.join(names)[:80]}")
            options = getattr(options, name)
        name = names[-1]
        if name not in options.DESCRIPTOR.fields_by_name:
            self._refuse(f"there is no option {'.'.join(names)[:80]}")
        try:
            text_format.Merge(f"{name}: {self._words()}", options)
        except text_format.ParseError as error:
            self._refuse(f"the option {name}: {str(error).partition(' : ')[2] or error}")

    def _words(self) -> str:
        """Of a value, as the text format has them."""
        if self._sees("{"):
            return f"{{ {self._aggregate()} }}"
        words = ["-"] if self._took("-") else []
        if self._token.kind == "string":
            return f'"{text_encoding.CEscape(self._bytes(), as_utf8=False)}"'
        if self._token.kind not in ("name", "number"):
            self._refuse(f"a value is expected, not {self._token.text[:40]}")
        self._next += 1
        return "".join([*words, self._tokens[self._next - 1].text])

    def _uninterpreted(self, option: Any) -> None:
        if self._sees("{"):
            option.aggregate_value = self._aggregate()
        elif self._token.kind == "string":
            option.string_value = self._bytes()
        else:
            negative = self._took("-")
            if self._token.kind == "name" and not negative:
                option.identifier_value = self._name()
            elif self._token.kind == "name":
                option.double_value = -float(self._inf_or_nan())
            else:
                self._number_value(option, self._take("number"), negative=negative)

    def _inf_or_nan(self) -> str:
        if not self._sees("inf", "nan"):
            self._refuse(f"a number is expected, not {self._token.text[:40]}")
        return self._name()

    def _number_value(self, option: Any, text: str, *, negative: bool) -> None:
        if not re.fullmatch(r"0[xX][0-9a-fA-F]+|[0-9]+", text):
            option.double_value = float(text.rstrip("fF")) * (-1 if negative else 1)
            return
        value = _whole(text)
        if value > (2**63 if negative else 2**64 - 1):
            self._refuse(f"{text[:40]} is too large")
        if negative:
            option.negative_int_value = -value
        else:
            option.positive_int_value = value

    def _aggregate(self) -> str:
        """The words within braces, with a space between each; a sign is its number's."""
        self._symbol("{")
        words: list[str] = []
        depth = 1
        while True:
            token = self._token
            if token.kind == "end":
                self._refuse("} is expected")
            self._next += 1
            depth += {"{": 1, "}": -1}.get(token.text, 0) if token.kind == "symbol" else 0
            if depth == 0:
                return " ".join(words)
            if words and words[-1] == "-":
                words[-1] += token.text
            else:
                words.append(token.text)


def _editions() -> Mapping[str, int]:
    return dict(descriptor_pb2.Edition.items())


def _is_hex(text: str) -> bool:
    return text[:2] in ("0x", "0X")


def _whole(text: str) -> int:
    if _is_hex(text):
        return int(text, 16)
    return int(text, 8 if text.startswith("0") and text.strip("01234567") == "" else 10)
