"""The key filters of a segment: which chunks are read for a key, and what is done without them."""

import dataclasses
from contextlib import closing

import pytest
from msgspec.structs import replace

from tests.fakes.cold_segments import upload, write_segment
from tests.unit.cold_tier.test_cold_reader import QUICK, bytes_of, gets
from tierlog.cold_tier import segment_lookup
from tierlog.cold_tier.cold_reader import ColdReader
from tierlog.cold_tier.index_bundle import parse_bundle, parse_directory
from tierlog.cold_tier.key_filters import find_key_filters, pack_key_filters, parse_key_filters
from tierlog.cold_tier.key_search import KeySearch
from tierlog.cold_tier.segment_check import check_segment
from tierlog.cold_tier.segment_lookup import SegmentIndexes
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.decode import decode_batch
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import CorruptObject, UnknownFormatVersion
from tierlog.record_format.findings import ProblemKind
from tierlog.record_format.key_filter import hash_key

KEYS_OF_A_BATCH = 50
BATCHES = 40
CHUNK_BYTES = 8192  # some four batches


@pytest.fixture
def reader(store, cache):
    store.read_policy = QUICK
    with closing(ColdReader(store, cache)) as cold_reader:
        yield cold_reader


@pytest.fixture
def keyed(tmp_path):
    """Batch n has the keys n-0 to n-49, but every fifth has none."""
    written, body = write_segment(tmp_path / "log", batches=1), bytearray()
    for number in range(BATCHES):
        keys = [b"%d-%d" % (number, one) for one in range(KEYS_OF_A_BATCH)]
        body += encode_batch(
            [b"value of some length"] * KEYS_OF_A_BATCH,
            keys=keys if number % 5 else [None] * KEYS_OF_A_BATCH,
            timestamps=[1] * KEYS_OF_A_BATCH,
            base_offset=number * KEYS_OF_A_BATCH,
        )
    files = dataclasses.replace(written.files, last_offset=BATCHES * KEYS_OF_A_BATCH - 1)
    files.log.write_bytes(body)
    return dataclasses.replace(written, files=files, body=bytes(body))


def filters_in(store, segment):
    body = store.get(segment.indexes_key, max_bytes=1 << 20)
    table = parse_bundle(body, file="f").table
    return find_key_filters(body, parse_directory(body, file="f"), table, file="f"), table


def find_all(reader, segment, key):
    """The offsets of the key's records; reads as a search does."""
    search, offset, found = KeySearch(key), 0, []
    while offset < segment.next_offset:
        start, end = reader.find_chunk_with_key(segment, offset, search, beyond=lambda _: None)
        if start == end:
            assert end == segment.next_offset
            break
        read = reader.read_segments(segment, start, max_bytes=1 << 20, end_offset=end)
        assert read.next_offset == end
        body = bytes_of(read)
        for header in iter_headers(body):
            found += [one.offset for one in decode_batch(body, header) if one.key == key]
        offset = read.next_offset
    return found


def replant(store, segment, change):
    """Overwrite the `.indexes` object, with its new checksum in the entry."""
    body = bytearray(store.get(segment.indexes_key, max_bytes=1 << 20))
    change(body, parse_directory(body, file="f").sections[6])
    store.put(segment.indexes_key, bytes(body), crc32c=crc32c_of(body))
    return replace(segment, indexes_crc32c=crc32c_of(body))


def test_a_key_costs_at_most_three_requests_a_chunk_that_has_it(store, reader, keyed):
    segment = upload(store, keyed, chunk_bytes=CHUNK_BYTES)
    store.calls.clear()
    assert find_all(reader, segment, b"21-7") == [21 * KEYS_OF_A_BATCH + 7]
    assert len(gets(store)) <= 3
    assert len(gets(store, ".log")) == 1


def test_a_chunk_is_found_below_an_end_and_as_a_whole(store, reader, keyed):
    segment = upload(store, keyed, chunk_bytes=CHUNK_BYTES)
    at, search = 21 * KEYS_OF_A_BATCH + 7, KeySearch(b"21-7")

    def find(offset, end_offset):
        return reader.find_chunk_with_key(
            segment, offset, search, end_offset=end_offset, beyond=lambda _: None
        )

    start, end = find(0, segment.next_offset)
    assert start < at < end < segment.next_offset
    assert find(0, start) == (start, start)
    assert find(0, start + 1) == (start, end)
    assert find(at, at + 1) == (at, end)
    assert find(end, end + 5) == (end + 5, end + 5)


def test_a_segment_that_lacks_the_key_costs_one_request(store, reader, keyed):
    segment = upload(store, keyed, chunk_bytes=CHUNK_BYTES)
    store.calls.clear()
    assert find_all(reader, segment, b"no such key") == []
    assert [gets(store), find_all(reader, segment, b"nor that")] == [[segment.indexes_key], []]
    assert len(gets(store)) == 1


def test_large_filters_and_those_of_a_segment_that_was_read_cost_one_request_more(
    store,
    reader,
    keyed,
    monkeypatch,
):
    monkeypatch.setattr(segment_lookup, "KEYS_HEAD_BYTES", 0)
    segment = upload(store, keyed, chunk_bytes=CHUNK_BYTES)
    store.calls.clear()
    assert find_all(reader, segment, b"no such key") == []
    assert gets(store) == [segment.indexes_key] * 2


