"""What every object store guarantees, run for each kind of store."""

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from botocore.exceptions import ClientError

from tierlog.object_store.store import ChecksumRefused, InvalidKey
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import CorruptObject, MissingObject, ObjectExists, TierlogError

MIB = 1024 * 1024


def test_a_put_object_is_read_back(store):
    store.put("a/b.json", b"hello")
    assert store.get("a/b.json", max_bytes=100) == b"hello"
    assert store.get("a/b.json", max_bytes=5) == b"hello"


def test_an_empty_object_is_stored(store):
    store.put("empty", b"")
    assert store.get("empty", max_bytes=0) == b""
    stat = store.head("empty")
    assert stat is not None
    assert stat.size_bytes == 0


def test_a_memoryview_is_accepted_as_a_body(store):
    store.put("view", memoryview(b"0123456789")[2:5])
    assert store.get("view", max_bytes=10) == b"234"


def test_an_unconditional_put_overwrites(store):
    store.put("k", b"old and longer")
    store.put("k", b"new")
    assert store.get("k", max_bytes=100) == b"new"


def test_if_absent_refuses_an_existing_key_and_keeps_its_bytes(store):
    store.put("k", b"first", if_absent=True)
    with pytest.raises(ObjectExists) as refused:
        store.put("k", b"second", if_absent=True)
    assert refused.value.key == "k"
    assert store.get("k", max_bytes=100) == b"first"


def test_if_absent_succeeds_after_a_delete(store):
    store.put("k", b"first", if_absent=True)
    store.delete(["k"])
    store.put("k", b"second", if_absent=True)
    assert store.get("k", max_bytes=100) == b"second"


def test_one_of_many_concurrent_creators_wins(store, store_kind):
    if store_kind == "moto":
        pytest.skip(
            "moto's creates are not atomic: the probe refuses it without --allow-single-writer"
        )
    writers = 8
    for round_number in range(5):
        gate = threading.Barrier(writers)

        def create(writer, key=f"race/{round_number}", gate=gate):
            gate.wait()
            try:
                store.put(key, b"%d" % writer * 1000, if_absent=True)
            except ObjectExists:
                return None
            return writer

        with ThreadPoolExecutor(writers) as pool:
            winners = [w for w in pool.map(create, range(writers)) if w is not None]
        assert len(winners) == 1
        assert store.get(f"race/{round_number}", max_bytes=10_000) == b"%d" % winners[0] * 1000


def test_every_read_reports_a_missing_object(store):
    with pytest.raises(MissingObject) as missing:
        store.get("nope", max_bytes=10)
    assert missing.value.file == "nope"
    with pytest.raises(MissingObject):
        list(store.get_range("nope", 0, 1))
    assert store.head("nope") is None


def test_get_refuses_an_object_larger_than_its_limit(store):
    store.put("big", b"x" * 1000)
    with pytest.raises(CorruptObject):
        store.get("big", max_bytes=999)


@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 10), (3, 7), (9, 10)])
def test_get_range_returns_exactly_the_range(store, start, end):
    store.put("digits", b"0123456789")
    assert b"".join(store.get_range("digits", start, end)) == b"0123456789"[start:end]


def test_a_long_range_is_returned_in_pieces(store):
    body = bytes(range(256)) * 4096
    store.put("long", body)
    pieces = list(store.get_range("long", 100, len(body) - 7))
    assert b"".join(pieces) == body[100:-7]
    assert max(map(len, pieces)) <= 256 * 1024


@pytest.mark.parametrize(("start", "end"), [(0, 11), (5, 12), (10, 11), (20, 30)])
def test_a_range_beyond_the_end_is_refused(store, start, end):
    store.put("digits", b"0123456789")
    with pytest.raises(CorruptObject):
        list(store.get_range("digits", start, end))


def test_an_abandoned_range_leaves_the_store_usable(store):
    store.put("long", b"z" * MIB)
    for _ in range(5):
        pieces = store.get_range("long", 0, MIB)
        next(pieces)
        pieces.close()
    assert store.get("long", max_bytes=MIB) == b"z" * MIB
    assert store.ledger.failures == 0


