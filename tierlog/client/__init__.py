"""The broker from Python: one sans-I/O core under a synchronous and an asynchronous client.

* Calls: `calls` and `group_calls` define requests and results, `exchange` retries, `problems` maps
  error responses; `client` and `async_client` do the I/O through `transport`, with the calls as
  methods.
* Consumers: `scheduling` is the progress in each partition, and the order of fetches.
* Producers: `batching` gathers records, `sender` chooses their partitions and sends them;
  `producer` and `async_producer` are the thread and the task around them.

Names load when they are first used, so that importing a leaf of this package does not import
httpx2.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tierlog.client.async_client import AsyncClient
    from tierlog.client.async_producer import AsyncProducer
    from tierlog.client.batching import Batching, RecordMetadata
    from tierlog.client.calls import Limits, Sequenced
    from tierlog.client.client import Client
    from tierlog.client.exchange import AnswerLost, BrokerUnreachable, RetryPolicy
    from tierlog.client.group_calls import OffsetCommit
    from tierlog.client.problems import (
        AppendedInPart,
        BrokerFault,
        NotOfferedHere,
        Unauthorized,
        UnexpectedAnswer,
    )
    from tierlog.client.producer import Producer
    from tierlog.client.records import ConsumedRecord, JsonSource, NewRecord
    from tierlog.client.responses import ProducerIdentity
    from tierlog.client.wire import DEFAULT_SERVER

__all__ = [
    "DEFAULT_SERVER",
    "AnswerLost",
    "AppendedInPart",
    "AsyncClient",
    "AsyncProducer",
    "Batching",
    "BrokerFault",
    "BrokerUnreachable",
    "Client",
    "ConsumedRecord",
    "JsonSource",
    "Limits",
    "NewRecord",
    "NotOfferedHere",
    "OffsetCommit",
    "Producer",
    "ProducerIdentity",
    "RecordMetadata",
    "RetryPolicy",
    "Sequenced",
    "Unauthorized",
    "UnexpectedAnswer",
]

_MODULES: Final = {
    "responses": ("ProducerIdentity",),
    "async_client": ("AsyncClient",),
    "async_producer": ("AsyncProducer",),
    "batching": ("Batching", "RecordMetadata"),
    "calls": ("Limits", "Sequenced"),
    "client": ("Client",),
    "exchange": ("AnswerLost", "BrokerUnreachable", "RetryPolicy"),
    "group_calls": ("OffsetCommit",),
    "problems": (
        "AppendedInPart",
        "BrokerFault",
        "NotOfferedHere",
        "Unauthorized",
        "UnexpectedAnswer",
    ),
    "producer": ("Producer",),
    "records": ("ConsumedRecord", "JsonSource", "NewRecord"),
    "wire": ("DEFAULT_SERVER",),
}
_MODULE_OF: Final = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # as in tierlog/__init__.py

    def __getattr__(name: str) -> Any:
        if name in _MODULE_OF:
            return getattr(import_module(f"tierlog.client.{_MODULE_OF[name]}"), name)
        raise AttributeError(f"module 'tierlog.client' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
