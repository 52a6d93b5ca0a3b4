"""What a handler is given and gives back, and the table of all handlers.

* A handler is a plain function where the answer is there at once. One that waits returns an
  awaitable: a coroutine, which becomes a task, or a future that some callback completes, which
  costs neither a task nor a thread. A coroutine may return such a future too.
* What is pipelined is begun in order: the next one once the one before is a future.
* An error that belongs to one topic, partition or group is a code in the answer (`error_codes`).
  What a handler raises ends the connection; with an EndConnection that is the answer.
* ApiVersions advertises exactly the APIs of the table.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from tierlog.api.kafka.context import KafkaContext
from tierlog.api.serving.grants import NOBODY, Grant
from tierlog.record_format.kafka_messages.apis import APIS, Api
from tierlog.record_format.kafka_messages.codec import RequestHead

Answer = msgspec.Struct | None
"""None: nothing is sent (Produce with acks=0)."""


@dataclass(slots=True)
class Session:
    """What is known of a connection's client."""

    address: str
    is_tls: bool
    grant: Grant = NOBODY
    is_authenticated: bool = False
    software: str = ""  # name and version, as ApiVersions gave them

    # `close` calls them once: whatever of the client ends with its connection.
    on_close: list[Callable[[], object]] = field(default_factory=list)


class Call(NamedTuple):
    """One request: its head, and who sent it."""

    context: KafkaContext
    session: Session
    head: RequestHead

    @property
    def version(self) -> int:
        return self.head.version


Later = asyncio.Future[Answer]
Handler = Callable[[Call, Any], Answer | Later | Coroutine[Any, Any, Answer | Later]]


class EndConnection(Exception):
    """The client is told by the end of its connection: it asked for no answer."""


class Row(NamedTuple):
    """`request`: the type to decode. `is_pipelined`: the next request of this kind may begin before
    this one is answered; answers are sent in order all the same. `is_open`: also for a client that
    has not authenticated.
    """

    request: type[msgspec.Struct]
    handle: Handler
    is_pipelined: bool = False
    is_open: bool = False


Calls = Mapping[str, Row]
"""By the API's name."""


def served_apis(calls: Calls) -> list[Api]:
    return [api for api in APIS.values() if api.name in calls]
