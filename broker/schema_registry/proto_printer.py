"""Protobuf's description of a file, as the text of a .proto file. Pure.

* What it prints parses to what it printed; a name that is the default of its field is left out.
* A custom option that its definition in the pool explains is printed by its name. Another is left
  out: without it, its bytes are all that there is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from google.protobuf import descriptor_pb2, message_factory, text_encoding, text_format

from tierlog.record_format.proto_parser import NUMBER_MAX

_INT32_MAX: Final = 2**31 - 1
_FIELD: Final[Any] = descriptor_pb2.FieldDescriptorProto
_TYPES: Final[Mapping[int, str]] = {
    number: name.removeprefix("TYPE_").lower() for name, number in _FIELD.Type.items()
}
_EDITION: Final = "EDITION_"


def print_proto(file: Any, pool: Any) -> str:
    """`file`: a FileDescriptorProto with types that are resolved; `pool` has what it imports."""
    return "\n".join(_Printer(file, pool).lines()) + "\n"


class _Printer:
    def __init__(self, file: Any, pool: Any) -> None:
        self._file, self._pool = file, pool

    def lines(self) -> Iterator[str]:
        file = self._file
        if file.syntax == "editions":
            name = descriptor_pb2.Edition.Name(file.edition).removeprefix(_EDITION)
            yield f'edition = "{name}";'
        else:
            yield f'syntax = "{file.syntax or "proto2"}";'
        if file.package:
            yield f"package {file.package};"
        for index, name in enumerate(file.dependency):
            public = "public " if index in file.public_dependency else ""
            weak = "weak " if index in file.weak_dependency else ""
            yield f"import {public}{weak}{_quoted(name)};"
        yield from self._option_lines(file.options)
        for message in file.message_type:
            yield f"\nmessage {message.name} {{"
            yield from _indented(self._message(message))
            yield "}"
        for enum in file.enum_type:
            yield ""
            yield from self._enum(enum)
        yield from self._extensions(file.extension, {})
        for service in file.service:
            yield f"\nservice {service.name} {{"
            yield from _indented(self._service(service))
            yield "}"

    def _message(self, message: Any) -> Iterator[str]:
        nested = {one.name: one for one in message.nested_type}
        yield from self._option_lines(message.options, without=("map_entry",))
        printed: set[int] = set()
        for field in message.field:
            if not field.HasField("oneof_index") or field.proto3_optional:
                yield from self._field(field, nested)
            elif field.oneof_index not in printed:
                printed.add(field.oneof_index)
                yield from self._oneof(message, field.oneof_index, nested)
        used = {one.type_name.rpartition(".")[2] for one in message.field if _has_body(one, nested)}
        used |= {one.type_name.rpartition(".")[2] for one in message.extension if _is_group(one)}
        for one in message.nested_type:
            if one.name not in used:
                yield f"message {one.name} {{"
                yield from _indented(self._message(one))
                yield "}"
        for enum in message.enum_type:
            yield from self._enum(enum)
        yield from self._extensions(message.extension, nested)
        for one in message.extension_range:
            options = self._in_brackets(self._options(one.options))
            yield f"extensions {_range(one.start, one.end - 1, NUMBER_MAX)}{options};"
        yield from _reserved(
            [_range(one.start, one.end - 1, NUMBER_MAX) for one in message.reserved_range],
            self._reserved_names(message),
        )

    def _reserved_names(self, owner: Any) -> list[str]:
        is_word = self._file.syntax == "editions"
        return [one if is_word else _quoted(one) for one in owner.reserved_name]

    def _oneof(self, message: Any, index: int, nested: Mapping[str, Any]) -> Iterator[str]:
        oneof = message.oneof_decl[index]
        yield f"oneof {oneof.name} {{"
        yield from _indented(self._option_lines(oneof.options))
        for field in message.field:
            if field.HasField("oneof_index") and field.oneof_index == index:
                yield from _indented(self._field(field, nested, is_alone=False))
        yield "}"

    def _field(
        self, field: Any, nested: Mapping[str, Any], *, is_alone: bool = True
    ) -> Iterator[str]:
        """`is_alone`: it is in no oneof."""
        options = self._in_brackets(self._field_options(field))
        body = nested.get(field.type_name.rpartition(".")[2])
        if body is not None and _is_map(field, nested):
            key, value = body.field
            yield f"map<{_type(key)}, {_type(value)}> {field.name} = {field.number}{options};"
            return
        label = f"{self._label(field)} " if is_alone and self._label(field) else ""
        if _is_group(field) and body is not None:
            yield f"{label}group {body.name} = {field.number}{options} {{"
            yield from _indented(self._message(body))
            yield "}"
        else:
            yield f"{label}{_type(field)} {field.name} = {field.number}{options};"

    def _label(self, field: Any) -> str:
        if field.label == _FIELD.LABEL_REPEATED:
            return "repeated"
        if field.label == _FIELD.LABEL_REQUIRED:
            return "required"
        return "optional" if field.proto3_optional or not self._file.syntax else ""

    def _extensions(self, fields: Any, nested: Mapping[str, Any]) -> Iterator[str]:
        for field in fields:
            yield f"extend {field.extendee} {{"
            yield from _indented(self._field(field, nested))
            yield "}"

    def _enum(self, enum: Any) -> Iterator[str]:
        yield f"enum {enum.name} {{"
        yield from _indented(self._option_lines(enum.options))
        for one in enum.value:
            yield f"  {one.name} = {one.number}{self._in_brackets(self._options(one.options))};"
        yield from _indented(
            _reserved(
                [_range(one.start, one.end, _INT32_MAX) for one in enum.reserved_range],
                self._reserved_names(enum),
            )
        )
        yield "}"

    def _service(self, service: Any) -> Iterator[str]:
        yield from self._option_lines(service.options)
        for one in service.method:
            given = "stream " if one.client_streaming else ""
            answered = "stream " if one.server_streaming else ""
            text = f"rpc {one.name}({given}{one.input_type}) returns ({answered}{one.output_type})"
            options = list(self._option_lines(one.options))
            yield f"{text} {{" if options else f"{text};"
            yield from _indented(options)
            if options:
                yield "}"

    # --- options ----------------------------------------------------------------------------------

    def _option_lines(self, options: Any, *, without: Iterable[str] = ()) -> Iterator[str]:
        for name, value in self._options(options):
            if name not in without:
                yield f"option {name} = {value};"

    def _in_brackets(self, options: Iterable[tuple[str, str]]) -> str:
        found = ", ".join(f"{name} = {value}" for name, value in options)
        return f" [{found}]" if found else ""

    def _field_options(self, field: Any) -> Iterator[tuple[str, str]]:
        if field.HasField("default_value"):
            yield "default", _default(field)
        if field.json_name and field.json_name != _json_name(field.name):
            yield "json_name", _quoted(field.json_name)
        yield from self._options(field.options)

    def _options(self, options: Any) -> list[tuple[str, str]]:
        """Custom ones last, by name: a description has them by number, a text in any order."""
        own, custom = list[tuple[str, str]](), list[tuple[str, str]]()
        for field, value in self._known(options).ListFields():
            if field.name == "uninterpreted_option":
                custom += [(self._custom_name(one), self._custom_value(one)) for one in value]
                continue
            values = value if field.is_repeated else [value]
            if field.is_extension:
                custom += [(f"({field.full_name})", _option_value(field, one)) for one in values]
            else:
                own += [(field.name, _option_value(field, one)) for one in values]
        return [*own, *sorted(custom, key=lambda one: one[0])]

    def _custom_name(self, option: Any) -> str:
        parts = (
            f"({self._extension_name(one.name_part)})" if one.is_extension else one.name_part
            for one in option.name
        )
        return ".".join(parts)

    def _extension_name(self, name: str) -> str:
        known = self._extension(name)
        return name if known is None else str(known.full_name)

    def _extension(self, name: str) -> Any:
        """What the pool has for a name within the package; None if it has nothing."""
        scope = "" if name.startswith(".") else self._file.package
        while True:
            try:
                return self._pool.FindExtensionByName(f"{scope}.{name}".lstrip("."))
            except KeyError:
                if not scope:
                    return None
            scope = scope.rpartition(".")[0]

    def _custom_value(self, option: Any) -> str:
        known = self._extension(option.name[0].name_part) if len(option.name) == 1 else None
        if known is None or known.message_type is None or not option.HasField("aggregate_value"):
            return _uninterpreted_value(option)
        value = message_factory.GetMessageClass(known.message_type)()
        try:
            text_format.Parse(option.aggregate_value, value, descriptor_pool=self._pool)
        except text_format.ParseError:
            return _uninterpreted_value(option)
        return _option_value(known, value)

    def _known(self, options: Any) -> Any:
        """With the extensions that the pool has."""
        try:
            descriptor = self._pool.FindMessageTypeByName(options.DESCRIPTOR.full_name)
        except KeyError:
            return options
        return message_factory.GetMessageClass(descriptor).FromString(options.SerializeToString())


def _indented(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield f"  {line}"


def _quoted(text: str) -> str:
    return f'"{text_encoding.CEscape(text.encode(), as_utf8=True)}"'


def _type(field: Any) -> str:
    return str(field.type_name or _TYPES[field.type])


def _is_group(field: Any) -> bool:
    return bool(field.type == _FIELD.TYPE_GROUP)


def _is_map(field: Any, nested: Mapping[str, Any]) -> bool:
    body = nested.get(field.type_name.rpartition(".")[2])
    is_repeated = field.label == _FIELD.LABEL_REPEATED
    return body is not None and is_repeated and bool(body.options.map_entry)


def _has_body(field: Any, nested: Mapping[str, Any]) -> bool:
    return _is_group(field) or _is_map(field, nested)


def _range(start: int, last: int, maximum: int) -> str:
    return str(start) if start == last else f"{start} to {'max' if last == maximum else last}"


def _reserved(ranges: list[str], names: list[str]) -> Iterator[str]:
    for found in (ranges, names):
        if found:
            yield f"reserved {', '.join(found)};"


def _json_name(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(one[:1].upper() + one[1:] for one in others)


def _default(field: Any) -> str:
    if field.type == _FIELD.TYPE_STRING:
        return _quoted(field.default_value)
    if field.type == _FIELD.TYPE_BYTES:
        return f'"{field.default_value}"'  # it is escaped already
    return str(field.default_value)


def _uninterpreted_value(option: Any) -> str:
    if option.HasField("aggregate_value"):
        return f"{{ {option.aggregate_value} }}"
    if option.HasField("string_value"):
        return f'"{text_encoding.CEscape(option.string_value, as_utf8=False)}"'
    for name in ("identifier_value", "positive_int_value", "negative_int_value"):
        if option.HasField(name):
            return str(getattr(option, name))
    return _float(option.double_value)


def _float(value: float) -> str:
    return repr(value)


def _option_value(field: Any, value: Any) -> str:
    if field.message_type is not None:
        return f"{{ {text_format.MessageToString(value, as_one_line=True)} }}"
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return str(value) if known is None else str(known.name)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bytes):
        return f'"{text_encoding.CEscape(value, as_utf8=False)}"'
    return _float(value) if isinstance(value, float) else str(value)
