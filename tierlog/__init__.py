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
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tierlog import errors
    from tierlog.client.async_producer import AsyncProducer
    from tierlog.client.batching import Batching, Delivery, RecordMetadata
    from tierlog.client.calls import Sequenced
    from tierlog.client.client import AsyncClient, Client
    from tierlog.client.exchange import RetryPolicy
    from tierlog.client.group_calls import OffsetCommit
    from tierlog.client.membership import Membership
    from tierlog.client.producer import Producer
    from tierlog.client.records import ConsumedRecord, JsonSource, NewRecord
    from tierlog.client.responses import ProducerIdentity, Topic
    from tierlog.client.transactions import AsyncTransaction, Transaction
    from tierlog.client.wire import Limits
    from tierlog.integrations.polars import scan_polars
    from tierlog.record_format.decode import Record
    from tierlog.spark_reader.arrow_dataset import dataset, read_arrow

__version__ = "0.1.0"

__all__ = [
    "AsyncClient",
    "AsyncProducer",
    "AsyncTransaction",
    "Batching",
    "Client",
    "ConsumedRecord",
    "Delivery",
    "JsonSource",
    "Limits",
    "Membership",
    "NewRecord",
    "OffsetCommit",
    "Producer",
    "ProducerIdentity",
    "Record",
    "RecordMetadata",
    "RetryPolicy",
    "Sequenced",
    "Topic",
    "Transaction",
    "__version__",
    "dataset",
    "errors",
    "read_arrow",
    "scan_polars",
]

_MODULES: Final = {
    "client.async_producer": ("AsyncProducer",),
    "client.batching": ("Batching", "Delivery", "RecordMetadata"),
    "client.calls": ("Sequenced",),
    "client.client": ("AsyncClient", "Client"),
    "client.exchange": ("RetryPolicy",),
    "client.group_calls": ("OffsetCommit",),
    "client.membership": ("Membership",),
    "client.producer": ("Producer",),
    "client.records": ("ConsumedRecord", "JsonSource", "NewRecord"),
    "client.responses": ("ProducerIdentity", "Topic"),
    "client.transactions": ("AsyncTransaction", "Transaction"),
    "client.wire": ("Limits",),
    "record_format.decode": ("Record",),
}
_EXTRAS: Final = {  # need one
    "dataset": "spark_reader.arrow_dataset",
    "read_arrow": "spark_reader.arrow_dataset",
    "scan_polars": "integrations.polars",
}
_MODULE_OF: Final = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # else a type checker would accept any name, with type Any

    def __getattr__(name: str) -> Any:
        if name == "errors":
            return import_module("tierlog.errors")
        if name in _EXTRAS:
            return _of_an_extra(name)
        if name in _MODULE_OF:
            return getattr(import_module(f"tierlog.{_MODULE_OF[name]}"), name)
        raise AttributeError(f"module 'tierlog' has no attribute {name!r}")


def __dir__() -> list[str]:
    """For completion: includes names that are not loaded yet, and nothing internal."""
    return sorted(__all__)


def _of_an_extra(name: str) -> Any:
    try:
        return getattr(import_module(f"tierlog.{_EXTRAS[name]}"), name)
    except ModuleNotFoundError as error:
        from tierlog.extras import how_to_install

        if (hint := how_to_install(error)) is None:
            raise
        missing = ModuleNotFoundError(f"tierlog.{name}: {hint}", name=error.name)

    def not_installed(*_: Any, **__: Any) -> Any:
        """Needs an extra. Raises when it is called: `help`, `from tierlog import *` and
        whatever else looks at all names of a module must work without it.
        """
        raise missing

    return not_installed