def test_filters_are_at_most_one_and_a_quarter_bytes_a_key(store, keyed):
    segment = upload(store, keyed)
    bare = upload(store, keyed, filters_keys=False)
    keys = BATCHES * 4 // 5 * KEYS_OF_A_BATCH
    assert segment.indexes_size_bytes - bare.indexes_size_bytes <= 1.25 * keys + 24 + 28 + 24 * 4


def test_of_chunks_without_keys_none_is_read(store, reader, tmp_path):
    segment = upload(store, write_segment(tmp_path / "log"))
    assert find_all(reader, segment, b"key") == []
    assert not gets(store, ".log")


@pytest.mark.parametrize("key", [b"21-7", b"no such key"])
def test_without_filters_all_chunks_are_read(store, reader, keyed, key):
    segment = upload(store, keyed, chunk_bytes=CHUNK_BYTES, filters_keys=False)
    offsets = [21 * KEYS_OF_A_BATCH + 7] if key == b"21-7" else []
    assert find_all(reader, segment, key) == offsets
    assert len(gets(store, ".log")) == len(filters_in(store, segment)[1].chunks) > 5


def test_what_is_not_known_of_a_chunk_is_read(store, keyed):
    segment = upload(store, keyed, chunk_bytes=CHUNK_BYTES)
    filters, table = filters_in(store, segment)
    packed = pack_key_filters(table, [None, b"", *filters.filters[2:]])
    found = parse_key_filters(packed, table, file="f")
    assert [found.may_hold(number, hash_key(b"21-7")) for number in (0, 1)] == [True, False]


def damaged(body, section):
    body[section.position + section.size_bytes - 3] ^= 1


def test_a_damaged_filter_hides_no_record_and_is_found_by_verify(store, reader, keyed):
    segment = replant(store, upload(store, keyed, chunk_bytes=CHUNK_BYTES), damaged)
    for number in (1, 21, BATCHES - 1):
        assert find_all(reader, segment, b"%d-7" % number) == [number * KEYS_OF_A_BATCH + 7]
    findings = check_segment(store, segment, partition=0, deep=True)
    (problem,) = findings.problems
    assert problem.kind is ProblemKind.INDEXES_CORRUPT
    assert "section 6 fails its CRC-32C: no key is looked up by its key filters" in problem.detail
    assert findings.checked.chunks > 5


def test_a_filter_that_lacks_a_key_is_found_by_verify(store, keyed):
    segment = upload(store, keyed, chunk_bytes=CHUNK_BYTES)
    assert check_segment(store, segment, partition=0, deep=True).problems == []
    filters, table = filters_in(store, segment)
    lying = pack_key_filters(table, [filters.filters[0], b"", *filters.filters[2:]])

    def change(body, section):
        lies = lying + bytes(section.size_bytes - len(lying))
        body[section.position : section.position + len(lies)] = lies
        at = 28 + 24  # the second entry of the directory: its checksum, and its size
        body[at + 4 : at + 8] = crc32c_of(lying).to_bytes(4, "big")
        body[at + 16 : at + 24] = len(lying).to_bytes(8, "big")
        end = 28 + 24 * 6
        body[end : end + 4] = crc32c_of(bytes(body[:end])).to_bytes(4, "big")

    segment = replant(store, segment, change)
    assert check_segment(store, segment, partition=0, deep=False).problems == []
    (problem,) = check_segment(store, segment, partition=0, deep=True).problems
    assert "chunk 1" in problem.detail
    assert "its key filter lacks a key" in problem.detail


def test_filters_truncated_or_flipped_anywhere_in_their_table_are_refused(store, keyed):
    segment = upload(store, keyed, chunk_bytes=CHUNK_BYTES)
    filters, table = filters_in(store, segment)
    body = pack_key_filters(table, filters.filters)
    for end in range(len(body)):
        with pytest.raises(CorruptObject):
            parse_key_filters(body[:end], table, file="f")
    for position in range(28 + 4 * len(table.chunks)):
        bad = bytearray(body)
        bad[position] ^= 0x10
        with pytest.raises((CorruptObject, UnknownFormatVersion)):
            parse_key_filters(bytes(bad), table, file="f")


def test_filters_of_another_segment_are_refused(store, keyed, tmp_path):
    filters, table = filters_in(store, upload(store, keyed))
    _, other = filters_in(store, upload(store, write_segment(tmp_path / "other", seed=2)))
    with pytest.raises(CorruptObject, match="belong to another segment"):
        parse_key_filters(pack_key_filters(table, filters.filters), other, file="f")


def test_an_index_that_another_thread_has_loaded_meanwhile_counts_once(store, keyed):
    segment = upload(store, keyed)
    alone, indexes = SegmentIndexes(store), SegmentIndexes(store)
    alone.load_key_filters(segment)

    def meanwhile(*_):
        store.before_call = lambda *_: None
        indexes.load_index(segment)

    store.before_call = meanwhile
    assert indexes.load_key_filters(segment) is indexes.load_key_filters(segment)
    assert indexes.cached_bytes == alone.cached_bytes
