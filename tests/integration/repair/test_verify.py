"""Verification names each kind of object that is deleted, truncated or corrupted."""

import msgspec
import pytest

from tests.fakes.bad_sectors import cannot_read
from tests.fakes.damage import cut, flip
from tierlog.broker.partition.segment_listing import iter_segments, peek_segments
from tierlog.cold_tier import segment_check
from tierlog.manifest.topic_objects import TopicObjects
from tierlog.object_store.folder import FolderStore
from tierlog.object_store.open import open_store
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.errors import CorruptManifest, StoreUnavailable
from tierlog.record_format.findings import Findings, ProblemKind
from tierlog.repair import local_check, verify
from tierlog.repair.repair import repair_topic
from tierlog.repair.verify import verify_bucket, verify_topic

CONFIG = {"segment.bytes": 4096, "retention.ms": -1, "local.retention.bytes": 8192}


@pytest.fixture
def filled(harness):
    harness.broker.create_topic("t", config=CONFIG)
    harness.fill(200)
    harness.offload()
    harness.produce("t", [b"active"])
    return harness


def entries(harness):
    return list(harness.broker.partition("t", 0).cold_entries(0))


def path_of(harness, key):
    return harness.root / "bucket" / key


def offline(harness, *, deep=False):
    store = open_store(f"file://{harness.root / 'bucket'}")
    return verify_bucket(store, TopicObjects(store).find_topic("t"), deep=deep, clock=lambda: 0)


def kinds_of(report, key):
    """The kinds of problems reported for this object."""
    assert not report.ok
    return {one.kind for one in report.problems if one.object_key and one.object_key.endswith(key)}


def test_an_intact_topic_is_ok_and_counts_what_was_checked(filled):
    shallow = verify_topic(filled.broker, "t")
    assert shallow.ok, shallow.problems
    assert shallow.checked.objects == 2 * len(entries(filled))
    deep = verify_topic(filled.broker, "t", deep=True)
    assert deep.ok, deep.problems
    cold = sum(entry.record_count for entry in entries(filled))
    local = 201 - filled.broker.partition("t", 0).offsets().local_log_start_offset
    assert deep.checked.records == cold + local
    assert offline(filled, deep=True).ok


@pytest.mark.parametrize("which", ["log_key", "indexes_key"])
@pytest.mark.parametrize(
    ("damage", "kind"),
    [(lambda path: path.unlink(), "object-missing"), (cut, "object-size")],
)
def test_a_missing_or_truncated_object_is_named_without_reading_it(filled, which, damage, kind):
    key = getattr(entries(filled)[1], which)
    damage(path_of(filled, key))
    for report in (verify_topic(filled.broker, "t"), offline(filled)):
        assert kinds_of(report, key) == {kind}
        assert len(report.problems) == 1


def test_every_flipped_byte_of_an_indexes_object_is_found(filled):
    key = entries(filled)[0].indexes_key
    path = path_of(filled, key)
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        flip(path, position)
        assert "object-checksum" in kinds_of(offline(filled), key), position
        path.write_bytes(whole)
    assert offline(filled).ok


def test_a_flipped_byte_of_a_log_object_is_found_only_by_a_deep_check(filled):
    key = entries(filled)[1].log_key
    for position in (0, 61, 2000):
        flip(path_of(filled, key), position)
        assert offline(filled).ok, "a folder store has no checksums; a shallow check reads no log"
        report = verify_topic(filled.broker, "t", deep=True)
        assert kinds_of(report, key) == {"chunk-corrupt"}
        assert f"first offset {entries(filled)[1].base_offset}" in report.problems[0].detail
        flip(path_of(filled, key), position)


def test_a_log_without_a_chunk_table_is_checked_against_the_manifest(filled):
    entry = entries(filled)[1]
    path_of(filled, entry.indexes_key).unlink()
    flip(path_of(filled, entry.log_key), 100)
    report = offline(filled, deep=True)
    assert kinds_of(report, entry.indexes_key) == {"object-missing"}
    assert kinds_of(report, entry.log_key) == {"object-checksum"}


