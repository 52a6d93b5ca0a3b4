"""Protobuf schemas: .proto files, or descriptions of them in base64, as Confluent's clients of
Python and C# send them.

* A description becomes a text first, so that the two are one schema where they say the same.
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

from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import DecodeError, EncodeError

from tierlog.broker.schema_registry.json_text import Malformed
from tierlog.broker.schema_registry.proto_parser import parse_proto
from tierlog.broker.schema_registry.proto_printer import print_proto
from tierlog.broker.schema_registry.protobuf_compatibility import (
    ProtoTypes,
    protobuf_incompatibilities,
)

_NAME: Final = "the schema"  # of its file, which references do not have
_GOOGLE: Final = re.compile(r"google/(protobuf|type)/([a-z_]+)\.proto")
_BASE64: Final = re.compile(r"[A-Za-z0-9+/\s]+={0,2}")
_INDEXES_MAX: Final = 64
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


class ProtobufSchema:
    """`text`: what was given, or printed of what was given; `identity`: equal for schemas that say
    the same; `serialized`: the description, in base64.
    """

    def __init__(self, text: str, dependencies: Sequence[tuple[str, str]]) -> None:
        """`dependencies`: what it imports, by name. Raises Malformed."""
        texts = dict(reversed(dependencies))
        self.text = text
        if _is_base64(text):
            self.text = print_proto(*_linked(_described(text), texts))
        self._file, pool = _linked(parse_proto(self.text), texts)
        self.identity = print_proto(self._file, pool)
        package = f"{self._file.package}." if self._file.package else ""
        names = (f"{package}{one.name}" for one in self._file.message_type)
        self._messages = [pool.FindMessageTypeByName(one) for one in names]
        self._types = ProtoTypes(self._file, _imported(pool))

    @property
    def serialized(self) -> str:
        return base64.b64encode(self._file.SerializeToString(deterministic=True)).decode()

    def incompatibilities(self, writer: ProtobufSchema) -> list[str]:
        """Why this schema cannot read what was written with that one; empty if it can."""
        return protobuf_incompatibilities(writer._types, self._types)

    def encode_value(self, text: bytes) -> bytes:
        """Of its JSON, as the first message of the file. Raises Malformed."""
        message = message_factory.GetMessageClass(self._message_at([0]))()
        try:
            json_format.Parse(text, message, descriptor_pool=message.DESCRIPTOR.file.pool)
            return b"\0" + bytes(message.SerializeToString())
        except (json_format.ParseError, EncodeError, RecursionError) as error:
            raise Malformed(f"it is no {message.DESCRIPTOR.full_name}: {error}") from error

    def check_value(self, encoded: bytes) -> None:
        """Raises Malformed."""
        self._message(encoded)

    def decode(self, encoded: bytes) -> Any:
        """By Protobuf's mapping to JSON, with the fields' own names. Raises Malformed."""
        try:
            return json_format.MessageToDict(
                self._message(encoded), preserving_proto_field_name=True
            )
        except (json_format.Error, ValueError, TypeError) as error:
            raise Malformed(str(error)) from error

    def _message(self, encoded: bytes) -> Any:
        indexes, position = _message_indexes(encoded)
        message = message_factory.GetMessageClass(self._message_at(indexes))()
        try:
            message.ParseFromString(encoded[position:])
        except DecodeError as error:
            name = message.DESCRIPTOR.full_name
            raise Malformed(f"it is no {name}: {error}") from error
        missing = message.FindInitializationErrors()
        if missing:
            raise Malformed(f"it lacks required fields: {', '.join(missing)[:500]}")
        return message

    def _message_at(self, indexes: Sequence[int]) -> Any:
        level = self._messages
        path = ", ".join(map(str, indexes))
        for depth, index in enumerate(indexes):
            if not 0 <= index < len(level):
                raise Malformed(f"the schema has no message with the index [{path}]")
            if depth + 1 == len(indexes):
                return level[index]
            level = list(level[index].nested_types)
        raise Malformed("it names no message")


def _file_of(text: str) -> Any:
    """Raises Malformed."""
    return _described(text) if _is_base64(text) else parse_proto(text)


def _is_base64(text: str) -> bool:
    return _BASE64.fullmatch(text.strip()) is not None


def _described(text: str) -> Any:
    file = descriptor_pb2.FileDescriptorProto()
    try:
        file.ParseFromString(base64.b64decode("".join(text.split()), validate=True))
    except (binascii.Error, DecodeError) as error:
        raise Malformed(f"neither a .proto file nor a description of one: {error}") from error
    return file


def _linked(file: Any, texts: Mapping[str, str]) -> tuple[Any, Any]:
    """With all types resolved, and the pool that has it and what it imports. Raises Malformed."""
    pool = descriptor_pool.DescriptorPool()
    seen = set[str]()

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
    found = _description(pool.FindFileByName(_NAME))
    found.ClearField("name")
    return found, pool


def _import(name: str, texts: Mapping[str, str]) -> Any:
    if name in texts:
        return _file_of(texts[name])
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


def _imported(pool: Any) -> Iterator[Any]:
    """What the file imports, and what those do."""
    waiting, seen = [pool.FindFileByName(_NAME)], set[str]()
    while waiting:
        for one in waiting.pop().dependencies:
            if one.name not in seen:
                seen.add(one.name)
                waiting.append(one)
                yield _description(one)


def _message_indexes(encoded: bytes) -> tuple[list[int], int]:
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
