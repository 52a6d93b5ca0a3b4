"""The program itself: help, usage errors, exit codes, starting and stopping a broker."""

import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import httpx2
import pytest

from tests.fakes.command_line import ENVIRONMENT, ROOT, Program, RunningBroker
from tests.fakes.forked import Forked
from tests.fakes.waiting import until
from tierlog.api.serving.listening import bind

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
        command_help = offline.ok(command, "--help").decode()
        assert "Usage" in command_help
        assert "completion" not in command_help, "an option of the program only"
    serve = offline.ok("serve", "--help").decode()
    for default in ("127.0.0.1:8640", "8 MiB", "1 d", "30 s"):
        assert default in serve


@pytest.mark.parametrize(
    ("code", "arguments", "expected"),
    [
        (2, ("nope",), "nope"),
        (2, ("consme", "t"), "did you mean 'consume'?"),
        (2, ("topic", "create"), "NAME"),
        (2, ("topic", "list", "--output", "xml"), ": 'xml' is not one of 'auto', 'text', 'json' ("),
        (2, ("consume", "t", "--colour"), "--colour"),
        (2, ("consume", "t", "-p", "0", "--format", "batches", "-f"), "--follow"),
        (2, ("consume", "t", "-n", "9" * 19), f"not '{'9' * 19}'"),
        (2, ("serve", "--cache-bytes", "1"), "data.dir"),
        (2, (*SERVE, "--port", "1"), "give either --listen or --port"),
        (2, ("dev", "--listen", "127.0.0.1:0", "--port", "0"), "give either --listen or --port"),
        (2, ("dev", "--listen", "0.0.0.0:0"), "is not a loopback address"),
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
        (2, (*SERVE, "--restore-offset-gap", "9" * 18), "must be between 1000000000 and 10"),
        (
            2,
            ("storage", "restore", "--restore-offset-gap", "9" * 18),
            "must be between 1000000000 and 10",
        ),
        (2, ("storage", "restore", "--restore-offset-gap", "999999999"), "1000000000"),
        (2, (*SERVE, "--store", "./bucket"), "write this folder as file:///"),
        (2, (*SERVE, "--store", "file://bucket"), "file:///absolute/path"),
        (
            2,
            ("storage", "verify", "t", "--store", "s3:/b/p"),
            "store s3:/b/p: the URL has no bucket",
        ),
        (2, ("storage", "offload", "t", "--wait", "61"), "60, not '61'"),
        (2, ("consume", "t", "--timestamp", "yesterday"), "--since: 'yesterday' is not a time"),
        (2, ("storage", "pin", "t", "p", "--store", "memory://", "--days", "inf"), "not 'inf'"),
        (
            1,
            ("serve", "--data-dir", __file__, "--listen", "127.0.0.1:0"),
            "data.dir " + __file__ + " is a file, not a folder",
        ),
        (1, ("dump", str(FIXTURES)), "has no log files; the folder of a partition is"),
    ],
)
def test_a_usage_error_is_one_line(offline, code, arguments, expected):
    assert expected in offline.fails(code, *arguments)


def test_control_characters_in_errors_are_escaped(offline):
    error = offline.fails(1, "dump", "\x1b]0;title\x07")
    assert "\\x1b]0;title\\x07: no such file" in error


def test_an_unreachable_broker_is_one_line():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        server = f"http://127.0.0.1:{sock.getsockname()[1]}"
        error = Program(server).fails(1, "topic", "list")
        assert "cannot reach the broker" in error
        assert "`tierlog dev` starts a broker" in error


