"""Packs tierlog's code into a zip, for executors that do not have it installed.

* It holds the rooms that executors import, and nothing compiled: dependencies (pyarrow, numba,
  boto3 and the codecs) have to be installed on the executors.
* The zip is reproducible.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from tierlog.record_format.errors import ConfigurationError

PACKAGES: Final = ("tierlog", "pyspark_tierlog")
LEFT_OUT: Final = frozenset(("api", "broker", "hot_tier", "repair"))
_TIMESTAMP: Final = (2020, 1, 1, 0, 0, 0)  # of every file in the zip


def build_zip(target: Path) -> Path:
    """Write the zip to `target`, for `--py-files` or `SparkContext.addPyFile`."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, path in _files():
            info = zipfile.ZipInfo(name, _TIMESTAMP)
            archive.writestr(info, path.read_bytes(), zipfile.ZIP_DEFLATED)
    return target


def _files() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        root = _folder(package)
        for folder, folders, names in os.walk(root, followlinks=True):  # a checkout's rooms: links
            folders[:] = sorted(set(folders) - LEFT_OUT)
            for path in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
                yield f"{package}/{path.relative_to(root).as_posix()}", path


def _folder(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None
    folder = Path((spec.submodule_search_locations or [""])[0])
    if not folder.is_dir():
        raise ConfigurationError(
            f"{folder} is not a folder: tierlog is running from a zip already; use that zip"
        )
    return folder
