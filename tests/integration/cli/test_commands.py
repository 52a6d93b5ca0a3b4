"""The command line as people and scripts use it, against a broker in its own process."""

import contextlib
import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from array import array
from datetime import UTC, datetime
from pathlib import Path
from termios import FIONREAD

import pytest

from tests.fakes.broker_process import BrokerProcess
from tests.fakes.command_line import Program, Terminal
from tests.fakes.forked import Forked
from tests.fakes.served_broker import served_broker
from tests.fakes.waiting import until
from tierlog.client.client import Client
from tierlog.client.wire import Limits

SMALL = ("--config", "segment.bytes=16384", "--config", "local.retention.bytes=16384")


def lines_of(output: bytes) -> list[bytes]:
    return output.splitlines()


HALF = b'{"value": 1}\n{"val'  # one valid record, then a truncated one


def test_topics_are_created_listed_described_altered_and_deleted(tierlog):
    created = json.loads(tierlog.ok("topic", "create", "t1", "--partitions", "2"))
    assert [partition["partition"] for partition in created["partitions"]] == [0, 1]
    listed = json.loads(tierlog.ok("topic", "list", "--prefix", "t1"))
    assert listed["topics"] == [
        {
            "name": "t1",
            "topic_id": created["topic_id"],
            "partitions": 2,
            "config": {},
            "replication_factor": 1,
        }
    ]
    altered = json.loads(tierlog.ok("topic", "alter", "t1", "--config", "retention.ms=5000000"))
    assert altered["config"] == {"retention.ms": 5000000}
    altered = json.loads(tierlog.ok("topic", "alter", "t1", "--unset", "retention.ms"))
    assert altered["config"] == {}
    assert (
        len(json.loads(tierlog.ok("topic", "alter", "t1", "--partitions", "3"))["partitions"]) == 3
    )
    tierlog.ok("topic", "alter", "t1", "--config", "remote.storage.enable=false")
    for command in (("list",), ("describe", "t1")):
        assert b"false" in tierlog.ok("topic", *command, "--output", "text"), (
            "spelled as --config takes it"
        )
    settings = ("--config", "retention.ms=7d", "--config", "retention.bytes=unlimited")
    altered = json.loads(tierlog.ok("topic", "alter", "t1", *settings))
    assert altered["config"]["retention.ms"] == 604_800_000
    shown = tierlog.ok("topic", "describe", "t1", "--output", "text").decode()
    assert "high watermark" in shown
    assert re.search(r"retention.ms +7 d\n", shown), shown
    assert re.search(r"retention.bytes +unlimited\n", shown), shown
    assert "as in 90s" in tierlog.fails(2, "topic", "alter", "t1", "--config", "segment.ms=1 week")
    assert "--yes" in tierlog.fails(2, "topic", "delete", "t1")
    code, shown = tierlog.answer_prompt("n", "topic", "delete", "t1")
    assert (code, "nothing was deleted" in shown) == (1, True)
    assert "this deletes all records of t1, hot and cold. Continue? [y/N]" in shown
    tierlog.ok("topic", "describe", "t1")
    assert tierlog.answer_prompt("y", "topic", "delete", "t1")[0] == 0
    assert "no topic 't1'" in tierlog.fails(1, "topic", "describe", "t1")


def test_lines_round_trip_including_invalid_utf8(tierlog):
    tierlog.ok("topic", "create", "lines")
    sent = [b"one", b"", b"\xff\xfe", "zwölf".encode()]
    report = json.loads(tierlog.ok("produce", "lines", stdin=b"\n".join(sent) + b"\n"))
    assert report["records"] == 4
    assert lines_of(tierlog.ok("consume", "lines")) == sent
    shown = [
        json.loads(line) for line in lines_of(tierlog.ok("consume", "lines", "--format", "json"))
    ]
    assert [record.get("value") for record in shown] == ["one", "", None, "zwölf"]
    assert shown[2]["value_base64"] == "//4="
    assert lines_of(tierlog.ok("consume", "lines", "--offset", "1", "-n", "2")) == sent[1:3]


