import random

from tierlog.cold_tier.index_bundle import Chunk
from tierlog.cold_tier.ranged_reader import ChunkRef
from tierlog.record_format.record_walk import RowFilter
from tierlog.spark_reader.splits import (
    ChunkPiece,
    PartitionWork,
    RowsWanted,
    SplitLimits,
    TailPiece,
    default_split_bytes,
    pack_tasks,
    plan_splits,
)

MIB = 1 << 20


def chunk(number, *, records=100, size=8 * MIB, first=None):
    first = number * records if first is None else first
    position, last = number * size, first + records - 1
    return ChunkPiece(
        ChunkRef("a.log", ("a", number), position, size, 0),
        Chunk(position, size, first, last, records, None, None, 0, False, False),
    )


def work(chunks=(), tail=(), start=0, end=None, partition=0):
    last = max([c.chunk.last_offset + 1 for c in chunks] + [t.end_offset for t in tail], default=0)
    return PartitionWork(
        topic_id="id",
        topic="t",
        partition=partition,
        start_offset=start,
        end_offset=last if end is None else end,
        chunks=chunks,
        tail=tail,
    )


def plan(*parts, split=64 * MIB, **limits):
    return plan_splits(parts, SplitLimits(split, **limits))


def test_the_default_split_size_grows_with_the_data():
    sizes = {0: 16, 100: 16, 512: 32, 1024: 64, 10**6: 64}
    assert {n: default_split_bytes(n * MIB) // MIB for n in sizes} == sizes
    assert len(plan(work([chunk(n, size=MIB) for n in range(64)]), split=None)) == 4


def test_chunks_are_packed_into_splits_of_equal_bytes():
    splits = plan(work([chunk(n) for n in range(20)]))
    assert [len(split.chunks) for split in splits] == [7, 6, 7]
    assert [(split.start_offset, split.end_offset) for split in splits] == [
        (0, 700),
        (700, 1300),
        (1300, 2000),
    ]


def test_a_split_has_one_partition_and_one_tier():
    both = work([chunk(0)], [TailPiece(100, 200, MIB)])
    splits = plan(both, work([chunk(0)], partition=1))
    assert [(s.partition, s.is_cold, s.start_offset, s.end_offset) for s in splits] == [
        (0, True, 0, 100),
        (0, False, 100, 200),
        (1, True, 0, 100),
    ]


def test_the_tail_is_split_by_offsets():
    splits = plan(work(tail=[TailPiece(0, 1000, 160 * MIB)]))
    assert [(s.start_offset, s.end_offset) for s in splits] == [(0, 333), (333, 666), (666, 1000)]


def small_work(partitions):
    return [
        work([chunk(0, size=1000)], [TailPiece(100, 200, 1000)], partition=number)
        for number in range(partitions)
    ]


def test_small_splits_share_a_task_unless_options_set_their_size():
    splits = plan(*small_work(100), work([chunk(number) for number in range(4)]), split=None)
    tasks = pack_tasks(splits, SplitLimits())
    assert [split for task in tasks for split in task] == splits
    assert [len(task) for task in tasks] == [*[7] * 28, 4, 1, 1]
    for limits in (SplitLimits(MIB), SplitLimits(min_splits=1), SplitLimits(max_records=1000)):
        assert pack_tasks(splits, limits) == [(split,) for split in splits]


def test_rows_that_chunk_tables_tell_share_a_task_by_their_number():
    splits = plan(work([chunk(number, records=100_000) for number in range(40)]), split=8 * MIB)
    for columns, tasks in (
        (("partition",), 4),
        (("offset", "topic"), 4),
        (("value", "offset"), 40),
    ):
        assert len(pack_tasks(splits, SplitLimits(), RowsWanted(columns))) == tasks
    later = RowsWanted(
        ("partition",), RowFilter(start_offset=150_000)
    )  # cuts a chunk, and excludes
    assert [later.fetched_bytes(split) for split in splits[:3]] == [8 * MIB, 8 * MIB, 0]


def test_little_data_still_gives_several_tasks():
    tasks = {n: len(pack_tasks(plan(*small_work(n)), SplitLimits())) for n in (0, 1, 8, 12, 20, 50)}
    assert tasks == {0: 0, 1: 2, 8: 16, 12: 24, 20: 20, 50: 17}


def test_only_chunks_in_the_range_are_read():
    splits = plan(work([chunk(n) for n in range(10)], start=150, end=301))
    assert [c.ref.number for s in splits for c in s.chunks] == [1, 2, 3]
    assert (splits[0].start_offset, splits[-1].end_offset) == (150, 301)


def test_chunks_that_may_match_the_time_are_never_skipped():
    times = [
        (10, 20),
        (None, 20),
        (10, None),
        (None, None),
        (10, 90),  # timestamps are not ordered
        (60, 90),
        (10, 49),
        (51, 51),
    ]

    def kept(first, last):
        row_filter = RowFilter(start_timestamp=first, last_timestamp=last)
        return [number for number, bounds in enumerate(times) if row_filter.may_match(*bounds)]

    assert kept(50, 50) == [2, 3, 4]
    assert kept(0, 9) == [1, 3]
    assert kept(91, 99) == [2, 3]
    assert kept(49, 51) == [2, 3, 4, 6, 7]


def test_a_minimum_number_of_splits_divides_chunks():
    splits = plan(work([chunk(0), chunk(1)]), min_splits=8)
    assert len(splits) == 8
    assert [s.chunks[0].ref.number for s in splits] == [0] * 4 + [1] * 4


def test_no_split_has_more_records_than_allowed():
    splits = plan(work([chunk(0), chunk(1)], [TailPiece(200, 300, 5)]), max_records=30)
    assert max(s.end_offset - s.start_offset for s in splits) <= 30


def test_a_gap_is_one_split_however_long():
    tail = [TailPiece(0, 100, 50), TailPiece(100, 10**9, 0)]
    splits = plan(work(tail=tail), split=10, min_splits=5, max_records=40)
    assert [s.start_offset for s in splits] == [0, 20, 40, 60, 80, 100]
    assert splits[-1].end_offset == 10**9
    assert len(plan(work(tail=tail[1:]))) == 1


def test_an_empty_range_gives_no_split():
    assert plan(work([chunk(0)], start=50, end=50)) == []
    assert plan() == []


def test_every_offset_is_read_exactly_once():
    for seed in range(200):
        check_random_plan(random.Random(seed), seed)


def check_random_plan(rng, seed):
    chunks, first = [], 0
    for number in range(rng.randrange(12)):
        records = rng.randrange(1, 50)
        chunks.append(chunk(number, records=records, size=rng.randrange(1, 100), first=first))
        first += records + rng.choice((0, 0, 3))
    tail, at = [], first
    for _ in range(rng.randrange(4)):
        end = at + rng.randrange(1, 60)
        tail.append(TailPiece(at, end, rng.randrange(300)))
        at = end
    start = rng.randrange(at + 1)
    end = rng.randrange(start, at + 1)
    limits = {
        "split": rng.randrange(1, 400),
        "min_splits": rng.choice((None, 1, 5, 40)),
        "max_records": rng.choice((None, 1, 7, 100)),
    }
    splits = plan(work(chunks, tail, start=start, end=end), **limits)
    read = []
    for split in splits:
        offsets = set(range(split.start_offset, split.end_offset))
        if split.is_cold:
            contained = {
                o
                for c in split.chunks
                for o in range(c.chunk.first_offset, c.chunk.last_offset + 1)
            }
            offsets &= contained
        else:
            assert split.start_offset >= first
        read += sorted(offsets)
    cold = [o for c in chunks for o in range(c.chunk.first_offset, c.chunk.last_offset + 1)]
    wanted = [o for o in cold + list(range(first, at)) if start <= o < end]
    assert read == wanted, f"seed {seed}"
