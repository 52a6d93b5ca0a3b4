"""Which segments are merged."""

import pytest
from msgspec.structs import replace

from tests.fakes.manifests import entry, run_of
from tierlog.broker.background.merging import (
    SEGMENTS_MAX,
    MergeLimits,
    limits_of,
    plan_runs,
)
from tierlog.hot_tier.log_config import LogConfig
from tierlog.record_format.index_layouts import MAX_RELATIVE_OFFSET

WIDE = MergeLimits(max_bytes=1 << 30, max_span_ms=1 << 40, enough_bytes=1 << 30)
SEGMENT_BYTES = entry(0).size_bytes


def bases(entries, limits=WIDE):
    return [[one.base_offset for one in run.entries] for run in plan_runs(entries, limits)]


def test_neighbours_become_one_up_to_the_size():
    limits = WIDE._replace(max_bytes=3 * SEGMENT_BYTES, enough_bytes=3 * SEGMENT_BYTES)
    assert bases(run_of(7), limits) == [[0, 100, 200], [300, 400, 500], [600]]


def test_one_that_is_large_enough_is_left_as_it_is():
    entries = run_of(5)
    entries[2] = replace(entries[2], size_bytes=2 * SEGMENT_BYTES)
    limits = WIDE._replace(enough_bytes=2 * SEGMENT_BYTES)
    assert bases(entries, limits) == [[0, 100], [200], [300, 400]]


def test_a_run_ends_once_it_is_large_enough():
    limits = WIDE._replace(enough_bytes=2 * SEGMENT_BYTES)
    runs = list(plan_runs(run_of(5), limits))
    assert [(len(run.entries), run.is_whole) for run in runs] == [(2, True), (2, True), (1, False)]
    assert list(plan_runs(run_of(4), limits))[-1].is_whole


def test_a_run_spans_no_more_time_than_a_segment_may():
    """Segments of the fakes begin 100 ms after each other, and have 100 ms."""
    assert bases(run_of(6), WIDE._replace(max_span_ms=300)) == [[0, 100, 200], [300, 400, 500]]


def test_segments_without_timestamps_are_as_old_as_their_files():
    without = [
        replace(one, min_timestamp=-1, max_timestamp=-1, modified_ms=1000 * number)
        for number, one in enumerate(run_of(4))
    ]
    assert bases(without, WIDE._replace(max_span_ms=1000)) == [[0, 100], [200, 300]]


@pytest.mark.parametrize(
    "unknown",
    [
        {"min_timestamp": None},
        {"min_timestamp": None, "max_timestamp": -1},
        {"min_timestamp": -1},
    ],
)
def test_a_segment_of_unknown_age_is_left_alone(unknown):
    entries = run_of(5)
    entries[2] = replace(entries[2], **unknown)
    assert bases(entries) == [[0, 100], [200], [300, 400]]


def test_nothing_is_merged_across_missing_offsets():
    assert bases([*run_of(2), *run_of(2, start=300)]) == [[0, 100], [300, 400]]


def test_offsets_fit_the_indexes():
    last = entry(100, records=MAX_RELATIVE_OFFSET - 99, size_bytes=1000)
    assert bases([entry(0), last]) == [[0, 100]]
    assert bases([entry(0), replace(last, last_offset=last.last_offset + 1)]) == [[0], [100]]


def test_so_many_become_one_that_a_merge_ends_in_time():
    assert [len(run) for run in bases(run_of(SEGMENTS_MAX + 2))] == [SEGMENTS_MAX, 2]


@pytest.mark.parametrize(
    ("config", "limits"),
    [
        ({"retention.ms": -1}, (1 << 30, 7 * 86_400_000, 1 << 30)),
        ({"retention.ms": 1000, "retention.bytes": 4000}, (400, 100, 400)),
        ({"retention.ms": -1, "segment.bytes": 4096, "segment.ms": 5}, (4096, 5, 4096)),
    ],
)
def test_limits_are_those_of_segments_and_a_tenth_of_retention(config, limits):
    assert limits_of(LogConfig.parse(config)) == limits


def test_enough_is_no_more_than_a_segment():
    config = LogConfig.parse({"segment.bytes": 4096})
    assert limits_of(config, enough_bytes=1024).enough_bytes == 1024
    assert limits_of(config, enough_bytes=1 << 20).enough_bytes == 4096
