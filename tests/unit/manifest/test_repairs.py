"""Other objects for the same offsets, or a gap, inline and inside pages."""

import pytest
from msgspec.structs import replace

from manifest import repairs, transitions
from manifest.invariants import InvalidTransition, violation
from manifest.keys import PartitionKeys
from manifest.paging import spill_overflow
from manifest.state import EpochStart, PageRef, SegmentEntry
from manifest.transitions import Claim

KEYS = PartitionKeys("t", "id", 0)


def entry(base, *, unique="a"):
    stem = f"{KEYS.segments}{base:020d}-1-{unique}"
    return SegmentEntry(
        base_offset=base,
        last_offset=base + 9,
        size_bytes=100,
        record_count=10,
        min_timestamp=1,
        max_timestamp=2,
        leader_epoch=1,
        log_key=f"{stem}.log",
        log_crc32c=base,
        indexes_key=f"{stem}.indexes",
        indexes_crc32c=2,
        indexes_size_bytes=50,
        chunk_table_position=10,
        chunk_table_size=20,
    )


class Pages:
    """Keeps what a spill_overflow wrote."""

    def __init__(self):
        self.kept = {}

    def entries(self, page):
        return self.kept[page.key]


@pytest.fixture
def pages():
    return Pages()


@pytest.fixture(params=["inline", "paged"])
def manifest(request, pages, monkeypatch):
    claim = Claim("o", (EpochStart(1, 0, "o"),), frozenset())
    made = transitions.create(KEYS, claim=claim, log_start_offset=0)
    made = transitions.add_segments(made, [entry(base) for base in range(0, 100, 10)])
    if request.param == "inline":
        return made
    monkeypatch.setattr("manifest.paging.INLINE_MAX", 2)
    monkeypatch.setattr("manifest.paging.SMALL_PAGE", 4)
    before = iter(made.segments)
    names = iter("abcdefgh")
    folded = spill_overflow(made, unique=lambda: next(names)).manifest
    for page in folded.pages:
        assert isinstance(page, PageRef)
        pages.kept[page.key] = tuple(next(before) for _ in range(page.entry_count))
    return folded


def entries_of(manifest, pages):
    found = [e for page in manifest.pages for e in transitions.live_entries(page, pages)]
    return [*found, *manifest.segments]


@pytest.mark.parametrize("base", [0, 30, 90])
def test_objects_are_swapped_and_the_old_ones_listed(manifest, pages, base):
    new = entry(base, unique="b")
    swap = {"pages": pages, "now_ms": 7}
    after = repairs.replace_objects(manifest, entry(base), new, **swap)
    assert violation(after) is None
    assert [e.base_offset for e in entries_of(after, pages)] == list(range(0, 100, 10))
    assert new in entries_of(after, pages)
    assert set(entry(base).keys) <= {removed.key for removed in after.removed}
    assert after.compacted_before == manifest.compacted_before
    assert repairs.replace_objects(after, new, new, **swap) is after


def test_other_bytes_are_refused(manifest, pages):
    other = replace(entry(30, unique="b"), log_crc32c=99)
    with pytest.raises(InvalidTransition, match="different bytes"):
        repairs.replace_objects(manifest, entry(30), other, pages=pages, now_ms=7)


@pytest.mark.parametrize("base", [0, 30, 90])
def test_what_is_left_of_a_segment_takes_its_place(manifest, pages, base):
    left = replace(entry(base, unique="b"), log_crc32c=99, record_count=3)
    keep = {"pages": pages, "now_ms": 7}
    after = repairs.replace_with_readable(manifest, entry(base), left, **keep)
    assert violation(after) is None
    assert left in entries_of(after, pages)
    assert set(entry(base).keys) <= {removed.key for removed in after.removed}
    assert (after.compacted_before, after.gaps) == (manifest.compacted_before, manifest.gaps)
    assert repairs.replace_with_readable(after, entry(base), left, **keep) is after
    trimmed = transitions.trim(manifest, 95, pages=pages, now_ms=1)
    if base < 90:
        assert repairs.replace_with_readable(trimmed, entry(base), left, **keep) is trimmed


@pytest.mark.parametrize("wrong", [{"last_offset": 38}, {"record_count": 11}, {"base_offset": 31}])
def test_what_is_not_left_of_a_segment_is_refused(manifest, pages, wrong):
    other = replace(entry(30, unique="b"), log_crc32c=99, **wrong)
    with pytest.raises(InvalidTransition, match="what is left"):
        repairs.replace_with_readable(manifest, entry(30), other, pages=pages, now_ms=7)


def test_what_was_trimmed_meanwhile_is_left(manifest, pages):
    trimmed = transitions.trim(manifest, 45, pages=pages, now_ms=1)
    swap = {"pages": pages, "now_ms": 7}
    assert repairs.replace_objects(trimmed, entry(30), entry(30, unique="b"), **swap) is trimmed
    assert repairs.drop_lost_segment(trimmed, entry(30), **swap) is trimmed


def test_lost_segments_become_one_gap_and_twice_is_once(manifest, pages):
    after = manifest
    for base in (30, 50, 40, 0, 90):
        after = repairs.drop_lost_segment(after, entry(base), pages=pages, now_ms=7)
        assert violation(after) is None
        assert repairs.drop_lost_segment(after, entry(base), pages=pages, now_ms=8) is after
    gaps = [(gap.start_offset, gap.end_offset) for gap in after.gaps]
    assert gaps == [(0, 10), (30, 60), (90, 100)]
    assert [e.base_offset for e in entries_of(after, pages)] == [10, 20, 60, 70, 80]
    assert after.end_offset == 100, "no offset is given twice"


def test_planted_a_drop_without_a_gap_is_refused(manifest, pages, monkeypatch):
    monkeypatch.setattr(repairs, "_merged", lambda gaps: manifest.gaps)
    with pytest.raises(InvalidTransition, match="missing"):
        repairs.drop_lost_segment(manifest, entry(30), pages=pages, now_ms=7)
