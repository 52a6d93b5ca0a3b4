import json
import os
import signal
from tempfile import TemporaryFile

import pytest

from tests.fakes.command_line import Program, RunningBroker
from tests.fakes.forked import Forked
from tests.fakes.waiting import until
from tierlog.client.client import Client
from tierlog.client.records import NewRecord


def test_groups_are_set_shown_listed_and_deleted(tierlog):
    tierlog.ok("topic", "create", "g-topic", "--partitions", "2")
    tierlog.ok("produce", "g-topic", "--partition", "1", stdin=b"a\nb\nc\n")
    shown = json.loads(tierlog.ok("group", "set", "my group", "g-topic:0=0", "g-topic:1=latest"))
    assert [one["offset"] for one in shown["offsets"]] == [0, 3]
    tierlog.ok("group", "set", "my group", "g-topic:1=1", "--output", "text")
    shown = json.loads(tierlog.ok("group", "describe", "my group"))
    assert [(one["partition"], one["offset"], one["lag"]) for one in shown["offsets"]] == [
        (0, 0, 0),
        (1, 1, 2),
    ]
    described = tierlog.ok("group", "describe", "my group", "--output", "text")
    assert b"my group: classic, Empty, generation 0" in described
    assert b"g-topic" in described
    listed = json.loads(tierlog.ok("group", "list"))["groups"]
    seen = {"topics": ["g-topic"], "partitions": 2, "lag": 2, "state": "Empty", "members": 0}
    assert {"group": "my group", **seen, "type": "classic"} in listed
    shown = tierlog.ok("group", "describe", "my group", "--members", "--output", "text")
    assert b"my group: classic, Empty, generation 0" in shown
    assert b"my group" in tierlog.ok("group", "list", "--output", "text")
    assert "--yes" in tierlog.fails(2, "group", "delete", "my group")
    tierlog.ok("group", "delete", "my group", "--yes")
    assert "my group" in tierlog.fails(1, "group", "describe", "my group")


def test_group_set_clamps_offsets_to_the_log_with_a_warning(tierlog):
    tierlog.ok("topic", "create", "bordered")
    tierlog.ok("produce", "bordered", stdin=b"a\nb\nc\n")
    tierlog.ok("storage", "trim", "bordered", "--partition", "0", "--before", "1")
    for offset, expected in (("7", 3), ("0", 1), ("3", 3), ("1", 1)):
        result = tierlog.run("group", "set", "bounds", f"bordered:0={offset}")
        assert json.loads(result.stdout)["offsets"][0]["offset"] == expected
        warning = f"bordered-0 has offsets 1 to 3: {offset} becomes {expected}".encode()
        assert (warning in result.stderr) == (int(offset) != expected)


def test_consume_resumes_a_group_after_the_last_printed_record(tierlog):
    tierlog.ok("topic", "create", "for-a-group")
    tierlog.ok("produce", "for-a-group", stdin=b"a\nb\nc\nd\n")

    def consume(*options):
        return tierlog.ok("consume", "for-a-group", "--group", "readers", *options).split()

    assert consume("--max-records", "2") == [b"a", b"b"]
    assert consume("-n", "1") == [b"c"]
    assert consume() == [b"d"]
    assert consume() == []
    shown = json.loads(tierlog.ok("group", "describe", "readers"))
    assert [one["offset"] for one in shown["offsets"]] == [4]
    for options in (["--timestamp", "0"], ["--partition", "0", "--format", "batches"]):
        assert "--group" in tierlog.fails(2, "consume", "for-a-group", "-g", "readers", *options)


def test_a_group_has_no_offset_in_a_topic_created_again_while_records_were_printed(tierlog):
    tierlog.ok("topic", "create", "again")
    tierlog.ok("produce", "again", stdin=b"x" * 500_000)
    read, write = os.pipe()
    command = ["consume", "again", "--group", "late", "--max-records", "1"]
    with open(read, "rb") as shown, open(write, "wb") as out, TemporaryFile() as errors:
        program = Forked(command, stdout=out, stderr=errors, env=tierlog.environment)
        out.close()
        shown.read(1)  # it was fetched, and is larger than a pipe's buffer
        tierlog.ok("topic", "delete", "again", "--yes")
        tierlog.ok("topic", "create", "again")
        shown.read()
        assert program.wait(60) == 1
        errors.seek(0)
        assert b"re-created" in errors.read()
    assert json.loads(tierlog.ok("group", "describe", "late"))["offsets"] == []


@pytest.mark.parametrize("position", ["t", "t:0", "t=0", "t:x=0", ":0=0", "t:0=", "t:0=soon"])
def test_an_invalid_group_position_is_a_usage_error(tierlog, position):
    assert position.split("=")[-1] in tierlog.fails(2, "group", "set", "g", position)