def test_keys_decide_the_partition(tierlog):
    tierlog.ok("topic", "create", "keyed", "--partitions", "3")
    tierlog.ok("produce", "keyed", "--key-separator", ":", stdin=b"a:1\nb:2\na:3\nb:4\n")
    shown = [
        json.loads(line) for line in lines_of(tierlog.ok("consume", "keyed", "--format", "json"))
    ]
    by_key = {}
    for record in shown:
        by_key.setdefault(record["key"], []).append((record["partition"], record["value"]))
    assert {key: [v for _, v in found] for key, found in by_key.items()} == {
        "a": ["1", "3"],
        "b": ["2", "4"],
    }
    assert all(len({p for p, _ in found}) == 1 for found in by_key.values())
    error = tierlog.fails(1, "produce", "keyed", "--key-separator", ":", stdin=b"nothing\n")
    assert "line 1" in error


def test_csv_ndjson_and_envelope_inputs_become_records(tierlog, tmp_path):
    tierlog.ok("topic", "create", "formats")
    # With byte order marks, as spreadsheets and Windows write.
    (tmp_path / "rows.csv").write_text("name,city\nanna,Köln\nben,\n", "utf-8-sig")
    tierlog.ok("produce", "formats", tmp_path / "rows.csv")
    ndjson = '\ufeff{"a": 1.50}\n\n[1,\t2]\n'.encode()
    tierlog.ok("produce", "formats", "--format", "ndjson", stdin=ndjson)
    enveloped = {
        "key": "k",
        "value_base64": "/w==",
        "timestamp": "2024-01-01T00:00:00Z",
        "headers": {"h": "x"},
    }
    tierlog.ok("produce", "formats", "--format", "envelope", stdin=json.dumps(enveloped).encode())
    values = lines_of(tierlog.ok("consume", "formats"))
    assert values == [
        '{"name":"anna","city":"Köln"}'.encode(),
        b'{"name":"ben","city":null}',
        b'{"a": 1.50}',
        b"[1,\t2]",
        b"\xff",
    ]
    last = json.loads(tierlog.ok("consume", "formats", "--offset", "4", "--format", "json"))
    assert (last["key"], last["timestamp"]) == ("k", 1704067200000)
    assert last["headers"] == [{"name": "h", "value": "x"}]
    error = tierlog.fails(1, "produce", "formats", "--format", "ndjson", stdin=b"{}\n{broken\n")
    assert "line 2" in error


def test_csv_from_pandas_and_windows_is_accepted(tierlog):
    def produce(text: str):
        encoded = text.encode(errors="surrogateescape")
        return ("produce", "csv", "--format", "csv"), {"stdin": encoded}

    tierlog.ok("topic", "create", "csv")
    large = "x" * 200_000
    # pandas writes its index as an unnamed column; Windows ends lines with CR LF.
    arguments, kwargs = produce(f",a\r\n0,{large}\r\n")
    tierlog.ok(*arguments, **kwargs)
    assert lines_of(tierlog.ok("consume", "csv")) == [f'{{"":"0","a":"{large}"}}'.encode()]
    arguments, kwargs = produce("a;b\n1,5;2\n")
    tierlog.ok(*arguments, "--delimiter", ";", **kwargs)
    arguments, kwargs = produce("a\tb\n1\t2\n")
    tierlog.ok(*arguments, "--delimiter", r"\t", **kwargs)
    assert lines_of(tierlog.ok("consume", "csv", "--offset", "1")) == [
        b'{"a":"1,5","b":"2"}',
        b'{"a":"1","b":"2"}',
    ]
    for refused in ("", ";;", '"', "\n"):
        message = tierlog.fails(2, *arguments, "--delimiter", refused)
        assert (
            f"must be one character, neither a quote nor a line break, not {refused!r}" in message
        )
    assert "requires --format csv" in tierlog.fails(2, "produce", "csv", "--delimiter", ";")
    for text, expected in (
        ("a,b,a\n1,2,3\n", "more than one column is named 'a'"),
        (",a\n1,2,3\n", "line 2: more cells than the first row has columns"),
        ('a,b\n1,2\n"1"x,2\n', "line 3: ',' expected after"),
        ("\udce4,a\n1,2\n", "line 1: not UTF-8"),
        ("a\n1\n" + "\udce4\n" * 2, "line 3: not UTF-8"),
    ):
        arguments, kwargs = produce(text)
        assert expected in tierlog.fails(1, *arguments, **kwargs)


