"""Sets the environment variables that Spark on this machine needs before its first session.

* Variables that are set already are kept: a cluster's Python, or a Java of the user's choice.
* Spark starts its Python workers, and the process that discovers sources, as `python3` from PATH.
  In an environment that was not activated (a notebook's, a service's) that is another Python
  without `tierlog`, which does not find the source.
* Spark does not find a Python whose path contains a space either, since it passes the path to a
  shell unquoted. Then only its name is given, and its folder is put first in PATH.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import MutableMapping
from pathlib import Path

from spark_reader.java import ensure_java


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
