"""A folder as a store: durable, and read where it is read-only or not mounted."""

import errno
import os
import stat
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.bad_sectors import cannot_read
from tests.fakes.small_disk import read_only
from tierlog.manifest.versions import CreateOutcome, VersionChain
from tierlog.object_store.folder import FolderStore
from tierlog.object_store.open import open_store
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptObject,
    MissingObject,
    ObjectExists,
    OutcomeUnknownError,
    StoreUnavailable,
)


def test_an_object_appears_only_once_it_is_complete_and_synced(tmp_path, monkeypatch):
    store = FolderStore(tmp_path)
    seen = []
    real = os.fsync

    def look(fd):
        if stat.S_ISREG(os.fstat(fd).st_mode):
            seen.append((tmp_path / "a" / "k").exists())
        real(fd)

    monkeypatch.setattr(os, "fsync", look)
    store.put("a/k", b"body", if_absent=True)
    assert seen == [False]
    assert (tmp_path / "a" / "k").read_bytes() == b"body"


def test_the_folders_of_a_new_object_are_synced(tmp_path, monkeypatch):
    synced = []
    real = os.fsync

    def look(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            path = Path(f"/proc/self/fd/{fd}").readlink()
            synced.append((path, sorted(entry.name for entry in path.iterdir())))
        real(fd)

    monkeypatch.setattr(os, "fsync", look)
    store = FolderStore(tmp_path / "new" / "root")
    root = tmp_path / "new" / "root"
    assert synced == [(tmp_path, ["new"]), (root.parent, ["root"]), (root, [".tierlog-tmp"])]
    synced.clear()
    store.put("a/b/k", b"body")
    assert synced == [(root, [".tierlog-tmp", "a"]), (root / "a", ["b"]), (root / "a/b", ["k"])]


def test_a_failed_put_leaves_no_file(tmp_path, monkeypatch):
    store = FolderStore(tmp_path)

    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreUnavailable, match="No space left"):
        store.put("a/k", b"body")
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


def no_folder_sync(monkeypatch):
    real = os.fsync

    def fails(fd):
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    monkeypatch.setattr(os, "fsync", fails)


def test_an_object_whose_folder_cannot_be_synced_is_not_found_in_it(tmp_path, monkeypatch):
    """A create without a response is read back, and would count as durable."""
    store = FolderStore(tmp_path)
    store.put("a/before", b"")
    with monkeypatch.context() as bad:
        no_folder_sync(bad)
        with pytest.raises(
            OutcomeUnknownError, match="a/k: put: could not fsync the folder: Input"
        ):
            store.put("a/k", b"body", if_absent=True)
        assert store.head("a/k") is None
    store.put("a/k", b"other", if_absent=True)
    assert store.get("a/k", max_bytes=9) == b"other"


def test_a_version_that_is_neither_synced_nor_removed_is_not_taken_for_created(
    tmp_path, monkeypatch
):
    """The disk turns read-only while the folder is synced."""
    store = FolderStore(tmp_path)
    versions = VersionChain(store, "a/", max_bytes=99)
    versions.create_version(1, b"{}")

    def read_only(_: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as bad:
        no_folder_sync(bad)
        bad.setattr(Path, "unlink", lambda path, **_: read_only(path) if path.suffix else None)
        with pytest.raises(OutcomeUnknownError, match="Input/output error"):
            versions.create_version(2, b"{}")
    assert versions.newest_version() == 2
    assert versions.create_version(2, b"{}") is CreateOutcome.OURS


def test_a_version_whose_temporary_file_cannot_be_removed_is_created(tmp_path, monkeypatch):
    """The disk turns read-only once the version is durable."""
    versions = VersionChain(FolderStore(tmp_path), "a/", max_bytes=99)

    def read_only(path: Path, **_: bool) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as bad:
        bad.setattr(Path, "unlink", read_only)
        assert versions.create_version(1, b"{}") is CreateOutcome.OURS
    assert versions.read_version(1) == b"{}"


def test_a_new_folder_whose_entry_could_not_be_synced_is_synced_by_the_next_put(
    tmp_path, monkeypatch
):
    store = FolderStore(tmp_path)
    with monkeypatch.context() as bad:
        no_folder_sync(bad)
        with pytest.raises(StoreUnavailable):
            store.put("a/k", b"body", if_absent=True)
    synced, real = [], os.fsync

    def look(fd):
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())
        real(fd)

    monkeypatch.setattr(os, "fsync", look)
    store.put("a/k", b"body", if_absent=True)
    assert tmp_path in synced


def test_old_temporary_files_are_removed_and_new_ones_kept(tmp_path):
    FolderStore(tmp_path)
    temp = tmp_path / ".tierlog-tmp"
    (temp / "old").write_bytes(b"")
    (temp / "new").write_bytes(b"")
    past = time.time() - 3 * 86_400
    os.utime(temp / "old", (past, past))
    store = FolderStore(tmp_path)
    assert [p.name for p in temp.iterdir()] == ["new"]
    assert store.list("", limit=10) == []


def test_concurrent_puts_and_deletes_in_one_folder_succeed(tmp_path):
    store = FolderStore(tmp_path)

    def work(writer):
        for step in range(60):
            key = f"a/b/{step % 3}/{writer}"
            store.put(key, b"x", if_absent=True)
            store.delete([key])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert store.list("", limit=10) == []


def test_two_stores_on_one_folder_share_its_objects(tmp_path):
    first, second = FolderStore(tmp_path), open_store(tmp_path.as_uri())
    first.put("k", b"x", if_absent=True)
    with pytest.raises(ObjectExists):
        second.put("k", b"y", if_absent=True)
    assert second.url == tmp_path.as_uri()


