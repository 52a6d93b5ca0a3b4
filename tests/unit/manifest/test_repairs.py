"""Repairs replace a segment's objects or record a gap, inline and in pages."""

import pytest
from msgspec.structs import replace

from tests.fakes import manifests
from tierlog.manifest import transitions
from tierlog.manifest.codec import spill_overflow
from tierlog.manifest.invariants import InvalidTransition, violation
from tierlog.manifest.state import PageRef, live_entries


def entry(base, *, unique="a"):
    return manifests.entry(base, records=10, unique=unique)


class Pages:
    """Pages written by spill_overflow."""

    def __init__(self):
        self.written = {}

    def page_entries(self, page):
        return self.written[page.key]


@pytest.fixture
def pages():
    return Pages()


@pytest.fixture(params=["inline", "paged"])
def manifest(request, pages, monkeypatch):
    state = manifests.manifest()
    state = transitions.add_segments(state, [entry(base) for base in range(0, 100, 10)])
    if request.param == "inline":
        return state
    monkeypatch.setattr("tierlog.manifest.codec.INLINE_MAX", 2)
    monkeypatch.setattr("tierlog.manifest.codec.SMALL_PAGE", 4)
    before = iter(state.segments)
    names = iter("abcdefgh")
    paged = spill_overflow(state, unique=lambda: next(names)).manifest
    for page in paged.pages:
        assert isinstance(page, PageRef)
        pages.written[page.key] = tuple(next(before) for _ in range(page.entry_count))
    return paged


def entries_of(manifest, pages):
    found = [e for page in manifest.pages for e in live_entries(page, pages)]
    return [*found, *manifest.segments]


@pytest.mark.parametrize("base", [0, 30, 90])
def test_replaced_objects_are_listed_as_removed(manifest, pages, base):
    new = entry(base, unique="b")
    swap = {"pages": pages, "now_ms": 7}
    after = transitions.replace_objects(manifest, entry(base), new, **swap)
    assert violation(after) is None
    assert [e.base_offset for e in entries_of(after, pages)] == list(range(0, 100, 10))
    assert new in entries_of(after, pages)
    assert set(entry(base).keys) <= {removed.key for removed in after.removed}
    assert after.compacted_before == manifest.compacted_before
    assert transitions.replace_objects(after, new, new, **swap) is after


def test_objects_with_different_bytes_are_refused(manifest, pages):
    other = replace(entry(30, unique="b"), log_crc32c=99)
    with pytest.raises(InvalidTransition, match="different bytes"):
        transitions.replace_objects(manifest, entry(30), other, pages=pages, now_ms=7)


@pytest.mark.parametrize("base", [0, 30, 90])
def test_a_segment_is_replaced_by_its_readable_records(manifest, pages, base):
    left = replace(entry(base, unique="b"), log_crc32c=99, record_count=3)
    keep = {"pages": pages, "now_ms": 7}
    after = transitions.replace_with_readable(manifest, entry(base), left, **keep)
    assert violation(after) is None
    assert left in entries_of(after, pages)
    assert set(entry(base).keys) <= {removed.key for removed in after.removed}
    assert (after.compacted_before, after.gaps) == (manifest.compacted_before, manifest.gaps)
    assert transitions.replace_with_readable(after, entry(base), left, **keep) is after
    trimmed = transitions.trim(manifest, 95, pages=pages, now_ms=1)
    if base < 90:
        assert transitions.replace_with_readable(trimmed, entry(base), left, **keep) is trimmed


@pytest.mark.parametrize("wrong", [{"last_offset": 38}, {"record_count": 11}, {"base_offset": 31}])
def test_a_replacement_that_is_not_part_of_the_segment_is_refused(manifest, pages, wrong):
    other = replace(entry(30, unique="b"), log_crc32c=99, **wrong)
    with pytest.raises(InvalidTransition, match="what is left"):
        transitions.replace_with_readable(manifest, entry(30), other, pages=pages, now_ms=7)


def test_a_segment_trimmed_meanwhile_is_not_repaired(manifest, pages):
    trimmed = transitions.trim(manifest, 45, pages=pages, now_ms=1)
    swap = {"pages": pages, "now_ms": 7}
    assert transitions.replace_objects(trimmed, entry(30), entry(30, unique="b"), **swap) is trimmed
    assert transitions.drop_lost_segment(trimmed, entry(30), **swap) is trimmed


def test_dropping_lost_segments_merges_gaps_and_is_idempotent(manifest, pages):
    after = manifest
    for base in (30, 50, 40, 0, 90):
        after = transitions.drop_lost_segment(after, entry(base), pages=pages, now_ms=7)
        assert violation(after) is None
        assert transitions.drop_lost_segment(after, entry(base), pages=pages, now_ms=8) is after
    gaps = [(gap.start_offset, gap.end_offset) for gap in after.gaps]
    assert gaps == [(0, 10), (30, 60), (90, 100)]
    assert [e.base_offset for e in entries_of(after, pages)] == [10, 20, 60, 70, 80]
    assert after.end_offset == 100, "no offset is assigned twice"


def test_dropping_a_segment_without_a_gap_is_refused(manifest, pages, monkeypatch):
    monkeypatch.setattr(transitions, "_merged", lambda gaps: manifest.gaps)
    with pytest.raises(InvalidTransition, match="missing"):
        transitions.drop_lost_segment(manifest, entry(30), pages=pages, now_ms=7)
