"""`tierlog sql` over a bucket without a broker, and over both tiers of one."""

import json
import re

import pytest

from tests.fakes.bucket import put_topic
from tierlog.object_store.open import open_store

pytest.importorskip("duckdb")


@pytest.fixture(scope="module")
def bucket(tmp_path_factory):
    url = f"file://{tmp_path_factory.mktemp('sql') / 'bucket'}"
    put_topic(open_store(url), "many", {0: "many-segments-0", 1: "codec-lz4-0"})
    put_topic(open_store(url), "with-dash", {0: "codec-lz4-0"})
    return url


def rows_of(output):
    return [json.loads(line) for line in output.splitlines()]


def test_topics_are_tables(offline, bucket):
    def rows(query, *more):
        return rows_of(offline.ok("sql", "--store", bucket, query, *more))

    grouped = (
        'select partition, count(*) as n, max("offset") as last from many group by 1 order by 1'
    )
    assert rows(grouped) == [
        {"partition": 0, "n": 177, "last": 176},
        {"partition": 1, "n": 260, "last": 259},
    ]
    joined = 'select count(*) as n from many join "with-dash" using (partition, "offset")'
    assert rows(joined) == [{"n": 177}]
    assert rows("with one as (select 1 as a) select * from one") == [{"a": 1}]
    assert rows("select sum(size) as s from (select 1::hugeint << 70 as size)") == [{"s": 2**70}]
    assert len(rows("from many", "--option", 'endingOffsets={"many": {"0": 5, "1": 2}}')) == 7


def test_values_are_text_where_they_are_and_escapes_where_not(offline, bucket):
    query = (
        r"select 'a'::blob as text, '\xFF\x00'::blob as bytes, "
        "['b'::blob] as list, 'nan'::float as nan"
    )
    assert rows_of(offline.ok("sql", "--store", bucket, query)) == [
        {"text": "a", "bytes": "\\xff\x00", "list": ["b"], "nan": None}
    ]


def test_files_are_read_and_written_beside_topics(offline, bucket, tmp_path):
    file = tmp_path / "many.parquet"
    query = f"copy (select partition, \"offset\", value from many) to '{file}'"
    assert rows_of(offline.ok("sql", "--store", bucket, query)) == [{"Count": 437}]
    query = f"select count(*) as n from many join '{file}' using (partition, \"offset\")"
    assert rows_of(offline.ok("sql", "--store", bucket, query)) == [{"n": 437}]


@pytest.mark.parametrize(
    ("code", "query", "more", "message"),
    [
        (1, "select * from nope", (), "there is no topic 'nope'"),
        (1, "selec 1", (), 'Parser Error: syntax error at or near "selec"'),
        (1, "select 1; select 2", (), "there are 2 statements"),
        (1, "select nope from many", (), '"nope" not found'),
        (1, "select * from many, other.many", (), "Catalog Error"),
        (1, "select max(value) from many", ("--max-bytes", "100k"), r"reads 590.2 KiB .* 97.7 KiB"),
        (2, "select 1", ("--max-bytes", "much"), "'much' is not a size"),
        (1, "from many", ("--option", "startingOffset=1"), "did you mean startingOffsets"),
        (2, "from many", ("--from-time", "soon"), "--from-time: 'soon' is not a time"),
        (
            2,
            "from many",
            ("--from-time", "2", "--to-time", "1"),
            r"--from-time \(2 ms\) is later than --to",
        ),
        (1, "from many", ("--from-time", "-2"), "--from-time: '-2' is not a time"),
        (1, "from many", ("--server", "http://u:p@h"), "--server: the address .not shown"),
        (1, "from many", ("--s3-endpoint", "here"), "--s3-endpoint: 'here' is not a URL"),
        (1, "from many", ("--option", "startingTimestamp=x"), "--option startingTimestamp: 'x' is"),
        (1, "from many", ("--option", "tier=all"), "--server: required.* or set tier=cold"),
        (1, "from many", ("--option", "pin=june"), "--option pin: many-0 has no pin 'june'"),
    ],
)
def test_what_cannot_be_queried_is_said_in_one_line(offline, bucket, code, query, more, message):
    found = offline.fails(code, "sql", "--store", bucket, query, *more)
    assert re.search(message, found), found


def test_a_time_may_be_a_duration_ago_as_in_other_commands(offline, bucket):
    query = "select count(*) as n from many"
    assert rows_of(offline.ok("sql", "--store", bucket, "--from-time", "1h", query)) == [{"n": 0}]
    assert rows_of(offline.ok("sql", "--store", bucket, "--to-time", "1h", query)) == [{"n": 437}]


def test_a_filter_keeps_a_query_below_its_limit(offline, bucket):
    query = 'select max("offset") as n from many where "offset" < 3'
    assert rows_of(offline.ok("sql", "--store", bucket, "--max-bytes", "100k", query)) == [{"n": 2}]


def test_a_count_of_whole_partitions_reads_no_records(offline, bucket):
    def rows(query):
        return rows_of(offline.ok("sql", "--store", bucket, "--max-bytes", "0", query))

    per_partition = "select partition, count(*) as n from many where topic = 'many' group by all"
    assert rows(f"{per_partition} order by 1") == [
        {"partition": 0, "n": 177},
        {"partition": 1, "n": 260},
    ]
    assert rows("select count(*) as n from many") == [{"n": 437}]
    ever = "timestamp between '1970-01-01' and '2100-01-01' and \"offset\" >= 0"
    assert rows(f"select count(*) as n from many where {ever}") == [{"n": 437}]


def test_without_a_broker_the_tail_is_left_out_and_with_one_it_is_not(tierlog, broker):
    tierlog.ok("topic", "create", "tiers")
    tierlog.ok("produce", "tiers", stdin=b"cold\n")
    tierlog.ok("storage", "offload", "tiers")
    tierlog.ok("produce", "tiers", stdin=b"hot\n")
    query = 'select decode(value) as value from tiers order by "offset"'
    store = f"file://{broker.folder / '.tierlog/bucket'}"
    both = rows_of(tierlog.ok("sql", "--store", store, query))
    assert both == [{"value": "cold"}, {"value": "hot"}]
