"""Formats items: as JSON, one object per line, or as text, as `kafka-dump-log.sh --deep-iteration`
prints them.

* Every line that DumpLogSegments 4.3 prints for the same file is printed exactly the same, except
  for its false alarm that -1 is followed by the first record of a log.
* Files that it does not know (checkpoints, metadata) are printed in its style.
* An object has `file`, `kind`, and the item's members.
"""

from __future__ import annotations

import base64
from typing import Final

import msgspec

from tierlog.cli.dump_reader import (
    BatchItem,
    Empty,
    FileBegin,
    Gaps,
    Item,
    Line,
    Problem,
    RecordItem,
)
from tierlog.record_format.batch import LOG_APPEND_TIME
from tierlog.record_format.checkpoint_files import ProducerEntry
from tierlog.record_format.codecs import CODEC_NAMES
from tierlog.record_format.index_layouts import AbortedTxn, OffsetEntry, TimeEntry

_CONTROL_TYPES: Final = {
    0: "ABORT",
    1: "COMMIT",
    2: "LEADER_CHANGE",
    3: "SNAPSHOT_HEADER",
    4: "SNAPSHOT_FOOTER",
    5: "KRAFT_VERSION",
    6: "KRAFT_VOTERS",
}


def to_text(item: Item, *, with_data: bool = False) -> str:
    """One line without its line break; FileBegin may be two. `with_data`: keys and values."""
    match item:
        case FileBegin(name, start_offset):
            start = "" if start_offset is None else f"\nLog starting offset: {start_offset}"
            return f"Dumping {name}{start}"
        case Empty(name):
            return f"{name} is empty."
        case BatchItem():
            return _batch(item)
        case RecordItem():
            return _record(item) + (_data(item) if with_data else "")
        case OffsetEntry(offset, position):
            return f"offset: {offset} position: {position}"
        case TimeEntry(timestamp, offset):
            return f"timestamp: {timestamp} offset: {offset}"
        case AbortedTxn(producer_id, first_offset, last_offset, last_stable_offset):
            return (
                f"version: 0 producerId: {producer_id} firstOffset: {first_offset} "
                f"lastOffset: {last_offset} lastStableOffset: {last_stable_offset}"
            )
        case ProducerEntry():
            return _producer(item)
        case Line(members):
            return " ".join(f"{name}: {value}" for name, value in members)
        case Gaps():
            return _gaps(item)
        case Problem(file, detail):
            return f"Found {detail} in {file}"


def _batch(item: BatchItem) -> str:
    header = item.header
    horizon = f"[{header.base_timestamp}]" if header.has_delete_horizon else ".empty"
    clock = "LogAppendTime" if header.timestamp_type == LOG_APPEND_TIME else "CreateTime"
    return (
        f"baseOffset: {header.base_offset} lastOffset: {header.last_offset} "
        f"count: {header.record_count} baseSequence: {header.base_sequence} "
        f"lastSequence: {header.last_sequence} producerId: {header.producer_id} "
        f"producerEpoch: {header.producer_epoch} partitionLeaderEpoch: {header.leader_epoch} "
        f"isTransactional: {_bool(header.is_transactional)} isControl: {_bool(header.is_control)} "
        f"deleteHorizonMs: OptionalLong{horizon} position: {header.position} "
        f"{clock}: {header.max_timestamp} size: {header.size_bytes} magic: {header.magic} "
        f"compresscodec: {CODEC_NAMES.get(header.codec, header.codec)} crc: {header.crc} "
        f"isvalid: {_bool(item.crc_matches)}"
    )


def _record(item: RecordItem) -> str:
    record = item.record
    clock = "LogAppendTime" if item.is_log_append_time else "CreateTime"
    line = (
        f"| offset: {record.offset} {clock}: {record.timestamp} "
        f"keySize: {_size(record.key)} valueSize: {_size(record.value)} "
        f"sequence: {item.sequence} headerKeys: [{','.join(name for name, _ in record.headers)}]"
    )
    if item.marker is not None:
        name = "COMMIT" if item.marker.committed else "ABORT"
        line += f" endTxnMarker: {name} coordinatorEpoch: {item.marker.coordinator_epoch}"
    elif item.control_type is not None:
        line += f" controlType: {_CONTROL_TYPES.get(item.control_type, 'UNKNOWN')}"
    return line


def _data(item: RecordItem) -> str:
    if item.control_type is not None:
        return ""
    key, value = item.record.key, item.record.value
    shown = "" if key is None else f" key: {key.decode(errors='replace')}"
    return shown + ("" if value is None else f" payload: {value.decode(errors='replace')}")


def _producer(entry: ProducerEntry) -> str:
    first = entry.current_txn_first_offset
    line = (
        f"producerId: {entry.producer_id} producerEpoch: {entry.producer_epoch} "
        f"coordinatorEpoch: {entry.coordinator_epoch} "
        f"currentTxnFirstOffset: OptionalLong{f'[{first}]' if first >= 0 else '.empty'} "
        f"lastTimestamp: {entry.timestamp}"
    )
    if entry.last_offset < 0:
        return line
    return line + (
        f" firstSequence: {entry.first_sequence} lastSequence: {entry.last_sequence} "
        f"lastOffset: {entry.last_offset} offsetDelta: {entry.offset_delta} "
        f"timestamp: {entry.timestamp}"
    )


def _gaps(item: Gaps) -> str:
    lines = [f"  {offset} is followed by {following}" for offset, following in item.pairs]
    lines += [f"  and {item.more} more"] if item.more else []
    return "\n".join((f"Non-consecutive offsets in {item.name}", *lines))


def _bool(value: bool) -> str:
    return "true" if value else "false"


def _size(content: bytes | None) -> int:
    return -1 if content is None else len(content)


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
            return _record_members(item, with_data=with_data)
        case Line(members):
            return {"kind": "line", **dict(members)}
        case Gaps(_, pairs, more):
            return {"kind": "gaps", "pairs": pairs, "more": more}
        case Problem(_, detail):
            return {"kind": "problem", "detail": detail}
    return {"kind": _KINDS[type(item).__name__], **item._asdict()}


def _record_members(item: RecordItem, *, with_data: bool) -> dict[str, object]:
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
