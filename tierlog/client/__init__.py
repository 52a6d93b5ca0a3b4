"""The broker from Python: one sans-I/O core under a synchronous and an asynchronous client."""

from tierlog.client.answers import ProducerIdentity
from tierlog.client.async_client import AsyncClient
from tierlog.client.async_producer import AsyncProducer
from tierlog.client.batching import Batching, Placed
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
from tierlog.client.transport import DEFAULT_SERVER

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
    "Placed",
    "Producer",
    "ProducerIdentity",
    "RetryPolicy",
    "Sequenced",
    "Unauthorized",
    "UnexpectedAnswer",
]