@pytest.mark.parametrize("group", [(), ("--group", "g")])
def test_consume_follow_ends_when_its_pipe_is_closed(tmp_path, group):
    broker = RunningBroker("dev", "--port", "0", cwd=tmp_path)
    program = Program(broker.server)
    program.ok("topic", "create", "t")
    program.ok("produce", "t", stdin=b"a\nb\n")
    reading, writing = os.pipe()
    command = ("consume", "t", "--follow", "--server", broker.server, *group)
    follower = Forked(command, stdout=writing, stderr=writing, env=ENVIRONMENT)
    os.close(writing)
    with os.fdopen(reading, "rb") as lines:
        assert [lines.readline(), lines.readline()] == [b"a\n", b"b\n"]
    assert follower.wait(20) == 0, "without another write"
    if group:
        (committed,) = json.loads(program.ok("group", "describe", "g"))["offsets"]
        assert committed["offset"] >= 1, "the first line was printed before the second"
    assert broker.stop() == 0


def test_a_forked_process_ends_with_its_parent(tmp_path):
    forked = (
        f"Forked(['dev', '--port', '0'], stdout=2, stderr=2, cwd={str(tmp_path)!r}, env=environ)"
    )
    code = f"from os import environ; from tests.fakes.forked import Forked; print({forked}.pid)"
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    until(lambda: not Path(f"/proc/{int(result.stdout)}").exists())


def test_dump_verify_exits_3_for_a_damaged_log(offline, tmp_path):
    folder = Path(shutil.copytree(FIXTURES / "txn-0", tmp_path / "txn-0"))
    assert offline.run("dump", folder, "--verify").returncode == 0
    shown = offline.ok("dump", folder / "00000000000000000000.index").decode()
    assert shown.startswith("Dumping 00000000000000000000.index\noffset: 35 position: 4754\n")
    assert b'"kind":"batch"' in offline.ok("dump", folder, "--output", "json")
    log = folder / "00000000000000000000.log"
    log.write_bytes(log.read_bytes()[:-3])
    result = offline.run("dump", folder, "--verify")
    assert result.returncode == 3
    assert b"invalid bytes at the end" in result.stdout
    assert "no such file" in offline.fails(1, "dump", tmp_path / "00000000000000000001.log")
    assert "no such file" in offline.fails(1, "dump", tmp_path / "t-0")
    (tmp_path / "notes.txt").touch()
    assert "is not a log file" in offline.fails(1, "dump", tmp_path / "notes.txt")


def test_doctor_reports_each_check_and_exits_3_on_a_problem(offline, tmp_path):
    report = json.loads(offline.ok("doctor", "--data-dir", tmp_path / "not" / "yet"))
    assert {"Python", "Java", "disk", "fdatasync"} <= {check["check"] for check in report["checks"]}
    assert list(tmp_path.iterdir()) == []
    result = offline.run("doctor", "--server", "http://127.0.0.1:1", "--output", "text")
    assert result.returncode == 3
    assert "cannot reach the broker" in result.stdout.decode()
    result = offline.run("doctor", "--data-dir", __file__, "--output", "text")
    assert result.returncode == 3
    assert "is a file, not a folder" in result.stdout.decode()


def test_a_closed_output_pipe_is_not_a_failure():
    file = FIXTURES / "compacted-codec-0" / "00000000000000000000.log"
    dump = f'"{sys.executable}" -m tierlog.cli.main dump "{file}" "{file}" "{file}"'
    result = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {dump} | head -n 1"],
        env=ENVIRONMENT,
        capture_output=True,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["doctor"]])
def test_output_to_a_full_disk_is_a_failure_in_one_line(arguments):
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [sys.executable, "-m", "tierlog.cli.main", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT | {"PYTHONUNBUFFERED": "1"},
            check=False,
        )
    message = b"tierlog: standard output: No space left on device\n"
    assert (result.returncode, result.stderr) == (1, message)


