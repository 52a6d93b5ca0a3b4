"""Peers' jars from Maven Central, kept in `.cache`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from bench.children import MissingPeer


def fetch(artifact: str, *, into: Path) -> Path:
    """The jar of `group:name:version[:kind:classifier]`, fetched once. Raises MissingPeer."""
    _, name, version, *rest = artifact.split(":")
    jar = into / f"{'-'.join((name, version, *rest[1:]))}.jar"
    if jar.exists():
        return jar
    if shutil.which("mvn") is None:
        raise MissingPeer(f"{artifact} is not in .cache, and there is no Maven to fetch it with")
    goal = ("dependency:copy", f"-Dartifact={artifact}", f"-DoutputDirectory={into}")
    done = subprocess.run(["mvn", "-q", "-B", *goal], capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingPeer(f"{artifact} could not be fetched: {done.stdout[-500:]}")
    return jar
