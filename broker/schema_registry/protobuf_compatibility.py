"""Whether a reader with one Protobuf schema can read what was written with another, by Confluent's
rules. Pure.

* Fields are matched by number, messages by the names that lead to them, and both count whatever
  their order. What a field is called does not count, nor what an enum has.
* Kinds of numbers that are written alike are one: int32, int64, uint32, uint64, bool and enums;
  sint32 and sint64; fixed32 and sfixed32; and so on; and strings and bytes are one.
* A message that is imported is compared where a field has it: its package may be another.
* The differences that make it incompatible are named as Confluent names them, each with its path.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from google.protobuf import descriptor_pb2

_FIELD: Final[Any] = descriptor_pb2.FieldDescriptorProto
_ALIKE: Final[Mapping[int, str]] = {
    _FIELD.TYPE_INT32: "number",
    _FIELD.TYPE_INT64: "number",
    _FIELD.TYPE_UINT32: "number",
    _FIELD.TYPE_UINT64: "number",
    _FIELD.TYPE_BOOL: "number",
    _FIELD.TYPE_ENUM: "number",
    _FIELD.TYPE_SINT32: "signed",
    _FIELD.TYPE_SINT64: "signed",
    _FIELD.TYPE_STRING: "text",
    _FIELD.TYPE_BYTES: "text",
    _FIELD.TYPE_FIXED32: "fixed32",
    _FIELD.TYPE_SFIXED32: "fixed32",
    _FIELD.TYPE_FIXED64: "fixed64",
    _FIELD.TYPE_SFIXED64: "fixed64",
    _FIELD.TYPE_FLOAT: "float",
    _FIELD.TYPE_DOUBLE: "double",
}


class _Message(NamedTuple):
    description: Any
    local_name: str  # without its package
    is_imported: bool
    has_labels: bool  # whether a field without a word before it says `optional`: in proto2


class ProtoTypes:
    """The messages of a file and of what it imports; descriptions have types that are resolved."""

    def __init__(self, file: Any, imported: Iterable[Any]) -> None:
        self.file = file
        self._messages: dict[str, _Message] = {}
        for one in imported:
            self._collect(one, one.message_type, "", is_imported=True)
        self._collect(file, file.message_type, "", is_imported=False)

    def _collect(
        self, file: Any, messages: Iterable[Any], within: str, *, is_imported: bool
    ) -> None:
        package = f".{file.package}" if file.package else ""
        for one in messages:
            local = f"{within}{one.name}"
            found = _Message(one, local, is_imported, not file.syntax)
            self._messages[f"{package}.{local}"] = found
            self._collect(file, one.nested_type, f"{local}.", is_imported=is_imported)

    def message(self, full_name: str) -> _Message:
        return self._messages[full_name]

    def local(self, names: Sequence[str]) -> _Message:
        package = f".{self.file.package}" if self.file.package else ""
        return self._messages[f"{package}.{'.'.join(names)}"]


def protobuf_incompatibilities(writer: ProtoTypes, reader: ProtoTypes) -> list[str]:
    """Why what is written with the one cannot be read with the other; empty if it can."""
    return list(_Comparison(writer, reader).compare())


class _Comparison:
    def __init__(self, writer: ProtoTypes, reader: ProtoTypes) -> None:
        self._writer, self._reader = writer, reader
        self._known: dict[tuple[str, str], bool] = {}  # compatible; so are those being compared

    def compare(self) -> Iterator[str]:
        if self._writer.file.package != self._reader.file.package:
            yield _problem("PACKAGE_CHANGED", ())
        writer, reader = self._writer.file.message_type, self._reader.file.message_type
        yield from self._compare_messages(writer, reader, ())

    def _compare_messages(
        self, writer: Iterable[Any], reader: Iterable[Any], path: tuple[str, ...]
    ) -> Iterator[str]:
        read = {one.name for one in reader}
        for one in sorted(writer, key=lambda one: str(one.name)):
            if one.options.map_entry:
                continue
            at = (*path, one.name)
            if one.name not in read:
                yield _problem("MESSAGE_REMOVED", at)
            else:
                pair = self._writer.local(at), self._reader.local(at)
                yield from self._compare_message(*pair, at)

    def _compare_message(
        self, writer: _Message, reader: _Message, path: tuple[str, ...]
    ) -> Iterator[str]:
        written, read = _Fields(writer.description), _Fields(reader.description)
        yield from _made_exclusive(written, read, path)
        for number in sorted(written.by_number.keys() | read.by_number.keys()):
            old, new = written.by_number.get(number), read.by_number.get(number)
            if new is None:
                yield from _removed(written, read, old, path)
            elif old is None:
                if new.label == _FIELD.LABEL_REQUIRED:
                    yield _problem("REQUIRED_FIELD_ADDED", (*path, str(number)))
            else:
                oneof = read.oneof(new)
                at = (*path, *([oneof] if oneof else []), str(number))
                yield from self._compare_field((writer, old), (reader, new), at)
        nested = writer.description.nested_type, reader.description.nested_type
        yield from self._compare_messages(*nested, path)

    def _compare_field(
        self, old: tuple[_Message, Any], new: tuple[_Message, Any], path: tuple[str, ...]
    ) -> Iterator[str]:
        (_, written), (_, read) = old, new
        kind = self._kind(self._writer, written)
        if kind != self._kind(self._reader, read):
            yield _problem("FIELD_KIND_CHANGED", path)
        elif kind == "scalar":
            if _ALIKE[written.type] != _ALIKE[read.type]:
                yield _problem("FIELD_SCALAR_KIND_CHANGED", path)
            elif _ALIKE[written.type] != "text":
                labels = {_label(*old), _label(*new)} - {""}
                if len(labels) > 1:
                    yield _problem("FIELD_NUMERIC_LABEL_CHANGED", path)
        elif kind == "map":
            parts = zip(
                self._writer.message(written.type_name).description.field,
                self._reader.message(read.type_name).description.field,
                strict=True,
            )
            for old_part, new_part in parts:
                yield from self._compare_field((old[0], old_part), (new[0], new_part), path)
        else:
            yield from self._compare_types(written.type_name, read.type_name, path)

    def _kind(self, types: ProtoTypes, field: Any) -> str:
        if field.type == _FIELD.TYPE_GROUP:
            return "group"
        if field.type != _FIELD.TYPE_MESSAGE:
            return "scalar"
        return "map" if types.message(field.type_name).description.options.map_entry else "message"

    def _compare_types(self, written: str, read: str, path: tuple[str, ...]) -> Iterator[str]:
        writer, reader = self._writer.message(written), self._reader.message(read)
        if writer.local_name != reader.local_name:
            yield _problem("FIELD_NAMED_TYPE_CHANGED", path)
        elif writer.is_imported or reader.is_imported:
            pair = written, read
            if pair not in self._known:
                self._known[pair] = True
                found = list(
                    self._compare_message(writer, reader, tuple(writer.local_name.split(".")))
                )
                self._known[pair] = not found
                yield from found
            if not self._known[pair]:
                yield _problem("FIELD_NAMED_TYPE_CHANGED", path)


class _Fields:
    """Of a message, by number; oneofs without those that `optional` makes in proto3."""

    def __init__(self, message: Any) -> None:
        self._message = message
        self.by_number = {one.number: one for one in message.field}
        self.oneofs: dict[str, list[int]] = {}
        for field in message.field:
            if name := self.oneof(field):
                self.oneofs.setdefault(name, []).append(field.number)

    def oneof(self, field: Any) -> str:
        """Its name, or empty."""
        if field.proto3_optional or not field.HasField("oneof_index"):
            return ""
        return str(self._message.oneof_decl[field.oneof_index].name)


def _made_exclusive(written: _Fields, read: _Fields, path: tuple[str, ...]) -> Iterator[str]:
    """Fields of one oneof that could be there together."""
    for name, numbers in read.oneofs.items():
        known = [written.by_number[one] for one in numbers if one in written.by_number]
        groups = {written.oneof(one) or one.number for one in known}
        if len(groups) > 1:
            several = len([one for one in known if not written.oneof(one)]) > 1
            kind = "MULTIPLE_FIELDS_MOVED_TO_ONEOF" if several else "FIELD_MOVED_TO_EXISTING_ONEOF"
            yield _problem(kind, (*path, name))


def _removed(written: _Fields, read: _Fields, field: Any, path: tuple[str, ...]) -> Iterator[str]:
    oneof = written.oneof(field)
    if oneof:
        # All of a oneof may go, with its name.
        remains = any(one in read.by_number for one in written.oneofs[oneof])
        if oneof in read.oneofs or remains:
            yield _problem("ONEOF_FIELD_REMOVED", (*path, oneof, str(field.number)))
    elif field.label == _FIELD.LABEL_REQUIRED:
        yield _problem("REQUIRED_FIELD_REMOVED", (*path, str(field.number)))


def _label(message: _Message, field: Any) -> str:
    """What is said before the type, or empty."""
    if field.label == _FIELD.LABEL_REPEATED:
        return "repeated"
    if field.label == _FIELD.LABEL_REQUIRED:
        return "required"
    in_oneof = field.HasField("oneof_index") and not field.proto3_optional
    is_said = field.proto3_optional or (message.has_labels and not in_oneof)
    return "optional" if is_said else ""


def _problem(kind: str, path: tuple[str, ...]) -> str:
    return f"{{errorType:'{kind}', path:'#/{'/'.join(path)}'}}"