def test_output_that_is_cut_short_is_a_failure(tmp_path):
    """Linux writes what fits, and refuses only the next write."""
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (4, 4))
    with (tmp_path / "out").open("wb") as out:
        result = subprocess.run(
            [sys.executable, "-m", "tierlog.cli.main", "--version"],
            stdout=out,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT | {"PYTHONUNBUFFERED": "1"},
            preexec_fn=limit,
            check=False,
        )
    message = b"tierlog: standard output: File too large\n"
    assert (result.returncode, result.stderr) == (1, message)
    assert (tmp_path / "out").read_bytes() == b"tier"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_does_not_replace_the_exit_code_of_a_failure():
    interrupted = "program.run_command = lambda _: print('half') or program.INTERRUPTED"
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [
                sys.executable,
                "-c",
                f"from tierlog.cli import program; {interrupted}; program.main()",
            ],
            stdout=full,
            stderr=subprocess.PIPE,
            env=ENVIRONMENT | {"PYTHONUNBUFFERED": "1"},
            check=False,
        )
    assert (result.returncode, result.stderr) == (130, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_or_message_that_cannot_be_written_changes_nothing():
    script = """
import structlog
from tierlog.cli import logs, program

def command(_):
    logs.configure_logs()
    structlog.get_logger().error("x" * 10_000)
    raise program.SettingsError("lost, too")

program.load_command = command
program.main()
"""
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [sys.executable, "-c", script, "serve"], stderr=full, env=ENVIRONMENT, check=False
        )
    assert result.returncode == 2


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)]
)
def test_a_signal_before_a_broker_has_its_handlers_ends_the_program_by_custom(number, code):
    script = f"""
import signal
from tierlog.cli import program

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it

def command(_):
    try:
        signal.raise_signal({number:d})
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as the demo while it cleans up

program.load_command = command
program.main()
"""
    result = subprocess.run(
        [sys.executable, "-c", script, "serve"], capture_output=True, env=ENVIRONMENT, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (code, b"", b"")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_during_a_start_changes_nothing(tmp_path, number):
    script = (
        "import signal; from types import SimpleNamespace; "
        "from tierlog.cli import broker_process, program; "
        f"signalled = lambda *_, **__: signal.raise_signal({number:d}); "
        "broker_process._open_broker = signalled; "
        "broker_process.log = SimpleNamespace(info=signalled); program.main()"
    )
    command = [sys.executable, "-c", script, "serve", "--data-dir", str(tmp_path / "data")]
    result = subprocess.run(
        [*command, "--listen", "127.0.0.1:0"], capture_output=True, env=ENVIRONMENT, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


def test_a_broker_stopped_by_a_signal_exits_0_and_keeps_its_records(tmp_path):
    store = (tmp_path / "bucket").as_uri()
    (tmp_path / "bucket").mkdir()
    flags = ("serve", "--data-dir", "data", "--store", store, "--port", "0")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        broker = RunningBroker(*flags, cwd=tmp_path)
        program, topic = Program(broker.server), number.name
        program.ok("topic", "create", topic)
        program.ok("produce", topic, stdin=b"a\nb\n")
        assert broker.stop(number) == 0
        log = tmp_path / "broker.log"
        lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        (stopping,) = (line for line in lines if line["event"] == "stopping")
        assert stopping["signal"] == ("SIGINT" if topic == "SIGINT" else "SIGTERM")
        assert lines[-1]["event"] == "stopped"
        log.unlink()
    last = RunningBroker(*flags, cwd=tmp_path)
    for topic in ("SIGTERM", "SIGINT", "SIGHUP"):
        assert Program(last.server).ok("consume", topic) == b"a\nb\n"
    second = Program().run(*flags, cwd=tmp_path)
    assert second.returncode == 1
    assert b"in use by another broker" in second.stderr
    assert last.stop() == 0


@pytest.mark.parametrize("verbose", [True, False])
def test_a_verbose_broker_logs_http_and_store_requests(tmp_path, verbose):
    (tmp_path / "bucket").mkdir()
    flags = ("--data-dir", "data", "--store", (tmp_path / "bucket").as_uri())
    verbosity = ("--verbose",) * verbose
    broker = RunningBroker("serve", *flags, "--listen", "127.0.0.1:0", *verbosity, cwd=tmp_path)
    headers = {"x-request-id": "mine"}
    for path in ("/v1/topics/none", "/v1/topics?prefix=secret", "/%1b%5b31m"):
        httpx2.get(broker.server + path, headers=headers, trust_env=False)
    assert broker.stop() == 0
    log = (tmp_path / "broker.log").read_text().splitlines()
    lines = [json.loads(line) for line in log if line.startswith("{")]
    if not verbose:
        assert not [line for line in lines if line["level"] == "debug"]
        return
    requests = [
        line for line in lines if line["event"] == "request" and line["request_id"] == "mine"
    ]
    assert [(line["method"], line["path"], line["status"]) for line in requests] == [
        ("GET", "/v1/topics/none", "404"),
        ("GET", "/v1/topics", "200"),
        ("GET", "/%1b%5b31m", "404"),
    ]
    assert all(line["ms"] > 0 for line in requests)
    first = next(line for line in lines if line["event"] == "store request")
    assert (first["operation"], first["key"]) == ("get", "cluster.json")
    assert (first["outcome"], "error" in first) == ("missing", False)


def test_an_incomplete_offload_is_a_failure(tmp_path):
    (tmp_path / "bucket").mkdir()
    store = (tmp_path / "bucket").as_uri()
    flags = ("serve", "--data-dir", "data", "--store", store, "--port", "0")
    broker = RunningBroker(*flags, cwd=tmp_path)
    program = Program(broker.server)
    program.ok("topic", "create", "t")
    program.ok("produce", "t", stdin=b"a\n")
    (tmp_path / "bucket").rename(tmp_path / "elsewhere")
    error = program.fails(1, "storage", "offload", "t", "--wait", "0.1")
    assert "1 segments are not uploaded after 0.1 s" in error
    assert program.fails(1, "storage", "offload", "--wait", "0.1") == error
    program.ok("storage", "offload", "t", "--wait", "0")
    assert broker.stop() == 0


@pytest.mark.parametrize("is_started", [True, False])
def test_a_port_in_use_is_reported_before_the_data_folder_is_opened(tmp_path, is_started):
    with bind("127.0.0.1", 0) as sock:
        if is_started:
            sock.listen()
        port = sock.getsockname()[1]
        result = Program().run("dev", "--port", port, cwd=tmp_path)
    assert result.returncode == 1
    error = result.stderr.decode()
    assert f"cannot listen on 127.0.0.1:{port}" in error
    assert "by another broker: stop it, or choose another port" in error
    assert not (tmp_path / ".tierlog" / "data").exists()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="counts in /proc")
def test_a_broker_at_rest_is_small_and_loads_its_kernels_once_there_is_work(tmp_path):
    command = (sys.executable, "-m", "tierlog", "dev", "--port", "0")
    log = tmp_path / "broker.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            command, stdout=output, stderr=output, cwd=tmp_path, env=ENVIRONMENT
        ) as process,
    ):
        try:
            until(lambda: "listens on http" in log.read_text())
            server = log.read_text().split("listens on ")[1].split()[0].strip(",")
            until(lambda: httpx2.get(f"{server}/readyz", trust_env=False).status_code == 200)
            status = Path(f"/proc/{process.pid}/status").read_text()
            numbers = dict(line.split(":\t") for line in status.splitlines() if "\t" in line)
            assert int(numbers["Threads"]) <= 48
            assert int(numbers["VmRSS"].split()[0]) <= 150 << 10
            program, maps = Program(server), Path(f"/proc/{process.pid}/maps")
            program.ok("topic", "create", "t")
            program.ok("produce", "t", stdin=b"few\n")
            assert program.ok("consume", "t", "--format", "json")
            assert "llvmlite" not in maps.read_text()
            program.ok("produce", "t", stdin=b"many\n" * (1 << 18))
            url = f"{server}/v1/topics/t/partitions/0/records?offset=0&max_bytes=4194304"
            assert len(httpx2.get(url, trust_env=False).json()["records"]) > 1000
            until(lambda: "llvmlite" in maps.read_text())
        finally:
            process.terminate()
