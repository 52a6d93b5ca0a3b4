"""What Spark on this machine has to know before its first session.

Rules that keep it honest:

* What is already set stays: a cluster's own Python, or a Java of the user's choice.
* Spark starts its Python workers, and the process that finds sources, as `python3` of the PATH. In
  an environment that was not activated (a notebook's, a service's) that is another Python, which
  has no `tierlog`: the source is then not found.
* Nor is it if the Python's path has a space in it: Spark asks a shell whether it is there, without
  quotes. Then it is named, and its folder leads the PATH.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import MutableMapping
from pathlib import Path

from spark_reader.java import ensure_java


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let Spark find a Java and this very Python; call it before the first SparkSession.

    For sessions on this machine. Raises ConfigurationError if there is no Java of version 17 or
    newer.
    """
    ensure_java(environment)
    python = sys.executable
    if shlex.quote(python) != python:
        environment["PATH"] = f"{Path(python).parent}:{environment.get('PATH', os.defpath)}"
        python = Path(python).name
    environment.setdefault("PYSPARK_PYTHON", python)
    environment.setdefault("PYSPARK_DRIVER_PYTHON", python)
