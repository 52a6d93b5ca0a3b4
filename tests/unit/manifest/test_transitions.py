from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.fakes.manifests import NoPages, claim, entry, manifest, run_of
from tierlog.manifest.invariants import InvalidTransition, uncovered, violation
from tierlog.manifest.state import EpochStart, OffsetGap, Reason
from tierlog.manifest.transitions import (
    Claim,
    add_segments,
    apply_claim,
    drop_expired,
    forget_removed,
    merge_segments,
    record_gap,
    replace_segments,
    trim,
)
from tierlog.record_format.errors import FencedError

PAGES = NoPages()


def test_segments_are_added_at_the_end() -> None:
    after = add_segments(manifest(2), [entry(200), entry(300)])
    assert [e.base_offset for e in after.segments] == [0, 100, 200, 300]
    assert after.end_offset == 400


def test_a_hole_between_segments_is_refused() -> None:
    with pytest.raises(InvalidTransition, match=r"\[200, 300\) are missing"):
        add_segments(manifest(2), [entry(300)])


def test_an_overlapping_segment_is_refused() -> None:
    with pytest.raises(InvalidTransition, match="overlaps"):
        add_segments(manifest(2), [entry(150)])


def test_a_first_segment_above_the_log_start_is_refused() -> None:
    with pytest.raises(InvalidTransition, match="missing"):
        add_segments(manifest(), [entry(100)])


@pytest.mark.parametrize(
    "broken",
    [
        {"size_bytes": 0},
        {"indexes_size_bytes": 0},
        {"chunk_table_size": 0},
        {"chunk_table_position": 450},
        {"leader_epoch": 5},
        {"log_key": ""},
        {"record_count": -1},
    ],
)
def test_an_impossible_entry_is_refused(broken: dict[str, object]) -> None:
    with pytest.raises(InvalidTransition):
        add_segments(manifest(), [replace(entry(0), **broken)])


def test_an_epoch_or_end_without_room_for_a_take_over_is_refused() -> None:
    """It would be written into checkpoints and batches, which hold 64 and 32 bits."""
    state = manifest(2)
    last = replace(state.epochs[-1], epoch=2**31 - 1)
    assert violation(replace(state, leader_epoch=last.epoch, epochs=(last,)))
    assert violation(record_gap(state, end_offset=2**62)) is None
    with pytest.raises(InvalidTransition, match="no room"):
        record_gap(state, end_offset=2**63 - 1)


def test_adding_an_existing_segment_changes_nothing() -> None:
    before = manifest(3)
    assert add_segments(before, [entry(100), entry(200, unique="again")]) is before


def test_adding_existing_and_new_segments_adds_only_the_new() -> None:
    after = add_segments(manifest(3), [entry(200, unique="again"), entry(300)])
    assert [e.base_offset for e in after.segments] == [0, 100, 200, 300]
    assert after.segments[2].log_key.endswith("-a.log")


def test_a_different_segment_at_the_same_offsets_is_refused() -> None:
    with pytest.raises(InvalidTransition, match="ends below"):
        add_segments(manifest(3), [entry(200, log_crc32c=99)])


def test_a_trim_drops_whole_segments_and_lists_their_objects() -> None:
    before = manifest(3)
    after = trim(before, 150, pages=PAGES, now_ms=5)
    assert after.log_start_offset == 150
    assert [e.base_offset for e in after.segments] == [100, 200]
    assert [(r.key, r.removed_ms, r.reason) for r in after.removed] == [
        (key, 5, Reason.TRIM) for key in before.segments[0].keys
    ]


def test_a_trim_never_moves_back() -> None:
    before = trim(manifest(3), 150, pages=PAGES, now_ms=5)
    assert trim(before, 150, pages=PAGES, now_ms=6) is before
    assert trim(before, 20, pages=PAGES, now_ms=6) is before


def test_a_trim_past_the_cold_end_lets_the_next_segment_begin_below_it() -> None:
    after = trim(manifest(3), 450, pages=PAGES, now_ms=5)
    assert (after.log_start_offset, after.end_offset, after.segments) == (450, 450, ())
    assert add_segments(after, [entry(300)]) is after, "it lies below the trim"
    more = add_segments(after, [entry(400)])
    assert (more.log_start_offset, more.end_offset) == (450, 500)
    with pytest.raises(InvalidTransition, match="missing"):
        add_segments(after, [entry(500)])


def test_objects_dropped_by_retention_say_so() -> None:
    after = drop_expired(manifest(3), 100, pages=PAGES, now_ms=9)
    assert {r.reason for r in after.removed} == {Reason.RETENTION}


def test_forget_removed_forgets_only_the_given_keys() -> None:
    after = trim(manifest(3), 200, pages=PAGES, now_ms=5)
    gone = after.removed[0].key
    assert [r.key for r in forget_removed(after, {gone}).removed] == [
        r.key for r in after.removed[1:]
    ]
    assert forget_removed(after, {"nothing"}) is after


