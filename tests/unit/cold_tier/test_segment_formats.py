import os
import struct

import pytest

from tests.fakes.cold_segments import FIXTURES, write_segment
from tests.unit.record_format import golden
from tierlog.cold_tier import segment_check
from tierlog.cold_tier.index_bundle import (
    SectionKind,
    join_chunks,
    pack_bundle,
    pack_chunk_table,
    pack_spans,
    parse_bundle,
    parse_chunk_table,
    parse_directory,
    parse_spans,
)
from tierlog.cold_tier.segment_check import SPAN_BYTES_MIN, describe_chunk, scan_segment
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.compaction import empty_batch
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.decode import decode_batch
from tierlog.record_format.errors import CorruptBatch, CorruptObject, UnknownFormatVersion


def scan(written, chunk_bytes=4096):
    files = written.files
    return scan_segment(
        files.log,
        base_offset=files.base_offset,
        size_bytes=len(written.body),
        chunk_bytes=chunk_bytes,
    )


@pytest.mark.parametrize("chunk_bytes", [1, 61, 1000, 4096, 1 << 20])
@pytest.mark.parametrize("codec", [0, 4])
def test_chunks_cover_the_log_in_whole_batches_with_correct_statistics(
    tmp_path, chunk_bytes, codec
):
    written = write_segment(tmp_path, base_offset=500, codec=codec)
    table = scan(written, chunk_bytes)
    assert table.log_crc32c == crc32c_of(written.body)
    assert table.record_count == len(written.records)
    position, offset = 0, 500
    for chunk in table.chunks:
        assert chunk.position == position
        assert chunk.first_offset == offset
        body = written.body[position : chunk.end_position]
        assert chunk.end_position in written.batch_ends
        assert chunk.crc32c == crc32c_of(body)
        stamps = [r.timestamp for h in iter_headers(body) for r in decode_batch(body, h)]
        assert (chunk.min_timestamp, chunk.max_timestamp) == (min(stamps), max(stamps))
        assert chunk.record_count == len(stamps)
        assert not chunk.has_gap
        assert chunk.size_bytes <= chunk_bytes or len(list(iter_headers(body))) == 1
        position, offset = chunk.end_position, chunk.last_offset + 1
    assert (position, offset) == (len(written.body), written.files.last_offset + 1)


@pytest.mark.parametrize("chunk_bytes", [1, 20_000, 50_000, 1 << 20])
@pytest.mark.parametrize("codec", [0, 4])
def test_spans_are_chunks_in_parts(tmp_path, chunk_bytes, codec):
    written, spans = write_segment(tmp_path, batches=300, base_offset=500, codec=codec), []
    table = scan_segment(
        written.files.log,
        base_offset=500,
        size_bytes=len(written.body),
        chunk_bytes=chunk_bytes,
        on_span=spans.append,
    )
    assert table == scan(written, chunk_bytes)
    assert table.min_timestamp == scan(written, 1).min_timestamp
    if chunk_bytes > SPAN_BYTES_MIN:
        assert len(spans) > len(table.chunks)
        assert max(span.size_bytes for span in spans) <= SPAN_BYTES_MIN
    found = parse_spans(pack_spans(table, spans), table, file="f")
    assert [join_chunks(found.within(chunk)) for chunk in table.chunks] == list(table.chunks)
    next_offset = 500
    for span in spans:
        body = written.body[span.position : span.end_position]
        assert span == describe_chunk(body, span.position, next_offset=next_offset, file="f")
        next_offset = span.last_offset + 1


def test_every_segment_of_kafka_has_spans_that_join_to_its_chunks(monkeypatch):
    monkeypatch.setattr(segment_check, "SPAN_BYTES_MIN", 600)
    for path in golden.files("*.log"):
        given = {"base_offset": int(path.stem), "size_bytes": path.stat().st_size}
        spans = []
        table = scan_segment(path, **given, chunk_bytes=4096, on_span=spans.append)
        assert table == scan_segment(path, **given, chunk_bytes=4096), path
        assert parse_spans(pack_spans(table, spans), table, file="f").chunks == tuple(spans)


