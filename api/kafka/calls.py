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
import math
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from tierlog.api.serving.grants import NOBODY, Grant
from tierlog.api.serving.tokens import TokenEntry
from tierlog.record_format.kafka_messages.apis import APIS, Api
from tierlog.record_format.kafka_messages.codec import RequestHead

if TYPE_CHECKING:
    from tierlog.api.kafka.context import KafkaContext

Answer = msgspec.Struct | None
"""None: nothing is sent (Produce with acks=0)."""


class Exchange(Protocol):
    """SASL in progress. `token`: the client's, once it has proved that it has it."""

    mechanism: str
    token: TokenEntry | None

    def answer(self, message: bytes) -> bytes:
        """Raises AuthenticationFailed."""
        ...


@dataclass(slots=True)
class Session:
    """What is known of a connection's client. `address`: its own; `local`: host and port that it
    connected to.
    """

    address: str
    local: tuple[str, int]
    is_tls: bool
    grant: Grant = NOBODY
    is_authenticated: bool = False
    software: str = ""  # name and version, as ApiVersions gave them

    token: TokenEntry | None = None  # that the client authenticated with, and how
    mechanism: str = ""
    generation: int = -1  # of the tokens that `grant` was judged by
    ends_ms: float = math.inf  # when the client has to have authenticated again
    exchange: Exchange | None = None
    is_refused: bool = False  # the connection ends after this answer

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

    @property
    def advertised(self) -> tuple[str, int]:
        """Where this client is told to connect to: never an address that means all."""
        host, port = self.context.settings.advertised or self.session.local
        return (self.session.local[0] if _means_all(host) else host), port


def _means_all(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


Later = asyncio.Future[Answer]
Handler = Callable[[Call, Any], Answer | Later | Coroutine[Any, Any, Answer | Later]]


class EndConnection(Exception):
    """The client is told by the end of its connection: it asked for no answer."""


class Row(NamedTuple):
    """`request`: the type to decode. `is_pipelined`: the next request of this kind may begin before
    this one is answered; answers are sent in order all the same. `is_open`: also for a client that
    has not authenticated. `continues_exchange`: also while SASL is in progress.
    """

    request: type[msgspec.Struct]
    handle: Handler
    is_pipelined: bool = False
    is_open: bool = False
    continues_exchange: bool = False


Calls = Mapping[str, Row]
"""By the API's name."""


def served_apis(calls: Calls) -> list[Api]:
    return [api for api in APIS.values() if api.name in calls]
