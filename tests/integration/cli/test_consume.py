"""Which records `tierlog consume` prints, and how."""

import json
import os
import time

import pytest

from tests.fakes.forked import Forked

HOUR_MS = 3_600_000
NOW_MS = time.time_ns() // 1_000_000


@pytest.fixture(scope="module")
def log(broker):
    """Two partitions whose records are an hour apart, the newest of all in partition 0."""
    from tests.fakes.command_line import Program

    tierlog = Program(broker.server)
    tierlog.ok("topic", "create", "log", "--partitions", "2")
    for partition, hours in ((0, (5, 3, 1)), (1, (6, 4, 2))):
        records = [
            {"key": f"k{ago % 3}", "value": f"{ago} h ago", "timestamp": NOW_MS - ago * HOUR_MS}
            for ago in hours
        ]
        body = b"\n".join(json.dumps(record).encode() for record in records)
        tierlog.ok("produce", "log", "-p", partition, "--format", "envelope", stdin=body)
    return tierlog


def hours(output: bytes) -> list[int]:
    return [int(line.split()[0]) for line in output.splitlines()]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--last", "1"), [1]),
        (("--last", "3"), [3, 2, 1]),
        (("--last", "100"), [6, 5, 4, 3, 2, 1]),
        (("--last", "2", "-p", "1"), [4, 2]),
        (("--last", "2", "-p", "1", "--until", "2"), [6, 4]),
        (("--last", "1", "--key", "k2"), [2]),
        (("--last", "1", "--until", "150min"), [3]),
        (("--since", "3.5h"), [3, 1, 2]),
        (("--since", "3.5h", "--until", "90m"), [3, 2]),
        (("--until", "1"), [5, 6]),
        (("--until", "0"), []),
        (("--until", "1000"), [5, 3, 1, 6, 4, 2]),
        (("--until", "1d"), []),
        (("--offset", "1", "--until", "2"), [3, 4]),
        (("--since", "2020-01-01T00:00:00Z", "--until", "now", "-n", "1"), [5]),
        (("--key", "k1"), [1, 4]),
        (("--grep", "^[12] h"), [1, 2]),
        (("--grep", "^[12] h", "-n", "1"), [1]),
        (("--key", "k1", "--grep", "4"), [4]),
    ],
)
def test_a_range_or_a_filter_chooses_records(log, options, expected):
    assert hours(log.ok("consume", "log", *options)) == expected


def test_the_last_records_are_found_where_the_log_is_sparse(tierlog):
    """The last offsets match nothing: the reader goes back in steps, to the log's start."""
    tierlog.ok("topic", "create", "sparse")
    tierlog.ok("produce", "sparse", stdin=b"rare a\nrare b\n" + b"frequent\n" * 300)
    tierlog.ok("storage", "trim", "sparse", "--partition", "0", "--before", "1")
    assert tierlog.ok("consume", "sparse", "--grep", "rare", "--last", "2") == b"rare b\n"
    assert tierlog.ok("consume", "sparse", "--last", "1") == b"frequent\n"


def test_a_time_without_an_offset_is_utc_and_said_so(log):
    done = log.run("consume", "log", "--since", "2020-01-01 12:30")
    assert hours(done.stdout) == [5, 3, 1, 6, 4, 2]
    said = b"--since 2020-01-01 12:30 has no UTC offset: read as 2020-01-01T12:30:00Z\n"
    assert done.stderr == said
    assert log.run("consume", "log", "--since", "2020-01-01T12:30:00+05:00").stderr == b""


def test_a_follower_begins_with_the_last_records_and_goes_on(tierlog):
    tierlog.ok("topic", "create", "tail")
    tierlog.ok("produce", "tail", stdin=b"a\nb\nc\n")
    read, write = os.pipe()
    follower = Forked(
        ("consume", "tail", "--last", "2", "--follow"),
        stdout=write,
        stderr=write,
        env=tierlog.environment,
    )
    os.close(write)
    try:
        with open(read, "rb") as shown:
            assert [shown.readline(), shown.readline()] == [b"b\n", b"c\n"]
            tierlog.ok("produce", "tail", stdin=b"d\n")
            assert shown.readline() == b"d\n"
    finally:
        follower.kill()


def test_fields_and_templates_print_what_they_name(tierlog):
    tierlog.ok("topic", "create", "shown")
    record = {
        "key": "k",
        "value": "v",
        "timestamp": NOW_MS,
        "headers": [{"name": "h", "value": "1"}],
    }
    tombstone = {"key": "k", "value": None, "timestamp": NOW_MS}
    body = b"\n".join(json.dumps(one).encode() for one in (record, tombstone))
    tierlog.ok("produce", "shown", "--format", "envelope", stdin=body)

    def shown(*options: str) -> bytes:
        return tierlog.ok("consume", "shown", *options)

    assert shown("--show", "partition,offset,key,headers") == b"0\t0\tk\th=1\tv\n0\t1\tk\t\t\n"
    assert shown("--show", "value, key,topic") == b"v\tk\tshown\n\tk\tshown\n"
    (written, *_), _ = (line.split(b"\t") for line in shown("--show", "timestamp").splitlines())
    seconds, ms = divmod(NOW_MS, 1000)
    assert written == time.strftime(f"%Y-%m-%dT%H:%M:%S.{ms:03}Z", time.gmtime(seconds)).encode()
    found = shown("--template", r"%t [%p] at %o: %k=%s %K/%S %T %h 100%%\x21\n")
    assert (
        found
        == (
            f"shown [0] at 0: k=v 1/1 {NOW_MS} h=1 100%!\nshown [0] at 1: k= 1/-1 {NOW_MS}  100%!\n"
        ).encode()
    )
    assert shown("--template", "%R%s") == b"\x00\x00\x00\x01v\xff\xff\xff\xff"


