import pytest

from tests.fakes.cold_segments import FOLDER
from tests.fakes.faulty_object_store import FailsAfter, FailsBefore, ShortRead, WrongBytes
from tierlog.cold_tier.index_bundle import parse_bundle
from tierlog.cold_tier.segment_uploader import SegmentUploader, UploadLimits
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import CorruptBatch, StoreUnavailable
from tierlog.record_format.segment_entry import name_of


def uploader(store, **options):
    return SegmentUploader(store, limits=UploadLimits(chunk_bytes=4096), **options)


def upload(store, written, **options):
    return uploader(store, **options).upload_segment(written.files, folder=FOLDER, leader_epoch=7)


def test_a_segment_is_uploaded_byte_for_byte(store, written):
    uploaded = upload(store, written)
    assert store.get(uploaded.log_key, max_bytes=1 << 20) == written.body
    assert uploaded.size_bytes == len(written.body)
    assert uploaded.log_crc32c == crc32c_of(written.body)
    assert (uploaded.base_offset, uploaded.last_offset) == (0, written.files.last_offset)
    assert uploaded.record_count == len(written.records)
    stamps = [stamp for _, stamp in written.records]
    assert (uploaded.min_timestamp, uploaded.max_timestamp) == (min(stamps), max(stamps))


def test_object_keys_have_base_offset_and_epoch_and_are_unique(store, written):
    first, second = upload(store, written), upload(store, written)
    assert first.log_key != second.log_key
    assert (name_of(first.log_key) or "").startswith(f"{0:020d}-7-")
    assert first.indexes_key == first.log_key.removesuffix(".log") + ".indexes"


def test_the_bundle_has_the_indexes_and_the_snapshot(store, written, tmp_path):
    snapshot = tmp_path / "next.snapshot"
    snapshot.write_bytes(b"producers")
    files = written.files.__class__(**(written.files.__dict__ | {"snapshot": snapshot}))
    uploaded = uploader(store).upload_segment(files, folder=FOLDER, leader_epoch=7)
    body = store.get(uploaded.indexes_key, max_bytes=1 << 20)
    assert (len(body), crc32c_of(body)) == (uploaded.indexes_size_bytes, uploaded.indexes_crc32c)
    bundle = parse_bundle(body, file=uploaded.indexes_key)
    assert bundle.offset_index == files.index.read_bytes()
    assert bundle.time_index == files.timeindex.read_bytes()
    assert bundle.producer_snapshot == b"producers"


def test_stored_bytes_that_differ_are_detected(store, written):
    store.fail("put_file", WrongBytes(100))
    with pytest.raises(StoreUnavailable, match="CRC-32C"):
        upload(store, written)


def test_an_incomplete_object_is_detected(store, written):
    store.fail("put_file", ShortRead(100))
    with pytest.raises(StoreUnavailable, match="100 of"):
        upload(store, written)


def test_an_upload_to_a_store_without_checksums_is_read_back(store, written, monkeypatch):
    plain = store._store
    monkeypatch.setattr(
        store, "head", lambda key: plain.head(key)._replace(crc32c=None), raising=False
    )
    put_file = store.put_file
    monkeypatch.setattr(store, "put_file", lambda *a, **k: put_file(*a, **k)._replace(crc32c=None))
    uploaded = upload(store, written)
    assert ("get_range", uploaded.log_key) in store.calls
    assert ("get_range", uploaded.indexes_key) in store.calls
    store.fail("put_file", WrongBytes(100))
    with pytest.raises(StoreUnavailable, match="read back"):
        upload(store, written)


def test_an_upload_is_read_back_if_the_store_ignores_checksums(store, written):
    uploaded = upload(store, written, reads_back=lambda: True)
    assert ("get_range", uploaded.log_key) in store.calls


def test_an_upload_confirmed_by_its_checksum_is_not_read_back(store, written):
    upload(store, written)
    assert "get_range" not in [call for call, _ in store.calls]


@pytest.mark.parametrize("fault", [FailsBefore(), FailsAfter()])
@pytest.mark.parametrize("call", ["put", "put_file"])
def test_an_upload_after_a_failed_one_uses_another_key(store, written, call, fault):
    store.fail(call, fault)
    with pytest.raises(Exception):  # noqa: B017  whatever the store raised
        upload(store, written)
    keys_before = {stat.key for stat in store.list("", limit=100)}
    uploaded = upload(store, written)
    assert uploaded.log_key not in keys_before


def test_a_corrupt_segment_is_not_uploaded(store, written):
    body = bytearray(written.body)
    body[written.batch_ends[0] - 1] ^= 1
    written.files.log.write_bytes(body)
    with pytest.raises(CorruptBatch):
        upload(store, written)
    assert store.list("", limit=10) == []


def test_a_segment_that_extends_past_its_last_offset_is_not_uploaded(store, written):
    short = {"last_offset": written.files.last_offset - 1}
    files = written.files.__class__(**(written.files.__dict__ | short))
    with pytest.raises(CorruptBatch, match="extends past"):
        uploader(store).upload_segment(files, folder=FOLDER, leader_epoch=7)


def test_the_rate_limit_counts_every_byte(store, written):
    paced = []
    uploaded = upload(store, written, pace=paced.append)
    assert sum(paced) == uploaded.size_bytes + uploaded.indexes_size_bytes
