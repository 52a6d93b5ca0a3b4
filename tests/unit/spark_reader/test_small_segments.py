"""What a read of a topic of small segments fetches, counted in requests and bytes."""

import random
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from tests.fakes.bucket import put_partition, put_topic
from tests.fakes.cold_segments import SegmentFiles
from tests.fakes.damage import flip
from tierlog.cold_tier import segment_check
from tierlog.cold_tier.index_bundle import SectionKind, parse_directory
from tierlog.object_store.ledger import Usage
from tierlog.object_store.open import open_store
from tierlog.record_format.encode import encode_batch
from tierlog.spark_reader.access import Connections
from tierlog.spark_reader.arrow_dataset import dataset
from tierlog.spark_reader.options import parse_options

RECORDS_OF_A_BATCH = 10
STEP_MS = 1000
time, offset = pc.field("timestamp"), pc.field("offset")


def write_segment(folder, *, base_offset, batches, value_bytes, stamp=lambda n: n * STEP_MS):
    dice, body, first = random.Random(base_offset), bytearray(), base_offset
    for _ in range(batches):
        offsets = range(first, first := first + RECORDS_OF_A_BATCH)
        body += encode_batch(
            [dice.randbytes(value_bytes) for _ in offsets],
            timestamps=[stamp(n) for n in offsets],
            base_offset=offsets.start,
        )
    folder.mkdir(exist_ok=True)
    log = folder / f"{base_offset:020d}.log"
    log.write_bytes(body)
    index, timeindex = log.with_suffix(".index"), log.with_suffix(".timeindex")
    for file in (index, timeindex):
        file.write_bytes(b"")
    return SegmentFiles(base_offset, first - 1, log, index, timeindex)


class Small(NamedTuple):
    """A topic with one partition of small segments, each of a chunk."""

    url: str
    records: int
    log_bytes: int

    def usage(self):
        """Of this process's store, so far."""
        options = parse_options({"store": self.url, "subscribe": "t"}, streaming=False)
        found = Connections(options.access).store.ledger.usage()
        return found.get(("cold_read", "get"), Usage())

    def read(self, **scan):
        """The rows, and what it took to fetch them."""
        before = self.usage()
        rows = dataset("t", store=self.url, tier="cold").to_table(**scan)
        return rows, Usage(*(now - then for now, then in zip(self.usage(), before, strict=True)))


def put_small(tmp_path, *, segments, batches, value_bytes=1000, **write):
    url = f"file://{tmp_path / 'bucket'}"
    store, records = open_store(url), batches * RECORDS_OF_A_BATCH
    put_topic(store, "t", {0: "empty-0"})
    files = [
        write_segment(
            tmp_path / "log",
            base_offset=number * records,
            batches=batches,
            value_bytes=value_bytes,
            **write,
        )
        for number in range(segments)
    ]
    put_partition(store, "t", 0, files, chunk_bytes=8 << 20)
    return Small(url, segments * records, sum(one.log.stat().st_size for one in files))


def between(first, end):
    """The records of these numbers, by their timestamps."""
    low, high = (pa.scalar(n * STEP_MS * 1000, pa.timestamp("us", "UTC")) for n in (first, end))
    return (time >= low) & (time < high)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return put_small(tmp_path_factory.mktemp("four"), segments=4, batches=100)


@pytest.mark.parametrize("first", [0, 1234, 1980, 3960])
def test_one_percent_of_the_time_reads_at_most_three_percent_of_the_bytes(four, first):
    wanted = range(first, first + four.records // 100)
    rows, used = four.read(columns=["offset", "value"], filter=between(wanted.start, wanted.stop))
    assert rows["offset"].to_pylist() == list(wanted)
    assert used.received_bytes <= 0.03 * four.log_bytes
    assert used.requests <= 4  # of indexes and of what is wanted, each of at most two segments


def test_one_percent_by_startings_timestamps_reads_as_little(four):
    before = four.usage()
    times = {"startingTimestamp": 2500 * STEP_MS, "endingTimestamp": 2540 * STEP_MS}
    rows = dataset("t", store=four.url, tier="cold", **times).to_table()
    assert rows["offset"].to_pylist() == list(range(2500, 2540))
    fetched = four.usage().received_bytes - before.received_bytes
    assert fetched <= 0.03 * four.log_bytes


def test_a_scan_of_all_has_one_request_for_the_log_of_each_segment(four, tmp_path):
    fresh = put_small(tmp_path, segments=4, batches=100)
    rows, used = fresh.read(columns=["value"])
    assert len(rows) == fresh.records
    assert used.requests == 4 + 4  # their indexes, too


def test_a_half_of_a_segment_is_one_request(four):
    four.read(filter=between(150, 850))  # what it takes to plan
    rows, used = four.read(filter=between(150, 850))
    assert (len(rows), used.requests) == (700, 1)
    assert used.received_bytes <= 0.75 * four.log_bytes / 4


@pytest.mark.parametrize(
    "where", [between(155, 855), (offset >= 155) & (offset < 855)], ids=["time", "offset"]
)
def test_counting_a_half_of_a_segment_reads_the_spans_at_its_ends(four, where):
    four.read(columns=[], filter=where)
    before = four.usage()
    assert dataset("t", store=four.url, tier="cold").count_rows(filter=where) == 700
    used = four.usage()
    assert used.requests - before.requests == 2
    assert used.received_bytes - before.received_bytes <= 0.02 * four.log_bytes


def test_offsets_are_told_by_the_chunk_table_alone(four):
    four.read(columns=[])
    rows, used = four.read(columns=["offset", "partition"])
    assert rows["offset"].to_pylist() == list(range(four.records))
    assert used == Usage()
    rows, used = four.read(columns=["offset"], filter=between(155, 855))
    assert rows["offset"].to_pylist() == list(range(155, 855))
    assert used.received_bytes <= 0.02 * four.log_bytes


def test_segments_that_cannot_match_cost_no_request(tmp_path):
    many = put_small(tmp_path, segments=120, batches=1, value_bytes=100)
    rows, used = many.read(filter=between(603, 605))
    assert rows["offset"].to_pylist() == [603, 604]
    assert used.requests == 2


@pytest.mark.parametrize("spans", ["as uploaded", "none", "damaged"])
def test_records_in_any_order_are_read_by_any_filter(tmp_path, monkeypatch, spans):
    stamps = random.Random(3).choices(range(1000), k=800)
    if spans == "none":  # as in what was uploaded before there were any
        monkeypatch.setattr(segment_check, "SPANS", 1)
    topic = put_small(tmp_path, segments=2, batches=40, stamp=lambda n: stamps[n] * STEP_MS)
    bundles = sorted((tmp_path / "bucket").rglob("*.indexes"))
    sections = [
        parse_directory(one.read_bytes(), file="f").section(SectionKind.SPANS) for one in bundles
    ]
    assert [section is not None for section in sections] == [spans != "none"] * 2
    if spans == "damaged":
        for one, section in zip(bundles, sections, strict=True):
            flip(one, section.position + 40)
    dice = random.Random(4)
    for _ in range(8):
        first, end = sorted(dice.choices(range(1000), k=2))
        low, high = sorted(dice.choices(range(800), k=2))
        where = between(first, end) & (offset >= low) & (offset < high)
        expected = [n for n in range(low, high) if first <= stamps[n] < end]
        rows, _ = topic.read(filter=where)
        assert rows["offset"].to_pylist() == expected
        found = dataset("t", store=topic.url, tier="cold").count_rows(filter=where)
        assert found == len(expected)