def test_key_column_sets_the_key(tierlog, tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "rows.csv").write_text("city,n\nKöln,1\n,2\n")
    table = {"n": [7, None], "b": [b"\xff", b"x"], "x": [0.5, 1.5]}
    pq.write_table(pa.table(table), tmp_path / "rows.parquet")
    tierlog.ok("topic", "create", "columns")
    for file, column in (("csv", "city"), ("parquet", "n"), ("parquet", "b")):
        tierlog.ok("produce", "columns", tmp_path / f"rows.{file}", "--key-column", column)
    found = tierlog.ok("consume", "columns", "--format", "json").splitlines()
    keys = [(record.get("key"), record.get("key_base64")) for record in map(json.loads, found)]
    assert [key for key, _ in keys] == ["Köln", None, "7", None, None, "x"]
    assert keys[4][1] == "/w=="
    parquet = (tmp_path / "rows.parquet", "--key-column")
    assert "no column 'N'" in tierlog.fails(1, "produce", "columns", *parquet, "N")
    assert "not float" in tierlog.fails(1, "produce", "columns", *parquet, "x")
    assert "requires --format csv or parquet" in tierlog.fails(
        2, "produce", "columns", "--key-column", "n"
    )


def test_parquet_rows_become_json(tierlog, tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"n": [1, 2], "x": [0.5, float("nan")], "s": ["a", None]}), file)
    tierlog.ok("topic", "create", "parquet")
    tierlog.ok("produce", "parquet", file)
    values = [json.loads(line) for line in lines_of(tierlog.ok("consume", "parquet"))]
    assert values == [{"n": 1, "x": 0.5, "s": "a"}, {"n": 2, "x": None, "s": None}]


def test_parquet_from_standard_input_is_refused_under_each_of_its_names(tierlog):
    for names in ((), ("-",), ("/dev/stdin",)):
        error = tierlog.fails(2, "produce", "any", *names, "--format", "parquet")
        assert "--format parquet needs a FILE" in error


