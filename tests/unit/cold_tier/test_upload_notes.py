"""What a crash leaves of an upload: believed only where all agrees."""

import pytest
from crc32c import crc32c

from cold_tier.object_store import UploadLost
from cold_tier.segment_uploader import SegmentUploader, UploadLimits
from cold_tier.upload_notes import LogContent, UploadNotes
from record_format.errors import StoreUnavailable
from tests.fakes.cold_segments import FOLDER
from tests.fakes.faulty_object_store import FailsBefore

KEY = f"{FOLDER}00000000000000000000-3-earlier.log"
CONTENT = LogContent(size_bytes=100, crc32c=7, part_bytes=10)
KEPT_MS = 1000


@pytest.fixture
def now():
    return [5000]


@pytest.fixture
def notes(tmp_path, now):
    return UploadNotes(tmp_path / "uploads", kept_ms=KEPT_MS, clock=lambda: now[0])


def test_a_note_is_found_by_another_process(notes, tmp_path, now):
    notes.write(FOLDER, KEY, CONTENT, upload_id="u1")
    found = UploadNotes(tmp_path / "uploads", kept_ms=KEPT_MS, clock=lambda: now[0]).find(
        FOLDER, CONTENT
    )
    assert (found.log_key, found.upload_id) == (KEY, "u1")
    notes.forget(FOLDER)
    notes.forget(FOLDER)
    assert notes.find(FOLDER, CONTENT) is None


@pytest.mark.parametrize(
    "other",
    [
        LogContent(size_bytes=101, crc32c=7, part_bytes=10),
        LogContent(size_bytes=100, crc32c=8, part_bytes=10),
        LogContent(size_bytes=100, crc32c=7, part_bytes=11),
    ],
)
def test_a_note_of_something_else_says_nothing(notes, other):
    notes.write(FOLDER, KEY, CONTENT, upload_id="u1")
    assert notes.find(FOLDER, other) is None


def test_a_note_is_of_one_partition(notes):
    notes.write(FOLDER, KEY, CONTENT, upload_id="u1")
    assert notes.find(FOLDER.replace("/0/", "/1/"), CONTENT) is None


@pytest.mark.parametrize(("later_ms", "is_found"), [(-1, False), (999, True), (1000, False)])
def test_an_old_note_is_not_believed(notes, now, later_ms, is_found):
    notes.write(FOLDER, KEY, CONTENT, upload_id="u1")
    now[0] += later_ms
    assert (notes.find(FOLDER, CONTENT) is not None) is is_found


def test_a_cut_note_is_none_wherever_it_is_cut(notes, tmp_path):
    notes.write(FOLDER, KEY, CONTENT, upload_id="u1")
    (path,) = (tmp_path / "uploads").iterdir()
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert notes.find(FOLDER, CONTENT) is None


def test_a_note_is_none_wherever_it_rots(notes, tmp_path):
    notes.write(FOLDER, KEY, CONTENT, upload_id="u1")
    (path,) = (tmp_path / "uploads").iterdir()
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + b"\xff" + whole[position + 1 :])
        assert notes.find(FOLDER, CONTENT) is None


def test_a_note_that_cannot_be_written_is_left_out(notes, tmp_path):
    (tmp_path / "uploads").write_text("in the way")
    notes.write(FOLDER, KEY, CONTENT, upload_id="u1")
    assert notes.find(FOLDER, CONTENT) is None


def upload(store, written, notes):
    limits = UploadLimits(chunk_bytes=4096)
    uploader = SegmentUploader(store, limits=limits, notes=notes)
    return uploader.upload(written.files, folder=FOLDER, leader_epoch=7)


def note_of(written, notes):
    body = written.body
    content = LogContent(
        size_bytes=len(body), crc32c=crc32c(body), part_bytes=UploadLimits().part_bytes
    )
    notes.write(FOLDER, KEY, content, upload_id="u1")
    return content


def test_what_was_begun_keeps_its_name_and_the_note_goes(store, written, notes):
    content = note_of(written, notes)
    done = upload(store, written, notes)
    assert (done.log_key, done.leader_epoch) == (KEY, 7)
    assert done.indexes_key == KEY.removesuffix(".log") + ".indexes"
    assert notes.find(FOLDER, content) is None


def test_what_is_lost_begins_anew_under_a_new_name(store, written, notes):
    note_of(written, notes)
    store.fail("put_file", FailsBefore(error=UploadLost))
    done = upload(store, written, notes)
    assert done.log_key != KEY
    assert store.head(KEY) is None


def test_an_outage_leaves_the_note(store, written, notes):
    content = note_of(written, notes)
    store.fail("put_file", FailsBefore())
    with pytest.raises(StoreUnavailable):
        upload(store, written, notes)
    assert notes.find(FOLDER, content) is not None
    assert upload(store, written, notes).log_key == KEY