def test_compaction_replaces_a_run_and_leaves_holes() -> None:
    before = manifest(4)
    compacted = entry(0, records=150, unique="c")
    after = replace_segments(before, before.segments[:2], [compacted], pages=PAGES, now_ms=5)
    assert [e.base_offset for e in after.segments] == [0, 200, 300]
    assert after.compacted_before == 200
    assert len(after.removed) == 4
    assert violation(after) is None
    assert replace_segments(after, before.segments[:2], [compacted], pages=PAGES, now_ms=6) is after


def test_compaction_of_the_end_does_not_move_the_end_back() -> None:
    before = manifest(2)
    after = replace_segments(before, before.segments[1:], [], pages=PAGES, now_ms=5)
    assert after.end_offset == 200
    assert add_segments(after, [entry(200)]).end_offset == 300


def test_compaction_of_a_changed_run_is_refused() -> None:
    before = manifest(3)
    once = replace_segments(
        before, before.segments[:1], [entry(0, unique="c")], pages=PAGES, now_ms=5
    )
    with pytest.raises(InvalidTransition, match="have changed"):
        replace_segments(once, before.segments[:2], [entry(0, unique="d")], pages=PAGES, now_ms=6)


def test_compaction_after_a_trim_keeps_the_remaining_segments() -> None:
    before = manifest(4)
    trimmed = trim(before, 250, pages=PAGES, now_ms=4)
    new = [entry(0, records=90, unique="c"), entry(200, unique="c")]
    after = replace_segments(trimmed, before.segments[:3], new, pages=PAGES, now_ms=5)
    assert [e.log_key for e in after.segments] == [new[1].log_key, before.segments[3].log_key]


def test_a_replacement_outside_its_run_is_refused() -> None:
    before = manifest(3)
    with pytest.raises(InvalidTransition, match="not within"):
        replace_segments(
            before, before.segments[:1], [entry(0, records=101, unique="c")], pages=PAGES, now_ms=5
        )
    gapped = add_segments(record_gap(manifest(1), end_offset=200), [entry(200)])
    with pytest.raises(InvalidTransition, match="not within"):
        replace_segments(
            gapped, gapped.segments[1:], [entry(199, records=101)], pages=PAGES, now_ms=5
        )


MERGED = entry(100, records=200, unique="m")


def test_merged_segments_are_one_and_excuse_no_hole() -> None:
    before = manifest(4)
    after = merge_segments(before, before.segments[1:3], MERGED, pages=PAGES, now_ms=5)
    assert [e.base_offset for e in after.segments] == [0, 100, 300]
    assert (after.compacted_before, after.end_offset) == (0, 400)
    assert {r.key for r in after.removed} == {k for e in before.segments[1:3] for k in e.keys}
    assert {r.reason for r in after.removed} == {Reason.REPLACED}
    assert merge_segments(after, before.segments[1:3], MERGED, pages=PAGES, now_ms=6) is after


@pytest.mark.parametrize(
    "wrong",
    [
        {"base_offset": 101},
        {"last_offset": 298},
        {"size_bytes": 1999},
        {"record_count": 201},
    ],
)
def test_a_merge_that_changes_what_there_is_is_refused(wrong: dict[str, int]) -> None:
    before = manifest(4)
    with pytest.raises(InvalidTransition, match="are merged to"):
        merge_segments(
            before, before.segments[1:3], replace(MERGED, **wrong), pages=PAGES, now_ms=5
        )


def test_segments_do_not_merge_across_a_gap() -> None:
    before = add_segments(record_gap(manifest(2), end_offset=300), [entry(300)])
    merged = entry(100, records=200, last_offset=399, unique="m")
    with pytest.raises(InvalidTransition, match="do not join"):
        merge_segments(before, before.segments[1:], merged, pages=PAGES, now_ms=5)


def test_a_merge_of_what_was_trimmed_changes_nothing() -> None:
    before = manifest(4)
    trimmed = trim(before, 200, pages=PAGES, now_ms=4)
    assert merge_segments(trimmed, before.segments[1:3], MERGED, pages=PAGES, now_ms=5) is trimmed
    within = trim(before, 150, pages=PAGES, now_ms=4)
    after = merge_segments(within, before.segments[1:3], MERGED, pages=PAGES, now_ms=5)
    assert [e.base_offset for e in after.segments] == [100, 300]


def test_a_merge_of_segments_that_were_replaced_is_refused() -> None:
    before = manifest(4)
    again = replace(before.segments[1], log_key=MERGED.log_key + "x")
    changed = replace(before, segments=(before.segments[0], again, *before.segments[2:]))
    with pytest.raises(InvalidTransition, match="have changed"):
        merge_segments(changed, before.segments[1:3], MERGED, pages=PAGES, now_ms=5)


def test_a_restore_gap_is_recorded_and_bridges_the_next_segment() -> None:
    after = record_gap(manifest(2), end_offset=1_000_200)
    assert after.gaps == (OffsetGap(200, 1_000_200),)
    assert add_segments(after, [entry(1_000_200)]).end_offset == 1_000_300
    twice = record_gap(after, end_offset=2_000_200)
    assert twice.gaps == (OffsetGap(200, 2_000_200),)
    with pytest.raises(InvalidTransition, match="is not above"):
        record_gap(after, end_offset=1_000_200)


