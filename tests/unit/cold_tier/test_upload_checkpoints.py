"""Upload checkpoints are used only if everything in them matches."""

import pytest

from tests.fakes.cold_segments import FOLDER
from tests.fakes.faulty_object_store import FailsBefore
from tierlog.cold_tier.segment_uploader import (
    LogContent,
    SegmentUploader,
    UploadCheckpoints,
    UploadLimits,
)
from tierlog.object_store.store import UploadNotFound
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import StoreUnavailable

KEY = f"{FOLDER}00000000000000000000-3-earlier.log"
CONTENT = LogContent(size_bytes=100, crc32c=7, part_bytes=10)
MAX_AGE_MS = 1000


@pytest.fixture
def now():
    return [5000]


@pytest.fixture
def checkpoints(tmp_path, now):
    return UploadCheckpoints(tmp_path / "uploads", max_age_ms=MAX_AGE_MS, clock=lambda: now[0])


def test_a_checkpoint_is_found_by_another_process(checkpoints, tmp_path, now):
    checkpoints.save_checkpoint(FOLDER, KEY, CONTENT, upload_id="u1")
    found = UploadCheckpoints(
        tmp_path / "uploads", max_age_ms=MAX_AGE_MS, clock=lambda: now[0]
    ).find_checkpoint(FOLDER, CONTENT)
    assert (found.log_key, found.upload_id) == (KEY, "u1")
    checkpoints.delete_checkpoint(FOLDER)
    checkpoints.delete_checkpoint(FOLDER)
    assert checkpoints.find_checkpoint(FOLDER, CONTENT) is None


@pytest.mark.parametrize(
    "other",
    [
        LogContent(size_bytes=101, crc32c=7, part_bytes=10),
        LogContent(size_bytes=100, crc32c=8, part_bytes=10),
        LogContent(size_bytes=100, crc32c=7, part_bytes=11),
    ],
)
def test_a_checkpoint_of_other_content_is_ignored(checkpoints, other):
    checkpoints.save_checkpoint(FOLDER, KEY, CONTENT, upload_id="u1")
    assert checkpoints.find_checkpoint(FOLDER, other) is None


def test_a_checkpoint_belongs_to_one_partition(checkpoints):
    checkpoints.save_checkpoint(FOLDER, KEY, CONTENT, upload_id="u1")
    assert checkpoints.find_checkpoint(FOLDER.replace("/0/", "/1/"), CONTENT) is None


@pytest.mark.parametrize(("later_ms", "is_found"), [(-1, False), (999, True), (1000, False)])
def test_an_expired_checkpoint_is_ignored(checkpoints, now, later_ms, is_found):
    checkpoints.save_checkpoint(FOLDER, KEY, CONTENT, upload_id="u1")
    now[0] += later_ms
    assert (checkpoints.find_checkpoint(FOLDER, CONTENT) is not None) is is_found


def test_a_truncated_checkpoint_is_ignored(checkpoints, tmp_path):
    checkpoints.save_checkpoint(FOLDER, KEY, CONTENT, upload_id="u1")
    (path,) = (tmp_path / "uploads").iterdir()
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert checkpoints.find_checkpoint(FOLDER, CONTENT) is None


def test_a_corrupt_checkpoint_is_ignored(checkpoints, tmp_path):
    checkpoints.save_checkpoint(FOLDER, KEY, CONTENT, upload_id="u1")
    (path,) = (tmp_path / "uploads").iterdir()
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + b"\xff" + whole[position + 1 :])
        assert checkpoints.find_checkpoint(FOLDER, CONTENT) is None


def test_a_checkpoint_that_cannot_be_written_is_skipped(checkpoints, tmp_path):
    (tmp_path / "uploads").write_text("in the way")
    checkpoints.save_checkpoint(FOLDER, KEY, CONTENT, upload_id="u1")
    assert checkpoints.find_checkpoint(FOLDER, CONTENT) is None


def upload(store, written, checkpoints):
    limits = UploadLimits(chunk_bytes=4096)
    uploader = SegmentUploader(store, limits=limits, checkpoints=checkpoints)
    return uploader.upload_segment(written.files, folder=FOLDER, leader_epoch=7)


def save_checkpoint(written, checkpoints):
    body = written.body
    content = LogContent(
        size_bytes=len(body), crc32c=crc32c_of(body), part_bytes=UploadLimits().part_bytes
    )
    checkpoints.save_checkpoint(FOLDER, KEY, content, upload_id="u1")
    return content


def test_a_resumed_upload_keeps_its_name_and_its_checkpoint_is_deleted(store, written, checkpoints):
    content = save_checkpoint(written, checkpoints)
    done = upload(store, written, checkpoints)
    assert (done.log_key, done.leader_epoch) == (KEY, 7)
    assert done.indexes_key == KEY.removesuffix(".log") + ".indexes"
    assert checkpoints.find_checkpoint(FOLDER, content) is None


def test_an_upload_that_the_store_lost_restarts_under_a_new_name(store, written, checkpoints):
    save_checkpoint(written, checkpoints)
    store.fail("put_file", FailsBefore(error=UploadNotFound))
    done = upload(store, written, checkpoints)
    assert done.log_key != KEY
    assert store.head(KEY) is None


def test_an_outage_keeps_the_checkpoint(store, written, checkpoints):
    content = save_checkpoint(written, checkpoints)
    store.fail("put_file", FailsBefore())
    with pytest.raises(StoreUnavailable):
        upload(store, written, checkpoints)
    assert checkpoints.find_checkpoint(FOLDER, content) is not None
    assert upload(store, written, checkpoints).log_key == KEY