def test_tokens_are_created_listed_revoked_and_required(tmp_path):
    offline = Program()
    data = tmp_path / "data"

    def create(*arguments: str) -> str:
        return json.loads(offline.ok("token", "create", *arguments, "--data-dir", data))["token"]

    admin = create("ops", "--scope", "admin")
    reader = create("reader", "--scope", "read", "--topics", "orders.")
    listed = json.loads(offline.ok("token", "list", "--data-dir", data))["tokens"]
    assert [(one["name"], one["scopes"], one["topics"]) for one in listed] == [
        ("ops", ["admin"], None),
        ("reader", ["read"], "orders."),
    ]
    assert admin not in (data / "tierlog" / "tokens.json").read_text()
    broker = RunningBroker("serve", "--data-dir", data, "--listen", "0.0.0.0:0", cwd=tmp_path)
    try:
        program = Program(broker.server.replace("0.0.0.0", "127.0.0.1"))
        error = program.fails(1, "topic", "list")
        assert "TIERLOG_TOKEN" in error
        assert "--token-file" in error
        program.environment["TIERLOG_TOKEN"] = admin
        program.ok("topic", "create", "orders.eu")
        (tmp_path / "token").write_text(reader + "\n")
        topics = program.ok("topic", "list", "--token-file", tmp_path / "token")
        assert json.loads(topics)["topics"][0]["name"] == "orders.eu"
        error = program.fails(1, "topic", "create", "orders.us", "--token-file", tmp_path / "token")
        assert "admin" in error, "the option overrides the variable"
        del program.environment["TIERLOG_TOKEN"]
        program.environment["TIERLOG_TOKEN_FILE"] = str(tmp_path / "token")
        program.ok("topic", "list")
        offline.ok("token", "revoke", "reader", "--data-dir", data)
        program.fails(1, "topic", "list", "--token-file", tmp_path / "token")
        assert admin not in (tmp_path / "broker.log").read_text()
    finally:
        assert broker.stop() == 0


def test_serve_refuses_a_public_address_without_tokens(tmp_path):
    offline = Program()
    error = offline.fails(2, "serve", "--data-dir", tmp_path / "d", "--listen", "0.0.0.0:0")
    assert "tierlog token create" in error
    assert "--insecure-no-auth" in error
    error = offline.fails(
        2, "serve", "--data-dir", tmp_path / "d", "--tokens-file", tmp_path / "none.json"
    )
    assert "none.json" in error


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        (2, ["create", "a"]),
        (2, ["create", "a", "--scope", "root"]),
        (1, ["create", "a b", "--scope", "read"]),
        (1, ["create", "a", "--scope", "read", "--topics", "/"]),
        (1, ["revoke", "nobody"]),
    ],
)
def test_invalid_token_arguments_are_refused(tmp_path, code, arguments):
    Program().fails(code, "token", *arguments, "--data-dir", tmp_path)


def test_a_token_name_is_unique(tmp_path):
    arguments = ("token", "create", "a", "--scope", "read", "--tokens-file", tmp_path / "t.json")
    text = Program().ok(*arguments, "--output", "text").decode().strip()
    assert text.startswith("tierlog_")
    assert "revoke" in Program().fails(1, *arguments)


def test_token_commands_require_a_data_folder():
    assert "--data-dir" in Program().fails(2, "token", "list")


def test_two_consumers_of_a_group_divide_its_topic(tierlog, tmp_path):
    command = ("consume", "divided", "--group", "pair", "--follow", "--format", "json")

    def start(name: str) -> Forked:
        with (tmp_path / name).open("wb") as out:
            return Forked(command, stdout=out, stderr=out, env=tierlog.environment)

    def printed(name: str) -> list[tuple[int, int]]:
        lines = (tmp_path / name).read_text().splitlines()
        return [(one["partition"], one["offset"]) for one in map(json.loads, lines)]

    def put() -> None:
        client.produce("divided", [NewRecord("x", partition=number) for number in range(6)])

    def owned() -> list[int]:
        found = client.group("pair") if client.groups() else None
        if found is None or found.state != "Stable":
            return []
        return [sum(len(row.partitions) for row in one.assignment) for one in found.members]

    with Client(tierlog.server) as client:
        client.create_topic("divided", partitions=6)
        put()
        one = start("one")
        try:
            until(lambda: len(printed("one")) == 6)
            two = start("two")
            until(lambda: owned() == [3, 3])
            put()
            until(lambda: len(printed("one") + printed("two")) == 12)
            assert len(printed("two")) == 3
            shown = tierlog.ok("group", "describe", "pair", "--members", "--output", "text")
            assert b"pair: classic, Stable, generation 2" in shown
            assert shown.count(b"divided-") == 6
            one.send_signal(signal.SIGINT)
            assert one.wait(30) == 130
            until(lambda: owned() == [6])
            put()
            until(lambda: len(set(printed("one") + printed("two"))) == 18)
        finally:
            for program in (one, two):
                program.kill()
