"""Loading the compiled kernels, each time in its own process."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tierlog.record_format import compiled
from tierlog.spark_reader.jobs.package import build_zip

PROJECT = Path(__file__).parents[3]
KERNELS = (
    "arrow_columns",
    "avro_kernel",
    "column_kernel",
    "compiled",
    "filter_kernel",
    "key_kernel",
    "proto_kernel",
    "record_kernel",
)
# Nothing of these is inlined into a kernel.
IN_PLAIN_PYTHON = {"arrow_schema", "batch_runs", "compaction", "crc32c", "decode", "errors"}


def run(program: str, *, cwd: Path = PROJECT, **env: str) -> str:
    command = [sys.executable, "-c", program]
    env = {**os.environ, **env}
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_numba_is_imported_only_by_load_which_switches_the_walk() -> None:
    assert (
        run(
            "import sys\n"
            "from tierlog.record_format import decode, native, produced, record_walk\n"
            "assert record_walk._in_use == [record_walk.walk_plain]\n"
            "assert 'numba' not in sys.modules and 'numpy' not in sys.modules\n"
            "print(native.load(), record_walk._in_use[0].__name__)"
        )
        == "True walk_native"
    )


def test_without_numba_the_plain_walk_is_used() -> None:
    assert (
        run(
            "import importlib.util\n"
            "real = importlib.util.find_spec\n"
            "importlib.util.find_spec = lambda n, *a: None if n == 'numba' else real(n, *a)\n"
            "from tierlog.record_format import native, record_walk\n"
            "print(native.load(), record_walk._in_use[0].__name__)"
        )
        == "False walk_plain"
    )


def test_without_a_cache_folder_the_plain_walk_is_used() -> None:
    assert (
        run(
            "from numba.core import caching\n"
            "caching.CacheImpl._locator_classes = []\n"
            "from tierlog.record_format import native, record_walk\n"
            "print(native.load(), record_walk._in_use[0].__name__)"
        )
        == "False walk_plain"
    )


def test_from_a_zip_without_a_cache_folder_the_plain_walk_is_used(tmp_path: Path) -> None:
    path = build_zip(tmp_path / "code.zip")
    home = tmp_path / "home"
    home.touch()  # not a folder, like the home of some container users
    assert (
        run(
            "from tierlog.record_format import compaction, native, record_walk\n"
            "print(native.load(), record_walk._in_use[0].__name__)\n"
            "print(type(compaction.make_key_table(1000)).__name__, native.__file__)",
            cwd=tmp_path,
            PYTHONPATH=str(path),
            HOME=str(home),
            XDG_CACHE_HOME=str(home),
        )
        == f"False walk_plain\nPlainKeyTable {path}/tierlog/record_format/native.py"
    )


def small_package(root: Path) -> Path:
    """`tierlog.record_format` with most modules empty."""
    package = root / "tierlog/record_format"
    package.mkdir(parents=True)
    (root / "tierlog/__init__.py").touch()
    for name in ("__init__", *compiled._INLINED_FROM):
        (package / f"{name}.py").touch()
    for name in ("batch", "compiled", "crc32c", "errors"):
        shutil.copy(PROJECT / f"record_format/{name}.py", package)
    return package


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_machine_code_lost_in_a_power_failure_is_compiled_again(tmp_path: Path, kind: str) -> None:
    package = small_package(tmp_path)
    (package / "record_kernel.py").write_text(
        "from tierlog.record_format.compiled import compiled\n"
        "@compiled('int64(int64)')\ndef one(x):\n    return x + 1\n"
    )
    for _ in range(2):
        program = "from tierlog.record_format.record_kernel import one; print(one(1))"
        assert run(program, cwd=tmp_path, PYTHONPATH=str(tmp_path)) == "2"
        (cached,) = package.glob(f"__pycache__/record_kernel.*.{kind}")
        assert cached.stat().st_size
        cached.write_bytes(b"")


def test_a_kernel_is_compiled_again_when_an_inlined_function_changes(
    tmp_path: Path,
) -> None:
    package = small_package(tmp_path)
    imports = "from tierlog.record_format.compiled import compiled\n"
    kernel = "@compiled('int64(int64)')\ndef {}(x):\n    return {}\n"
    (package / "caller.py").write_text(
        imports
        + "from tierlog.record_format.record_kernel import one\n"
        + kernel.format("ten", "10 * one(x)")
    )
    results = []
    for text in ("x + 1", "x + 2"):
        (package / "record_kernel.py").write_text(imports + kernel.format("one", text))
        program = "from tierlog.record_format.caller import ten; print(ten(1))"
        results.append(run(program, cwd=tmp_path, PYTHONPATH=str(tmp_path)))
    assert results == ["20", "30"]


def test_with_numbas_compiler_disabled_a_broker_does_without_and_a_kernel_says_what_to_do() -> None:
    program = (
        "from tierlog.record_format import compaction, native\n"
        "print(native.load(), type(compaction.make_key_table(1000)).__name__)\n"
        "try:\n    from tierlog.record_format import record_kernel\n"
        "except ImportError as error:\n    print(error)"
    )
    done, error = run(program, cwd=PROJECT, NUMBA_DISABLE_JIT="1").splitlines()
    assert done == "False PlainKeyTable"
    assert "unset NUMBA_DISABLE_JIT" in error


def test_all_modules_inlined_into_kernels_are_listed() -> None:
    imported = set()
    for name in KERNELS:
        for node in ast.walk(ast.parse((PROJECT / f"record_format/{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "tierlog.record_format":
                imported.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module.startswith(
                "tierlog.record_format."
            ):
                imported.add(node.module.rpartition(".")[2])
    assert imported - IN_PLAIN_PYTHON == set(compiled._INLINED_FROM)