@pytest.mark.parametrize(
    ("start", "end", "found"),
    [
        (0, 10, (0, 10)),
        (0, 40, (0, 20)),
        (10, 30, (10, 20)),
        (20, 30, None),
        (25, 40, (30, 40)),
        (25, 60, (30, 50)),
        (60, 60, None),
    ],
)
def test_missing_offsets_end_where_a_recorded_gap_begins(
    start: int, end: int, found: tuple[int, int] | None
) -> None:
    gaps = (OffsetGap(20, 30), OffsetGap(50, 60))
    assert uncovered(replace(manifest(1), gaps=gaps), start, end) == found


def test_a_gap_below_the_log_start_is_dropped() -> None:
    gapped = add_segments(record_gap(manifest(2), end_offset=1_000), [entry(1_000)])
    assert trim(gapped, 1_050, pages=PAGES, now_ms=5).gaps == ()
    for kept_at in (500, 1_000):  # readers may stand where it begins
        assert trim(gapped, kept_at, pages=PAGES, now_ms=5).gaps == gapped.gaps


def test_a_folder_can_claim_what_it_recorded() -> None:
    after = apply_claim(manifest(2), claim(epoch=1, start_offset=200, recorded=[("owner-a", 0)]))
    assert (after.owner, after.leader_epoch) == ("owner-a", 1)
    assert after.epochs == (EpochStart(0, 0, "owner-a"), EpochStart(1, 200, "owner-a"))


def test_a_repeated_claim_changes_nothing() -> None:
    before = manifest(2)
    assert apply_claim(before, claim(recorded=[("owner-a", 0)])) is before


def test_an_unrecorded_claim_of_the_current_epoch_is_fenced() -> None:
    with pytest.raises(FencedError, match="never recorded"):
        apply_claim(manifest(2), claim())


def test_a_folder_cannot_claim_what_it_never_recorded() -> None:
    with pytest.raises(FencedError, match="never recorded"):
        apply_claim(manifest(2), claim("owner-b", 9, recorded=[("owner-b", 8)]))


def test_a_folder_cannot_claim_back_what_its_copy_took_over() -> None:
    taken = apply_claim(manifest(2), claim("owner-a", 5, start_offset=200, take_over=True))
    with pytest.raises(FencedError, match="never recorded"):
        apply_claim(taken, claim("owner-a", 6, recorded=[("owner-a", 0), ("owner-a", 1)]))


def test_a_take_over_needs_a_higher_epoch() -> None:
    with pytest.raises(FencedError, match="is not above"):
        apply_claim(manifest(2), claim("owner-b", 0, take_over=True))
    assert apply_claim(manifest(2), claim("owner-b", 1, take_over=True)).owner == "owner-b"


def test_a_claim_adds_epochs_missing_in_the_bucket() -> None:
    epochs = (
        EpochStart(0, 0, "owner-a"),  # already in the manifest
        EpochStart(1, 150, "owner-a"),
        EpochStart(2, 180, "owner-a"),
        EpochStart(3, 180, "owner-a"),
    )
    after = apply_claim(manifest(2), Claim("owner-a", epochs, frozenset([("owner-a", 0)])))
    assert [(e.epoch, e.start_offset) for e in after.epochs] == [(0, 0), (1, 150), (3, 180)]


def test_the_epochs_of_an_elected_replica_are_those_of_its_log() -> None:
    """Epoch 2 began at 70 in a log whose records nobody else had: the next leader has 70 to 79 as
    epoch 1 wrote them.
    """
    before = replace(
        manifest(2),
        leader_epoch=2,
        epochs=(
            EpochStart(0, 0, "owner-a"),
            EpochStart(1, 40, "owner-b"),
            EpochStart(2, 70, "owner-a"),
        ),
    )

    def epochs_after(*own: tuple[int, int]) -> list[tuple[int, int, str]]:
        epochs = tuple(EpochStart(epoch, start, "owner-c") for epoch, start in own)
        after = apply_claim(before, Claim("owner-c", epochs, frozenset(), elected=True))
        return [(one.epoch, one.start_offset, one.owner) for one in after.epochs]

    kept = [(0, 0, "owner-a"), (1, 40, "owner-b")]
    assert epochs_after((1, 40), (4, 80)) == [*kept, (4, 80, "owner-c")]
    assert epochs_after((1, 60), (4, 80)) == [*kept, (4, 80, "owner-c")]  # it begins at 60
    assert epochs_after((0, 0), (4, 80)) == [kept[0], (4, 80, "owner-c")]
    assert epochs_after((0, 0), (1, 30), (4, 80)) == [
        kept[0],
        (1, 30, "owner-c"),
        (4, 80, "owner-c"),
    ]
    assert epochs_after((4, 60)) == [*kept, (4, 60, "owner-c")]


def test_many_segments_are_added_in_one_transition() -> None:
    assert len(add_segments(manifest(), run_of(1000)).segments) == 1000
