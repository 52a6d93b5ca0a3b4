import dataclasses
import os
import random
import threading
from bisect import bisect_right
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress

import pytest
from msgspec.structs import replace

from tests.fakes.at_once import at_once
from tests.fakes.cold_segments import FIXTURES, FOLDER, SegmentFiles, upload, write_segment
from tests.fakes.faulty_object_store import FailsBefore, Slow, WrongBytes
from tests.fakes.waiting import until
from tierlog.cold_tier import segment_lookup
from tierlog.cold_tier.chunk_cache import ChunkCache
from tierlog.cold_tier.chunk_fills import ReadAhead
from tierlog.cold_tier.cold_reader import ColdLimits, ColdReader
from tierlog.cold_tier.ranged_reader import RangedReader
from tierlog.cold_tier.segment_lookup import BatchFinder, SegmentIndexes
from tierlog.cold_tier.segment_uploader import SegmentUploader, UploadLimits
from tierlog.host.retry import RetryPolicy
from tierlog.host.waiting import Wait, WouldBlock
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.checkpoint_files import ProducerEntry, format_snapshot
from tierlog.record_format.decode import decode_batch
from tierlog.record_format.errors import (
    CorruptObject,
    MissingObject,
    ShuttingDown,
    StoreUnavailable,
    UnknownFormatVersion,
)
from tierlog.record_format.index_layouts import AbortedTxn, pack_txn_index

QUICK = RetryPolicy(attempts=2, sleep=lambda _: None)


@pytest.fixture
def reader(store, cache):
    store.read_policy = QUICK
    cold_reader = ColdReader(store, cache, limits=ColdLimits(requests_max=8))
    yield cold_reader
    cold_reader.close()


@pytest.fixture
def segment(store, written):
    return upload(store, written)


def gets(store, suffix=""):
    return [key for call, key in store.calls if call == "get_range" and key.endswith(suffix)]


def bytes_of(read):
    return b"".join(piece.read() for piece in read.slices)


def starts_of(written):
    return [0, *written.batch_ends[:-1]]


def batch_of(written, offset):
    """Index of the batch that holds an offset, by walking the bytes."""
    for number, header in enumerate(iter_headers(written.body)):
        if header.last_offset >= offset:
            return number
    raise AssertionError


def corrupt_cached_chunks(reader, cache, *, position):
    until(lambda: not reader._fills._filling)  # whoever joins a fill gets the file it opened
    for path in cache._folder.rglob("[0-9]"):
        with path.open("r+b") as file:
            file.seek(position)
            file.write(b"\xff" * 12)


@pytest.mark.parametrize("mode", ["blocking", "nonblocking"])
def test_a_corrupt_cached_chunk_is_fetched_again(reader, cache, segment, written, mode):
    whole = {"max_bytes": 1 << 20}
    assert bytes_of(reader.read_segments(segment, 0, **whole)) == written.body
    reader._finder = BatchFinder()
    corrupt_cached_chunks(reader, cache, position=0)
    if mode == "nonblocking":
        assert at_once(reader.read_segments, segment, 5, **whole) is None
    assert bytes_of(reader.read_segments(segment, 0, **whole)) == written.body


def test_a_timestamp_look_up_survives_a_corrupt_cached_chunk(reader, cache, segment, written):
    timestamp = next(iter_headers(written.body)).max_timestamp
    found = reader.offset_for_timestamp(segment, timestamp)
    corrupt_cached_chunks(reader, cache, position=20)
    assert reader.offset_for_timestamp(segment, timestamp) == found