def test_parquet_timestamps_become_iso_8601_or_a_one_line_error(tierlog, tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    tierlog.ok("topic", "create", "times")
    units = {unit: pa.array([0], pa.timestamp(unit, "UTC")) for unit in ("us", "ns")}
    pq.write_table(pa.table(units), tmp_path / "times.parquet")
    tierlog.ok("produce", "times", tmp_path / "times.parquet")
    (row,) = map(json.loads, lines_of(tierlog.ok("consume", "times")))
    assert {datetime.fromisoformat(text) for text in row.values()} == {
        datetime(1970, 1, 1, tzinfo=UTC)
    }
    assert all("T" in text for text in row.values()), "with pandas installed as well"
    pq.write_table(
        pa.table({"t": pa.array([10**18], pa.timestamp("ms"))}), tmp_path / "far.parquet"
    )
    error = tierlog.fails(1, "produce", "times", tmp_path / "far.parquet")
    assert "far.parquet: " in error
    mars = pa.table({"t": pa.array([0], pa.timestamp("us", "Mars/Olympus"))})
    pq.write_table(mars, tmp_path / "mars.parquet")
    error = tierlog.fails(1, "produce", "times", tmp_path / "mars.parquet")
    assert "time zone" in error
    assert "Mars/Olympus" in error


def test_batches_are_copied_between_topics_unchanged(tierlog):
    tierlog.ok("topic", "create", "from")
    tierlog.ok("topic", "create", "to")
    tierlog.ok("produce", "from", "--batch-records", "2", stdin=b"a\nb\nc\nd\ne\n")
    batches = tierlog.ok("consume", "from", "-p", "0", "--format", "batches")
    tierlog.ok("produce", "to", "-p", "0", "--format", "batches", stdin=batches)
    assert tierlog.ok("consume", "to", "-p", "0", "--format", "batches") == batches
    truncated = tierlog.run("produce", "to", "-p", "0", "--format", "batches", stdin=batches[:-1])
    assert truncated.returncode == 2
    progress, error = truncated.stderr.decode().splitlines()
    assert "before that: to: 4 records" in progress
    assert "the last batch" in error
    assert "--partition" in tierlog.fails(2, "consume", "from", "--format", "batches")


def test_both_tiers_read_as_one(tierlog, broker):
    tierlog.ok("topic", "create", "tiers", *SMALL)
    sent = [b"record number %d" % number for number in range(5000)]
    tierlog.ok("produce", "tiers", "--batch-records", "1000", stdin=b"\n".join(sent))
    result = json.loads(tierlog.ok("storage", "offload", "tiers"))
    assert result["remaining_segments"] == 0
    segments = json.loads(tierlog.ok("storage", "segments", "tiers"))["partitions"][0]["segments"]
    deadline = time.monotonic() + 30
    while segments[0]["tier"] != "cold":
        assert time.monotonic() < deadline, segments
        found = json.loads(tierlog.ok("storage", "segments", "tiers"))
        segments = found["partitions"][0]["segments"]
    assert segments[0]["base_offset"] == 0
    assert [s["base_offset"] for s in segments[1:]] == [s["last_offset"] + 1 for s in segments[:-1]]
    assert lines_of(tierlog.ok("consume", "tiers")) == sent
    manifest = json.loads(tierlog.ok("storage", "manifest", "tiers"))
    assert len(manifest["segments"]) == len([s for s in segments if s["tier"] != "hot"])
    report = json.loads(tierlog.ok("storage", "report"))
    assert report["cold_bytes"] > 0
    requests = sum(use["requests"] for use in report["store_requests"])
    assert (requests > 0, report["cost_dollars"]) == (True, 0), "a local store costs nothing"
    done = json.loads(tierlog.ok("storage", "compact", "tiers"))
    assert done["new_segments"] == 0, "they are as large as the topic's segments are"
    assert b"cold" in tierlog.ok("storage", "segments", "tiers", "--output", "text")
    shown = tierlog.ok("storage", "report", "--output", "text").decode()
    assert re.search(r"^in the bucket +\d.* in \d+ segments$", shown, re.MULTILINE)
    assert re.search(r"^tiers +1 +\d.* in \d+ segments? +\d.* in \d+ segments +- +-$", shown, re.M)
    assert "_" not in shown.partition("\n")[2], "in words"
    assert b"version" in tierlog.ok("storage", "manifest", "tiers", "--output", "text")
    compare_with_the_bucket(tierlog, broker, segments, manifest)
    folder = broker.folder / ".tierlog" / "data" / "tiers-0"
    assert tierlog.run("dump", folder, "--verify").returncode == 0
    dump_objects(tierlog, folder, manifest["segments"][0])
    shown = json.loads(
        tierlog.ok("storage", "segments", "tiers", "--cache", "--data-dir", folder.parent)
    )["partitions"][0]
    assert len(shown["segments"]) >= len(manifest["segments"])
    for segment, cached in zip(shown["segments"], shown["cached_bytes"], strict=True):
        assert cached is None or segment["tier"] != "cold", segment
        assert cached is None or cached <= segment["size_bytes"], "what the page cache holds of it"
    assert shown["cached_bytes"][-1] is not None, "the active segment is on the disk"
    assert "--data-dir" in tierlog.fails(2, "storage", "segments", "tiers", "--cache")
    assert "'--partition'" in tierlog.fails(2, "storage", "trim", "tiers", "--before", "100")
    start = json.loads(tierlog.ok("storage", "trim", "tiers", "--before", "100", "-p", "0"))
    assert start == {"topic": "tiers", "partition": 0, "log_start_offset": 100}
    assert lines_of(tierlog.ok("consume", "tiers", "-n", "1")) == [sent[100]]


def dump_objects(tierlog, folder, segment):
    """An object is dumped like the local file that was uploaded."""
    url = Path(segment["object_key"]).as_uri()
    name = f"{segment['base_offset']:020d}"
    bundle = url.removesuffix("log") + "indexes"
    shown = tierlog.ok("dump", url).decode().splitlines()
    assert shown[1] == "Log starting offset: 0"
    assert f"offset: {segment['last_offset']} " in shown[-1]
    indexes = tierlog.ok("dump", bundle).decode()
    for suffix in ("index", "timeindex"):
        local = folder / f"{name}.{suffix}"
        if local.exists():
            assert tierlog.ok("dump", local).decode().partition("\n")[2] in indexes
    assert tierlog.run("dump", url, bundle, "--verify").returncode == 0
    dumped = tierlog.ok("dump", url, bundle, "--batches-only", "--output", "json")
    places = {json.loads(line)["file"] for line in lines_of(dumped)}
    assert places >= {url, f"{url[:-4]}.index", f"{url[:-4]}.timeindex"}
    assert all(place.startswith(url[:-4]) for place in places), "each names its object"
    assert "no such object" in tierlog.fails(1, "dump", url[:-5] + "x.log")


def compare_with_the_bucket(tierlog, broker, segments, manifest):
    store = ("--store", (broker.folder / ".tierlog" / "bucket").as_uri())
    offline = json.loads(tierlog.ok("storage", "segments", "tiers", *store))
    members = ("base_offset", "last_offset", "size_bytes", "crc32c", "object_key")
    cold = [segment for segment in segments if segment["tier"] != "hot"]
    assert [[s[m] for m in members] for s in offline["partitions"][0]["segments"]] == [
        [s[m] for m in members] for s in cold
    ]
    latest = json.loads(tierlog.ok("storage", "manifest", "tiers", *store))
    assert latest["version"] >= manifest["version"]
    assert len(latest["segments"]) == len(manifest["segments"])
    kept = json.loads(tierlog.ok("storage", "manifest", "tiers", "--history", *store))["versions"]
    assert kept[-1]["version"] == latest["version"]
    versions = [str(kept[0]["version"]), str(kept[-1]["version"])]
    for source in ((), store):
        found = tierlog.ok("storage", "manifest", "tiers", "--diff", *versions, *source)
        diff = json.loads(found)
        assert diff["changed"]["version"] == [int(version) for version in versions]
        assert diff["added"] == latest["segments"] if source else manifest["segments"]
        assert diff["removed"] == []
    text = tierlog.ok("storage", "manifest", "tiers", "--diff", *versions, "--output", "text")
    assert b"added" in text
    assert b"removed" not in text
    assert "no manifest version 99" in tierlog.fails(
        1, "storage", "manifest", "tiers", "--diff", "1", "99"
    )
    unreachable = Program("http://[is-not-asked")
    error = unreachable.fails(1, "storage", "segments", "tires", *store)
    assert error.startswith("tierlog: there is no topic 'tires' in file://"), error
    assert "--store" in tierlog.fails(2, "storage", "manifest", "tiers", "--history")
    assert b"object key" in tierlog.ok("storage", "manifest", "tiers", *store, "--output", "text")


def test_errors_are_one_line(tierlog, tmp_path):
    assert "no topic 'missing'; `tierlog topic list`" in tierlog.fails(1, "consume", "missing")
    assert "no topic 'missing'" in tierlog.fails(1, "produce", "missing", stdin=b"")
    assert "segment.bytes" in tierlog.fails(
        1, "topic", "create", "bad", "--config", "segment.bytes=12"
    )
    assert "KEY=VALUE" in tierlog.fails(2, "topic", "create", "bad", "--config", "nothing")
    assert "no/such" in tierlog.fails(1, "produce", "missing", tmp_path / "no/such")
    assert "--offset" in tierlog.fails(2, "consume", "missing", "--offset", "soon")
    thousands = "9" * 5000  # more digits than Python converts
    assert "--since" in tierlog.fails(2, "consume", "missing", "--timestamp", thousands)
    assert "--offset" in tierlog.fails(2, "consume", "missing", "--offset", thousands)
    both = ("--offset", "1", "--timestamp", "1")
    assert "give either --offset or --since" in tierlog.fails(2, "consume", "missing", *both)
    tierlog.ok("topic", "create", "short")
    assert "did you mean 'short'?" in tierlog.fails(1, "topic", "describe", "shrot")
    assert "did you mean 'retention.ms'?" in tierlog.fails(
        1, "topic", "create", "bad", "--config", "retention.mss=1"
    )
    result = tierlog.run(
        "produce", "short", "--format", "ndjson", "--batch-records", "1", stdin=HALF
    )
    assert result.returncode == 1
    assert "before that: short: 1 record (partition 0: 0 to 0)" in result.stderr.decode()
    tierlog.ok("storage", "trim", "short", "-p", "0", "--before", "1")
    assert "above the high watermark" in tierlog.fails(1, "consume", "short", "--offset", "7")


def test_slow_input_is_produced_without_waiting_for_more(tierlog):
    tierlog.ok("topic", "create", "slow")
    with tierlog.started("produce", "slow") as (stdin, finish):
        stdin.write(b"one\nhalf a ")
        with Client(tierlog.server) as client:
            got = client.fetch("slow", 0, limits=Limits(wait_ms=30_000))
        assert [record.value for record in got.records] == [b"one"]
        stdin.write(b"line\n")
        assert finish().returncode == 0
    assert lines_of(tierlog.ok("consume", "slow")) == [b"one", b"half a line"]


def test_produce_survives_a_broker_restart(tmp_path):
    process = BrokerProcess(tmp_path).start()
    tierlog = Program(process.url)
    tierlog.ok("topic", "create", "followed")
    with tierlog.started("produce", "followed") as (stdin, finish):
        stdin.write(b"before\n")
        with Client(process.url) as client:
            client.fetch("followed", 0, limits=Limits(wait_ms=30_000))
        assert process.stop() == 0
        stdin.write(b"while it is down\n")
        stdin.close()
        process.start()
        assert b'"records":2' in finish().stdout
    assert lines_of(tierlog.ok("consume", "followed")) == [b"before", b"while it is down"]
    assert process.stop() == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_a_follower_that_is_stopped_commits_for_its_group(tierlog, number, code):
    topic = f"stopped-{number}"
    tierlog.ok("topic", "create", topic)
    tierlog.ok("produce", topic, stdin=b"a\nb\nc\n")
    read, write = os.pipe()
    arguments = ("consume", topic, "--follow", "--group", topic)
    program = Forked(arguments, stdout=write, stderr=write, env=tierlog.environment)
    os.close(write)
    with open(read, "rb") as shown:
        assert [shown.readline() for _ in range(3)] == [b"a\n", b"b\n", b"c\n"]
        program.send_signal(number)
        assert program.wait(30) == code
    (offset,) = json.loads(tierlog.ok("group", "describe", topic))["offsets"]
    assert offset["offset"] in (2, 3), "the last one may not have been finished"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_a_second_sigterm_ends_a_command_whose_output_nobody_reads(tierlog):
    tierlog.ok("topic", "create", "unread")
    tierlog.ok("produce", "unread", stdin=(b"x" * 4095 + b"\n") * 50)
    read, write = os.pipe()
    with open(read), open(os.devnull, "w") as null:
        program = Forked(("consume", "unread"), stdout=write, stderr=null, env=tierlog.environment)
        os.close(write)
        full = fcntl.fcntl(read, fcntl.F_GETPIPE_SZ)
        available = array("i", [0])
        try:
            until(lambda: not fcntl.ioctl(read, FIONREAD, available) and available[0] == full)
            program.send_signal(signal.SIGTERM)
            until(lambda: not is_caught(program.pid, signal.SIGTERM))
            program.send_signal(signal.SIGTERM)
            assert program.wait(30) == -signal.SIGTERM
        finally:
            program.kill()


def is_caught(pid, number):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("SigCgt:\t")[1].split()[0], 16) >> (number - 1) & 1


