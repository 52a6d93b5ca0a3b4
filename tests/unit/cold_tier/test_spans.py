"""The spans of a small segment's chunks: how they are found, and what is done without them."""

import pytest
from msgspec.structs import replace

from tests.fakes.cold_segments import upload, write_segment
from tests.unit.cold_tier.test_cold_reader import gets
from tierlog.cold_tier import segment_lookup
from tierlog.cold_tier.index_bundle import pack_bundle, parse_bundle, parse_directory
from tierlog.cold_tier.segment_check import check_segment
from tierlog.cold_tier.segment_lookup import SegmentIndexes
from tierlog.record_format.crc32c import crc32c_joined, crc32c_of
from tierlog.record_format.findings import ProblemKind


@pytest.fixture
def segment(store, tmp_path):
    written = write_segment(tmp_path / "log", batches=300)
    found = upload(store, written, chunk_bytes=1 << 20)
    store.calls.clear()
    return found


def bundle_of(store, segment):
    return store.get(segment.indexes_key, max_bytes=1 << 20)


def with_indexes(store, segment, body):
    store.put(segment.indexes_key, body, crc32c=crc32c_of(body))
    return replace(segment, indexes_crc32c=crc32c_of(body), indexes_size_bytes=len(body))


def test_spans_come_with_the_chunk_table_in_one_request(store, segment):
    indexes = SegmentIndexes(store)
    spans = indexes.load_spans(segment)
    assert len(spans.chunks) > 10
    assert len(indexes.load_index(segment).chunks) == 1
    assert indexes.load_spans(segment) is spans
    assert gets(store) == [segment.indexes_key]


def test_spans_of_a_segment_that_was_read_cost_one_request_more(store, segment, monkeypatch):
    monkeypatch.setattr(segment_lookup, "SPANS_HEAD_BYTES", 0)
    indexes = SegmentIndexes(store)
    indexes.load_index(segment)
    assert indexes.load_spans(segment).record_count == segment.record_count
    assert gets(store) == [segment.indexes_key] * 2


def test_a_segment_of_one_span_or_of_large_chunks_has_none(store, tmp_path):
    small = write_segment(tmp_path / "a", batches=2)
    large = write_segment(tmp_path / "b", batches=100)
    for written, chunk_bytes in [(small, 1 << 20), (large, 4096)]:
        found = upload(store, written, chunk_bytes=chunk_bytes)
        assert SegmentIndexes(store).load_spans(found) is None


def test_damaged_spans_are_not_used_and_are_found_by_verify(store, segment):
    body = bytearray(bundle_of(store, segment))
    body[parse_directory(body, file="f").sections[7].position + 50] ^= 1
    segment = with_indexes(store, segment, bytes(body))
    indexes = SegmentIndexes(store)
    assert indexes.load_spans(segment) is None
    assert indexes.load_index(segment).table.record_count == segment.record_count
    findings = check_segment(store, segment, partition=0, deep=True)
    (problem,) = findings.problems
    assert problem.kind is ProblemKind.INDEXES_CORRUPT
    assert "section 7 fails its CRC-32C: chunks are read whole" in problem.detail
    assert findings.checked.records == segment.record_count


def test_spans_that_are_wrong_are_found_by_verify(store, segment):
    assert check_segment(store, segment, partition=0, deep=True).problems == []
    parsed = parse_bundle(bundle_of(store, segment), file="f")
    spans = list(SegmentIndexes(store).load_spans(segment).chunks)
    spans[3] = spans[3]._replace(min_timestamp=spans[3].min_timestamp + 1)
    bundle = pack_bundle(parsed.table, spans=spans, offset_index=b"", time_index=b"")
    segment = with_indexes(store, segment, bundle.body)
    segment = replace(
        segment,
        chunk_table_position=bundle.chunk_table_position,
        chunk_table_size=bundle.chunk_table_size,
    )
    assert check_segment(store, segment, partition=0, deep=False).problems == []
    (problem,) = check_segment(store, segment, partition=0, deep=True).problems
    assert problem.kind is ProblemKind.CHUNK_TABLE_WRONG
    assert "a span is not what the spans say" in problem.detail


@pytest.mark.parametrize("second_bytes", [0, 1, 65_535, 65_536, 200_001])
def test_the_checksums_of_two_parts_make_that_of_the_whole(second_bytes):
    first, second = b"first part" * 99, bytes(range(1, 256)) * 1000
    second = second[:second_bytes]
    joined = crc32c_joined(crc32c_of(first), crc32c_of(second), second_bytes=second_bytes)
    assert joined == crc32c_of(first + second)
