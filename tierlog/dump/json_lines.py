"""Formats items as JSON, one object per line: `file`, `kind`, and the item's members."""

from __future__ import annotations

import base64

import msgspec

from tierlog.dump.items import BatchItem, Empty, FileBegin, Gaps, Item, Line, Problem, RecordItem

_KINDS = {
    "OffsetEntry": "offset_index_entry",
    "TimeEntry": "time_index_entry",
    "AbortedTxn": "aborted_transaction",
    "ProducerEntry": "producer",
}


def to_json_line(file: str, item: Item, *, with_data: bool = False) -> bytes:
    """One object and a line break. `with_data`: keys and values, as base64."""
    return msgspec.json.encode({"file": file, **_members(item, with_data=with_data)}) + b"\n"


def _members(item: Item, *, with_data: bool) -> dict[str, object]:
    match item:
        case FileBegin(_, start_offset):
            return {"kind": "file", "log_start": start_offset}
        case Empty():
            return {"kind": "empty"}
        case BatchItem(header, crc_matches):
            facts = {"last_offset": header.last_offset, "codec": header.codec}
            return {"kind": "batch", **header._asdict(), **facts, "crc_matches": crc_matches}
        case RecordItem():
            return _record(item, with_data=with_data)
        case Line(members):
            return {"kind": "line", **dict(members)}
        case Gaps(_, pairs, more):
            return {"kind": "gaps", "pairs": pairs, "more": more}
        case Problem(_, detail):
            return {"kind": "problem", "detail": detail}
    return {"kind": _KINDS[type(item).__name__], **item._asdict()}


def _record(item: RecordItem, *, with_data: bool) -> dict[str, object]:
    record = item.record
    members: dict[str, object] = {
        "kind": "record",
        "offset": record.offset,
        "timestamp": record.timestamp,
        "key_size": -1 if record.key is None else len(record.key),
        "value_size": -1 if record.value is None else len(record.value),
        "sequence": item.sequence,
        "header_names": [name for name, _ in record.headers],
    }
    if item.control_type is not None:
        members["control_type"] = item.control_type
    if with_data:
        members["key_base64"] = _base64(record.key)
        members["value_base64"] = _base64(record.value)
    return members


def _base64(content: bytes | None) -> str | None:
    return None if content is None else base64.b64encode(content).decode()
