"""Kafka's small files: byte-for-byte round trips, and strict parsing."""

from __future__ import annotations

import re
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.record_format import golden
from tierlog.record_format.checkpoint_files import (
    EpochEntry,
    ProducerEntry,
    TopicPartitionOffset,
    format_epoch_checkpoint,
    format_offset_checkpoint,
    format_partition_metadata,
    format_properties,
    format_snapshot,
    format_topic_id,
    parse_epoch_checkpoint,
    parse_offset_checkpoint,
    parse_partition_metadata,
    parse_properties,
    parse_snapshot,
    parse_topic_id,
)
from tierlog.record_format.errors import CorruptSnapshot, UnknownFormatVersion

i64 = st.integers(-(2**63), 2**63 - 1)
i32 = st.integers(-(2**31), 2**31 - 1)
entries = st.builds(
    ProducerEntry,
    producer_id=i64,
    producer_epoch=st.integers(-(2**15), 2**15 - 1),
    last_sequence=i32,
    last_offset=i64,
    offset_delta=i32,
    timestamp=i64,
    coordinator_epoch=i32,
    current_txn_first_offset=i64,
)


# --- producer snapshots ---------------------------------------------------------------------------


def test_kafkas_snapshots_round_trip() -> None:
    for path in golden.files("*.snapshot"):
        data = path.read_bytes()
        assert format_snapshot(parse_snapshot(data)) == data, path


def as_printed(entry: ProducerEntry) -> tuple[str, ...]:
    batch = (entry.first_sequence, entry.last_sequence, entry.last_offset, entry.offset_delta)
    return (
        str(entry.producer_id),
        str(entry.producer_epoch),
        str(entry.coordinator_epoch),
        "" if entry.current_txn_first_offset < 0 else str(entry.current_txn_first_offset),
        str(entry.timestamp),
        # If the producer's last batch was an end marker, Kafka keeps no batch.
        *(map(str, batch) if entry.last_offset >= 0 else ("", "", "", "")),
    )


def test_snapshots_have_the_entries_that_kafkas_dump_tool_prints() -> None:
    for dump in golden.files("*.snapshot.dump.txt"):
        printed = re.findall(
            r"producerId: (-?\d+) producerEpoch: (-?\d+) coordinatorEpoch: (-?\d+) "
            r"currentTxnFirstOffset: OptionalLong(?:\.empty|\[(\d+)\]) lastTimestamp: (-?\d+)"
            r"(?: firstSequence: (-?\d+) lastSequence: (-?\d+) lastOffset: (-?\d+) "
            r"offsetDelta: (-?\d+))?",
            dump.read_text(),
        )
        entries = parse_snapshot(golden.dumped_by(dump).read_bytes())
        assert [as_printed(entry) for entry in entries] == printed, dump


@given(st.lists(entries, max_size=5))
def test_any_snapshot_round_trips(producers: list[ProducerEntry]) -> None:
    assert parse_snapshot(format_snapshot(producers)) == producers


def test_a_damaged_snapshot_is_refused() -> None:
    data = format_snapshot([ProducerEntry(1, 2, 3, 4, 5, 6, 7, -1)])
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            with pytest.raises((CorruptSnapshot, UnknownFormatVersion)):
                parse_snapshot(changed)
    for size in range(len(data)):
        with pytest.raises(CorruptSnapshot):
            parse_snapshot(data[:size])
    with pytest.raises(CorruptSnapshot):
        parse_snapshot(data + b"\0")


def test_a_newer_snapshot_is_refused_by_name() -> None:
    data = b"\0\2" + format_snapshot([])[2:]
    with pytest.raises(UnknownFormatVersion, match="version 2"):
        parse_snapshot(data, file="x.snapshot")


def test_the_first_sequence_is_derived_from_the_last() -> None:
    entry = ProducerEntry(1, 0, 2, 100, 5, 0, -1, -1)
    assert entry.first_sequence == 2**31 - 3
    empty = ProducerEntry(1, 0, -1, -1, 0, 0, -1, -1)
    assert empty.first_sequence == -1


# --- offset checkpoints ---------------------------------------------------------------------------


def test_kafkas_checkpoints_round_trip() -> None:
    for path in golden.files("*-offset-checkpoint"):
        data = path.read_bytes()
        found = parse_offset_checkpoint(data)
        assert (format_offset_checkpoint(found) if found else b"") == data, path
    for path in golden.files("leader-epoch-checkpoint"):
        data = path.read_bytes()
        assert format_epoch_checkpoint(parse_epoch_checkpoint(data)) == data, path