def test_head_returns_size_checksum_and_time(store):
    store.put("k", b"hello")
    stat = store.head("k")
    assert stat is not None
    assert (stat.key, stat.size_bytes) == ("k", 5)
    assert stat.modified_ms > 1_600_000_000_000
    assert stat.crc32c in {None, crc32c_of(b"hello")}


def test_list_is_ordered_and_limited(store):
    keys = ["a/1", "a/10", "a/2", "a-b", "a0", "b/1", "a/b/c"]
    for key in keys:
        store.put(key, b"x" * len(key))
    assert [stat.key for stat in store.list("", limit=100)] == sorted(keys)
    assert [stat.key for stat in store.list("a/", limit=100)] == ["a/1", "a/10", "a/2", "a/b/c"]
    assert [stat.key for stat in store.list("a/1", limit=100)] == ["a/1", "a/10"]
    assert [stat.key for stat in store.list("", limit=2)] == ["a-b", "a/1"]
    assert [stat.key for stat in store.list("a/", start_after="a/10", limit=1)] == ["a/2"]
    assert store.list("a/", start_after="a/b/c", limit=5) == []
    assert store.list("none/", limit=5) == []
    assert store.list("", limit=100)[0].size_bytes == 3


def test_list_reads_several_pages(store, monkeypatch):
    monkeypatch.setattr("tierlog.object_store.s3.LIST_PAGE", 10)
    for number in range(25):
        store.put(f"many/{number}", b"")
    found = [stat.key for stat in store.list("many/", limit=2000)]
    assert found == sorted(f"many/{number}" for number in range(25))
    assert len(store.list("many/", limit=23)) == 23


def test_list_of_nested_folders_is_complete_at_any_limit(store):
    keys = sorted(f"n/{a}/{b}/{c}" for a in ("a", "a-b", "a.b") for b in "12" for c in range(4))
    for key in keys:
        store.put(key, b"")
    for limit in (1, 3, 7, 24, 100):
        assert [stat.key for stat in store.list("n/", limit=limit)] == keys[:limit]


def test_missing_and_existing_objects_are_not_counted_as_failures(store):
    store.put("n/existing", b"")
    for call in (
        lambda: store.get("n/none", max_bytes=1),
        lambda: store.put("n/existing", b"", if_absent=True),
    ):
        with pytest.raises((MissingObject, ObjectExists)):
            call()
    used = store.ledger.usage()
    assert [used["manifest", operation].requests for operation in ("put", "get")] == [2, 1]
    assert not any(usage.failures for usage in used.values())


def test_folders_are_the_names_that_contain_objects(store):
    for key in ("t/a/1/x", "t/a/2/x", "t/a-b/3/x", "t/a.b/4/x", "t/A/x", "t/file", "u/x"):
        store.put(key, b"")
    assert sorted(store.folders("t/", limit=10)) == ["A", "a", "a-b", "a.b"]
    assert store.folders("t/a/", limit=10) == ["1", "2"]
    assert len(store.folders("t/", limit=3)) == 3
    assert set(store.folders("", limit=10)) == {"t", "u"}
    assert store.folders("t/A/", limit=10) == []
    assert store.folders("none/", limit=10) == []
    store.delete(["t/a/1/x"])
    assert store.folders("t/a/", limit=10) == ["2"]


def test_delete_removes_existing_keys_and_ignores_others(store):
    for key in ("d/1", "d/2", "d/3"):
        store.put(key, b"x")
    store.delete(["d/1", "d/never", "d/3"])
    store.delete([])
    assert [stat.key for stat in store.list("d/", limit=10)] == ["d/2"]


def test_the_name_of_an_emptied_folder_can_be_a_key(store):
    store.put("x/y/z", b"deep")
    store.delete(["x/y/z"])
    store.put("x", b"flat")
    assert store.get("x", max_bytes=10) == b"flat"


@pytest.mark.parametrize(
    "key",
    ["", "/a", "a/", "a//b", "../a", "a/../b", "a/.", ".tierlog-tmp/x", "a\\b", "a\nb", "x" * 256],
)
def test_a_key_that_some_store_cannot_hold_is_refused(store, store_kind, key):
    for call in (
        lambda: store.put(key, b"x"),
        lambda: store.get(key, max_bytes=1),
        lambda: list(store.get_range(key, 0, 1)),
        lambda: store.head(key),
    ):
        with pytest.raises(InvalidKey):
            call()
    if store_kind == "folder":
        with pytest.raises(InvalidKey):
            store.delete([key])
    assert store.list("", limit=10) == []


