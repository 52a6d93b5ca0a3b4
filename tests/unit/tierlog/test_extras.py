"""Without an extra, one line says what to install, never a traceback."""

import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest

from tierlog.extras import OPTIONAL_PACKAGES

ROOT = Path(__file__).parents[3]
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Missing())
"""


def run_without(names: set[str], code: str) -> subprocess.CompletedProcess:
    code = WITHOUT.format(names=names) + code
    return subprocess.run(
        [sys.executable, "-c", code], check=False, cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["demo"], "pyarrow is not installed: pip install 'tierlog[demo]'"),
        (
            ["stats", "t", "--store", "file:///x"],
            "pyspark is not installed: pip install 'tierlog[spark]'",
        ),
        (
            ["produce", "t", __file__, "--format", "parquet"],
            "pyarrow is not installed: pip install 'tierlog[arrow]'",
        ),
    ],
)
def test_a_command_names_the_missing_extra(arguments, hint):
    completed = run_without(
        set(OPTIONAL_PACKAGES),
        f"from tierlog.cli import program\nsys.exit(program.run_command({arguments!r}))",
    )
    assert (completed.returncode, completed.stderr) == (1, f"tierlog: {hint}\n")


def test_read_arrow_names_the_missing_extra():
    completed = run_without(set(OPTIONAL_PACKAGES), "import tierlog\ntierlog.read_arrow('t')")
    assert completed.stderr.splitlines()[-1].startswith(
        "ModuleNotFoundError: tierlog.read_arrow: pyarrow is not installed: pip install"
    )


@pytest.mark.parametrize(
    "code", ["from tierlog import *", "import pydoc; pydoc.render_doc('tierlog')"]
)
def test_all_names_can_be_looked_at_without_an_extra(code):
    completed = run_without(set(OPTIONAL_PACKAGES), code)
    assert (completed.returncode, completed.stderr) == (0, "")


def test_every_optional_package_is_in_its_extra():
    declared = requires("tierlog")
    for name, (_, extra) in OPTIONAL_PACKAGES.items():
        assert any(line.startswith(name) and f"extra == '{extra}'" in line for line in declared), (
            name
        )
