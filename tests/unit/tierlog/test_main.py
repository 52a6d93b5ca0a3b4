"""The entry point, before the program is loaded."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
INTERRUPTED_IMPORT = """
import sys

class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, CtrlC())
from tierlog.cli.main import main
main()
"""


def test_an_interrupt_during_imports_prints_nothing():
    completed = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT], check=False, cwd=ROOT, capture_output=True
    )
    assert (completed.returncode, completed.stdout, completed.stderr) == (130, b"", b"")
