"""The door of the codec: a frame to a message, a message to the parts of a frame.

    head = read_request_head(frame)                     # frame: what follows the four bytes of size
    request = decode(ProduceRequest, head.version, frame, position=head.size_bytes)
    ...
    for part in response_frame(response, head):         # bytearrays, and slices of files
        ...

* It does no I/O and keeps nothing of a frame but the `records` it was asked for, which are slices
  of it: the frame may be used again once these are done with.
* Whatever a frame holds, the answer is a message or a MessageError, and takes memory in proportion
  to the frame: each element has a byte at least, and is one object. The frame's size is the
  listener's limit.
* A decoder or an encoder is compiled at the first use of its (message, version), in one to
  three milliseconds; there are as many as Kafka has versions, and they stay. Safe in any thread.
"""

from __future__ import annotations

import struct
from functools import cache
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from tierlog.record_format.kafka_messages.apis import Api, api_of
from tierlog.record_format.kafka_messages.decoder import compile_decoder
from tierlog.record_format.kafka_messages.definitions import definition
from tierlog.record_format.kafka_messages.encoder import HasSize, compile_encoder
from tierlog.record_format.kafka_messages.messages import RequestHeader
from tierlog.record_format.kafka_messages.source import Compiled, MessageError, Refused

Message = TypeVar("Message", bound=msgspec.Struct)
Buffer = bytes | bytearray | memoryview
Part = bytearray | HasSize

SIZE_BYTES: Final = 4
_API: Final = struct.Struct(">hhi")
_VERSION: Final = struct.Struct(">h")
_RESPONSE_HEAD: Final = struct.Struct(">ii")
# What compiled code raises over a bad value or a bad frame; anything else is a bug.
_CAUSES: Final = (Refused, struct.error, IndexError, UnicodeError, AttributeError, TypeError)


class UnsupportedVersion(MessageError):
    """A request in a version that is not served. ApiVersions is answered all the same: in its
    version 0, with the correlation id and the error code 35.
    """

    def __init__(self, api: Api, version: int, correlation_id: int) -> None:
        super().__init__(
            f"served are {api.min_version} to {api.max_version}",
            message=f"{api.name}Request",
            version=version,
        )
        self.api, self.correlation_id = api, correlation_id


class RequestHead(NamedTuple):
    """The beginning of a request; its body begins at `size_bytes`."""

    api: Api
    version: int
    correlation_id: int
    client_id: str | None
    size_bytes: int


def read_request_head(frame: Buffer) -> RequestHead:
    """Raises UnsupportedVersion, and MessageError for an API that is not served."""
    if len(frame) < _API.size:
        raise MessageError("the frame ends inside it", message="RequestHeader", version=1)
    key, version, correlation_id = _API.unpack_from(frame)
    api = api_of(key)
    if api is None:
        raise MessageError(f"API {key} is not served", message="RequestHeader", version=1)
    if not api.min_version <= version <= api.max_version:
        raise UnsupportedVersion(api, version, correlation_id)
    header, position = _run(
        _decoder(RequestHeader, api.request_header_version(version)), memoryview(frame), 0
    )
    return RequestHead(api, version, correlation_id, header.client_id, position)


def decode(kind: type[Message], version: int, data: Buffer, *, position: int = 0) -> Message:
    """The message that fills `data` from `position` on. Raises MessageError."""
    decoder = _decoder(kind, version)
    value, end = _run(decoder, memoryview(data), position)
    if end != len(data):
        raise MessageError(
            f"{len(data) - end} bytes follow it", message=kind.__name__, version=version
        )
    return value  # type: ignore[no-any-return]


def decode_request(kind: type[Message], head: RequestHead, frame: Buffer) -> Message:
    """The request of this head. What follows it is ignored, as by Kafka's brokers: librdkafka's
    Metadata has more bytes than its version. Raises MessageError.
    """
    value, _ = _run(_decoder(kind, head.version), memoryview(frame), head.size_bytes)
    return value  # type: ignore[no-any-return]


def encode(value: msgspec.Struct, version: int) -> bytes:
    """The message's bytes, without slices of files. Raises MessageError."""
    (whole,) = _encode(value, version, bytearray())
    assert isinstance(whole, bytearray), "it has slices: they come with a frame"
    return bytes(whole)


def response_frame(value: msgspec.Struct, head: RequestHead) -> list[Part]:
    """The frame that answers `head`, its size first. Raises MessageError.

    Bytes and slices come in the order in which they are sent; the first and the last are bytes.
    """
    out = bytearray(_RESPONSE_HEAD.size)
    if head.api.response_header_version(head.version):
        out.append(0)  # no tags
    parts = _encode(value, head.version, out)
    size = size_of_parts(parts)
    _RESPONSE_HEAD.pack_into(out, 0, size - SIZE_BYTES, head.correlation_id)
    return parts


def size_of_parts(parts: list[Part]) -> int:
    return sum([len(p) if isinstance(p, bytearray) else p.size_bytes for p in parts])


# --- what is stored, and what members send each other ---------------------------------------------


def encode_versioned(value: msgspec.Struct, version: int) -> bytes:
    """The value of a coordinator's record, or a member's subscription: the version comes first."""
    return _VERSION.pack(version) + encode(value, version)


def decode_versioned(kind: type[Message], data: Buffer) -> Message:
    """Raises MessageError, also for a version that is not known."""
    return decode(kind, _first_number(kind, data), data, position=_VERSION.size)


def encode_record_key(key: msgspec.Struct) -> bytes:
    """The key of a coordinator's record: the record's type comes first."""
    return _VERSION.pack(definition(type(key).__name__).api_key) + encode(key, 0)


def decode_record_key(kind: type[Message], data: Buffer) -> Message:
    """Raises MessageError, also for another type of record: see `record_type`."""
    if _first_number(kind, data) != definition(kind.__name__).api_key:
        raise MessageError(f"its type is {record_type(data)}", message=kind.__name__, version=0)
    return decode(kind, 0, data, position=_VERSION.size)


def record_type(key: Buffer) -> int:
    """The type of a coordinator's record, of its key's bytes. Raises MessageError."""
    if len(key) < _VERSION.size:
        raise MessageError("the key is too short", message="record key", version=0)
    return int(_VERSION.unpack_from(key)[0])


def _first_number(kind: type[msgspec.Struct], data: Buffer) -> int:
    if len(data) < _VERSION.size:
        raise MessageError("it is too short", message=kind.__name__, version=0)
    return int(_VERSION.unpack_from(data)[0])


# --- compiled code --------------------------------------------------------------------------------


@cache
def _decoder(kind: type[msgspec.Struct], version: int) -> Compiled:
    return compile_decoder(_known(kind, version), version)


@cache
def _encoder(kind: type[msgspec.Struct], version: int) -> Compiled:
    return compile_encoder(_known(kind, version), version)


def _known(kind: type[msgspec.Struct], version: int) -> str:
    """The message's name. Raises MessageError, so that nothing unknown is kept."""
    name = kind.__name__
    if version not in definition(name).versions:
        raise MessageError("there is no such version", message=name, version=version)
    return name


def _run(decoder: Compiled, frame: memoryview, position: int) -> tuple[Any, int]:
    try:
        return decoder.call(frame, position)  # type: ignore[no-any-return]
    except _CAUSES as cause:
        raise decoder.error(cause) from cause


def _encode(value: msgspec.Struct, version: int, out: bytearray) -> list[Part]:
    encoder, parts = _encoder(type(value), version), list[Part]()
    try:
        parts.append(encoder.call(value, out, parts))
    except _CAUSES as cause:
        raise encoder.error(cause) from cause
    return parts
