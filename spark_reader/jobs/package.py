"""Our code as one zip, for executors that have not installed it.

* It holds what executors import, and nothing compiled: the packages that it depends on (pyarrow,
  numba, boto3 and the codecs) have to be where Python runs.
* The same code gives the same bytes.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from record_format.errors import ConfigurationError

ROOMS: Final = (
    "record_format",
    "cold_tier",
    "manifest",
    "spark_reader",
    "tierlog",
    "pyspark_tierlog",
)
_AT: Final = (2020, 1, 1, 0, 0, 0)  # of every file in the zip


def build_zip(target: Path) -> Path:
    """Write the zip to `target`, for `--py-files` or `SparkContext.addPyFile`."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in _files():
            archive.writestr(zipfile.ZipInfo(name, _AT), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return target


def _files() -> Iterator[tuple[str, Path]]:
    for room in ROOMS:
        folder = _folder(room)
        for path in sorted(folder.rglob("*.py")):
            yield f"{room}/{path.relative_to(folder).as_posix()}", path


def _folder(room: str) -> Path:
    spec = find_spec(room)
    assert spec is not None
    folder = Path((spec.submodule_search_locations or [""])[0])
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder} is no folder: tierlog runs out of a zip already; use it"
        )
    return folder
