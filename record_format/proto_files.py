"""Files of Protobuf: .proto texts, or descriptions of them in base64, linked with what they import;
and which message of a file a value is.

* A description is what Confluent's clients of Python and C# send instead of a text.
* What is imported is among the references, or one of the files of `google/` and `confluent/` that
  no client registers.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool
from google.protobuf.message import DecodeError

from tierlog.record_format.errors import InvalidOption
from tierlog.record_format.proto_parser import parse_proto
from tierlog.record_format.schema_records import Malformed

_NAME: Final = "the schema"  # of its file, which references do not have
_GOOGLE: Final = re.compile(r"google/(protobuf|type)/([a-z_]+)\.proto")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/\s]+={0,2}")
_INDEXES_MAX: Final = 64
INDEXES_BYTES: Final = 5 * (1 + _INDEXES_MAX)  # at most
_NOT_BUILT: Final = "Couldn't build proto file into descriptor pool: "
# What Confluent's serializers do not send along.
_CONFLUENT: Final[Mapping[str, str]] = {
    "confluent/meta.proto": """
        syntax = "proto3";
        package confluent;
        import "google/protobuf/descriptor.proto";
        message Meta { string doc = 1; map<string, string> params = 2; repeated string tags = 3; }
        extend google.protobuf.FileOptions { Meta file_meta = 1088; }
        extend google.protobuf.MessageOptions { Meta message_meta = 1088; }
        extend google.protobuf.FieldOptions { Meta field_meta = 1088; }
        extend google.protobuf.EnumOptions { Meta enum_meta = 1088; }
        extend google.protobuf.EnumValueOptions { Meta enum_value_meta = 1088; }
    """,
    "confluent/type/decimal.proto": """
        syntax = "proto3";
        package confluent.type;
        message Decimal { bytes value = 1; uint32 precision = 2; int32 scale = 3; }
    """,
}


class ProtoFile:
    """`description`: with all types resolved, and without a name; `pool`: has it, and what it
    imports; `messages`: those that are in no other.
    """

    def __init__(self, file: Any, dependencies: Sequence[tuple[str, str]]) -> None:
        """`file`: a description; `dependencies`: what it imports, by name. Raises Malformed."""
        self.pool = pool = descriptor_pool.DescriptorPool()
        texts, seen = dict(reversed(dependencies)), set[str]()

        def add(name: str, file: Any) -> None:
            for one in file.dependency:
                if one not in seen:
                    seen.add(one)
                    add(one, _import(one, texts))
            file.name = name
            try:
                pool.Add(file)
            except TypeError as error:
                within = "" if name == _NAME else f"{name}: "
                raise Malformed(within + str(error).removeprefix(_NOT_BUILT)) from error

        try:
            add(_NAME, file)
        except RecursionError as error:
            raise Malformed("its imports go too deep") from error
        self.description = _description(pool.FindFileByName(_NAME))
        self.description.ClearField("name")
        package = f"{self.description.package}." if self.description.package else ""
        names = (f"{package}{one.name}" for one in self.description.message_type)
        self.messages = [pool.FindMessageTypeByName(one) for one in names]

    def imported(self) -> Iterator[Any]:
        """What the file imports, and what those do: descriptions."""
        waiting, seen = [self.pool.FindFileByName(_NAME)], set[str]()
        while waiting:
            for one in waiting.pop().dependencies:
                if one.name not in seen:
                    seen.add(one.name)
                    waiting.append(one)
                    yield _description(one)

    def message_at(self, indexes: Sequence[int]) -> Any:
        """The message that the indexes before a value lead to. Raises Malformed."""
        level = self.messages
        path = ", ".join(map(str, indexes))
        for depth, index in enumerate(indexes):
            if not 0 <= index < len(level):
                raise Malformed(f"the schema has no message with the index [{path}]")
            if depth + 1 == len(indexes):
                return level[index]
            level = list(level[index].nested_types)
        raise Malformed("it names no message")


def file_of(text: str, dependencies: Sequence[tuple[str, str]]) -> ProtoFile:
    """Of a schema that a registry took. Raises InvalidOption."""
    try:
        return ProtoFile(describe(text), dependencies)
    except Malformed as error:
        raise InvalidOption(f"the schema is no .proto file: {error}") from error


def describe(text: str) -> Any:
    """A FileDescriptorProto of either. Raises Malformed."""
    if not is_base64(text):
        return parse_proto(text)
    file = descriptor_pb2.FileDescriptorProto()
    try:
        file.ParseFromString(base64.b64decode("".join(text.split()), validate=True))
    except (binascii.Error, DecodeError) as error:
        raise Malformed(f"neither a .proto file nor a description of one: {error}") from error
    return file


def is_base64(text: str) -> bool:
    return _BASE64.fullmatch(text.strip()) is not None


def _import(name: str, texts: Mapping[str, str]) -> Any:
    if name in texts:
        return describe(texts[name])
    if name in _CONFLUENT:
        return parse_proto(_CONFLUENT[name])
    known = _GOOGLE.fullmatch(name)
    if known is not None:
        try:
            module = import_module(f"google.{known[1]}.{known[2]}_pb2")
        except ModuleNotFoundError:
            pass
        else:
            return _description(module.DESCRIPTOR)
    raise Malformed(f"the import {name[:200]!r} is none of the references")


def _description(linked: Any) -> Any:
    found = descriptor_pb2.FileDescriptorProto()
    linked.CopyToProto(found)
    return found


def message_indexes(encoded: bytes) -> tuple[list[int], int]:
    """The way to the message, and where it begins; a zero is the first. Raises Malformed."""
    count, position = _zigzag(encoded, 0)
    if not 0 <= count <= _INDEXES_MAX:
        raise Malformed(f"{count} message indexes are not from 0 to {_INDEXES_MAX}")
    indexes = list[int]()
    for _ in range(count):
        index, position = _zigzag(encoded, position)
        indexes.append(index)
    return indexes or [0], position


def _zigzag(encoded: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 35, 7):
        if position >= len(encoded):
            break
        byte = encoded[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value >> 1 ^ -(value & 1), position
    raise Malformed("it does not begin with the indexes of a message")