def test_a_chunk_reported_corrupt_is_verified_before_it_is_served_again(
    reader, cache, segment, written
):
    read = reader.read_segments(segment, 0, max_bytes=1 << 20)
    corrupt_cached_chunks(reader, cache, position=len(written.body) // len(read.slices) // 2)
    assert bytes_of(reader.read_segments(segment, 0, max_bytes=1 << 20)) != written.body, (
        "not noticed yet"
    )
    for piece in read.slices:
        piece.file.report_corrupt()
    del read, piece
    assert bytes_of(reader.read_segments(segment, 0, max_bytes=1 << 20)) == written.body


def test_a_cached_chunk_that_cannot_be_opened_is_a_miss(reader, cache, segment, written):
    read = reader.read_segments(segment, 0, max_bytes=1 << 20)
    for piece in read.slices:
        piece.file.report_corrupt()
        piece.file.path.unlink(missing_ok=True)
        piece.file.path.symlink_to(piece.file.path)  # cannot be opened: a loop
    del read, piece
    assert bytes_of(reader.read_segments(segment, 0, max_bytes=1 << 20)) == written.body


@pytest.mark.parametrize("max_bytes", [1, 500, 4096, 10_000, 1 << 20])
def test_a_read_at_every_offset_returns_the_bytes_of_the_log(reader, segment, written, max_bytes):
    for offset in range(segment.base_offset, segment.last_offset + 1):
        read = reader.read_segments(segment, offset, max_bytes=max_bytes)
        body = bytes_of(read)
        start = starts_of(written)[batch_of(written, offset)]
        assert written.body[start : start + len(body)] == body
        headers = list(iter_headers(body))
        assert headers[-1].end_position == len(body)
        assert headers[0].base_offset <= offset <= headers[0].last_offset
        assert read.next_offset == headers[-1].next_offset
        assert len(body) <= max_bytes or len(headers) == 1


def test_successive_reads_return_the_whole_log(reader, segment, written):
    offset, body = 0, b""
    while offset <= segment.last_offset:
        read = reader.read_segments(segment, offset, max_bytes=3000)
        body += bytes_of(read)
        offset = read.next_offset
    assert body == written.body


def test_a_read_returns_as_many_batches_as_fit(reader, segment, written):
    """Unless it ends at the end of a chunk."""
    reader.read_segments(segment, 0, max_bytes=1 << 20)
    for offset in range(0, segment.last_offset, 5):
        body = bytes_of(reader.read_segments(segment, offset, max_bytes=1500))
        start = starts_of(written)[batch_of(written, offset)]
        ends = written.batch_ends
        fits = ends[bisect_right(ends, start + 1500) - 1]
        if start + len(body) < fits:
            chunk_ends = [c.end_position for c in reader._indexes.load_index(segment).table.chunks]
            assert start + len(body) in chunk_ends


def test_a_read_returns_nothing_at_or_above_its_end_offset(reader, segment, written):
    ends = [header.next_offset for header in iter_headers(written.body)]
    for end_offset in ends[::3]:
        offset, body = 0, b""
        while offset < end_offset:
            read = reader.read_segments(segment, offset, max_bytes=2000, end_offset=end_offset)
            assert read.next_offset > offset
            body += bytes_of(read)
            offset = read.next_offset
        assert offset == end_offset
        assert list(iter_headers(body))[-1].next_offset == end_offset


def test_reading_one_record_takes_one_index_and_one_chunk_request(store, reader, segment):
    store.calls.clear()
    reader.read_segments(segment, 50, max_bytes=1)
    assert gets(store) == [segment.indexes_key, segment.log_key]
    reader.read_segments(segment, 50, max_bytes=1)
    assert len(gets(store)) == 2


def test_concurrent_misses_of_a_chunk_share_one_request(store, reader, segment):
    reader._indexes.load_index(segment)
    store.calls.clear()
    gate = threading.Barrier(8)

    def read(_):
        gate.wait()
        return bytes_of(reader.read_segments(segment, 0, max_bytes=1))

    with ThreadPoolExecutor(8) as pool:
        bodies = set(pool.map(read, range(8)))
    assert len(bodies) == 1
    assert len(gets(store)) == 1


def test_slices_outlive_their_eviction_from_the_cache(store, segment, written, tmp_path):
    cache = ChunkCache(tmp_path / "small", limit_bytes=3 * 4096)
    reader = ColdReader(store, cache)
    early = reader.read_segments(segment, 0, max_bytes=1)
    offset = 0
    while offset <= segment.last_offset:
        with closing(reader.read_segments(segment, offset, max_bytes=1 << 20)) as read:
            offset = read.next_offset
    assert bytes_of(early) == written.body[: written.batch_ends[0]]
    reader.close()


def test_concurrent_readers_of_a_small_cache_get_the_right_bytes(store, tmp_path):
    written = write_segment(tmp_path / "big", batches=200)
    segment = upload(store, written)
    cache = ChunkCache(tmp_path / "small", limit_bytes=6 * 4096)
    reader = ColdReader(store, cache, limits=ColdLimits(requests_max=4))

    def scan(seed):
        dice, offset, body = random.Random(seed), 0, b""
        while offset <= segment.last_offset:
            read = reader.read_segments(segment, offset, max_bytes=dice.randint(1, 9000))
            with closing(read):
                body += bytes_of(read)
            offset = read.next_offset
        return body == written.body

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(scan, range(6)))
    usage = cache.usage()
    assert usage.cached_bytes + usage.reserved_bytes + usage.lingering_bytes <= 6 * 4096
    reader.close()


