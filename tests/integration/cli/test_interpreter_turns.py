"""How the broker's process shares Python's interpreter among its threads."""

import subprocess
import sys
from pathlib import Path

from tests.fakes.command_line import ENVIRONMENT

SCRIPT = """
import os, signal, sys
from tierlog.cli.broker_process import run_broker
from tierlog.settings import load_settings

def announce(url):
    print(sys.getswitchinterval(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

given = {"data.dir": sys.argv[1], "listen": "127.0.0.1:0"}
run_broker(load_settings(given, {}, None), announce=announce)
"""


def test_a_thread_that_computes_keeps_the_others_waiting_for_half_a_millisecond(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "data")]
    run = subprocess.run(
        command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=True
    )
    assert float(run.stdout.splitlines()[0]) == 0.0005
