"""What each package of an environment costs, as rows for docs/decisions/0002-dependencies.md.

    python .ci/dependency_sizes.py NAME... --environment .venv

Disk: all the files of its RECORD and their compiled modules. Import: CPU milliseconds of a fresh
`import` beyond those of an empty program, the least of seven, so that other load counts little.
"""

import argparse
import resource
import subprocess
from importlib.metadata import Distribution, distributions
from pathlib import Path


def disk_mb(distribution: Distribution) -> float:
    files = {Path(str(distribution.locate_file(name))) for name in distribution.files or ()}
    folders = {path.parent for path in files if path.suffix == ".py"}
    files |= {compiled for folder in folders for compiled in folder.glob("__pycache__/*.pyc")}
    return sum(path.stat().st_size for path in files if path.exists()) / 1e6


def cpu_ms(python: Path, program: str) -> float:
    def once() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([python, "-c", program], check=True)  # noqa: S603
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return 1000 * min(once() for _ in range(7))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="+")
    parser.add_argument("--environment", type=Path, required=True)
    asked = parser.parse_args()
    python = asked.environment / "bin/python"
    (packages,) = asked.environment.glob("lib/python*/site-packages")
    found = {
        one.metadata["Name"].lower().replace("-", "_"): one
        for one in distributions(path=[str(packages)])
    }
    empty = cpu_ms(python, "pass")
    for name in asked.names:
        ms = cpu_ms(python, f"import {name}") - empty
        print(f"| {name} | {disk_mb(found[name]):.1f} | {ms:.0f} |")


if __name__ == "__main__":
    main()
