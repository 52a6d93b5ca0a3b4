"""Installation, start and interruption of the development server."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.broker_process import free_port
from tests.fakes.waiting import until

SCRIPT = Path(__file__).resolve().parents[3] / "localstack" / "s3_server.py"


def test_an_interrupt_ends_the_installation(tmp_path: Path) -> None:
    script = Path(shutil.copytree(SCRIPT.parent, tmp_path / "localstack")) / SCRIPT.name
    go = tmp_path / "bin" / "go"
    go.parent.mkdir()
    note = f"echo $$ > {tmp_path}/server && mv {tmp_path}/server {tmp_path}/pid"
    go.write_text(f"#!/bin/sh\n{note}\nexec sleep 600\n")
    go.chmod(0o755)
    path = f"{go.parent}:{os.environ['PATH']}"
    # A shell makes its background commands ignore interrupts.
    restore_handler = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    )
    code = restore_handler + f"runpy.run_path({str(script)!r}, run_name='__main__')"
    server = subprocess.Popen(
        [sys.executable, "-c", code, "--port", str(free_port())],
        env=os.environ | {"PATH": path},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until((tmp_path / "pid").exists)
        os.killpg(server.pid, signal.SIGINT)  # as a terminal does
        stderr = server.communicate(timeout=30)[1]
    finally:
        server.kill()
    assert server.returncode == 130
    assert "Traceback" not in stderr
    installer = Path("/proc", (tmp_path / "pid").read_text().strip())
    until(lambda: not installer.exists())


ALWAYS_200 = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Always200(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_PUT = do_GET

host, _, port = sys.argv[2].partition(":")
HTTPServer((host, int(port)), Always200).serve_forever()
"""


@pytest.fixture
def fake_server(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """The script with an installed server that only answers, and the environment to start it in.
    The server's process id is in `server.pid`.
    """
    script = Path(shutil.copytree(SCRIPT.parent, tmp_path / "localstack")) / SCRIPT.name
    (tmp_path / "always_200.py").write_text(ALWAYS_200)
    start = f'exec "{sys.executable}" "{tmp_path}/always_200.py" "$@"'
    programs = {
        "go": f'#!/bin/sh\ncp "{tmp_path}/bin/versitygw" "$GOBIN"\n',
        "versitygw": f'#!/bin/sh\necho $$ > "{tmp_path}/server.pid"\n{start}\n',
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return script, os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}


def test_a_server_on_loopback_is_not_reached_through_the_proxy(
    fake_server: tuple[Path, dict[str, str]],
) -> None:
    script, environment = fake_server
    proxy = {"http_proxy": "http://127.0.0.1:1", "no_proxy": "", "NO_PROXY": ""}
    done = subprocess.run(
        [sys.executable, script, "--exec", "true"],
        env=environment | proxy,
        capture_output=True,
        text=True,
        timeout=100,  # longer than the server may take to start
        check=False,
    )
    assert done.returncode == 0, done.stderr


KILL_SERVER = """
import os, socket, urllib.parse

server = urllib.parse.urlsplit(os.environ["TIERLOG_TEST_S3_ENDPOINT"])
os.kill(int(open({pid_file!r}).read()), 9)
while socket.socket().connect_ex((server.hostname, server.port)) == 0:
    pass
"""


def test_the_end_of_the_server_is_reported_by_the_script_and_after_a_command(
    fake_server: tuple[Path, dict[str, str]], tmp_path: Path
) -> None:
    script, environment = fake_server
    serving = subprocess.Popen(
        [sys.executable, script, "--port", str(free_port())],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert serving.stdout is not None
        assert "listens on" in serving.stdout.readline()
        os.kill(int((tmp_path / "server.pid").read_text()), signal.SIGTERM)
        stderr = serving.communicate(timeout=30)[1]
    finally:
        serving.kill()
    assert serving.returncode == 1
    assert "s3_server: the S3 server ended with -15; the end of its log:" in stderr

    killing = KILL_SERVER.format(pid_file=str(tmp_path / "server.pid"))
    done = subprocess.run(
        [sys.executable, script, "--exec", sys.executable, "-c", killing],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "the S3 server ended with -9" in done.stderr


def test_a_missing_command_is_a_one_line_error() -> None:
    command = [sys.executable, SCRIPT, "--exec", "no-such-command"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("error: --exec: there is no command 'no-such-command'\n")