@pytest.mark.skipif(sys.platform == "darwin", reason="has no such names")
def test_the_name_of_a_folder_may_not_be_text(tmp_path):
    """As any that is not ASCII where Python's UTF-8 mode is off."""
    folder = tmp_path / os.fsdecode(b"b\xfccket")
    assert open_store(folder.as_uri()).url == folder.as_uri()


def test_a_listing_does_not_read_the_folders_beside_its_own(tmp_path, monkeypatch):
    """A topic may have thousands of partitions."""
    store, read, scandir = FolderStore(tmp_path / "bucket"), [], os.scandir
    for key in ("t/1/a", "t/1/b/c", "t/10/d", "t/2/e"):
        store.put(key, b"")
    monkeypatch.setattr(os, "scandir", lambda folder: read.append(folder) or scandir(folder))
    assert [one.key for one in store.list("t/1/", limit=9)] == ["t/1/a", "t/1/b/c"]
    assert [one.key for one in store.list("t/1/b/", start_after="t/1/b", limit=9)] == ["t/1/b/c"]
    assert {str(path.relative_to(tmp_path / "bucket")) for path in read} == {"t/1", "t/1/b"}


@pytest.mark.skipif(sys.platform == "darwin", reason="has no such names")
def test_a_file_that_no_key_can_name_is_not_an_object(tmp_path):
    """Else the deletion of its topic would never end."""
    store = FolderStore(tmp_path)
    store.put("t/k", b"body")
    for name in (b"a\\b", b"Icon\r", b"b\xfccket"):
        (tmp_path / "t" / os.fsdecode(name)).write_bytes(b"")
        (tmp_path / os.fsdecode(name)).mkdir()
        (tmp_path / os.fsdecode(name) / "k").write_bytes(b"")
    listed = [found.key for found in store.list("", limit=9)]
    store.delete(listed)
    assert listed == ["t/k"]
    assert store.list("", limit=9) == store.folders("", limit=9) == []


@pytest.mark.parametrize("copied", [True, False])
def test_a_read_only_folder_is_readable(tmp_path, copied):
    FolderStore(tmp_path / "store").put("a/k", b"body")
    temp = tmp_path / "store" / ".tierlog-tmp"
    if copied:
        temp.rmdir()  # most copy tools omit empty folders
    else:
        (temp / "left").write_bytes(b"")
        os.utime(temp / "left", (0, 0))
    with read_only(tmp_path / "store", tmp_path / "archive") as archive:
        store = FolderStore(archive, must_exist=True)
        assert store.get("a/k", max_bytes=9) == b"body"
        assert [found.key for found in store.list("", limit=9)] == ["a/k"]
        assert store.head("a/other") is None
        for write in (lambda: store.put("new", b"x"), lambda: store.delete(["a/k"])):
            with pytest.raises(ConfigurationError, match=r"no permission to .*[Rr]ead"):
                write()


def test_a_file_that_may_not_be_deleted_keeps_no_other(tmp_path, monkeypatch):
    store, unlink = FolderStore(tmp_path), Path.unlink
    for key in ("locked", "other"):
        store.put(key, b"x")

    def refuse(path, **more):
        if path.name == "locked":
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        unlink(path, **more)

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ConfigurationError, match="no permission to delete locked"):
        store.delete(["locked", "other"])
    assert [found.key for found in store.list("", limit=9)] == ["locked"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        FolderStore(tmp_path / "file")


def test_a_put_with_a_matching_checksum_is_stored(tmp_path):
    store = FolderStore(tmp_path)
    store.put("k", b"abc", crc32c=crc32c_of(b"abc"))
    assert store.get("k", max_bytes=9) == b"abc"


def test_an_object_removed_right_after_its_put_was_stored(tmp_path):
    """A create that raised would not be one of unknown outcome."""

    class RemovesWhatWasPut(FolderStore):
        def _publish(self, temp, path, **of):
            super()._publish(temp, path, **of)
            path.unlink()

    store, body = RemovesWhatWasPut(tmp_path / "store"), tmp_path / "body"
    body.write_bytes(b"abc")
    assert store.put("k", b"abc", if_absent=True).size_bytes == 3
    with pytest.raises(StoreUnavailable):  # it is described by a HEAD
        store.put_file("k", body, size_bytes=3, crc32c=crc32c_of(b"abc"))


def test_of_what_the_disk_cannot_read_a_range_is_corrupt_and_a_whole_object_unavailable(
    tmp_path, monkeypatch
):
    store = FolderStore(tmp_path / "bucket")
    store.put("one", b"0123456789")
    cannot_read(monkeypatch, tmp_path / "bucket/one", kept=tmp_path / "kept")
    with pytest.raises(CorruptObject, match=r"one: .*cannot be read"):
        list(store.get_range("one", 2, 4))
    with pytest.raises(StoreUnavailable, match="one: get: "):
        store.get("one", max_bytes=10)


def test_an_unmounted_folder_is_unavailable_and_its_objects_not_missing(tmp_path):
    root = tmp_path / "mounted"
    store = FolderStore(root)
    store.put("a/k", b"body")
    root.rename(tmp_path / "away")
    for mount_point_exists in (False, True):
        if mount_point_exists:
            root.mkdir()  # an empty mount point
        for call in (
            lambda: store.get("a/k", max_bytes=9),
            lambda: list(store.get_range("a/k", 0, 1)),
            lambda: store.head("a/k"),
            lambda: store.list("", limit=9),
            lambda: store.folders("a/", limit=9),
            lambda: store.delete(["a/k"]),
            lambda: store.put("a/new", b"x"),
        ):
            with pytest.raises(StoreUnavailable):
                call()
    root.rmdir()
    (tmp_path / "away").rename(root)
    assert store.get("a/k", max_bytes=9) == b"body"
    with pytest.raises(MissingObject):
        store.get("a/other", max_bytes=9)
