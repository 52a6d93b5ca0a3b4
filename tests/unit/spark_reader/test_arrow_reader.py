import subprocess
import sys
from datetime import UTC, date, datetime
from pathlib import Path

import numpy as np
import pytest

from tests.fakes.bucket import put_partition, put_topic
from tests.fakes.cold_segments import write_segment
from tierlog.client.records import decode_fetched
from tierlog.object_store.open import open_store
from tierlog.record_format.decode import Record
from tierlog.record_format.errors import ConfigurationError, InvalidOption
from tierlog.spark_reader.arrow_reader import read_arrow


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    url = f"file://{tmp_path_factory.mktemp('bucket')}"
    put_topic(open_store(url), "many", {0: "many-segments-0", 1: "codec-lz4-0"})
    return url


def test_reads_a_topic_from_the_bucket_in_order(url):
    table = read_arrow("many", store=url, tier="cold").read_all()
    assert table.column_names == [
        *("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")
    ]
    with_headers = read_arrow("many", store=url, tier="cold", includeHeaders=True)
    assert with_headers.schema.names == [*table.column_names, "headers"]
    places = list(zip(table["partition"].to_pylist(), table["offset"].to_pylist(), strict=True))
    assert places == [(0, n) for n in range(177)] + [(1, n) for n in range(260)]


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


def test_needs_no_pyspark():
    code = "import sys, tierlog.spark_reader.arrow_reader; print('pyspark' in sys.modules)"
    completed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert completed.stdout.strip() == "False"


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