@pytest.fixture
def three_segments(store, tmp_path):
    """Three consecutive segments, the last after a gap, and their bytes."""
    made = [write_segment(tmp_path / "log", batches=20)]
    for seed, gap in ((2, 0), (3, 1000)):
        base = made[-1].files.last_offset + 1 + gap
        made.append(write_segment(tmp_path / "log", base_offset=base, batches=20, seed=seed))
    return [upload(store, segment) for segment in made], [segment.body for segment in made]


@pytest.mark.parametrize("max_bytes", [1, 4096, 9000, 1 << 20])
@pytest.mark.usefixtures("everything_in_memory")
def test_a_read_continues_into_the_following_segments(reader, three_segments, max_bytes):
    segments, bodies = three_segments
    whole, offset, parts = b"".join(bodies), 0, []
    while offset <= segments[-1].last_offset:
        number = next(n for n, segment in enumerate(segments) if segment.last_offset >= offset)
        read, nonblocking = (
            reader.read_segments(
                segments[number],
                offset,
                max_bytes=max_bytes,
                following=segments[number + 1 :],
                wait=wait,
            )
            for wait in Wait
        )
        assert nonblocking is not None
        assert bytes_of(nonblocking) == bytes_of(read)
        assert nonblocking.next_offset == read.next_offset
        parts.append(bytes_of(read))
        offset = read.next_offset
    assert b"".join(parts) == whole
    assert all(len(part) <= max_bytes for part in parts if max_bytes >= 4096)
    if max_bytes == 1 << 20:
        assert len(parts) == 1


def test_a_read_opens_a_limited_number_of_files(store, reader, written):
    segment = upload(store, written, chunk_bytes=1)
    read = reader.read_segments(segment, 0, max_bytes=1 << 20)
    assert len(read.slices) == 16
    assert bytes_of(read) == written.body[: written.batch_ends[15]]


def test_a_read_across_segments_ends_at_its_end_offset(reader, three_segments):
    segments, bodies = three_segments
    end = segments[1].base_offset
    read = reader.read_segments(
        segments[0], 0, max_bytes=1 << 20, end_offset=end, following=segments[1:]
    )
    assert (bytes_of(read), read.next_offset) == (bodies[0], end)
    gap = segments[2].base_offset - 500
    read = reader.read_segments(
        segments[1], end, max_bytes=1 << 20, end_offset=gap, following=segments[2:]
    )
    assert (bytes_of(read), read.next_offset) == (bodies[1], segments[1].last_offset + 1)


def test_an_error_in_a_following_segment_is_raised_by_the_next_read(store, reader, three_segments):
    segments, bodies = three_segments
    store.delete([segments[1].indexes_key])
    read = reader.read_segments(segments[0], 0, max_bytes=1 << 20, following=segments[1:])
    assert (bytes_of(read), read.next_offset) == (bodies[0], segments[1].base_offset)
    with pytest.raises(MissingObject):
        reader.read_segments(
            segments[1], read.next_offset, max_bytes=1 << 20, following=segments[2:]
        )


