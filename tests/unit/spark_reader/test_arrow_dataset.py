import pickle
import random
import subprocess
import sys
import threading
from contextlib import closing
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pytest

from tests.fakes.bucket import put_partition, put_topic
from tests.fakes.cold_segments import FIXTURES, SegmentFiles, write_segment
from tierlog.client.records import decode_fetched
from tierlog.object_store.folder import FolderStore
from tierlog.object_store.open import open_store
from tierlog.record_format.decode import Record
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import ConfigurationError, InvalidOption
from tierlog.record_format.record_walk import I64_MAX, RowFilter
from tierlog.spark_reader.arrow_dataset import TopicDataset, dataset, read_arrow
from tierlog.spark_reader.filter_bounds import bounds_of, columns_of, keys_of
from tierlog.spark_reader.split_reader import read_in_order
from tierlog.spark_reader.splits import DataLoss


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    url = f"file://{tmp_path_factory.mktemp('bucket')}"
    put_topic(open_store(url), "many", {0: "many-segments-0", 1: "codec-lz4-0"})
    return url


def test_reads_a_topic_from_the_bucket_in_order(url):
    table = read_arrow("many", store=url, tier="cold").read_all()
    assert table.column_names == [
        *("partition", "offset", "timestamp", "key", "value", "topic", "timestampType")
    ]
    with_headers = read_arrow("many", store=url, tier="cold", includeHeaders=True)
    assert with_headers.schema.names == [*table.column_names, "headers"]
    places = list(zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True))
    assert places == [(0, n) for n in range(177)] + [(1, n) for n in range(260)]


def test_a_count_of_what_is_in_memory_takes_no_thread_and_no_request(url, monkeypatch):
    rows = dataset("many", store=url, tier="cold")
    assert rows.count_rows() == 437

    def refuse(*_, **__):
        raise AssertionError("a count needs neither")

    monkeypatch.setattr("threading.Thread.start", refuse)
    for call in ("get", "get_range", "head", "list"):
        monkeypatch.setattr(FolderStore, call, refuse)
    assert rows.count_rows() == 437
    assert rows.count_rows(pc.field("partition") == 1) == 260


def test_accepts_the_options_of_the_spark_source(url):
    reader = read_arrow(
        ["many"],
        store=url,
        tier="cold",
        columns=["offset"],
        startingOffsets={"many": {"0": 100, "1": 250}},
        endingOffsets={"many": {"0": 110}},
        splitBytes=4096,
        failOnDataLoss=True,
    )
    offsets = [*range(100, 110), *range(250, 260)]
    assert reader.read_all()["offset"].to_pylist() == offsets
    epoch = datetime.fromtimestamp(0, UTC)
    for times in (
        {"startingTimestamp": epoch},
        {"startingOffsetsByTimestamp": {"many": {"0": epoch, "1": epoch}}},
    ):
        assert (
            read_arrow("many", store=url, tier="cold", tokenFile=Path("t"), **times)
            .read_all()
            .num_rows
            == 437
        )
    given = {"pin": None, "region": None, "startingTimestamp": None}
    assert read_arrow("many", store=url, tier="cold", **given).read_all().num_rows == 437
    with pytest.raises(InvalidOption, match=r"startingTimestamp: 1970-.* needs a UTC offset"):
        read_arrow("many", store=url, tier="cold", startingTimestamp=epoch.replace(tzinfo=None))
    with pytest.raises(InvalidOption, match="did you mean startingOffsets"):
        read_arrow("many", store=url, tier="cold", startingOffset=1)
    with pytest.raises(InvalidOption, match="there is no option 'limit'"):
        read_arrow("many", store=url, tier="cold", limit=10)
    read_arrow("many", store=url, tier="cold", **{"kafka.group.id": "a", "groupIdPrefix": "b"})
    with pytest.raises(InvalidOption, match="columns offsets; the columns are key"):
        read_arrow("many", store=url, tier="cold", columns="offsets")


def test_options_may_have_numpys_numbers(url):
    starts = {"many": {"0": np.int64(100), "1": np.int32(250)}}
    bounds = {"startingOffsets": starts, "splitBytes": np.int64(4096)}
    assert read_arrow("many", store=url, tier="cold", **bounds).read_all().num_rows == 87


