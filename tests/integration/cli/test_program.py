"""The program by itself: help, usage, exit codes, starting and stopping a broker."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.fakes.command_line import ENVIRONMENT, ROOT, Program, RunningBroker
from tests.fakes.forked import Forked
from tests.fakes.waiting import until

FIXTURES = Path(__file__).parents[2] / "fixtures" / "kafka"
SERVE = ("serve", "--data-dir", "d", "--listen", "127.0.0.1:0")


def test_help_names_every_command(offline):
    shown = offline.ok("--help").decode()
    for command in (
        "dev",
        "serve",
        "demo",
        "topic",
        "produce",
        "consume",
        "group",
        "storage",
        "token",
        "dump",
        "doctor",
    ):
        assert f" {command} " in shown
        of_command = offline.ok(command, "--help").decode()
        assert "Usage" in of_command
        assert "completion" not in of_command, "that is the program's"
    serve = offline.ok("serve", "--help").decode()
    for default in ("127.0.0.1:8640", "8MiB", "(86400000)", "(30)"):
        assert default in serve


@pytest.mark.parametrize(
    ("code", "arguments", "said"),
    [
        (2, ("nope",), "nope"),
        (2, ("consme", "t"), "did you mean 'consume'?"),
        (2, ("topic", "create"), "NAME"),
        (2, ("topic", "list", "--output", "xml"), ": 'xml' is not one of 'auto', 'text', 'json' ("),
        (2, ("consume", "t", "--colour"), "--colour"),
        (2, ("consume", "t", "-p", "0", "--format", "batches", "-f"), "--follow"),
        (2, ("serve", "--cache-bytes", "1"), "data.dir"),
        (2, ("serve", "--data-dir", "d", "--cache-bytes", "lots"), "cache.bytes"),
        (2, ("serve", "--data-dir", "d", "--config", "gone.toml"), "gone.toml: No such file"),
        (2, ("token", "list", "--data-dir", "gone"), "tierlog: data folder gone does not exist ("),
        (2, ("token", "revoke", "a", "--data-dir", "gone"), "data folder gone does not exist ("),
        (2, ("replay", "t", "--to-json", "out"), "no source: give --store URL"),
        (2, ("topic", "list", "--server", "ftp://x"), "expected http://HOST:PORT"),
        (2, ("topic", "describe", "\udcff"), "tierlog: an argument is not valid text: \\udcff"),
        (2, ("produce", "t", "--key-separator", "\udcff"), "not valid text: \\udcff"),
        (2, ("produce", "t", "--key-separator", ""), "tierlog: --key-separator must not be empty"),
        (2, ("serve", "--data-dir", "d", "--listen", "0.0.0.0:0"), "insecure-no-auth"),
        (2, (*SERVE, "--restore-offset-gap", "9" * 18), "must be between 1 and 10"),
        (2, ("storage", "restore", "--restore-offset-gap", "9" * 18), "or equal to 10"),
        (2, (*SERVE, "--store", "./bucket"), "write this folder as file:///"),
        (2, (*SERVE, "--store", "file://bucket"), "file:///absolute/path"),
        (
            2,
            ("storage", "verify", "t", "--store", "s3:/b/p"),
            "store s3:/b/p: the URL has no bucket",
        ),
        (2, ("storage", "offload", "t", "--wait", "61"), "60, not '61'"),
        (2, ("consume", "t", "--timestamp", "yesterday"), "--timestamp: 'yesterday' is not a time"),
        (2, ("storage", "pin", "t", "p", "--store", "memory://", "--days", "inf"), "not 'inf'"),
        (
            1,
            ("serve", "--data-dir", __file__, "--listen", "127.0.0.1:0"),
            "data.dir " + __file__ + " is a file, not a folder",
        ),
        (1, ("dump", str(FIXTURES)), "has no log files; the folder of a partition is"),
    ],
)
def test_wrong_usage_is_one_line(offline, code, arguments, said):
    assert said in offline.fails(code, *arguments)


def test_what_an_error_quotes_gives_a_terminal_no_orders(offline):
    said = offline.fails(1, "dump", "\x1b]0;title\x07")
    assert "\\x1b]0;title\\x07: no such file" in said


def test_no_broker_is_one_line():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        server = f"http://127.0.0.1:{sock.getsockname()[1]}"
        said = Program(server).fails(1, "topic", "list")
        assert "cannot reach the broker" in said
        assert "`tierlog dev` starts a broker" in said


def test_a_follower_ends_when_nobody_reads_it_any_more(tmp_path):
    broker = RunningBroker("dev", "--port", "0", cwd=tmp_path)
    program = Program(broker.server)
    program.ok("topic", "create", "t")
    program.ok("produce", "t", stdin=b"a\nb\n")
    reading, writing = os.pipe()
    command = ("consume", "t", "--follow", "--server", broker.server)
    follower = Forked(command, stdout=writing, stderr=writing, env=ENVIRONMENT)
    os.close(writing)
    with os.fdopen(reading, "rb") as lines:
        assert [lines.readline(), lines.readline()] == [b"a\n", b"b\n"]
    assert follower.wait(20) == 0, "with nothing more to be written"
    assert broker.stop() == 0


def test_a_process_that_a_test_left_ends_with_the_test_run(tmp_path):
    left = f"Forked(['dev', '--port', '0'], stdout=2, stderr=2, cwd={str(tmp_path)!r}, env=environ)"
    code = f"from os import environ; from tests.fakes.forked import Forked; print({left}.pid)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    until(lambda: not Path(f"/proc/{int(done.stdout)}").exists())


def test_dump_verifies_and_says_so_by_its_exit_code(offline, tmp_path):
    folder = Path(shutil.copytree(FIXTURES / "txn-0", tmp_path / "txn-0"))
    assert offline.run("dump", folder, "--verify").returncode == 0
    shown = offline.ok("dump", folder / "00000000000000000000.index").decode()
    assert shown.startswith("Dumping 00000000000000000000.index\noffset: 35 position: 4754\n")
    assert b'"kind":"batch"' in offline.ok("dump", folder, "--output", "json")
    log = folder / "00000000000000000000.log"
    log.write_bytes(log.read_bytes()[:-3])
    done = offline.run("dump", folder, "--verify")
    assert done.returncode == 3
    assert b"invalid bytes at the end" in done.stdout
    assert "no such file" in offline.fails(1, "dump", tmp_path / "00000000000000000001.log")
    assert "no such file" in offline.fails(1, "dump", tmp_path / "t-0")
    (tmp_path / "notes.txt").touch()
    assert "is not a log file" in offline.fails(1, "dump", tmp_path / "notes.txt")


def test_doctor_says_what_is_there_and_what_is_not(offline, tmp_path):
    report = json.loads(offline.ok("doctor", "--data-dir", tmp_path / "not" / "yet"))
    assert {"Python", "Java", "disk", "fdatasync"} <= {one["check"] for one in report["checks"]}
    assert list(tmp_path.iterdir()) == []
    done = offline.run("doctor", "--server", "http://127.0.0.1:1", "--output", "text")
    assert done.returncode == 3
    assert "cannot reach the broker" in done.stdout.decode()
    done = offline.run("doctor", "--data-dir", __file__, "--output", "text")
    assert done.returncode == 3
    assert "is a file, not a folder" in done.stdout.decode()


def test_a_reader_that_has_enough_is_no_failure():
    file = FIXTURES / "compacted-codec-0" / "00000000000000000000.log"
    dump = f'"{sys.executable}" -m tierlog.cli.main dump "{file}" "{file}" "{file}"'
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {dump} | head -n 1"],
        env=ENVIRONMENT,
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_broker_stops_with_exit_0_and_has_everything_when_it_is_back(tmp_path):
    store = (tmp_path / "bucket").as_uri()
    (tmp_path / "bucket").mkdir()
    flags = ("serve", "--data-dir", "data", "--store", store, "--listen", "127.0.0.1:0")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        broker = RunningBroker(*flags, cwd=tmp_path)
        program, topic = Program(broker.server), number.name
        program.ok("topic", "create", topic)
        program.ok("produce", topic, stdin=b"a\nb\n")
        assert broker.stop(number) == 0
        log = tmp_path / "broker.log"
        lines = [json.loads(one) for one in log.read_text().splitlines() if one.startswith("{")]
        assert [one["event"] for one in lines[-2:]] == ["stopping", "stopped"]
        assert lines[-2]["signal"] == ("SIGINT" if topic == "SIGINT" else "SIGTERM")
        log.unlink()
    last = RunningBroker(*flags, cwd=tmp_path)
    for topic in ("SIGTERM", "SIGINT", "SIGHUP"):
        assert Program(last.server).ok("consume", topic) == b"a\nb\n"
    second = Program().run(*flags, cwd=tmp_path)
    assert second.returncode == 1
    assert b"in use by another broker" in second.stderr
    assert last.stop() == 0


@pytest.mark.parametrize("verbose", [True, False])
def test_a_verbose_broker_logs_each_request_and_each_to_the_store(tmp_path, verbose):
    (tmp_path / "bucket").mkdir()
    flags = ("--data-dir", "data", "--store", (tmp_path / "bucket").as_uri())
    more = ("--verbose",) * verbose
    broker = RunningBroker("serve", *flags, "--listen", "127.0.0.1:0", *more, cwd=tmp_path)
    named = {"x-request-id": "mine"}
    for path in ("/v1/topics/none", "/v1/topics?prefix=secret", "/%1b%5b31m"):
        httpx.get(broker.server + path, headers=named, trust_env=False)
    assert broker.stop() == 0
    log = (tmp_path / "broker.log").read_text().splitlines()
    lines = [json.loads(line) for line in log if line.startswith("{")]
    if not verbose:
        assert not [line for line in lines if line["level"] == "debug"]
        return
    asked = [line for line in lines if line["event"] == "request" and line["request_id"] == "mine"]
    assert [(line["method"], line["path"], line["status"]) for line in asked] == [
        ("GET", "/v1/topics/none", "404"),
        ("GET", "/v1/topics", "200"),
        ("GET", "/%1b%5b31m", "404"),
    ]
    assert all(line["ms"] > 0 for line in asked)
    first = next(line for line in lines if line["event"] == "store request")
    assert (first["operation"], first["key"]) == ("get", "cluster.json")
    assert (first["outcome"], "error" in first) == ("missing", False)


def test_an_offload_that_leaves_something_behind_is_a_failure(tmp_path):
    (tmp_path / "bucket").mkdir()
    store = (tmp_path / "bucket").as_uri()
    flags = ("serve", "--data-dir", "data", "--store", store, "--listen", "127.0.0.1:0")
    broker = RunningBroker(*flags, cwd=tmp_path)
    program = Program(broker.server)
    program.ok("topic", "create", "t")
    program.ok("produce", "t", stdin=b"a\n")
    (tmp_path / "bucket").rename(tmp_path / "elsewhere")
    said = program.fails(1, "storage", "offload", "t", "--wait", "0.1")
    assert "1 segments are not uploaded after 0.1 s" in said
    assert program.fails(1, "storage", "offload", "--wait", "0.1") == said
    program.ok("storage", "offload", "t", "--wait", "0")
    assert broker.stop() == 0


def test_a_port_in_use_is_said_before_anything_is_opened(tmp_path):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        done = Program().run("dev", "--port", port, cwd=tmp_path)
    assert done.returncode == 1
    said = done.stderr.decode()
    assert f"cannot listen on 127.0.0.1:{port}" in said
    assert "by another broker: stop it, or choose another port" in said
    assert not (tmp_path / ".tierlog" / "data").exists()