@pytest.mark.parametrize(
    "data",
    [
        b"0",
        b"0\n",
        b"0\n1\n",
        b"0\n1\nt 0 5",
        b"0\n2\nt 0 5\n",
        b"0\n0\nt 0 5\n",
        b"0\n1\nt 0 5\n\n",
        b"0\n1\nt 0\n",
        b"0\n1\nt 0 5 6\n",
        b"0\n1\nt 0 -1\n",
        b"0\n1\nt -1 5\n",
        b"0\n1\nt 0 x\n",
        b"0\n1\nt 0  5\n",
        b"0\n1\nt 0 9223372036854775808\n",
        b"0\n1\nt 0 99999999999999999999999\n",
        b"0\n1\nt 0 05\n",
        b"0\n1\nt 0 \xd9\xa3\n",  # a Unicode digit, which Java does not accept
        b"0\n1\n 0 5\n",
        b"0\n2\nt 0 5\nt 0 6\n",
        b"0\n-1\n",
        b"x\n0\n",
        b"\n",
        b"\xff\n0\n",
    ],
)
def test_an_invalid_offset_checkpoint_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptSnapshot):
        parse_offset_checkpoint(data)


def test_an_empty_file_is_an_empty_checkpoint() -> None:
    assert parse_offset_checkpoint(b"") == []
    assert parse_epoch_checkpoint(b"") == []


def test_a_newer_checkpoint_is_refused_by_name() -> None:
    for parse in (parse_offset_checkpoint, parse_epoch_checkpoint):
        with pytest.raises(UnknownFormatVersion, match="version 1"):
            parse(b"1\n0\n")


def test_checkpoints_have_kafkas_bytes() -> None:
    assert format_offset_checkpoint([TopicPartitionOffset("a.b", 3, 77)]) == b"0\n1\na.b 3 77\n"
    assert format_epoch_checkpoint([EpochEntry(0, 0), EpochEntry(4, 9)]) == b"0\n2\n0 0\n4 9\n"
    assert format_epoch_checkpoint([]) == b"0\n0\n"


@pytest.mark.parametrize(
    "lines", [[(1, 0), (1, 5)], [(2, 0), (1, 5)], [(1, 6), (2, 5)], [(-1, 0)], [(0, -1)]]
)
def test_unordered_epochs_are_refused(lines: list[tuple[int, int]]) -> None:
    with pytest.raises(CorruptSnapshot):
        parse_epoch_checkpoint(format_epoch_checkpoint(EpochEntry(*line) for line in lines))


def test_an_epoch_without_records_is_valid() -> None:
    data = format_epoch_checkpoint([EpochEntry(1, 5), EpochEntry(2, 5)])
    assert len(parse_epoch_checkpoint(data)) == 2


# --- partition.metadata ---------------------------------------------------------------------------


def test_kafkas_partition_metadata_round_trips() -> None:
    for path in golden.files("partition.metadata"):
        data = path.read_bytes()
        assert format_partition_metadata(parse_partition_metadata(data)) == data, path


@given(st.uuids())
def test_topic_ids_round_trip(topic_id: uuid.UUID) -> None:
    text = format_topic_id(topic_id)
    assert len(text) == 22
    assert parse_topic_id(text) == topic_id
    assert parse_partition_metadata(format_partition_metadata(topic_id) + b"\n") == topic_id


@pytest.mark.parametrize(
    "text", ["", "a", "A" * 21, "A" * 23, "A" * 21 + "B", "A" * 21 + "+", "A" * 20 + "==", "é" * 22]
)
def test_an_invalid_topic_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="topic id"):
        parse_topic_id(text)
    with pytest.raises(CorruptSnapshot):
        parse_partition_metadata(f"version: 0\ntopic_id: {text}".encode())


@pytest.mark.parametrize("data", [b"", b"version: 0\n", b"version: 0", b"topic_id: x", b"\xff"])
def test_invalid_partition_metadata_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptSnapshot):
        parse_partition_metadata(data)


def test_bytes_after_partition_metadata_are_refused() -> None:
    with pytest.raises(CorruptSnapshot):
        parse_partition_metadata(format_partition_metadata(uuid.UUID(int=1)) + b"\nmore")


def test_newer_partition_metadata_is_refused_by_name() -> None:
    with pytest.raises(UnknownFormatVersion, match="version 1"):
        parse_partition_metadata(b"version: 1\nother: form")


# --- meta.properties ------------------------------------------------------------------------------


def test_kafkas_properties_are_parsed() -> None:
    for path in golden.files("meta.properties"):
        found = parse_properties(path.read_bytes())
        assert set(found) == {"node.id", "directory.id", "version", "cluster.id"}
        assert found["version"] == "1"
        assert len(found["cluster.id"]) == 22


def test_properties_round_trip() -> None:
    properties = {"cluster.id": "abc-_DEF", "node.id": "1", "empty": ""}
    data = format_properties(properties)
    assert data == b"#\ncluster.id=abc-_DEF\nnode.id=1\nempty=\n"
    assert parse_properties(data) == properties


def test_properties_are_parsed_like_javas() -> None:
    data = b"# c\r\n! d\n\n  a : b c \nd\\:e=f\\\\g\\u0041\\t\n\nh=\n"
    assert parse_properties(data) == {"a": "b c ", "d:e": "f\\gA\t", "h": ""}


@pytest.mark.parametrize("data", [b"name\n", b"=x\n", b"a=b\na=c\n", b"a=b\\\n", b"a=\\u00g0\n"])
def test_invalid_properties_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptSnapshot):
        parse_properties(data)
