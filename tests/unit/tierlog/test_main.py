"""The entry point, and what is loaded before a command is called."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tierlog.cli import program

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


COMMANDS_IMPORTED = """
import sys
from tierlog.cli.main import main
try:
    main()
finally:
    from tierlog.cli.program import COMMANDS
    modules = [f"tierlog.cli.{entry.module}" for entry in COMMANDS.values()]
    slow = ["rich", "pydantic", "msgspec"] * ("--help" in sys.argv)  # typer completes with pydantic
    print(*(name for name in modules + slow if name in sys.modules), file=sys.stderr)
"""
COMPLETION = {"_TIERLOG_COMPLETE": "complete_bash", "COMP_WORDS": "tierlog sto", "COMP_CWORD": "1"}


@pytest.mark.parametrize(("arguments", "environment"), [(["--help"], {}), ([], COMPLETION)])
def test_listing_the_commands_imports_none_of_them_nor_a_slow_library(arguments, environment):
    completed = subprocess.run(
        [sys.executable, "-c", COMMANDS_IMPORTED, *arguments],
        check=True,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )
    assert "storage" in completed.stdout
    assert completed.stderr.split() == []


EACH_ALONE = """
import os
from importlib import import_module
from tests.fakes.forked import LIBRARIES
from tierlog.cli.program import COMMANDS
for library in LIBRARIES:
    import_module(library)
for module in {entry.module for entry in COMMANDS.values()}:
    if os.fork() == 0:
        import_module(f"tierlog.cli.{module}")
        os._exit(0)
    assert os.wait()[1] == 0, module
"""


def test_each_commands_module_can_be_imported_alone():
    """No other command that was imported before made up for a cycle."""
    subprocess.run([sys.executable, "-W", "error", "-c", EACH_ALONE], check=True, cwd=ROOT)


def test_a_bug_that_is_an_end_of_file_is_not_taken_for_an_interrupt(monkeypatch):
    def command():
        raise EOFError("EOF: read 1 bytes")

    app = typer.Typer(add_completion=False)
    app.command()(command)
    monkeypatch.setattr(program, "load_command", lambda _: typer.main.get_command(app))
    with pytest.raises(EOFError, match="read 1 bytes"):
        program.run_command(["doctor"])
