"""Programs that CI puts into .cache/deploy, or that a developer has."""

import os
import shutil

import pytest

from tests.fakes.command_line import ROOT


def find_program(name):
    """Its path; skips the test where there is none."""
    path = f"{ROOT / '.cache/deploy'}{os.pathsep}{os.environ['PATH']}"
    if (found := shutil.which(name, path=path)) is None:
        pytest.skip(f"needs {name}")
    return found