def test_spans_of_another_segment_and_across_chunks_are_refused(tmp_path):
    one, two = (write_segment(tmp_path / name, seed=seed) for seed, name in enumerate("ab", 1))
    table, other = scan(one), scan(two)
    with pytest.raises(CorruptObject, match="belong to another segment"):
        parse_spans(pack_spans(other, other.chunks), table, file="f")
    across = [join_chunks(table.chunks[:2]), *table.chunks[2:]]
    with pytest.raises(CorruptObject, match="of two chunks"):
        parse_spans(pack_spans(table, across), table, file="f")


def test_an_empty_segment_has_no_chunks(tmp_path):
    (tmp_path / "empty.log").write_bytes(b"")
    table = scan_segment(tmp_path / "empty.log", base_offset=9, size_bytes=0)
    assert table.chunks == ()
    assert table.min_timestamp is None
    assert parse_chunk_table(pack_chunk_table(table), file="f") == table


def test_every_segment_of_kafka_can_be_scanned():
    for path in golden.files("*.log"):
        body = path.read_bytes()
        table = scan_segment(
            path, base_offset=int(path.stem), size_bytes=len(body), chunk_bytes=2048
        )
        assert sum(chunk.size_bytes for chunk in table.chunks) == len(body), path
        for chunk in table.chunks:
            part = body[chunk.position : chunk.end_position]
            records = [r for h in iter_headers(part) for r in decode_batch(part, h)]
            if records:
                assert chunk.max_timestamp == max(record.timestamp for record in records)
                assert chunk.min_timestamp == min(record.timestamp for record in records)
            dense = len(records) == chunk.last_offset - chunk.first_offset + 1
            assert chunk.has_gap or dense, path
        assert parse_chunk_table(pack_chunk_table(table), file="f") == table


def test_chunks_of_a_compacted_segment_have_gaps():
    path = FIXTURES / "compacted-keep-0" / f"{0:020d}.log"
    table = scan_segment(path, base_offset=0, size_bytes=path.stat().st_size)
    assert any(chunk.has_gap for chunk in table.chunks)


def test_a_chunk_of_empty_batches_leaves_the_segments_time_range_known(tmp_path, written):
    end = written.files.last_offset + 1
    path = tmp_path / "compacted.log"
    path.write_bytes(written.body + empty_batch(end, end + 5, leader_epoch=0).body)
    table = scan_segment(path, base_offset=0, size_bytes=path.stat().st_size, chunk_bytes=1)
    assert (table.chunks[-1].record_count, table.chunks[-1].max_timestamp) == (0, None)
    whole = scan(written)
    assert (table.min_timestamp, table.max_timestamp) == (whole.min_timestamp, whole.max_timestamp)


def test_chunks_with_transactions_are_marked():
    path = FIXTURES / "txn-0" / f"{0:020d}.log"
    table = scan_segment(path, base_offset=0, size_bytes=path.stat().st_size)
    assert any(chunk.has_transactions for chunk in table.chunks)