def test_whatever_is_listed_can_be_deleted(store, store_kind):
    """Consoles and copying tools leave objects that are named like folders."""
    if store_kind not in {"moto", "s3"}:
        pytest.skip("no other store can hold such a key")
    put = []
    for key in ("d/", "d//x", "d/a\\b"):
        with suppress(ClientError):  # MinIO has no such names
            store._client.put_object(Bucket=store._bucket, Key=store.full_key(key), Body=b"")
            put.append(key)
    listed = [stat.key for stat in store.list("d/", limit=10)]
    assert len(listed) == len(put) > 0  # versitygw stores `d//x` as `d/x`
    store.delete(listed)
    assert store.list("d/", limit=10) == []


@pytest.mark.parametrize(
    "name", ["blank space", "ünïcode", "plus+and=more", "per%20cent", "a~b'(c)"]
)
def test_unusual_valid_names_round_trip(store, name):
    store.put(f"odd/{name}", b"x")
    assert [stat.key for stat in store.list("odd/", limit=5)] == [f"odd/{name}"]
    assert store.get(f"odd/{name}", max_bytes=1) == b"x"


def test_no_key_is_both_an_object_and_a_folder(store, store_kind):
    if store_kind in {"moto", "s3"}:
        pytest.skip("S3 itself has no folders; tierlog's keys never need it")
    store.put("a/b", b"x")
    with pytest.raises(InvalidKey):
        store.put("a", b"x")
    with pytest.raises(InvalidKey):
        store.put("a/b/c", b"x", if_absent=True)


def test_a_wrong_checksum_is_refused_and_nothing_is_stored(store, store_kind):
    if store_kind == "moto":
        pytest.skip("moto verifies no checksum: the probe finds out, and uploads are read back")
    with pytest.raises(ChecksumRefused):
        store.put("k", b"hello", crc32c=crc32c_of(b"jello"))
    assert store.head("k") is None


@pytest.mark.parametrize("size_bytes", [0, 1, 5 * MIB, 5 * MIB + 1, 11 * MIB + 3])
def test_a_file_of_any_size_is_stored_completely(store, tmp_path, size_bytes):
    path = tmp_path / "file"
    body = (hashlib.sha256(b"seed").digest() * (size_bytes // 32 + 1))[:size_bytes]
    path.write_bytes(body)
    paced = []
    stat = store.put_file(
        "s/file.log",
        path,
        size_bytes=size_bytes,
        crc32c=crc32c_of(body),
        part_bytes=5 * MIB,
        concurrency=3,
        pace=paced.append,
    )
    assert stat.size_bytes == size_bytes
    assert sum(paced) == size_bytes
    assert stat.crc32c in {None, crc32c_of(body)}
    assert store.get("s/file.log", max_bytes=size_bytes) == body


def test_a_file_with_a_wrong_checksum_is_refused(store, store_kind, tmp_path):
    if store_kind == "moto":
        pytest.skip("moto verifies no checksum")
    path = tmp_path / "file"
    path.write_bytes(b"y" * (6 * MIB))
    with pytest.raises(TierlogError):
        store.put_file("k.log", path, size_bytes=6 * MIB, crc32c=1, part_bytes=5 * MIB)
    assert store.head("k.log") is None


def test_a_file_shorter_than_its_declared_size_is_refused(store, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"short")
    with pytest.raises(ChecksumRefused):
        store.put_file("k.log", path, size_bytes=6, crc32c=crc32c_of(b"short"))
    assert store.head("k.log") is None


def test_requests_and_bytes_are_counted_by_purpose(store):
    key = "topics/t/id/0/segments/0-0-u.log"
    store.put(key, b"12345")
    list(store.get_range(key, 1, 4))
    store.put("topics/t/id/0/manifest/1.json", b"{}", if_absent=True)
    usage = store.ledger.usage()
    assert usage["offload", "put"].sent_bytes == 5
    assert usage["cold_read", "get"].requests == 1
    assert usage["cold_read", "get"].received_bytes == 3
    assert usage["manifest", "put"].requests == 1
