"""Segments written by a real Kafka are decoded as by Kafka's own consumer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fakes.records import iter_records
from tests.unit.record_format import golden
from tierlog.record_format.batch import check_crc, iter_headers, parse_header, stamp
from tierlog.record_format.codecs import CODEC_NAMES
from tierlog.record_format.decode import (
    decode_batch,
    decode_columns,
    end_marker_of,
    expand,
    min_timestamp_of,
)
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.record_walk import Walker

TYPES = {0: "CreateTime", 1: "LogAppendTime"}


def test_records_are_those_that_kafkas_consumer_saw(walk: Walker) -> None:
    for folder in golden.WITH_RECORDS:
        expected = golden.expected_records(folder)
        start = golden.offsets(folder)["log_start_offset"]
        found = [
            record
            for _, data in golden.logs(folder)
            for record in iter_records(data, from_offset=start)
        ]
        shown = [golden.as_expected(*pair) for pair in zip(found, expected, strict=True)]
        assert shown == expected, folder


def test_batches_have_the_timestamp_type_and_leader_epoch_of_their_records() -> None:
    for folder in golden.WITH_RECORDS:
        by_offset = {record["offset"]: record for record in golden.expected_records(folder)}
        for header, batch in golden.batches(folder):
            for record in decode_batch(batch, header) if not header.is_control else ():
                if record.offset in by_offset:
                    like = by_offset[record.offset]
                    assert like["timestamp_type"] == TYPES[header.timestamp_type]
                    assert like["leader_epoch"] == header.leader_epoch


def test_batches_are_contiguous_ordered_and_have_valid_checksums() -> None:
    for folder in golden.FOLDERS:
        next_offset = 0
        for base_offset, data in golden.logs(folder):
            end = 0
            for header in iter_headers(data):
                check_crc(data, header)
                assert header.base_offset >= max(base_offset, next_offset)
                assert header.position == end
                next_offset, end = header.next_offset, header.end_position
            assert end == len(data)


def test_headers_are_those_that_kafkas_dump_tool_prints() -> None:
    for dump in golden.files("*.log.dump.txt"):
        data = golden.dumped_by(dump).read_bytes()
        printed = re.findall(
            r"^baseOffset: (\d+) lastOffset: (\d+) count: (\d+) baseSequence: (-?\d+) "
            r"lastSequence: (-?\d+) producerId: (-?\d+) producerEpoch: (-?\d+) "
            r"partitionLeaderEpoch: (-?\d+) isTransactional: (\w+) isControl: (\w+) "
            r"deleteHorizonMs: (\S+) position: (\d+) (?:CreateTime|LogAppendTime): (-?\d+) "
            r"size: (\d+) magic: 2 compresscodec: (\w+) crc: (\d+) isvalid: true",
            dump.read_text(errors="replace"),
            re.M,
        )
        ours = [
            (
                str(header.base_offset),
                str(header.last_offset),
                str(header.record_count),
                str(header.base_sequence),
                str(header.last_sequence),
                str(header.producer_id),
                str(header.producer_epoch),
                str(header.leader_epoch),
                str(header.is_transactional).lower(),
                str(header.is_control).lower(),
                f"OptionalLong[{header.base_timestamp}]"
                if header.has_delete_horizon
                else "OptionalLong.empty",
                str(header.position),
                str(header.max_timestamp),
                str(header.size_bytes),
                CODEC_NAMES[header.codec],
                str(header.crc),
            )
            for header in iter_headers(data)
        ]
        assert ours == printed, dump


def test_minimum_and_maximum_timestamps_match_the_records(walk: Walker) -> None:
    for header, batch in golden.all_batches():
        timestamps = [record.timestamp for record in decode_batch(batch, header)]
        assert min_timestamp_of(batch, header) == (min(timestamps) if timestamps else None)
        if timestamps and not header.is_control:
            assert max(timestamps) == header.max_timestamp


def test_a_delete_horizon_does_not_shift_the_records_timestamps() -> None:
    folder = golden.ROOT / "compacted-keep-0"
    horizons = [header for header, _ in golden.batches(folder) if header.has_delete_horizon]
    assert horizons, "the fixture has such batches"
    for header, batch in golden.batches(folder):
        if header.has_delete_horizon:
            assert all(r.timestamp < header.base_timestamp for r in decode_batch(batch, header))


def test_batches_with_gaps_and_empty_batches_of_compaction_are_parsed() -> None:
    headers = [
        header
        for name in ("compacted-codec-0", "compacted-rm-0", "compacted-txn-0")
        for header, _ in golden.batches(golden.ROOT / name)
    ]
    assert any(header.record_count == 0 for header in headers)
    assert any(0 < header.record_count <= header.last_offset_delta for header in headers)


@pytest.mark.parametrize("folder", ["txn-0", "txn-multi-0", "txn-multi-1", "compacted-txn-0"])
def test_markers_are_those_that_kafkas_dump_tool_prints(folder: str) -> None:
    path = golden.ROOT / folder
    printed = [
        (marker == "COMMIT", int(epoch))
        for dump in sorted(Path(f"{path}.dumps").glob("*.log.dump.txt"))
        for marker, epoch in re.findall(
            r"endTxnMarker: (\w+) coordinatorEpoch: (-?\d+)", dump.read_text(errors="replace")
        )
    ]
    found = [end_marker_of(b, h) for h, b in golden.batches(path) if h.is_control]
    assert [tuple(marker) for marker in found if marker] == printed
    assert printed


def test_encoding_the_records_again_gives_kafkas_bytes() -> None:
    """Java's and librdkafka's bytes before compression; compressors may differ."""
    for header, batch in golden.all_batches():
        plain = not header.is_control and not header.timestamp_type
        if not plain or header.has_delete_horizon or not header.record_count:
            continue
        if header.record_count != header.last_offset_delta + 1:
            continue
        columns = decode_columns(batch, header)
        again = encode_batch(
            columns.values,
            timestamps=columns.timestamps,
            keys=columns.keys,
            headers=columns.headers,
            base_offset=header.base_offset,
            leader_epoch=header.leader_epoch,
            producer_id=header.producer_id,
            producer_epoch=header.producer_epoch,
            base_sequence=header.base_sequence,
            transactional=header.is_transactional,
        )
        assert again[61:] == expand(batch, header)
        if not header.codec:
            assert again == batch


def test_records_round_trip_with_every_codec() -> None:
    for header, batch in golden.all_batches():
        if not header.record_count or header.size_bytes > 200_000:
            continue
        columns = decode_columns(batch, header)
        for codec in CODEC_NAMES:
            again = encode_batch(
                columns.values,
                timestamps=columns.timestamps,
                keys=columns.keys,
                headers=columns.headers,
                codec=codec,
            )
            found = decode_columns(again, parse_header(again))
            assert found[1:] == columns[1:]


def test_stamping_gives_the_bytes_that_kafka_stored() -> None:
    for header, batch in golden.batches(golden.ROOT / "codec-lz4-0"):
        sent = bytearray(batch)
        stamp(sent, 0, base_offset=0, leader_epoch=-1)
        check_crc(sent, parse_header(sent))
        stamp(sent, 0, base_offset=header.base_offset, leader_epoch=header.leader_epoch)
        assert sent == batch


def test_iteration_starts_and_ends_at_the_given_offsets() -> None:
    _, data = golden.logs(golden.ROOT / "codec-zstd-0")[0]
    everything = list(iter_records(data))
    last = everything[-1].offset
    for low, high in ((0, 1), (3, 3), (17, 100), (last, None), (last + 1, None), (0, last)):
        found = list(iter_records(data, from_offset=low, end_offset=high))
        top = last + 1 if high is None else high
        assert found == [record for record in everything if low <= record.offset < top]
