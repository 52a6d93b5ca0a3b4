"""What `tierlog produce` tells a person: how far it is, and what will become of the records."""

import json
import os

from tests.fakes.command_line import Terminal

OLD = json.dumps({"value": "x", "timestamp": 1_370_000_000_000}).encode()


def produced(tierlog, topic: str, *options: str, body: bytes) -> tuple[int, str]:
    read, write = os.pipe()
    terminal = Terminal("produce", topic, *options, environment=tierlog.environment, stdin=read)
    os.close(read)
    with open(write, "wb", 0) as pipe:
        pipe.write(body)
        terminal.wait_for("records, ")
    return terminal.ended(), terminal.shown.decode()


def test_a_pipe_shows_how_many_records_there_are_and_their_rate(tierlog):
    tierlog.ok("topic", "create", "piped")
    code, shown = produced(tierlog, "piped", body=b"a\nb\nc\n")
    assert code == 0
    assert "produce piped: 3 records, " in shown
    assert "piped: 3 records (partition 0: 0 to 2)" in shown
    assert b"records, " not in tierlog.run("produce", "piped", stdin=b"a\n").stderr, "no terminal"


def test_records_that_retention_will_delete_are_a_warning_in_words(tierlog):
    tierlog.ok("topic", "create", "old")
    done = tierlog.run("produce", "old", "--format", "envelope", stdin=OLD)
    assert json.loads(done.stdout)["warnings"] == ["older-than-retention"]
    words = "tierlog topic alter old --config retention.ms=unlimited"
    assert done.stderr.decode().startswith("warning: all records of a request have timestamps")
    assert words in done.stderr.decode()
    code, shown = produced(tierlog, "old", "--format", "envelope", body=OLD)
    assert code == 0
    assert "\x1b[33mwarning: all records" in shown, "yellow"
    assert words in shown.replace("\r\n", "")
