"""tierlog: a tiered log store. What users import; everything else is internal.

    import tierlog

    with tierlog.Client("http://127.0.0.1:8640") as client:
        client.produce("events", [tierlog.NewRecord("hello", key="k")])
        for record in client.consume("events"):
            print(record.offset, record.value)

Names load when they are first used: `import tierlog` costs nothing. Errors are in `tierlog.errors`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tierlog import errors
    from tierlog.client import (
        AsyncClient,
        AsyncProducer,
        Batching,
        Client,
        ConsumedRecord,
        JsonSource,
        Limits,
        NewRecord,
        OffsetCommit,
        Producer,
        RecordMetadata,
        RetryPolicy,
    )
    from tierlog.spark_reader.arrow_reader import read_arrow

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncProducer",
    "Batching",
    "Client",
    "ConsumedRecord",
    "JsonSource",
    "Limits",
    "NewRecord",
    "OffsetCommit",
    "Producer",
    "RecordMetadata",
    "RetryPolicy",
    "__version__",
    "errors",
    "read_arrow",
]


if not TYPE_CHECKING:  # else a type checker would accept any name, with type Any

    def __getattr__(name: str) -> Any:
        if name == "errors":
            return import_module("tierlog.errors")
        if name == "read_arrow":  # needs the extra `arrow`
            return _read_arrow()
        if name in __all__:
            return getattr(import_module("tierlog.client"), name)
        raise AttributeError(f"module 'tierlog' has no attribute {name!r}")


def __dir__() -> list[str]:
    """For completion: includes names that are not loaded yet, and nothing internal."""
    return sorted(__all__)


def _read_arrow() -> Any:
    try:
        return import_module("tierlog.spark_reader.arrow_reader").read_arrow
    except ModuleNotFoundError as error:
        from tierlog.extras import how_to_install

        if (hint := how_to_install(error)) is None:
            raise
        missing = ModuleNotFoundError(f"tierlog.read_arrow: {hint}", name=error.name)

    def read_arrow(*_: Any, **__: Any) -> Any:
        """Needs the extra `arrow`. Raises when it is called: `help`, `from tierlog import *` and
        whatever else looks at all names of a module must work without it.
        """
        raise missing

    return read_arrow