@pytest.mark.parametrize("at", ["first", "middle", "last"])
def test_a_corrupt_segment_fails_the_scan(written, at):
    body = bytearray(written.body)
    body[{"first": 70, "middle": len(body) // 2, "last": len(body) - 1}[at]] ^= 1
    written.files.log.write_bytes(body)
    with pytest.raises(CorruptBatch):
        scan(written)


@pytest.mark.parametrize("beyond", [0, 1])
def test_a_corrupt_length_does_not_bring_the_rest_of_the_segment_into_memory(
    written, monkeypatch, beyond
):
    body, position, reads = bytearray(written.body), written.batch_ends[2], []
    struct.pack_into(">i", body, position + 8, len(body) - position - 12 + beyond)
    written.files.log.write_bytes(body)
    preadv = os.preadv

    def counting(fd, buffers, at):
        reads.extend(map(len, buffers))
        return preadv(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", counting)
    with pytest.raises(CorruptBatch) as caught:
        scan(written, 2048)
    assert caught.value.position == position
    assert max(reads) <= 2048 < len(body) - position


@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_a_corrupt_header_is_reported_with_its_position(written, chunk_bytes):
    body, position = bytearray(written.body), written.batch_ends[2]
    body[position + 16] ^= 1  # the magic
    written.files.log.write_bytes(body)
    with pytest.raises(CorruptBatch, match="magic") as corrupt:
        scan(written, chunk_bytes)
    assert (corrupt.value.file, corrupt.value.position) == (str(written.files.log), position)


@pytest.mark.parametrize("cut", [1, 30, 100])
def test_a_truncated_segment_fails_the_scan(written, cut):
    written.files.log.write_bytes(written.body[:-cut])
    with pytest.raises(CorruptBatch):
        scan(written)


def bundle_of(written):
    return pack_bundle(
        scan(written),
        offset_index=b"index" * 8,
        time_index=b"time" * 3,
        txn_index=b"",
        producer_snapshot=b"snapshot",
    )


def test_a_bundle_round_trips(written):
    bundle = bundle_of(written)
    parsed = parse_bundle(bundle.body, file="f")
    assert parsed.table == scan(written)
    assert parsed.offset_index == b"index" * 8
    assert parsed.time_index == b"time" * 3
    assert parsed.txn_index == b""
    assert parsed.producer_snapshot == b"snapshot"
    assert bundle.crc32c == crc32c_of(bundle.body)


def test_the_chunk_table_can_be_read_alone(written):
    bundle = bundle_of(written)
    end = bundle.chunk_table_position + bundle.chunk_table_size
    table = parse_chunk_table(bundle.body[bundle.chunk_table_position : end], file="f")
    assert table == scan(written)
    directory = parse_directory(bundle.body[:end], file="f")
    assert directory.section(SectionKind.TXN_INDEX) is None


def test_a_flipped_byte_anywhere_in_a_bundle_is_detected(written):
    body = bundle_of(written).body
    for position in range(len(body)):
        bad = bytearray(body)
        bad[position] ^= 0x10
        with pytest.raises((CorruptObject, UnknownFormatVersion)):
            parse_bundle(bytes(bad), file="f")


def test_a_bundle_truncated_anywhere_is_refused(written):
    body = bundle_of(written).body
    for end in range(len(body)):
        with pytest.raises(CorruptObject):
            parse_bundle(body[:end], file="f")


def test_a_chunk_table_truncated_or_flipped_anywhere_is_refused(written):
    body = pack_chunk_table(scan(written))
    for position in range(len(body)):
        with pytest.raises(CorruptObject):
            parse_chunk_table(body[:position], file="f")
        bad = bytearray(body)
        bad[position] ^= 1
        with pytest.raises((CorruptObject, UnknownFormatVersion)):
            parse_chunk_table(bytes(bad), file="f")


@pytest.mark.parametrize("parse", [parse_chunk_table, parse_directory])
def test_an_unknown_version_is_refused_by_name(written, parse):
    bundle = bundle_of(written)
    body = bytearray(bundle.body if parse is parse_directory else pack_chunk_table(scan(written)))
    struct.pack_into(">H", body, 4, 2)
    with pytest.raises(UnknownFormatVersion, match="format version 2"):
        parse(bytes(body), file="f")


def patched(table, layout, position, value):
    """The table parsed again with one field changed and the checksum corrected."""
    body = bytearray(pack_chunk_table(table)[:-4])
    struct.pack_into(layout, body, position, value)
    return parse_chunk_table(bytes(body) + struct.pack(">I", crc32c_of(bytes(body))), file="f")


SECOND = 32 + 56  # position of the second chunk's entry


@pytest.mark.parametrize(
    ("layout", "position", "value", "match"),
    [
        pytest.param(">q", SECOND, 1, "not begin where the previous", id="position"),
        pytest.param(">q", SECOND + 16, 0, "chunk 1 are out of order", id="offsets"),
        pytest.param(">q", 20, 1 << 40, "bytes", id="log size"),
    ],
)
def test_an_inconsistent_chunk_table_is_refused_despite_a_valid_checksum(
    written, layout, position, value, match
):
    with pytest.raises(CorruptObject, match=match):
        patched(scan(written), layout, position, value)


def test_a_chunk_with_unknown_flags_or_timestamps_is_never_skipped(written):
    """A flag of a newer version makes its timestamps unknown."""
    whole = scan(written)
    assert not whole.chunks[1].has_gap
    assert whole.min_timestamp is not None
    newer = patched(whole, ">I", SECOND + 52, 16)  # its flags
    assert (newer.min_timestamp, newer.max_timestamp) == (None, None)
    assert newer.chunks[1].has_gap
