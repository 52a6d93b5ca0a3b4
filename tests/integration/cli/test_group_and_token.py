import json

import pytest

from tests.fakes.command_line import Program, RunningBroker


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
    assert b"g-topic" in tierlog.ok("group", "describe", "my group", "--output", "text")
    listed = json.loads(tierlog.ok("group", "list"))["groups"]
    assert {"group": "my group", "topics": ["g-topic"], "partitions": 2, "lag": 2} in listed
    assert b"my group" in tierlog.ok("group", "list", "--output", "text")
    assert "--yes" in tierlog.fails(2, "group", "delete", "my group")
    tierlog.ok("group", "delete", "my group", "--yes")
    assert "my group" in tierlog.fails(1, "group", "describe", "my group")


def test_an_offset_outside_the_log_becomes_its_border_and_is_told(tierlog):
    tierlog.ok("topic", "create", "bordered")
    tierlog.ok("produce", "bordered", stdin=b"a\nb\nc\n")
    tierlog.ok("storage", "trim", "bordered", "--partition", "0", "--before", "1")
    for given, becomes in (("7", 3), ("0", 1), ("3", 3), ("1", 1)):
        done = tierlog.run("group", "set", "bounds", f"bordered:0={given}")
        assert json.loads(done.stdout)["offsets"][0]["offset"] == becomes
        said = f"bordered-0 has offsets 1 to 3: {given} becomes {becomes}".encode()
        assert (said in done.stderr) == (int(given) != becomes)


def test_consume_goes_on_for_a_group_behind_what_it_printed(tierlog):
    tierlog.ok("topic", "create", "for-a-group")
    tierlog.ok("produce", "for-a-group", stdin=b"a\nb\nc\nd\n")

    def consume(*more):
        return tierlog.ok("consume", "for-a-group", "--group", "readers", *more).split()

    assert consume("--max-records", "2") == [b"a", b"b"]
    assert consume("-n", "1") == [b"c"]
    assert consume() == [b"d"]
    assert consume() == []
    shown = json.loads(tierlog.ok("group", "describe", "readers"))
    assert [one["offset"] for one in shown["offsets"]] == [4]
    for other in (["--timestamp", "0"], ["--partition", "0", "--format", "batches"]):
        assert "--group" in tierlog.fails(2, "consume", "for-a-group", "-g", "readers", *other)


@pytest.mark.parametrize("place", ["t", "t:0", "t=0", "t:x=0", ":0=0", "t:0=", "t:0=soon"])
def test_a_place_that_is_none_is_a_wrong_usage(tierlog, place):
    assert place.split("=")[-1] in tierlog.fails(2, "group", "set", "g", place)


def test_tokens_are_made_listed_revoked_and_asked_for(tmp_path):
    offline = Program()
    data = tmp_path / "data"

    def make(*arguments: str) -> str:
        return json.loads(offline.ok("token", "create", *arguments, "--data-dir", data))["token"]

    admin = make("ops", "--scope", "admin")
    reader = make("reader", "--scope", "read", "--topics", "orders.")
    listed = json.loads(offline.ok("token", "list", "--data-dir", data))["tokens"]
    assert [(one["name"], one["scopes"], one["topics"]) for one in listed] == [
        ("ops", ["admin"], None),
        ("reader", ["read"], "orders."),
    ]
    assert admin not in (data / "tierlog" / "tokens.json").read_text()
    broker = RunningBroker("serve", "--data-dir", data, "--listen", "0.0.0.0:0", cwd=tmp_path)
    try:
        program = Program(broker.server.replace("0.0.0.0", "127.0.0.1"))
        said = program.fails(1, "topic", "list")
        assert "TIERLOG_TOKEN" in said
        assert "--token-file" in said
        program.environment["TIERLOG_TOKEN"] = admin
        program.ok("topic", "create", "orders.eu")
        (tmp_path / "token").write_text(reader + "\n")
        told = program.ok("topic", "list", "--token-file", tmp_path / "token")
        assert json.loads(told)["topics"][0]["name"] == "orders.eu"
        said = program.fails(1, "topic", "create", "orders.us", "--token-file", tmp_path / "token")
        assert "admin" in said, "the flag wins over the variable"
        del program.environment["TIERLOG_TOKEN"]
        program.environment["TIERLOG_TOKEN_FILE"] = str(tmp_path / "token")
        program.ok("topic", "list")
        offline.ok("token", "revoke", "reader", "--data-dir", data)
        program.fails(1, "topic", "list", "--token-file", tmp_path / "token")
        assert admin not in (tmp_path / "broker.log").read_text()
    finally:
        assert broker.stop() == 0


def test_a_broker_does_not_listen_openly_without_tokens(tmp_path):
    offline = Program()
    said = offline.fails(2, "serve", "--data-dir", tmp_path / "d", "--listen", "0.0.0.0:0")
    assert "tierlog token create" in said
    assert "--insecure-no-auth" in said
    said = offline.fails(
        2, "serve", "--data-dir", tmp_path / "d", "--tokens-file", tmp_path / "none.json"
    )
    assert "none.json" in said


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
def test_wrong_tokens_are_refused(tmp_path, code, arguments):
    Program().fails(code, "token", *arguments, "--data-dir", tmp_path)


def test_a_token_is_made_once_under_a_name(tmp_path):
    arguments = ("token", "create", "a", "--scope", "read", "--tokens-file", tmp_path / "t.json")
    text = Program().ok(*arguments, "--output", "text").decode().strip()
    assert text.startswith("tierlog_")
    assert "revoke" in Program().fails(1, *arguments)


def test_tokens_need_a_broker_to_be_for():
    assert "--data-dir" in Program().fails(2, "token", "list")