def test_a_produce_that_fails_in_one_partition_reports_what_another_appended(tmp_path):
    with served_broker(tmp_path) as served, Client(served.server.url) as client:
        client.create_topic("t", partitions=2)
        served.broker.partition("t", 1)._log._state.go_offline(OSError("bad disk"))
        done = Program(served.server.url).run(
            *("produce", "t", "--format", "envelope"),
            stdin=b"".join(b'{"partition": %d}\n' % number for number in (0, 1, 0)),
        )
    assert done.returncode == 1
    assert b"appended before that: t: 2 records (partition 0: 0 to 1)" in done.stderr


@pytest.mark.parametrize("form", ["value", "json", "dump"])
def test_control_characters_in_records_are_escaped_on_a_terminal(tierlog, broker, form):
    topic = f"orders-{form}"
    tierlog.ok("topic", "create", topic)
    value = b"\x1b]0;title\x07 \xff \xc2\x9b31m zw\xc3\xb6lf\ttab"
    tierlog.ok("produce", topic, stdin=value)
    ours, theirs = os.openpty()
    arguments = ["consume", topic, "--format", form]
    if form == "dump":
        (log,) = (broker.folder / ".tierlog" / "data" / f"{topic}-0").glob("*.log")
        arguments = ["dump", str(log), "--print-data-log"]
    program = Forked(arguments, stdout=theirs, stderr=theirs, env=tierlog.environment)
    assert program.wait(30) == 0
    os.close(theirs)
    shown = os.read(ours, 10_000)
    os.close(ours)
    assert form == "json" or "zwölf".encode() in shown
    assert not any(byte < 0x20 and byte not in b"\t\r\n" for byte in shown)
    assert b"\xc2\x9b" not in shown
    if form == "value":
        assert shown == "\\x1b]0;title\\x07 \\xff \\x9b31m zwölf\ttab\r\n".encode()
    assert lines_of(tierlog.ok("consume", topic)) == [value], "a pipe gets the raw bytes"


