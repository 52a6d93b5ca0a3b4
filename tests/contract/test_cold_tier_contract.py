"""Each store uploads and reads back segments, and passes the probe with the expected traits."""

import pytest

from tests.fakes.cold_segments import upload, write_segment
from tierlog.cold_tier.chunk_cache import ChunkCache
from tierlog.cold_tier.cold_reader import ColdReader
from tierlog.object_store.probe import probe
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.errors import CorruptObject


def test_the_probe_finds_the_traits_of_each_store(store, store_kind):
    traits = probe(store, allow_single_writer=store_kind == "moto", race_s=0.3)
    assert traits.read_back_whole is (store_kind in {"moto", "folder"})
    assert store.list("", limit=10) == []


@pytest.mark.parametrize("batches", [1, 40, 2500])
def test_an_uploaded_segment_is_read_back_unchanged(store, store_kind, tmp_path, batches):
    written = write_segment(tmp_path / "log", batches=batches, records=20)
    segment = upload(store, written, chunk_bytes=100_000, reads_back=lambda: store_kind == "moto")
    reader = ColdReader(store, ChunkCache(tmp_path / "cache", limit_bytes=1 << 26))
    offset, body = 0, b""
    while offset <= segment.last_offset:
        read = reader.read_segments(segment, offset, max_bytes=70_000)
        body += b"".join(piece.read() for piece in read.slices)
        offset = read.next_offset
    assert body == written.body
    reader.close()


def test_corrupt_bytes_in_the_bucket_are_never_served(store, tmp_path):
    written = write_segment(tmp_path / "log")
    segment = upload(store, written)
    bad = bytearray(written.body)
    bad[len(bad) // 2] ^= 1
    store.put(segment.log_key, bytes(bad))
    reader = ColdReader(store, ChunkCache(tmp_path / "cache", limit_bytes=1 << 26))
    offset, reported, body = 0, set(), b""
    while offset <= segment.last_offset:
        try:
            read = reader.read_segments(segment, offset, max_bytes=1)
        except CorruptObject as error:
            reported.add(error.file)
            offset += 1
        else:
            body += b"".join(piece.read() for piece in read.slices)
            offset = read.next_offset
    assert reported == {segment.log_key}
    assert 0 < len(body) < len(written.body)
    assert all(
        written.body[start:].startswith(piece) for start, piece in _batches_of(written, body)
    )
    reader.close()


def _batches_of(written, body):
    """Each batch of `body` with its position in the log."""
    positions = {h.base_offset: h.position for h in iter_headers(written.body)}
    for header in iter_headers(body):
        yield positions[header.base_offset], body[header.position : header.end_position]
