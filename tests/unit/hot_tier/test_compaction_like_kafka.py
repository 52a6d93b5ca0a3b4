"""Folders that Kafka's cleaner had not seen yet, cleaned by ours: what Kafka's left of them.

The fixtures hold a log before its first cleaning, and the same log after Kafka appended to it and
cleaned it several times. Ours cleans the first, is given what Kafka appended (as far as Kafka kept
it), and cleans again; every batch must then hold what Kafka's holds. Which batches had a tombstone
in between, and so a horizon, is history that the fixtures do not tell: that bit is left out.
(tests/integration/kafka lets both cleaners loose on the same folder.)
"""

import shutil
from pathlib import Path

import pytest

from tierlog.record_format.batch import DELETE_HORIZON_BIT, iter_headers
from tierlog.record_format.checkpoint_files import (
    format_topic_id,
    parse_partition_metadata,
)
from tierlog.record_format.compaction import PlainKeyTable, make_key_table
from tierlog.record_format.decode import decode_batch

FIXTURES = Path(__file__).parents[2] / "fixtures" / "kafka"
NAME = "compacted-keep-0"
DAYS_MS = 86_400_000
RETENTION_MS = 10 * DAYS_MS
CLEANED_TO = 325  # Kafka's cleaner checkpoint
TABLES = {"compiled": make_key_table, "plain": PlainKeyTable}


def batches(folder: Path):
    """(segment's base offset, header, its bytes) of every batch of a folder."""
    for log in sorted(folder.glob("*.log")):
        data = log.read_bytes()
        for header in iter_headers(data):
            yield int(log.stem), header, data[header.position : header.end_position]


def without_clock(header, data):
    """The parts of a batch that do not depend on when it was cleaned or on the compressor."""
    records = decode_batch(data, header._replace(position=0))
    attributes = header.attributes & ~DELETE_HORIZON_BIT
    fields = header._replace(
        position=0, crc=0, size_bytes=0, base_timestamp=0, attributes=attributes
    )
    return fields, records


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_our_cleaner_keeps_what_kafkas_kept(table, open_log, tmp_path, clock):
    folder, after = tmp_path / "t-0", FIXTURES / NAME
    shutil.copytree(FIXTURES / "before-clean" / NAME, folder)
    metadata = (folder / "partition.metadata").read_bytes()
    opening = {
        "topic_id": format_topic_id(parse_partition_metadata(metadata)),
        "config": {"cleanup.policy": "compact", "delete.retention.ms": RETENTION_MS},
        "clean": False,
        "recovery_point": 10**6,
    }
    keys = table(1 << 20)
    clock.now_ms = min(h.base_timestamp for _, h, _ in batches(after) if h.has_delete_horizon)
    clock.now_ms -= RETENTION_MS
    log = open_log(**opening)
    end = log.log_end_offset
    log.roll()
    first = log.sealed.clean(log.sealed.cleanable(None), keys)
    assert first.complete
    log.close()
    clock.now_ms += 60_000
    append_what_kafka_kept(folder, after, start=end, active=CLEANED_TO)
    log = open_log(**opening)
    assert log.sealed.clean(log.sealed.cleanable(end), keys).complete
    log.close()
    ours = {h.base_offset: without_clock(h, d) for _, h, d in batches(folder)}
    theirs = {h.base_offset: without_clock(h, d) for _, h, d in batches(after)}
    assert ours == theirs


def append_what_kafka_kept(folder: Path, after: Path, *, start: int, active: int) -> None:
    """The batches that Kafka appended later, as it left them: a segment, and an active one."""
    found = [(header.base_offset, data) for _, header, data in batches(after)]
    for path in folder.glob(f"{start:020d}.*"):
        path.unlink()
    cleaned = b"".join(data for offset, data in found if start <= offset < active)
    (folder / f"{start:020d}.log").write_bytes(cleaned)
    rest = b"".join(data for offset, data in found if offset >= active)
    (folder / f"{active:020d}.log").write_bytes(rest)
    for path in after.glob("*.txnindex"):
        target = folder / f"{active if int(path.stem) >= active else start:020d}.txnindex"
        target.write_bytes((target.read_bytes() if target.exists() else b"") + path.read_bytes())