def test_a_template_on_a_terminal_escapes_what_the_record_has_and_keeps_its_own(tierlog):
    tierlog.ok("topic", "create", "hostile")
    tierlog.ok("produce", "hostile", stdin=b"\x1b[31mred\n")
    ours, theirs = os.openpty()
    program = Forked(
        ("consume", "hostile", "--template", r"\x1b[1m%s\x1b[0m\n"),
        stdout=theirs,
        stderr=theirs,
        env=tierlog.environment,
    )
    assert program.wait(30) == 0
    os.close(theirs)
    with open(ours, "rb", 0) as screen:
        assert screen.read(1000) == b"\x1b[1m\\x1b[31mred\x1b[0m\r\n"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--last", "1", "--since", "1h"), "give either --since or --last"),
        (("--last", "1", "--offset", "1"), "give either --offset or --last"),
        (("--last", "1", "--group", "g"), "does not go with --since or --last"),
        (("--follow", "--until", "1h"), "--follow never ends"),
        (("--show", "keys"), "--show: no field 'keys'; did you mean 'key'?"),
        (("--show", ""), "; fields are topic, partition, offset"),
        (("--template", "%y"), "--template: '%y' stands for nothing; it takes %s"),
        (("--template", "a\\"), "stands for nothing"),
        (("--template", "%s", "--format", "json"), "give one of --show, --template and --format"),
        (("--grep", "("), "--grep: not a regular expression"),
        (("--until", "soon"), "--until: 'soon' is not a time"),
        (("--format", "batches", "-p", "0", "--grep", "x"), "does not go with --grep"),
    ],
)
def test_options_that_contradict_each_other_are_refused(log, options, expected):
    assert expected in log.fails(2, "consume", "log", *options)


FLIGHT = {
    "type": "record",
    "name": "Flight",
    "fields": [
        {"name": "carrier", "type": "string"},
        {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-millis"}]},
    ],
}


@pytest.fixture(scope="module")
def decoded(broker):
    """A topic of Avro, JSON and Protobuf, a tombstone, a value that is damaged, and plain text."""
    import httpx2

    from tests.fakes.command_line import Program
    from tierlog import Client, NewRecord

    tierlog = Program(broker.server)
    tierlog.ok("topic", "create", "decoded")
    heads = []
    for subject, kind, schema in (
        ("decoded-value", "AVRO", json.dumps(FLIGHT)),
        ("decoded-json", "JSON", '{"type": "object"}'),
        ("decoded-protobuf", "PROTOBUF", 'syntax = "proto3"; message F { string a_b = 1; }'),
    ):
        url = f"{broker.server}/subjects/{subject}/versions"
        answer = httpx2.post(url, json={"schema": schema, "schemaType": kind})
        heads.append(b"\0" + answer.json()["id"].to_bytes(4))
    values = [
        heads[0] + b"\4UA\2\0",
        heads[1] + b'{\n  "price": 1.10\n}',
        heads[2] + b"\0\n\1x",
        None,
        heads[0] + b"\4U",
        b"plain",
    ]
    with Client(broker.server) as client:
        client.produce("decoded", [NewRecord(value) for value in values], partition=0)
    return tierlog, values


AVRO, JSON, PROTOBUF = (
    b'{"carrier":"UA","at":"1970-01-01T00:00:00Z"}',
    b'{"price":1.10}',
    b'{"a_b":"x"}',
)


def test_values_are_decoded_by_the_schemas_that_they_name(decoded):
    tierlog, values = decoded
    ran = tierlog.run("consume", "decoded", "--decode")
    assert ran.returncode == 0, ran.stderr
    expected = [AVRO, JSON, PROTOBUF, b"", values[4], b"plain"]
    assert ran.stdout == b"".join(line + b"\n" for line in expected)
    assert b"warning: decoded-0, offset 4: printed as it is: the value is not of sch" in ran.stderr
    lines = tierlog.ok("consume", "decoded", "--decode", "--format", "json", "-n", "4").splitlines()
    found = [json.loads(line) for line in lines]
    assert found[0]["value"] == {"carrier": "UA", "at": "1970-01-01T00:00:00Z"}
    assert found[0]["value_schema_id"] == int.from_bytes(values[0][1:5])
    assert found[3]["value"] is None
    assert "value_schema_id" not in found[3]
    grepped = tierlog.ok("consume", "decoded", "--decode", "--grep", '"price":1', "-n", "1")
    assert grepped == JSON + b"\n"


def test_by_default_values_are_decoded_if_the_topic_checks_them(decoded):
    tierlog, values = decoded
    assert tierlog.ok("consume", "decoded", "-n", "1") == values[0] + b"\n"
    tierlog.ok("topic", "alter", "decoded", "--config", "schema.validation=id")
    assert tierlog.ok("consume", "decoded", "-n", "1") == AVRO + b"\n"
    assert tierlog.ok("consume", "decoded", "-n", "1", "--raw") == values[0] + b"\n"
