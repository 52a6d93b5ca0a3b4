"""The set-up of a broker's process."""

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