ENDLESS = {}
ENDLESS["many"] = ENDLESS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"startingOffsets": ENDLESS}, "option startingOffsets: cannot be written as JSON"),
        ({"minPartitions": 10**5000}, "option minPartitions: cannot be written as JSON"),
        ({"startingTimestamp": date(2020, 1, 1)}, "option startingTimestamp: .* is a date"),
        ({"startingOffsets": {"many": {1, 2}}}, "option startingOffsets: .* is a set"),
        ({"columns": ["value", "offset", "value"]}, "requested twice: value, offset, value"),
    ],
)
def test_unusable_arguments_are_refused_by_name(url, arguments, message):
    with pytest.raises(InvalidOption, match=message):
        read_arrow("many", store=url, tier="cold", **arguments)


def test_store_may_be_a_path_and_columns_one_name(url):
    folder = Path(url.removeprefix("file://"))
    assert read_arrow(
        "many", store=folder, tier="cold", columns="offset"
    ).read_all().column_names == ["offset"]
    with pytest.raises(ConfigurationError, match=f"write this folder as file://{folder}"):
        read_arrow("many", store=str(folder), tier="cold")


def test_reading_without_the_tail_must_be_requested(url):
    with pytest.raises(InvalidOption, match=r"option server: required.* set tier=cold"):
        read_arrow("many", store=url)
    with pytest.raises(InvalidOption, match="option server or store"):
        read_arrow("many")


COUNT = """
import sys, tierlog
print(tierlog.dataset("many", store=sys.argv[1], tier="cold").count_rows())
print(*sorted({"pyspark", "numba", "boto3", "httpx2", "structlog"}.intersection(sys.modules)))
"""


def test_a_count_loads_no_kernels_and_no_pyspark(url):
    completed = subprocess.run(
        [sys.executable, "-c", COUNT, url], capture_output=True, text=True, check=True, timeout=60
    )
    assert completed.stdout.split() == ["437"]


def test_concurrent_readers_do_not_share_buffers(tmp_path):
    """As when DuckDB joins two: a chunk holds more rows than one Arrow batch."""
    url = f"file://{tmp_path / 'bucket'}"
    store, values = open_store(url), {}
    for seed, topic in enumerate(("a", "b")):
        put_topic(store, topic, {0: "empty-0"})
        written = write_segment(
            tmp_path / topic, batches=5, records=20_000, value_bytes=4, seed=seed
        )
        put_partition(store, topic, 0, [written.files], chunk_bytes=8 << 20)
        values[topic] = [record.value for record in decode_fetched(written.body, Record).records]
    a, b = (read_arrow(topic, store=url, tier="cold", columns="value") for topic in values)
    first = {"a": a.read_next_batch(), "b": b.read_next_batch()}
    for topic, reader in (("a", a), ("b", b)):
        read = [*first[topic].column(0), *reader.read_all().column(0)]
        assert [value.as_py() for value in read] == values[topic]


# --- as a dataset ---------------------------------------------------------------------------------

offset, partition, time, key = map(pc.field, ("offset", "partition", "timestamp", "key"))
DAY_ONE = datetime(2026, 6, 1, tzinfo=UTC)
HOUR = timedelta(hours=1)


@pytest.fixture
def many(url):
    return dataset("many", store=url, tier="cold", includeHeaders=True)


def at(hours, minutes=0):
    moment = DAY_ONE + timedelta(hours=hours, minutes=minutes)
    return pa.scalar(moment, pa.timestamp("us", "UTC"))


