from hypothesis import given
from hypothesis import strategies as st

from tierlog.api.console.topic_pages import LEAST_WIDTH, WIDTH, Axis, Places, tier_map


def places(start: int, local: int, bucket_end: int, end: int, *gaps: tuple[int, int]) -> Places:
    return Places(start, local, end, bucket_end, gaps)


def test_offsets_in_both_tiers_are_in_both_lanes() -> None:
    drawn = tier_map(places(0, 400, 800, 1000), Axis(0, 1000))
    assert [(bar.x, bar.width) for bar in drawn.disk] == [(400, 600)]
    assert [(bar.x, bar.width) for bar in drawn.bucket] == [(0, 800)]


def test_partitions_of_a_topic_share_an_axis() -> None:
    axis = Axis.over([(100, 200), (150, 300)])
    assert axis == Axis(100, 300)
    drawn = tier_map(places(150, 150, 150, 300), axis)
    assert [(bar.x, bar.width) for bar in drawn.disk] == [(250, 750)]
    assert drawn.bucket == ()


def test_gaps_are_holes_in_the_bucket() -> None:
    drawn = tier_map(places(0, 900, 900, 1000, (300, 400), (500, 600)), Axis(0, 1000))
    found = [(bar.start_offset, bar.end_offset) for bar in drawn.bucket]
    assert found == [(0, 300), (400, 500), (600, 900)]


def test_a_restores_gap_does_not_crowd_out_the_records() -> None:
    gap = (1000, 1_000_001_000)
    there = places(0, gap[1], 1000, gap[1] + 1000, gap)
    drawn = tier_map(there, Axis.over(there.written()))
    assert [(bar.x, bar.width) for bar in drawn.bucket] == [(0, 454.55)]
    assert [(bar.x, bar.width) for bar in drawn.disk] == [(545.45, 454.55)]


def test_a_short_gap_is_to_scale() -> None:
    there = places(0, 900, 900, 1000, (300, 390))
    assert Axis.over(there.written()) == Axis(0, 1000)


def test_a_gap_of_one_partition_that_another_fills_is_to_scale() -> None:
    gapped, whole = places(0, 900, 100, 1000, (100, 900)), places(0, 0, 0, 1000)
    axis = Axis.over([*gapped.written(), *whole.written()])
    assert axis == Axis(0, 1000)


def test_a_gap_across_the_end_of_the_bucket_leaves_nothing_behind_it() -> None:
    drawn = tier_map(places(0, 500, 300, 1000, (200, 500)), Axis(0, 1000))
    assert [(bar.start_offset, bar.end_offset) for bar in drawn.bucket] == [(0, 200)]


def test_an_empty_partition_has_empty_lanes() -> None:
    assert tier_map(places(7, 7, 7, 7), Axis.over([(7, 7)])) == ((), ())
    assert tier_map(places(0, 0, 0, 0), Axis.over([])) == ((), ())


def test_one_record_in_billions_is_still_seen() -> None:
    end = 10**12
    drawn = tier_map(places(0, end - 1, end - 1, end), Axis(0, end))
    assert drawn.disk[0].width == LEAST_WIDTH
    assert drawn.disk[0].x == WIDTH - LEAST_WIDTH


OFFSETS = st.integers(0, 2**63 - 1)


@given(st.lists(OFFSETS, min_size=4, max_size=4), st.lists(st.tuples(OFFSETS, OFFSETS), max_size=3))
def test_nothing_is_drawn_outside_the_axis(four: list[int], gaps: list[tuple[int, int]]) -> None:
    start, local, bucket_end, end = sorted(four)
    ordered = [(min(gap), max(gap)) for gap in gaps]
    there = places(start, local, bucket_end, end, *ordered)
    drawn = tier_map(there, Axis.over(there.written()))
    for bar in (*drawn.disk, *drawn.bucket):
        assert start <= bar.start_offset < bar.end_offset <= end
        assert bar.x >= 0
        assert bar.x + bar.width <= WIDTH + 0.02
