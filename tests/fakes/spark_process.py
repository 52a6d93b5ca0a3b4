"""Spark in its own process, and the environment of every Spark process in a test."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.fakes import fast_jvm
from tierlog.spark_reader.environment import ensure_java


def environment() -> dict[str, str]:
    """Without the settings of the test's own environment; a JVM that starts fast, on loopback."""
    known = {k: v for k, v in os.environ.items() if not k.startswith(("TIERLOG_", "PYS"))}
    java = {"JAVA_HOME": str(ensure_java(dict(os.environ))), **fast_jvm.ENVIRONMENT}
    return known | java | {"SPARK_LOCAL_IP": "127.0.0.1"}


def run_python(code: str, *arguments: str, cwd: Path, **more: str) -> list[Any]:
    """Run it; return the JSON lines that it printed. `more`: additions to its environment."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        env=environment() | more,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line]
