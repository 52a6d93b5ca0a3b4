"""Partition folders written by a real Kafka, and what its own tools print about them."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tierlog.record_format.batch import BatchHeader, iter_headers
from tierlog.record_format.decode import Record

ROOT = Path(__file__).parents[2] / "fixtures" / "kafka"
FOLDERS = sorted(
    path for path in ROOT.rglob("*-[0-9]") if path.is_dir() and list(path.glob("*.log"))
)
assert len(FOLDERS) >= 42, "a test over no folder would pass"
WITH_RECORDS = [path for path in FOLDERS if Path(f"{path}.records.jsonl").exists()]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def files(pattern: str) -> list[Path]:
    found = sorted(ROOT.rglob(pattern))
    assert found, pattern
    return found


def dumped_by(dump: Path) -> Path:
    """The file of which Kafka's dump tool printed this."""
    folder = dump.parent.with_name(dump.parent.name.removesuffix(".dumps"))
    return folder / dump.name.removesuffix(".dump.txt")


def logs(folder: Path) -> list[tuple[int, bytes]]:
    """(base offset, bytes) of the segments, in order."""
    return [(int(path.stem), path.read_bytes()) for path in sorted(folder.glob("*.log"))]


def batches(folder: Path) -> list[tuple[BatchHeader, bytes]]:
    """Every batch separately; the header's position is 0."""
    return [
        (header._replace(position=0), data[header.position : header.end_position])
        for _, data in logs(folder)
        for header in iter_headers(data)
    ]


def all_batches() -> Iterator[tuple[BatchHeader, bytes]]:
    for folder in FOLDERS:
        yield from batches(folder)


def expected_records(folder: Path) -> list[dict[str, Any]]:
    with Path(f"{folder}.records.jsonl").open() as lines:
        return [json.loads(line) for line in lines]


def offsets(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(f"{folder}.offsets.json").read_text())
    return found


def committed(folder: Path) -> list[int]:
    """The offsets that a read_committed consumer saw."""
    found: list[int] = json.loads(Path(f"{folder}.read_committed.offsets.json").read_text())
    return found


def _text(content: bytes | None) -> str | None:
    return None if content is None else base64.b64encode(content).decode()


def as_expected(record: Record, like: dict[str, Any]) -> dict[str, Any]:
    """`record` in the form of records.jsonl; timestamp type and epoch are taken from `like`."""
    shown: dict[str, Any] = {
        "offset": record.offset,
        "timestamp": record.timestamp,
        "timestamp_type": like["timestamp_type"],
        "leader_epoch": like["leader_epoch"],
        "key_base64": _text(record.key),
        "headers": [[name, _text(content)] for name, content in record.headers],
    }
    if "value_sha256" in like:
        assert record.value is not None
        shown["value_sha256"] = hashlib.sha256(record.value).hexdigest()
        shown["value_length"] = len(record.value)
    else:
        shown["value_base64"] = _text(record.value)
    return shown