def test_a_large_read_fetches_its_chunks_concurrently(store, cache, written):
    segment = upload(store, written)
    with closing(ColdReader(store, cache)) as reader:
        chunks = reader._indexes.load_index(segment).table.chunks
        store.fail("get_range", Slow(gate := threading.Event()), times=99)
        with ThreadPoolExecutor(1) as pool:
            read = pool.submit(reader.read_segments, segment, 0, max_bytes=len(written.body))
            try:
                until(lambda: len(gets(store, ".log")) >= len(chunks) // 2)
                assert not read.done()
            finally:
                gate.set()
            assert written.body.startswith(bytes_of(read.result()))


def test_a_sequential_read_prefetches_across_segment_ends(store, cache, tmp_path):
    first = write_segment(tmp_path / "log", batches=40)
    second = write_segment(
        tmp_path / "log", base_offset=first.files.last_offset + 1, batches=20, seed=2
    )
    segment, following = upload(store, first), upload(store, second)
    reader = ColdReader(store, cache)
    offset = 0
    while offset <= segment.last_offset:
        read = reader.read_segments(segment, offset, max_bytes=4096, following=[following])
        offset = read.next_offset
    reader.close()  # waits for prefetches
    assert gets(store, ".log").count(following.log_key) >= 1
    assert following.indexes_key in gets(store)


def test_random_reads_prefetch_nothing(store, reader, segment):
    reader.read_segments(segment, 0, max_bytes=1)
    store.calls.clear()
    for offset in (100, 30, 70):
        reader.read_segments(segment, offset, max_bytes=1)
    assert len(gets(store)) <= 3


def test_a_corrupt_chunk_is_reported_and_the_others_are_readable(store, reader, segment, written):
    chunks = reader._indexes.load_index(segment).table.chunks
    bad = bytearray(written.body)
    bad[chunks[1].position + 100] ^= 1
    store.put(segment.log_key, bytes(bad))
    with pytest.raises(CorruptObject) as corrupt:
        reader.read_segments(segment, chunks[1].first_offset, max_bytes=1)
    assert corrupt.value.file == segment.log_key
    before = reader.read_segments(segment, 0, max_bytes=1 << 20)
    assert bytes_of(before) == written.body[: chunks[1].position]
    assert before.next_offset == chunks[1].first_offset
    after = reader.read_segments(segment, chunks[2].first_offset, max_bytes=1 << 20)
    assert bytes_of(after) == written.body[chunks[2].position :]


def test_a_missing_log_is_reported_with_its_key(store, reader, segment):
    store.delete([segment.log_key])
    with pytest.raises(MissingObject) as missing:
        reader.read_segments(segment, 0, max_bytes=1)
    assert missing.value.file == segment.log_key


def test_a_missing_or_corrupt_index_is_reported_with_its_key(store, reader, segment):
    body = store.get(segment.indexes_key, max_bytes=1 << 20)
    store.put(segment.indexes_key, body[:60] + b"\xff" + body[61:])
    with pytest.raises(CorruptObject) as corrupt:
        reader.read_segments(segment, 0, max_bytes=1)
    assert corrupt.value.file == segment.indexes_key
    store.delete([segment.indexes_key])
    with pytest.raises(MissingObject) as missing:
        reader.read_segments(segment, 0, max_bytes=1)
    assert missing.value.file == segment.indexes_key


def test_the_index_of_another_segment_is_refused(store, reader, segment, tmp_path):
    other = upload(store, write_segment(tmp_path / "other", seed=9))
    store.put(segment.indexes_key, store.get(other.indexes_key, max_bytes=1 << 20))
    with pytest.raises(CorruptObject):
        reader.read_segments(segment, 0, max_bytes=1)


def test_an_index_of_a_newer_format_is_refused(store, reader, segment):
    body = bytearray(store.get(segment.indexes_key, max_bytes=1 << 20))
    body[5] = 9
    store.put(segment.indexes_key, bytes(body))
    with pytest.raises(UnknownFormatVersion):
        reader.read_segments(segment, 0, max_bytes=1)


def test_an_index_received_wrong_is_fetched_again(store, reader, segment):
    store.fail("get_range", WrongBytes(40))
    assert reader.read_segments(segment, 0, max_bytes=1).slices


def test_cached_chunks_are_readable_while_the_store_is_down(store, reader, segment):
    reader.read_segments(segment, 0, max_bytes=1)
    store.fail("get_range", FailsBefore(), times=1000)
    assert reader.read_segments(segment, 0, max_bytes=1).slices
    with pytest.raises(StoreUnavailable):
        reader.read_segments(segment, segment.last_offset, max_bytes=1)


def test_chunk_tables_in_memory_are_limited_in_bytes(store, tmp_path):
    indexes = SegmentIndexes(store, limit_bytes=20_000)
    segments = [upload(store, write_segment(tmp_path / str(n), seed=n)) for n in range(10)]
    for segment in segments:
        indexes.load_index(segment)
    assert indexes.cached_bytes <= 20_000


def test_a_chunk_table_used_by_nonblocking_reads_stays_in_memory(store, tmp_path):
    indexes = SegmentIndexes(store, limit_bytes=20_000)
    used, *others = [upload(store, write_segment(tmp_path / str(n), seed=n)) for n in range(10)]
    indexes.load_index(used)
    for segment in others:
        indexes.load_index(segment)
        assert at_once(indexes.load_index, used) is not None
    assert at_once(indexes.load_index, others[0]) is None


@pytest.mark.parametrize("codec", [0, 3])
def test_a_timestamp_look_up_finds_the_first_record_in_offset_order(store, cache, tmp_path, codec):
    written = write_segment(tmp_path / "log", base_offset=100, codec=codec)
    segment = upload(store, written, chunk_bytes=2000)
    reader = ColdReader(store, cache)
    dice = random.Random(4)
    for _ in range(200):
        stamp = dice.choice([dice.randint(0, 1_100_000), dice.choice(written.records)[1]])
        start, end = sorted(dice.randint(90, segment.last_offset + 5) for _ in range(2))
        expected = next(
            (
                (offset, timestamp)
                for offset, timestamp in written.records
                if start <= offset < end and timestamp >= stamp
            ),
            None,
        )
        found = reader.offset_for_timestamp(segment, stamp, start_offset=start, end_offset=end)
        assert found == expected
    reader.close()


def kafka_segment(store, folder, base_offset, next_base):
    stem = FIXTURES / folder / f"{base_offset:020d}"
    txn = stem.with_suffix(".txnindex")
    files = SegmentFiles(
        base_offset,
        next_base - 1,
        stem.with_suffix(".log"),
        stem.with_suffix(".index"),
        stem.with_suffix(".timeindex"),
        txnindex=txn if txn.exists() else None,
    )
    uploader = SegmentUploader(store, limits=UploadLimits(chunk_bytes=1024))
    return uploader.upload_segment(files, folder=FOLDER, leader_epoch=0)


@pytest.mark.parametrize(
    ("folder", "base_offset", "next_base"),
    [("compacted-txn-0", 0, 274), ("compacted-txn-0", 328, 402), ("compacted-keep-0", 0, 238)],
)
def test_segments_compacted_by_kafka_are_read_across_their_gaps(
    store, reader, folder, base_offset, next_base
):
    segment = kafka_segment(store, folder, base_offset, next_base)
    body = store.get(segment.log_key, max_bytes=1 << 22)
    for start in range(base_offset, next_base):
        read = reader.read_segments(segment, start, max_bytes=1)
        if read.slices:
            header = next(iter_headers(bytes_of(read)))
            first = next(h for h in iter_headers(body) if h.last_offset >= start)
            assert header.base_offset == first.base_offset
        assert start < read.next_offset <= next_base
    offset, found = base_offset, b""
    while offset < next_base:
        read = reader.read_segments(segment, offset, max_bytes=700)
        found, offset = found + bytes_of(read), read.next_offset
    assert found == body


def test_timestamp_look_ups_in_kafkas_segments_are_exact(store, reader):
    segment = kafka_segment(store, "mixed-time-0", 9, 27)
    body = store.get(segment.log_key, max_bytes=1 << 22)
    records = [r for h in iter_headers(body) for r in decode_batch(body, h)]
    for wanted in {record.timestamp for record in records}:
        first = next(record for record in records if record.timestamp >= wanted)
        assert reader.offset_for_timestamp(segment, wanted) == (first.offset, first.timestamp)


def test_aborted_transactions_are_read_from_the_bundle(store, reader):
    segment = kafka_segment(store, "compacted-txn-0", 328, 402)
    found = reader.aborted_transactions([segment], start_offset=328, end_offset=402)
    assert found
    assert all(txn.last_offset >= 328 for txn in found)
    nothing = kafka_segment(store, "compacted-txn-0", 0, 274)
    assert reader.aborted_transactions([nothing], start_offset=0, end_offset=9) == []


A, B = 1 << 33, 2 << 33  # producers


def run_of_segments(store, folder, *snapshots, aborted=()):
    """Consecutive segments. `snapshots`: for each the open transactions at its end (first offset
    by producer id), None for no snapshot. `aborted`: first offset of the transaction aborted in
    it, by number of the segment.
    """
    made, base = [], 0
    for number, open_txns in enumerate(snapshots):
        written = write_segment(folder / str(number), base_offset=base, batches=3, seed=number)
        files = dataclasses.replace(written.files, snapshot=folder / f"{number}.snapshot")
        if open_txns is None:
            files = dataclasses.replace(files, snapshot=None)
        else:
            entries = [ProducerEntry(id_, 0, 0, base, 0, 1, 0, at) for id_, at in open_txns.items()]
            files.snapshot.write_bytes(format_snapshot(entries))
        if number in dict(aborted):
            first, last = dict(aborted)[number], written.files.last_offset
            files = dataclasses.replace(files, txnindex=folder / f"{number}.txnindex")
            files.txnindex.write_bytes(pack_txn_index([AbortedTxn(A, first, last, last + 1)]))
        made.append(upload(store, dataclasses.replace(written, files=files)))
        base = written.files.last_offset + 1
    return made


NONE, OPEN = -1, 0


@pytest.mark.parametrize(
    ("snapshots", "segments_searched"),
    [
        pytest.param([{}, {}, {}], 1, id="no producers"),
        pytest.param([{A: NONE}, {}, {}], 1, id="no open transaction"),
        pytest.param([{A: OPEN}, {A: NONE}, {}], 2, id="ends in the next segment"),
        pytest.param([{A: OPEN}, {A: 900}, {}], 2, id="ends, and another begins"),
        pytest.param(
            [{A: OPEN, B: OPEN}, {A: NONE, B: OPEN}, {B: NONE}, {}], 3, id="two transactions"
        ),
        pytest.param([{A: OPEN}, {}, {}], 3, id="producer expired"),
        pytest.param(
            [{A: 2}, {A: OPEN}, {A: NONE}, {}], 3, id="begins after the first offset of its segment"
        ),
        pytest.param([{A: 900}, {}, {}], 1, id="begins after the range"),
        pytest.param([None, {}, {}], 3, id="no snapshot"),
        pytest.param([{A: OPEN}, None, {A: NONE}, {}], 3, id="no snapshot later"),
    ],
)
def test_aborted_transactions_are_searched_only_while_one_is_open(
    store, reader, tmp_path, snapshots, segments_searched
):
    """Otherwise each read_committed read would fetch the indexes of all following segments."""
    segments = run_of_segments(store, tmp_path, *snapshots)
    end_offset = segments[0].last_offset
    assert not reader.aborted_transactions(segments, start_offset=0, end_offset=end_offset)
    assert set(gets(store)) == {segment.indexes_key for segment in segments[:segments_searched]}


def test_a_marker_in_a_later_segment_is_found(store, reader, tmp_path):
    snapshots = [{A: OPEN}, {A: OPEN}, {A: NONE}, {A: NONE}]
    segments = run_of_segments(store, tmp_path, *snapshots, aborted={2: 0})
    (found,) = reader.aborted_transactions(segments, start_offset=0, end_offset=3)
    assert (found.producer_id, found.first_offset) == (A, 0)


def test_a_failed_read_keeps_no_file_open(store, cache, written):
    """Open files take space in the cache."""
    segment = upload(store, written)
    store.read_policy = QUICK
    reader = ColdReader(store, cache, reader=RangedReader(store, requests_max=1))
    chunks = reader._indexes.load_index(segment).table.chunks
    store.fail("get_range", FailsBefore(), times=99, when=lambda key: len(gets(store, ".log")) > 1)
    read = reader.read_segments(segment, 0, max_bytes=2 * chunks[0].size_bytes)
    assert read.next_offset == chunks[1].first_offset
    store.heal()
    read.close()
    store.fail("get_range", FailsBefore(), times=2)
    with pytest.raises(StoreUnavailable):
        reader.read_segments(segment, chunks[3].first_offset, max_bytes=1)
    until(lambda: cache.shrink(1 << 30) == chunks[0].size_bytes)
    reader.close()


def test_an_error_shared_with_another_reader_keeps_no_file_open(
    store, cache, reader, three_segments
):
    segments, bodies = three_segments
    loading = Future()
    loading.set_exception(StoreUnavailable("it is down"))
    reader._indexes._loading[segments[1].indexes_key, 0] = loading
    read = reader.read_segments(segments[0], 0, max_bytes=1 << 20, following=segments[1:])
    assert bytes_of(read) == bodies[0]
    reader._indexes._loading.clear()
    read.close()

    def is_emptied():  # soon: what was read ahead may still arrive
        cache.shrink(1 << 30)
        return cache.usage().chunks == 0

    until(is_emptied)


def test_a_full_disk_evicts_cached_chunks_and_fails_no_read(store, cache, written, monkeypatch):
    segment = upload(store, written)
    reader = ColdReader(store, cache)
    chunks = reader._indexes.load_index(segment).table.chunks
    reader.read_segments(segment, 0, max_bytes=1)
    real, full = os.write, [True]

    def write(fd, body):
        if full:
            full.clear()
            raise OSError(28, "No space left on device")
        return real(fd, body)

    monkeypatch.setattr(os, "write", write)
    assert reader.read_segments(segment, chunks[1].first_offset, max_bytes=1).slices
    assert cache.usage().chunks == 1
    reader.close()


def test_a_read_after_close_raises(store, cache, written):
    segment = upload(store, written)
    reader = ColdReader(store, cache)
    reader.close()
    with pytest.raises(ShuttingDown):
        reader.read_segments(segment, 0, max_bytes=1)


def test_a_close_during_a_read_only_stops_its_prefetch(reader, segment):
    class Closes:
        def __iter__(self):
            reader._prefetcher.close()
            return iter([segment])

    assert reader._prefetcher._prefetch_beyond(Closes(), 1) is False
    assert reader.read_segments(segment, 0, max_bytes=1).slices


@pytest.mark.parametrize("wrong", [{"log_crc32c": 1}, {"size_bytes": 1}, {"base_offset": 1}])
def test_a_chunk_table_that_does_not_match_the_manifest_is_refused(reader, segment, wrong):
    with pytest.raises(CorruptObject, match="another segment"):
        reader.read_segments(replace(segment, **wrong), 5, max_bytes=1)


def test_cached_range_returns_only_verified_chunks(store, reader, segment, written):
    log, size = written.body, segment.size_bytes
    assert range_at_once(reader, segment, start=0, end=100) is None
    list(reader.byte_range(segment, start=0, end=100))
    calls_before = len(store.calls)
    (piece,) = range_at_once(reader, segment, start=10, end=100)
    assert piece.read() == log[10:100]
    assert range_at_once(reader, segment, start=0, end=size) is None, "other chunks are not cached"
    assert len(store.calls) == calls_before


def test_cached_range_does_not_return_unverified_chunks_of_an_earlier_process(
    store, segment, tmp_path
):
    def opened():
        return ColdReader(store, ChunkCache(tmp_path / "kept", limit_bytes=64 << 20))

    first = opened()
    list(first.byte_range(segment, start=0, end=100))
    assert range_at_once(first, segment, start=0, end=100) is not None
    first.close()
    second = opened()
    second.offset_for_timestamp(segment, 2**62)  # loads the index, and no chunk
    assert range_at_once(second, segment, start=0, end=100) is None
    list(second.byte_range(segment, start=0, end=100))
    assert range_at_once(second, segment, start=0, end=100) is not None
    second.close()


def in_memory(fd, size_bytes, position):
    return os.pread(fd, size_bytes, position)


def on_disk_only(fd, size_bytes, position):
    raise WouldBlock("on disk")


def range_at_once(reader, segment, **limits):
    with suppress(WouldBlock):
        return tuple(reader.byte_range(segment, **limits, wait=Wait.NEVER))
    return None


@pytest.fixture
def everything_in_memory(monkeypatch):
    monkeypatch.setattr(segment_lookup, "pread_nowait", in_memory)
    monkeypatch.setattr(segment_lookup, "IMMEDIATE_BATCHES_MAX", 8)


@pytest.mark.parametrize("max_bytes", [1, 500, 4096, 10_000])
@pytest.mark.usefixtures("everything_in_memory")
def test_nonblocking_reads_return_the_same_as_blocking_reads(store, cache, segment, max_bytes):
    with closing(ColdReader(store, cache)) as reader:
        for offset in range(segment.base_offset, segment.last_offset + 1):
            reader.read_segments(segment, offset, max_bytes=max_bytes)
        calls_before = len(store.calls)
        for offset in range(segment.base_offset, segment.last_offset + 1):
            nonblocking = at_once(reader.read_segments, segment, offset, max_bytes=max_bytes)
            blocking = reader.read_segments(segment, offset, max_bytes=max_bytes)
            assert nonblocking is not None
            assert bytes_of(nonblocking) == bytes_of(blocking)
            assert nonblocking.next_offset == blocking.next_offset
        assert len(store.calls) == calls_before


@pytest.mark.usefixtures("everything_in_memory")
def test_nonblocking_reads_send_no_request(store, cache, segment):
    with closing(ColdReader(store, cache)) as reader:
        store.calls.clear()
        assert at_once(reader.read_segments, segment, 0, max_bytes=500) is None, "no index"
        reader.offset_for_timestamp(segment, 2**62)
        store.calls.clear()
        assert at_once(reader.read_segments, segment, 0, max_bytes=500) is None, "no chunk"
        assert store.calls == []
        reader.read_segments(segment, 0, max_bytes=500)
        store.calls.clear()
        assert at_once(reader.read_segments, segment, 0, max_bytes=500) is not None
        assert at_once(reader.read_segments, segment, 0, max_bytes=1 << 20) is None, (
            "not the next chunk"
        )
        assert store.calls == []


def test_a_nonblocking_read_gives_up_on_headers_that_are_not_in_memory(
    store, cache, segment, monkeypatch
):
    monkeypatch.setattr(segment_lookup, "pread_nowait", on_disk_only)
    with closing(ColdReader(store, cache)) as reader:
        reader.read_segments(segment, 0, max_bytes=500)
        assert at_once(reader.read_segments, segment, 0, max_bytes=500) is None


def test_a_long_walk_is_left_to_blocking_reads_and_then_cached(store, cache, tmp_path, monkeypatch):
    written = write_segment(tmp_path / "log", batches=600)
    segment = upload(store, written, chunk_bytes=1 << 30)
    monkeypatch.setattr(segment_lookup, "pread_nowait", in_memory)
    monkeypatch.setattr(segment_lookup, "IMMEDIATE_BATCHES_MAX", 100)
    with closing(ColdReader(store, cache)) as reader:
        reader.read_segments(segment, 0, max_bytes=500)
        assert at_once(reader.read_segments, segment, segment.last_offset, max_bytes=500) is None
        reader.read_segments(segment, segment.last_offset, max_bytes=500)
        assert (
            at_once(reader.read_segments, segment, segment.last_offset, max_bytes=500) is not None
        )


def test_the_read_ahead_window_grows_per_chunk_even_if_prefetches_are_refused():
    """Small reads within a chunk do not grow it, although nothing was prefetched."""
    ahead, windows = ReadAhead(), []
    for offset in range(12):
        state = ahead.state_at("folder", offset, chunk=("log", offset // 4))
        ahead.record("folder", offset + 1, state._replace(is_complete=False))
        windows.append(state.window)
    assert windows == [0, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4]


@pytest.mark.usefixtures("everything_in_memory")
def test_nonblocking_reads_prefetch_too(store, cache, segment):
    with closing(ColdReader(store, cache)) as reader:
        first = reader.read_segments(segment, 0, max_bytes=500)
        assert at_once(reader.read_segments, segment, first.next_offset, max_bytes=500) is not None
        following = reader._indexes.load_index(segment).chunks[1]
        assert following in cache or following.key in reader._fills._filling