def test_a_refused_record_is_located_in_the_input(tierlog):
    tierlog.ok("topic", "create", "places")
    large = b"a\n" * 1500 + b"x" * 1_500_000
    result = tierlog.run("produce", "places", stdin=large)
    assert b"tierlog: record 1501 makes a batch of 1500074 bytes; max." in result.stderr
    envelope = ("produce", "places", "--format", "envelope")
    for line, expected in {
        b'{"partition": 7}': "line 3.partition: topic 'places' has no partition 7",
        b'{"value": "a", "value_base64": "YQ=="}': "line 3.value_base64: give value or",
        b'{"key": "a", "key_base64": "YQ=="}': "line 3.key_base64: give key or",
        b'{"headers": [{"name": "n", "value": "", "value_base64": ""}]}': "not both",
        b'{"timestamp": "soon"}': "line 3.timestamp: expected milliseconds since the epoch",
        b'{"timestamp": -2}': "line 3.timestamp: a time must be between 0 and",
        b'{"value": 1, "value": 2}': "line 3.value: given more than once",
        b'{"value": \xff}': "line 3: the body is not UTF-8",
        b"{broken": "line 3: ",
    }.items():
        assert expected in tierlog.fails(1, *envelope, stdin=b"{}\n\n" + line), line


def test_an_invalid_number_is_reported_with_its_option(tierlog):
    for arguments in (
        ("produce", "t", "--batch-records", "1000001"),
        ("topic", "create", "t", "--partitions", "many"),
    ):
        error = tierlog.fails(2, *arguments)
        assert arguments[-2] in error
        assert arguments[-1] in error


