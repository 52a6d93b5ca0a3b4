"""The set-up of a broker's process."""

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("patch", ["", "native.load = lambda: 1 / 0"])
def test_loaded_modules_are_excluded_from_garbage_collection(patch: str) -> None:
    code = f"""
import gc
from tierlog.record_format import native
from tierlog.cli import broker_process
{patch}
gc.disable()
try:
    broker_process.load_kernels()
except ZeroDivisionError:
    pass
print(gc.isenabled(), gc.get_freeze_count() > 10 * len(gc.get_objects()))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_a_failing_import_of_numba_is_logged_and_not_fatal(tmp_path) -> None:
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.3 or less')")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from tierlog.cli import broker_process
broker_process.load_kernels()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "no compiled kernels" in done.stdout
    assert "Numba needs NumPy 2.3 or less" in done.stdout


def test_without_descriptors_the_kernels_are_not_loaded_and_the_log_stays_json() -> None:
    code = """
import os, resource
from tierlog.cli import broker_process
from tierlog.cli.logs import configure_logs
configure_logs()
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
except OSError:
    pass
broker_process._load_kernels_in_thread()
import threading
for thread in threading.enumerate():
    if thread.name == "native-kernels":
        thread.join()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["level"] for line in lines] == ["warning"]
    assert "Too many open files" in lines[0]["error"]


def test_what_ends_a_thread_is_a_line_of_the_log() -> None:
    code = """
import threading
from tierlog.cli.logs import configure_logs
configure_logs()
threading.Thread(target=lambda: 1 / 0, name="some").start()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    (line,) = map(json.loads, done.stderr.splitlines())
    assert (line["event"], line["thread"]) == ("a thread failed", "some")
    assert line["exception"][0]["exc_type"] == "ZeroDivisionError"
