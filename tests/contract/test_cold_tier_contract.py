"""A segment up and back over every store, and what the probe says of each."""

import pytest

from cold_tier.chunk_cache import ChunkCache
from cold_tier.cold_reader import ColdReader
from cold_tier.probe import probe
from record_format.batch import iter_headers
from record_format.errors import CorruptObject
from tests.fakes.cold_segments import upload, write_segment


def test_the_probe_knows_what_each_store_is_worth(store, store_kind):
    traits = probe(store, allow_single_writer=store_kind == "moto", race_s=0.3)
    assert traits.read_back_whole is (store_kind in {"moto", "folder"})
    assert store.list("", limit=10) == []


@pytest.mark.parametrize("batches", [1, 40, 2500])
def test_a_segment_comes_back_as_it_went_up(store, store_kind, tmp_path, batches):
    written = write_segment(tmp_path / "log", batches=batches, records=20)
    segment = upload(store, written, chunk_bytes=100_000, read_back_whole=store_kind == "moto")
    reader = ColdReader(store, ChunkCache(tmp_path / "cache", limit_bytes=1 << 26))
    offset, body = 0, b""
    while offset <= segment.last_offset:
        read = reader.read(segment, offset, max_bytes=70_000)
        body += b"".join(piece.read() for piece in read.slices)
        offset = read.next_offset
    assert body == written.body
    reader.close()


def test_a_byte_that_rotted_in_the_bucket_is_never_served(store, tmp_path):
    written = write_segment(tmp_path / "log")
    segment = upload(store, written)
    bad = bytearray(written.body)
    bad[len(bad) // 2] ^= 1
    store.put(segment.log_key, bytes(bad))
    reader = ColdReader(store, ChunkCache(tmp_path / "cache", limit_bytes=1 << 26))
    offset, named, body = 0, set(), b""
    while offset <= segment.last_offset:
        try:
            read = reader.read(segment, offset, max_bytes=1)
        except CorruptObject as error:
            named.add(error.file)
            offset += 1
        else:
            body += b"".join(piece.read() for piece in read.slices)
            offset = read.next_offset
    assert named == {segment.log_key}
    assert 0 < len(body) < len(written.body)
    assert all(
        written.body[start:].startswith(piece) for start, piece in _batches_of(written, body)
    )
    reader.close()


def _batches_of(written, body):
    """Each batch of `body` with its place in the log, by its base offset."""
    places = {h.base_offset: h.position for h in iter_headers(written.body)}
    for header in iter_headers(body):
        yield places[header.base_offset], body[header.position : header.end_position]