def test_the_program_runs_with_standard_streams_closed(tierlog):
    command = f'"{sys.executable}" -m tierlog topic list <&- >&- 2>&-'
    result = subprocess.run(["bash", "-c", command], env=tierlog.environment, check=False)
    assert result.returncode == 0


def test_produce_says_that_it_reads_from_the_terminal(tierlog):
    tierlog.ok("topic", "create", "typed")
    code, shown = tierlog.answer_prompt("one\n\x04", "produce", "typed")
    assert code == 0
    assert "Ctrl-D ends the input" in shown
    assert "typed: 1 record" in shown


def test_unencodable_characters_are_escaped(tierlog):
    tierlog.ok("topic", "create", "latin")
    tierlog.ok("group", "set", "gr\u03b1\u00df", "latin:0=0")
    listing = [sys.executable, "-m", "tierlog", "group", "list", "--output", "text"]
    environment = tierlog.environment | {"PYTHONIOENCODING": "latin-1"}
    result = subprocess.run(listing, env=environment, capture_output=True, check=False)
    assert result.returncode == 0, result.stderr.decode()
    assert b"gr\\u03b1\xdf" in result.stdout


def test_bench_reports_its_phases_and_deletes_its_topic(tierlog):
    before = tierlog.ok("topic", "list")
    arguments = ("--records", "2500", "--record-bytes", "50", "--batch", "500", "--partitions", "2")
    phases = json.loads(tierlog.ok("bench", *arguments))["phases"]
    assert [(phase["phase"], phase["records"]) for phase in phases] == [
        ("produce", 2500),
        ("fetch", 2500),
    ]
    assert phases[0]["requests"] == 5
    assert tierlog.ok("topic", "list") == before
    assert "not one of 'all', '1'" in tierlog.fails(2, "bench", "--acks", "2")


