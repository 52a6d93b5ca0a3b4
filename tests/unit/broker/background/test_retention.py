from types import SimpleNamespace

from tests.fakes.manifests import entry
from tierlog.broker.background import retention
from tierlog.broker.background.retention import Limits, SegmentFacts, cold_facts

NOW_MS = 1_000_000


def segments(*sizes: int, newest_ms: int = NOW_MS, step_ms: int = 100) -> list[SegmentFacts]:
    """Ten offsets each, the newest active, timestamps `step_ms` apart."""
    last = len(sizes) - 1
    return [
        SegmentFacts(i * 10, i * 10 + 10, size, newest_ms - (last - i) * step_ms, i == last)
        for i, size in enumerate(sizes)
    ]


def expired_end(segments, limits, *, now_ms):
    sizes = sum(segment.size_bytes for segment in segments) if isinstance(segments, list) else 0
    return retention.expired_end(segments, limits, total_bytes=sizes, now_ms=now_ms)


def test_without_limits_nothing_expires():
    assert expired_end(segments(5, 5, 5), Limits(-1, -1), now_ms=NOW_MS * 9) is None


def test_by_time_the_oldest_segments_expire_up_to_the_first_young_one():
    assert expired_end(segments(5, 5, 5), Limits(150, -1), now_ms=NOW_MS) == 10


def test_a_segment_exactly_at_the_time_limit_is_kept():
    assert expired_end(segments(5, 5, 5), Limits(200, -1), now_ms=NOW_MS) is None


def test_an_old_segment_after_a_young_one_is_kept():
    oldest, *others = segments(5, 5, 5)
    young_first = [oldest._replace(age_timestamp=NOW_MS), *others]
    assert expired_end(young_first, Limits(50, -1), now_ms=NOW_MS) is None


def test_no_segment_after_the_first_kept_one_is_read():
    for limits in (Limits(250, -1), Limits(-1, 12), Limits(250, 12)):
        four = iter(segments(5, 5, 5, 5))
        assert retention.expired_end(four, limits, total_bytes=20, now_ms=NOW_MS) == 10
        assert len(list(four)) == 2
    unlimited = iter(segments(5, 5))
    assert expired_end(unlimited, Limits(-1, -1), now_ms=NOW_MS) is None
    assert len(list(unlimited)) == 2


def test_by_size_the_remaining_segments_still_reach_the_limit():
    assert expired_end(segments(5, 5, 5, 5), Limits(-1, 10), now_ms=NOW_MS) == 20
    assert expired_end(segments(5, 5, 5, 5), Limits(-1, 11), now_ms=NOW_MS) == 10


def test_of_two_limits_the_stricter_applies():
    four = segments(5, 5, 5, 5)
    assert expired_end(four, Limits(150, 11), now_ms=NOW_MS) == 20
    assert expired_end(four, Limits(250, 10), now_ms=NOW_MS) == 20
    assert expired_end(four, Limits(250, 11), now_ms=NOW_MS) == 10


def test_by_size_the_active_segment_is_kept():
    assert expired_end(segments(5), Limits(-1, 0), now_ms=NOW_MS) is None


def test_by_time_the_active_segment_expires_too():
    assert expired_end(segments(5, 5), Limits(50, -1), now_ms=NOW_MS + 60) == 20


def test_an_empty_active_segment_is_kept():
    assert expired_end(segments(5, 0), Limits(50, -1), now_ms=NOW_MS + 60) == 10


def test_an_empty_segment_of_kafkas_cleaner_does_not_stop_retention():
    assert expired_end(segments(5, 0, 5, 5), Limits(150, -1), now_ms=NOW_MS) == 20


def test_a_cold_segment_expires_by_its_records_or_else_by_its_files_time():
    def facts(**second):
        entries = [entry(0, records=10), entry(10, records=10, **second), entry(20)]
        partition = SimpleNamespace(
            oldest_cold_entries=lambda start: iter(entries),
            log_start_offset=0,
            log_end_offset=30,
        )
        return cold_facts(partition, [SegmentFacts(20, 30, 5, NOW_MS, True)])

    limits = Limits(50, -1)
    no_timestamps = {"max_timestamp": -1, "min_timestamp": None}
    assert expired_end(facts(), limits, now_ms=NOW_MS) == 20
    assert expired_end(facts(**no_timestamps, modified_ms=50), limits, now_ms=NOW_MS) == 20
    assert expired_end(facts(**no_timestamps, modified_ms=NOW_MS), limits, now_ms=NOW_MS) == 10
    assert expired_end(facts(**no_timestamps), limits, now_ms=NOW_MS) == 10
