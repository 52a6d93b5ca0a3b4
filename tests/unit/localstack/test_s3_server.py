"""Installation, start and interruption of the development server."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

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


def test_a_server_on_loopback_is_not_reached_through_the_proxy(
    tmp_path: Path,
) -> None:
    script = Path(shutil.copytree(SCRIPT.parent, tmp_path / "localstack")) / SCRIPT.name
    (tmp_path / "always_200.py").write_text(ALWAYS_200)
    programs = {
        "go": f'#!/bin/sh\ncp "{tmp_path}/bin/versitygw" "$GOBIN"\n',
        "versitygw": f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/always_200.py" "$@"\n',
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    proxy = {"http_proxy": "http://127.0.0.1:1", "no_proxy": "", "NO_PROXY": ""}
    done = subprocess.run(
        [sys.executable, script, "--exec", "true"],
        env=os.environ | proxy | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=100,  # longer than the server may take to start
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_missing_command_is_a_one_line_error() -> None:
    command = [sys.executable, SCRIPT, "--exec", "no-such-command"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.endswith("error: --exec: there is no command 'no-such-command'\n")