def test_top_reports_the_load_of_the_broker(tierlog):
    tierlog.ok("topic", "create", "watched")
    tierlog.ok("produce", "watched", stdin=b"x\n" * 100)
    load = json.loads(tierlog.ok("top", "--every", "0.1"))
    assert load["store_available"] is True
    assert load["partitions"]["serving"] >= 1
    (watched,) = [topic for topic in load["topics"] if topic["topic"] == "watched"]
    assert watched["hot_bytes"] > 0


@pytest.mark.parametrize("terminal", ["xterm", "dumb"])
def test_top_leaves_its_last_screen_on_the_terminal(tierlog, terminal):
    ours, theirs = os.openpty()
    arguments = ("top", "--every", "0.1", "--looks", "1")
    environment = tierlog.environment | {"TERM": terminal}
    program = Forked(arguments, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    with open(ours, "rb", 0) as screen:
        output = b""
        with contextlib.suppress(OSError):  # how a pty reports its end
            while more := screen.read(1 << 16):
                output += more
    assert program.wait(30) == 0
    assert b"serving" in output.rpartition(b"\x1b[?1049l")[2]


def test_top_sorts_filters_opens_a_topic_and_ends_with_q(tierlog):
    for topic in ("first", "second"):
        tierlog.ok("topic", "create", f"keys-{topic}")
    terminal = Terminal("top", "--every", "0.2", environment=tierlog.environment)
    terminal.wait_for("q quit")
    terminal.press("s")
    terminal.wait_for("by size")
    terminal.press("/keys-s")
    terminal.wait_for("filter: keys-s_")
    terminal.press("\r")
    terminal.wait_for("(keys-s; esc removes it)")
    terminal.press("\r")
    terminal.wait_for("partition 0")
    terminal.press("\x1b")
    terminal.wait_for("by size")
    terminal.press("q")
    assert terminal.ended() == 0
    left = terminal.shown.rpartition(b"\x1b[?1049l")[2]
    assert b"keys-second" in left
    assert b"keys-first" not in left
    assert b"q quit" not in left


def test_ctrl_c_ends_top_like_any_command_and_restores_the_terminal(tierlog):
    terminal = Terminal("top", "--every", "0.2", environment=tierlog.environment)
    terminal.wait_for("q quit")
    assert not terminal.reads_lines(), "a key does not wait for a line break"
    terminal.interrupt()
    assert terminal.ended() == 130
    assert terminal.was_restored