def write_day(folder, day):
    """A segment of 24 batches, one an hour, each a chunk of 4 KiB, with a key of its own."""
    body, first = bytearray(), day * 48
    for hour in range(24):
        stamps = [
            int((DAY_ONE + day * 24 * HOUR + hour * HOUR).timestamp() * 1000) + n for n in (0, 9)
        ]
        values = [bytes([hour]) * 2048] * 2
        body += encode_batch(
            values,
            keys=[b"%d-%d" % (day, hour), None],
            timestamps=stamps,
            base_offset=first + hour * 2,
            leader_epoch=0,
        )
    folder.mkdir(exist_ok=True)
    log = folder / f"{first:020d}.log"
    log.write_bytes(body)
    for suffix in (".index", ".timeindex"):
        log.with_suffix(suffix).write_bytes(b"")
    return SegmentFiles(
        first, first + 47, log, log.with_suffix(".index"), log.with_suffix(".timeindex")
    )


def test_an_hour_of_thirty_days_reads_the_chunks_that_it_overlaps(tmp_path):
    url = f"file://{tmp_path / 'bucket'}"
    put_topic(open_store(url), "hourly", {0: "many-segments-0"})
    days = [write_day(tmp_path / "log", day) for day in range(30)]
    put_partition(open_store(url), "hourly", 1, days)
    hourly = dataset("hourly", store=url, tier="cold", startingOffsets={"hourly": {"0": 177}})
    whole = hourly.scanner().planned_bytes
    where = (time >= at(24 * 9 + 7)) & (time < at(24 * 9 + 8))
    assert hourly.to_table(filter=where)["offset"].to_pylist() == [9 * 48 + 14, 9 * 48 + 15]
    assert hourly.scanner(filter=where).planned_bytes <= 2 * whole / (30 * 24)
    assert hourly.scanner(filter=where & (partition == 0)).planned_bytes == 0


@pytest.mark.parametrize(
    ("where", "offsets"),
    [
        (key == b"9-7", [446]),
        (key.isin([b"0-0", b"29-23", b"no such key"]), [0, 29 * 48 + 46]),
        ((key == b"9-7") | ((key == b"9-8") & (offset > 440)), [446, 448]),
        ((key == b"9-7") & (partition == 0), []),
    ],
    ids=str,
)
def test_of_a_few_keys_only_the_chunks_that_have_them_are_read(
    tmp_path, monkeypatch, where, offsets
):
    url = f"file://{tmp_path / 'bucket'}"
    put_topic(open_store(url), "keyed", {0: "many-segments-0"})
    put_partition(open_store(url), "keyed", 1, [write_day(tmp_path / "log", n) for n in range(30)])
    keyed = dataset("keyed", store=url, tier="cold", startingOffsets={"keyed": {"0": 177}})
    whole, gets, get_range = keyed.scanner().planned_bytes, [], FolderStore.get_range

    def counting(store, name, *bounds, **into):
        gets.append(name)
        return get_range(store, name, *bounds, **into)

    keyed = dataset("keyed", store=url, tier="cold", startingOffsets={"keyed": {"0": 177}})
    monkeypatch.setattr(FolderStore, "get_range", counting)
    planned_bytes = keyed.scanner(filter=where).planned_bytes
    assert planned_bytes <= (len(offsets) + 15) * whole / (30 * 24)  # one in a hundred seems to
    assert keyed.to_table(filter=where)["offset"].to_pylist() == offsets
    assert len([one for one in gets if one.endswith(".indexes")]) <= 30


@pytest.mark.parametrize(
    ("where", "keys"),
    [
        (key == b"AB", {b"AB"}),
        (key == b"", {b""}),
        (key == b'\x00"\n', {b'\x00"\n'}),
        ((key == b"a") | (key == b"b"), {b"a", b"b"}),
        ((key == b"a") & (offset > 5), {b"a"}),
        ((key == b"a") & (pc.field("topic") == "ABBA"), {b"a", b"\xab\xba"}),
        (key.isin([b"a", b"b"]), {b"a", b"b"}),
        (key.isin([b"a", None]), None),
        ((key == b"a") | (offset == 5), None),
        (key != b"a", None),
        (key > b"a", None),
        (key.cast(pa.string()) == "61", None),
        (pc.field("value") == b"a", None),
        (key == pc.field("value"), None),
        (key.isin([b"%d" % n for n in range(100)]), None),
        (pc.field("topic") == "ABBA", None),
    ],
    ids=lambda one: str(sorted(one) if isinstance(one, set) else one),  # in each process the same
)
def test_the_keys_of_a_filter_are_those_of_which_alone_it_can_be_true(where, keys):
    assert keys_of(where) == keys


