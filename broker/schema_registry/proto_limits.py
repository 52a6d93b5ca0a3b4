"""Counts the messages in an encoded Protobuf value before it is decoded, and refuses one that would
take much memory.

Google's library gives each message room for all of its fields, and two bytes are a message without
any. Values too small to take much, whatever they are, are not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Final

from tierlog.record_format.schema_records import Malformed

ROOM_MAX: Final = 128 << 20

_FIELD_BYTES: Final = 16  # at most; a number takes 8
_DEPTH_MAX: Final = 200  # the library refuses half of it
_VARINT, _EIGHT, _SIZED, _START, _END, _FOUR = range(6)


def widest(messages: Iterable[Any]) -> int:
    """The most bytes that one of these messages has room for, or of those in them."""
    waiting, seen = list(messages), dict[str, int]()
    while waiting:
        one = waiting.pop()
        if one.full_name not in seen:
            seen[one.full_name] = _room(one)
            fields = [*one.fields, *one.file.pool.FindAllExtensions(one)]
            waiting += (field.message_type for field in fields if field.message_type)
            waiting += one.nested_types
    return max(seen.values(), default=0)


def _room(message: Any) -> int:
    room = _FIELD_BYTES * (1 + len(message.fields))
    if message.GetOptions().map_entry and (value := message.fields_by_number[2].message_type):
        room += _room(value)  # which is there also if it is not said
    return room


def check_room(message: Any, encoded: bytes) -> None:
    """Raises Malformed; not of what else is wrong, which decoding finds out."""
    room, at = 0, 0
    within: list[tuple[Any, int]] = [(message, len(encoded))]
    while within and at >= 0 and len(within) < _DEPTH_MAX:
        message, end = within[-1]
        if at >= end:
            within.pop()
            continue
        tag, at = _varint(encoded, at)
        wire, field = tag & 7, _field(message, tag >> 3)
        inner = None if field is None else field.message_type
        if wire == _VARINT:
            _, at = _varint(encoded, at)
        elif wire in (_EIGHT, _FOUR):
            at += 8 if wire == _EIGHT else 4
        elif wire == _SIZED:
            size, at = _varint(encoded, at)
            if inner is not None and at >= 0:
                within.append((inner, min(at + size, end)))
            else:
                at += size if at >= 0 else 0
        elif wire == _START:
            within.append((inner, end))
        elif wire == _END:
            within.pop()
        else:
            return
        if inner is not None and wire in (_SIZED, _START):
            room += _room(inner)
            if room > ROOM_MAX:
                raise Malformed(
                    f"{field.full_name}: with its messages of {len(inner.fields)} fields the value "
                    f"takes more than {ROOM_MAX} bytes of memory"
                )


def _field(message: Any, number: int) -> Any:
    """None if it is not known, or within what is not."""
    if message is None or number in message.fields_by_number or not message.is_extendable:
        return None if message is None else message.fields_by_number.get(number)
    with suppress(KeyError):
        return message.file.pool.FindExtensionByNumber(message, number)
    return None


def _varint(encoded: bytes, at: int) -> tuple[int, int]:
    """(value, position after it); the position is -1 if it is damaged."""
    value = shift = 0
    while at < len(encoded) and shift < 70:
        byte = encoded[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7
    return 0, -1
