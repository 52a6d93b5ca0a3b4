"""Loading the compiled walk, each time in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[3]


def run(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=PROJECT, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_nothing_imports_numba_before_load_and_load_switches_the_walk() -> None:
    assert (
        run(
            "import sys\n"
            "from record_format import decode, native, produced, walker\n"
            "from record_format.record_walk import walk_plain\n"
            "assert walker._in_use == [walk_plain]\n"
            "assert 'numba' not in sys.modules and 'numpy' not in sys.modules\n"
            "print(native.load(), walker._in_use[0].__name__)"
        )
        == "True walk_native"
    )


def test_without_its_packages_the_plain_walk_stays() -> None:
    assert (
        run(
            "import importlib.util\n"
            "real = importlib.util.find_spec\n"
            "importlib.util.find_spec = lambda n, *a: None if n == 'numba' else real(n, *a)\n"
            "from record_format import native, walker\n"
            "print(native.load(), walker._in_use[0].__name__)"
        )
        == "False walk_plain"
    )


def test_without_a_folder_for_its_cache_the_plain_walk_stays() -> None:
    assert (
        run(
            "from numba.core import caching\n"
            "caching.CacheImpl._locator_classes = []\n"
            "from record_format import native, walker\n"
            "print(native.load(), walker._in_use[0].__name__)"
        )
        == "False walk_plain"
    )