FIXTURE_TOPICS = sorted(
    one.name for one in FIXTURES.iterdir() if any(log.stat().st_size for log in one.glob("*.log"))
)


@pytest.mark.parametrize("isolation", ["read_committed", "read_uncommitted"])
@pytest.mark.parametrize("name", FIXTURE_TOPICS)
def test_counts_are_those_of_the_rows_whatever_is_counted(tmp_path, name, isolation):
    url = f"file://{tmp_path}"
    put_topic(open_store(url), "counted", {0: name})
    counted = dataset("counted", store=url, tier="cold", isolationLevel=isolation)
    every, dice = counted.to_table(columns=["offset", "timestamp"]), random.Random(name)
    offsets, times = every["offset"].to_pylist() or [0], every["timestamp"].to_pylist()
    assert counted.count_rows() == every.num_rows
    assert counted.to_table(columns=["offset"]) == every.select(["offset"])
    for _ in range(5):
        low, high = sorted(dice.choices([0, *offsets, offsets[-1] + 1], k=2))
        where = (offset >= low) & (offset < high)
        if times and dice.random() < 0.5:
            where &= (time >= dice.choice(times)) & (time <= max(times))
        assert counted.count_rows(where) == every.filter(where).num_rows, where
    start = offsets[len(offsets) // 2]
    trimmed = dataset(
        "counted",
        store=url,
        tier="cold",
        isolationLevel=isolation,
        startingOffsets={"counted": {"0": start}},
    )
    assert trimmed.count_rows() == every.filter(offset >= start).num_rows


def test_what_chunk_tables_tell_is_counted_without_a_byte_of_the_log(tmp_path):
    url = f"file://{tmp_path}"
    put_topic(open_store(url), "gone", {0: "many-segments-0", 1: "compacted-codec-0"})
    topic = dataset("gone", store=url, tier="cold")
    per_partition = topic.to_table(columns=["partition"])
    inside = [(offset >= 0) & offset.is_valid(), partition.isin([0, 1]), time >= at(-(10**5))]
    counts = [topic.count_rows(where) for where in inside]
    for log in tmp_path.rglob("*.log"):
        log.unlink()
    assert topic.to_table(columns=["partition"]) == per_partition
    assert [topic.count_rows(where) for where in inside] == counts == [topic.count_rows()] * 3
    assert topic.scanner(columns=["topic"]).planned_bytes == 0
    with pytest.raises(DataLoss):
        topic.count_rows(offset == 7)
    assert topic.count_rows(partition == 0) == 177


def test_every_scan_of_a_dataset_has_the_same_rows(url, many):
    assert isinstance(many, ds.Dataset)
    expected = read_arrow("many", store=url, tier="cold", includeHeaders=True).read_all()
    assert many.schema == expected.schema
    for _ in range(2):
        assert many.to_table() == expected
        assert pa.Table.from_batches(many.to_batches(), many.schema) == expected
    assert many.count_rows() == 437
    assert many.head(3) == expected.slice(0, 3)
    assert "headers" not in dataset("many", store=url, tier="cold").schema.names


FILTERS = [
    offset == 100,
    (offset >= 90) & (offset < 120) & (partition == 0),
    offset.isin([0, 176, 259]),
    (partition == 1) | (offset < 3),
    ~(offset > 20),
    offset + 1 > 250,
    (offset > 5) & (offset < 3),
    pc.field("topic") == "another",
    pc.field("key").is_null(),
    (pc.field("key") > b"k") & (offset > 10),
    pc.field("key") == b"key-3",
    pc.field("key").isin([b"key-3", b"k1"]) | (offset == 5),
    pc.field("headers").is_valid(),
    time > datetime(2023, 11, 14, 22, 30, tzinfo=UTC),
    time.cast(pa.timestamp("us", "Europe/Berlin")).cast(pa.string()) > "2023-11-14 23:30",
    pc.scalar(False),
]


@pytest.mark.parametrize("where", FILTERS, ids=str)
def test_a_filter_finds_what_arrow_finds_in_all_rows(many, where):
    every = many.to_table()
    expected = every.filter(where)
    assert many.to_table(filter=where) == expected
    for columns in (["value"], ["offset", "key"], []):
        assert many.to_table(columns=columns, filter=where) == expected.select(columns)
    assert many.count_rows(filter=where) == expected.num_rows
    assert many.filter(where).filter(offset > 7).to_table() == expected.filter(offset > 7)


def test_columns_may_be_computed(many):
    found = many.to_table(columns={"size": pc.binary_length(pc.field("value")), "at": offset})
    every = many.to_table()
    assert found["size"].to_pylist() == pc.binary_length(every["value"]).to_pylist()
    assert found["at"].to_pylist() == every["offset"].to_pylist()


@pytest.mark.parametrize(
    ("where", "bounds"),
    [
        (offset == 5, (5, 6)),
        ((offset > 5) & (offset < 9), (6, 9)),
        (offset.isin([3, 9]), (3, 10)),
        ((offset > 5) | (partition == 1), (0, I64_MAX)),
        (pc.field("key") == b"a", (0, I64_MAX)),
        ((time >= at(1)) & (time < at(2)), (0, I64_MAX, 1780275600000, 1780279199999)),
        (
            time == pa.scalar(1_500, pa.timestamp("us")).cast(pa.timestamp("us", "UTC")),
            (0, I64_MAX, 2, 1),
        ),
        (offset + 1 == 5, (0, I64_MAX)),
    ],
    ids=str,
)
def test_bounds_are_those_of_arrows_own_simplification(where, bounds):
    assert bounds_of(where) == RowFilter(*bounds)


def test_the_bounds_of_any_filter_hold_all_that_it_finds(many):
    every, seed = (
        many.to_table(columns=["partition", "offset", "timestamp"]),
        random.randrange(2**32),
    )
    dice = random.Random(seed)
    times = every["timestamp"].to_pylist()

    def condition(depth):
        if depth and dice.random() < 0.7:
            one, two = condition(depth - 1), condition(depth - 1)
            return dice.choice([one & two, one | two, ~one & two])
        field, value = dice.choice(
            [
                (offset, dice.randrange(270)),
                (time, dice.choice(times)),
                (partition, dice.randrange(3)),
            ]
        )
        return dice.choice([field < value, field <= value, field == value, field >= value])

    for _ in range(50):
        where = condition(3)
        columns = ["partition", "offset", "timestamp"]
        found = many.to_table(columns=columns, filter=where)
        assert found == every.filter(where), f"seed {seed}: {where}"


def test_columns_are_named_rather_than_counted(many):
    assert columns_of((offset > 1) & pc.field("key").is_null()) == ["key", "offset"]
    with pytest.raises(InvalidOption, match="name columns, rather than their positions"):
        many.to_table(filter=pc.field(4) > 1)
    with pytest.raises(InvalidOption, match="unknown columns offsets; the columns are key"):
        many.to_table(columns=["offsets"])
    with pytest.raises(pa.ArrowInvalid, match="No match for FieldRef"):
        many.to_table(filter=pc.field("offsets") > 1)


def test_a_dataset_may_be_sent_to_another_process(many):
    copy = pickle.loads(pickle.dumps(many.filter(offset < 9)))
    assert isinstance(copy, TopicDataset)
    assert copy.to_table() == many.to_table(filter=offset < 9)


def test_what_arrow_would_do_without_the_rows_is_refused(many):
    for call in (many.get_fragments, lambda: many.join(many, "key"), lambda: many.sort_by("key")):
        with pytest.raises(NotImplementedError, match=r"use scanner\(\)"):
            call()


@pytest.fixture
def planned(monkeypatch):
    """How many bytes each scan was planned for."""
    calls, scanner = [], TopicDataset.scanner

    def note(self, *given, **named):
        scan = scanner(self, *given, **named)
        calls.append(scan.planned_bytes)
        return scan

    monkeypatch.setattr(TopicDataset, "scanner", note)
    return calls


def test_duckdb_queries_it_again_and_again_and_reads_what_the_query_needs(many, planned):
    duckdb = pytest.importorskip("duckdb")
    with duckdb.connect() as connection:
        for _ in range(2):
            found = connection.sql(
                'select partition, max("offset") from many group by 1 order by 1'
            )
            assert found.fetchall() == [(0, 176), (1, 259)]
        whole = many.scanner().planned_bytes
        ranged = 'select count(*), min("offset") from many where "offset" between 3 and 9'
        assert connection.sql(ranged).fetchall() == [(14, 3)]
        assert planned[-1] < whole / 10
        timed = "select count(*) from many where timestamp < timestamptz '2000-01-01 00:00:00+00'"
        assert connection.sql(timed).fetchall() == [(0,)]
        assert planned[-1] == 0
        pairs = 'select count(*) from many a join many b using (topic, partition, "offset")'
        assert connection.sql(pairs).fetchall() == [(437,)]


def test_polars_scans_it_lazily(many, planned):
    polars = pytest.importorskip("polars")
    lazy = polars.scan_pyarrow_dataset(many)
    chosen = lazy.filter(polars.col("offset") < 5).select("offset", "value")
    for _ in range(2):
        assert chosen.collect()["offset"].to_list() == [*range(5), *range(5)]
    assert planned[-1] < many.scanner().planned_bytes / 10
    assert lazy.head(3).collect().height == 3
    assert lazy.collect().height == 437


# --- several splits at once -----------------------------------------------------------------------


class Splits:
    """A reader whose splits have `batches` record batches of a mebibyte; it counts those alive."""

    def __init__(self, batches):
        self._batches, self.made = batches, []

    def read_split(self, split):
        for number in range(self._batches):
            column = pa.array(np.full(1 << 17, split * self._batches + number))
            self.made.append(split)
            yield pa.record_batch({"n": column})


def test_splits_are_read_at_once_and_their_rows_come_in_order():
    both_begun, begun = threading.Event(), set()

    class Two(Splits):
        def read_split(self, split):
            begun.add(split)
            if len(begun) == 2:
                both_begun.set()
            assert both_begun.wait(60)  # each of the first two waits for the other
            yield from super().read_split(split)

    found = read_in_order(Two(3), range(5), threads=2, readahead_bytes=64 << 20)
    assert [batch.column(0)[0].as_py() for batch in found] == list(range(15))


@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_read_ahead_is_bounded_by_its_bytes(threads):
    reader = Splits(40)
    rows, given = read_in_order(reader, range(9), threads=threads, readahead_bytes=12 << 20), 0
    for batch in rows:
        given += 1
        assert len(reader.made) - given <= 12 + 2 * threads
        assert batch.num_rows == 1 << 17
    assert given == len(reader.made) == 9 * 40


def test_an_error_comes_after_the_rows_before_it_and_a_reader_that_is_left_reads_no_further():
    class Broken(Splits):
        def read_split(self, split):
            if split == 2:
                raise DataLoss("gone")
            yield from super().read_split(split)

    rows = read_in_order(Broken(4), range(9), threads=3, readahead_bytes=64 << 20)
    assert [next(rows).column(0)[0].as_py() for _ in range(8)] == list(range(8))
    with pytest.raises(DataLoss, match="gone"):
        next(rows)
    reader = Splits(4)
    with closing(read_in_order(reader, range(9), threads=2, readahead_bytes=1 << 20)) as rows:
        next(rows)
    assert len(reader.made) <= 2 * 4


def test_the_number_of_threads_changes_no_row(url):
    for threads in (1, 2, 7):
        given = {"store": url, "tier": "cold", "splitBytes": "16k"}
        at_once = dataset("many", threads=threads, readahead_bytes=10_000, **given)
        assert at_once.to_table() == read_arrow("many", **given).read_all()
        assert at_once.head(5, use_threads=False)["offset"].to_pylist() == list(range(5))
    for wrong in ({"threads": 0}, {"readahead_bytes": 0}):
        with pytest.raises(InvalidOption, match=r"are at least 1: threads .*, readahead_bytes"):
            dataset("many", store=url, tier="cold", **wrong)