def test_planted_a_check_that_reads_no_bytes_misses_the_flip(filled, monkeypatch):
    flip(path_of(filled, entries(filled)[1].log_key), 2000)
    monkeypatch.setattr(segment_check._SegmentCheck, "check_log", lambda self, table: None)
    assert offline(filled, deep=True).ok, "the planted bug hides the damage"


def test_a_missing_or_corrupt_manifest_is_named(filled):
    cold = filled.broker.partition("t", 0)._cold
    key = cold._manifests.versions.key(cold.manifest.version)
    path = path_of(filled, key)
    whole = path.read_bytes()
    path.unlink()
    assert kinds_of(verify_topic(filled.broker, "t"), key) == {"manifest-missing"}
    path.write_bytes(whole)
    flip(path, len(whole) // 2)
    assert kinds_of(verify_topic(filled.broker, "t"), key) == {"manifest-corrupt"}
    assert kinds_of(offline(filled), key) == {"manifest-corrupt"}
    path.write_bytes(whole[:-20])
    assert verify_topic(filled.broker, "t").problems[0].kind == "manifest-corrupt"
    path.write_bytes(whole)
    assert verify_topic(filled.broker, "t").ok


def test_a_missing_topic_object_is_named(filled):
    folder = next((filled.root / "bucket").glob("topics/t/*/topic"))
    for path in folder.iterdir():
        path.unlink()
    assert [one.kind for one in verify_topic(filled.broker, "t").problems] == ["topic-object"]
    with pytest.raises(CorruptManifest, match="the topic object, which"):
        offline(filled)


def test_a_missing_truncated_or_corrupt_page_is_named_and_the_rest_is_checked(filled, monkeypatch):
    monkeypatch.setattr("tierlog.manifest.codec.INLINE_MAX", 2)
    monkeypatch.setattr("tierlog.manifest.codec.SMALL_PAGE", 2)
    monkeypatch.setattr("tierlog.manifest.codec.PAGE_ENTRIES", 2)
    for start in range(0, 100, 10):
        filled.produce("t", [b"%d" % (start + i) * 30 for i in range(10)], at=2000 + start)
    filled.offload()
    pages = filled.broker.partition("t", 0).manifest.pages
    assert len(pages) > 2
    assert offline(filled).checked.pages == len(pages)
    assert offline(filled).ok
    path = path_of(filled, pages[1].key)
    whole = path.read_bytes()
    path.unlink()
    report = verify_topic(filled.broker, "t")
    assert kinds_of(report, pages[1].key) == {"page-missing"}
    assert report.checked.segments == len(entries_readable(filled, pages[1]))
    path.write_bytes(whole)
    for position in range(0, len(whole), 41):
        flip(path, position)
        assert kinds_of(offline(filled), pages[1].key) == {"page-corrupt"}
        path.write_bytes(whole)
    cut(path)
    assert kinds_of(offline(filled), pages[1].key) == {"page-corrupt"}


def entries_readable(harness, lost_page):
    manifest = harness.broker.partition("t", 0).manifest
    count = manifest.segment_count - lost_page.entry_count
    return range(count)


def test_a_pin_whose_version_lost_an_object_is_named(filled):
    cold = filled.broker.partition("t", 0)._cold
    cold.pins.create_pin("friday", cold.manifest.version)
    assert verify_topic(filled.broker, "t").ok
    key = cold._manifests.versions.key(cold.manifest.version)
    filled.produce("t", [b"more"])
    filled.offload()
    path_of(filled, key).unlink()
    assert [one.kind for one in verify_topic(filled.broker, "t").problems] == ["pin-broken"]


def test_an_unreadable_pin_does_not_hide_the_others(filled):
    cold = filled.broker.partition("t", 0)._cold
    for name in ("friday", "monday"):
        cold.pins.create_pin(name, cold.manifest.version)
    key = cold._manifests.versions.key(cold.manifest.version)
    filled.produce("t", [b"more"])
    filled.offload()
    path_of(filled, key).unlink()
    path_of(filled, cold._manifests.keys.pin("friday")).write_bytes(b"{}")
    broken = [one.object_key for one in verify_topic(filled.broker, "t").problems]
    assert [key.rpartition("/")[2] for key in broken] == ["friday.json", "monday.json"]


def test_a_corrupt_local_segment_is_named_by_its_file(filled):
    view = next(v for v in filled.broker.partition("t", 0).local_segments() if v.sealed)
    flip(view.path, 500)
    assert verify_topic(filled.broker, "t").ok
    report = verify_topic(filled.broker, "t", deep=True)
    assert [(one.kind, one.file) for one in report.problems] == [
        ("segment-corrupt", str(view.path))
    ]


@pytest.mark.parametrize("damage", ["lost", "emptied", "cut between batches"])
def test_offsets_missing_from_local_files_are_named(harness, damage):
    config = {"segment.bytes": 1024, "retention.ms": -1, "remote.storage.enable": False}
    harness.broker.create_topic("t", config=config)
    for number in range(30):
        harness.produce("t", [b"%d" % number * 60])
    before, gone, after = harness.broker.partition("t", 0).local_segments()[1:4]
    harness.broker.close()
    if damage == "lost":
        gone.path.unlink()
        named_segment, first = before, gone.base_offset
    else:
        last = [] if damage == "emptied" else list(iter_headers(gone.path.read_bytes()))[:-1]
        gone.path.write_bytes(gone.path.read_bytes()[: last[-1].end_position if last else 0])
        named_segment, first = gone, last[-1].next_offset if last else gone.base_offset
    harness.broker = harness.open()
    (problem,) = verify_topic(harness.broker, "t", deep=True).problems
    assert (problem.kind, problem.file) == ("gap", str(named_segment.path))
    assert f"offsets {first} to {after.base_offset - 1} are missing" in problem.detail


def test_tiers_that_differ_are_named_and_repaired_from_the_bucket(filled):
    view = next(v for v in filled.broker.partition("t", 0).local_segments() if v.sealed)
    before = filled.records("t")
    flip(view.path, 15)  # the leader epoch, which a batch's own CRC leaves out
    report = verify_topic(filled.broker, "t", deep=True)
    assert [(one.kind, one.file) for one in report.problems] == [("tiers-differ", str(view.path))]
    (step,) = repair_topic(filled.broker, "t", apply=True, deep=True)
    assert (step.action, step.base_offset, step.done) == ("set-aside", view.base_offset, True)
    assert verify_topic(filled.broker, "t", deep=True).ok
    assert filled.records("t") == before


def test_a_mirror_commit_during_the_check_is_not_a_problem(filled, monkeypatch):
    """The manifest is read before compaction's commit, the disk after it."""
    real = verify.check_partition

    def check_partition(*args):
        found, manifest, now = real(*args)
        stale = [msgspec.structs.replace(one, size_bytes=one.size_bytes + 1) for one in now]
        return found, manifest, stale

    monkeypatch.setattr(verify, "check_partition", check_partition)
    report = verify_topic(filled.broker, "t")
    assert report.ok, report.problems


def test_altering_a_topic_during_the_check_is_not_a_problem(filled, monkeypatch):
    load = TopicObjects.load_topic

    def altered_meanwhile(objects, *args):
        monkeypatch.undo()
        filled.broker.alter_topic("t", config={"retention.ms": 10**12})
        filled.wait_for(lambda: not filled.broker.registry.by_name("t").dirty)
        return load(objects, *args)

    monkeypatch.setattr(TopicObjects, "load_topic", altered_meanwhile)
    assert verify_topic(filled.broker, "t").ok


def test_the_stores_own_checksum_is_compared_without_reading(filled, monkeypatch):
    key = entries(filled)[1].log_key
    real = FolderStore.head

    def head(self, requested):
        stat = real(self, requested)
        return stat._replace(crc32c=0) if requested == key else stat

    monkeypatch.setattr(FolderStore, "head", head)
    assert kinds_of(offline(filled), key) == {"object-checksum"}


def test_objects_collected_during_the_check_are_not_a_problem(filled, monkeypatch):
    """A check may take longer than the grace of dropped objects."""
    filled.restart(gc_grace_ms=0)
    filled.produce("t", [b"claims"])
    filled.offload()
    gone = entries(filled)[0].log_key
    real = FolderStore.head

    def head(self, requested):
        if requested == gone and path_of(filled, gone).exists():
            filled.broker.trim("t", 0, 50)
            filled.broker.collect_garbage("t", apply=True)
        return real(self, requested)

    monkeypatch.setattr(FolderStore, "head", head)
    report = verify_topic(filled.broker, "t")
    assert not path_of(filled, gone).exists()
    assert report.ok, report.problems


def test_an_unavailable_store_is_an_error_not_a_problem(filled):
    filled.set_down(True)
    with pytest.raises(StoreUnavailable):
        verify_topic(filled.broker, "t")
    filled.set_down(False)
    assert verify_topic(filled.broker, "t").ok


def test_a_report_is_bounded(monkeypatch):
    monkeypatch.setattr("tierlog.record_format.findings.MAX_PROBLEMS", 3)
    found = Findings(0)
    for _ in range(5):
        found.add_problem(ProblemKind.GAP, "x")
    whole = Findings(0)
    whole.merge(found)
    report = whole.report()
    assert (len(report.problems), report.problems_left_out, report.ok) == (3, 2, False)


def test_segments_offloaded_during_the_check_are_not_a_hole(filled, monkeypatch):
    """A deep check of the bucket takes hours; the disk is checked after it."""
    check = verify.check_partition

    def check_for_long(*args):
        found = check(*args)
        filled.produce("t", [b"more"] * 10)
        filled.offload()
        filled.broker.partition("t", 0).upkeep.delete_local(211)
        return found

    monkeypatch.setattr(verify, "check_partition", check_for_long)
    report = verify_topic(filled.broker, "t")
    assert report.ok, report.problems


def test_a_local_segment_with_a_bad_sector_is_named(filled, monkeypatch):
    log = filled.broker.partition("t", 0)._log
    bad = log.segments()[0]
    with monkeypatch.context() as disk:
        log.sealed.prepare_upload(bad.base_offset)  # opened before the sector fails
        cannot_read(disk, bad.path, kept=filled.root / "kept")
        report = verify_topic(filled.broker, "t", deep=True)
        filled.broker.background.holes.check_next(filled.broker.partition("t", 0))
    (problem,) = report.problems
    assert (problem.kind, problem.file) == (ProblemKind.SEGMENT_CORRUPT, str(bad.path))
    assert "cannot be read" in problem.detail
    assert verify_topic(filled.broker, "t", deep=True).ok


@pytest.mark.parametrize("which", ["log_key", "indexes_key"])
def test_an_object_that_the_folders_disk_cannot_read_does_not_hide_the_others(
    filled, monkeypatch, which
):
    unreadable, other = getattr(entries(filled)[1], which), entries(filled)[2].log_key
    path_of(filled, other).unlink()
    cannot_read(monkeypatch, path_of(filled, unreadable), kept=filled.root / "kept")
    report = verify_topic(filled.broker, "t", deep=True)
    assert kinds_of(report, unreadable) == {"object-checksum"}
    assert "cannot be read" in next(one.detail for one in report.problems)
    assert kinds_of(report, other) == {"object-missing"}


def test_a_local_segment_with_a_bad_sector_is_listed(filled, monkeypatch):
    filled.restart()  # clears cached counts
    partition = filled.broker.partition("t", 0)
    listed = [one.base_offset for one in peek_segments(partition)]
    bad = partition.local_segments()[0]
    with monkeypatch.context() as disk:
        cannot_read(disk, bad.path, kept=filled.root / "kept")
        assert [one.base_offset for one in iter_segments(partition)] == listed


def test_the_active_segment_can_be_rolled_during_the_check(filled, monkeypatch):
    log, scan = filled.broker.partition("t", 0)._log, local_check.scan_segment
    assert log.segments()[-1].size_bytes

    def roll_first(path, **kwargs):
        if not rolled:
            rolled.append(log.roll())
            filled.produce("t", [b"one more"])
        return scan(path, **kwargs)

    rolled = []
    monkeypatch.setattr(local_check, "scan_segment", roll_first)
    report = verify_topic(filled.broker, "t", deep=True)
    assert report.ok, report.problems
    assert rolled
