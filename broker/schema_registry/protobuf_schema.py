"""Protobuf schemas: .proto files, or descriptions of them in base64, as Confluent's clients of
Python and C# send them.

A description becomes a text first, so that the two are one schema where they say the same.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

from google.protobuf import json_format, message_factory
from google.protobuf.message import DecodeError, EncodeError

from tierlog.broker.schema_registry.proto_limits import ROOM_MAX, check_room, widest
from tierlog.broker.schema_registry.proto_printer import print_proto
from tierlog.broker.schema_registry.protobuf_compatibility import (
    ProtoTypes,
    protobuf_incompatibilities,
)
from tierlog.record_format.proto_files import ProtoFile, describe, is_base64, message_indexes
from tierlog.record_format.schema_records import Malformed


class ProtobufSchema:
    """`text`: what was given, or printed of what was given; `identity`: equal for schemas that say
    the same; `serialized`: the description, in base64.
    """

    def __init__(self, text: str, dependencies: Sequence[tuple[str, str]]) -> None:
        """`dependencies`: what it imports, by name. Raises Malformed."""
        self.text = text
        if is_base64(text):
            given = ProtoFile(describe(text), dependencies)
            self.text = print_proto(given.description, given.pool)
        self._file = ProtoFile(describe(self.text), dependencies)
        self.identity = print_proto(self._file.description, self._file.pool)
        self._widest = widest(self._file.messages)
        self._types = ProtoTypes(self._file.description, self._file.imported())

    @property
    def serialized(self) -> str:
        return base64.b64encode(
            self._file.description.SerializeToString(deterministic=True)
        ).decode()

    def incompatibilities(self, writer: ProtobufSchema) -> list[str]:
        """Why this schema cannot read what was written with that one; empty if it can."""
        return protobuf_incompatibilities(writer._types, self._types)

    def encode_value(self, text: bytes) -> bytes:
        """Of its JSON, as the first message of the file. Raises Malformed."""
        message = message_factory.GetMessageClass(self._file.message_at([0]))()
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
        indexes, position = message_indexes(encoded)
        message = message_factory.GetMessageClass(self._file.message_at(indexes))()
        encoded = encoded[position:]
        if len(encoded) // 2 * self._widest > ROOM_MAX:
            check_room(message.DESCRIPTOR, encoded)
        try:
            message.ParseFromString(encoded)
        except DecodeError as error:
            name = message.DESCRIPTOR.full_name
            raise Malformed(f"it is no {name}: {error}") from error
        missing = message.FindInitializationErrors()
        if missing:
            raise Malformed(f"it lacks required fields: {', '.join(missing)[:500]}")
        return message
