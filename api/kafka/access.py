"""Who a connection's client is, by the tokens that HTTP has too.

* Without a tokens file everybody may do everything, and the settings let such a broker listen on
  loopback only. With one, a client has authenticated, or it gets no further than SASL.
* Each request is judged by the tokens as they are then: once the file has changed, none begins
  before it was read again, and a connection whose token is no longer there ends.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

import structlog

from tierlog.api.kafka.calls import Row, Session
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.api.serving.client_rates import ClientRates
from tierlog.api.serving.grants import EVERYTHING, NOBODY
from tierlog.api.serving.tokens import TokenEntry, TokensFile
from tierlog.host.clock import monotonic_ms
from tierlog.host.loopback import is_loopback

log = structlog.get_logger(__name__)

NEVER: Final = math.inf


class Access:
    """`tokens` and `rates` are those of the HTTP server. Used on the event loop only."""

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        tokens: TokensFile | None,
        rates: ClientRates | None,
        threads: Executor,
    ) -> None:
        self._settings, self.tokens, self._rates = settings, tokens, rates
        self._threads = threads
        self._waiting: list[Callable[[], None]] = []
        self._refreshing: asyncio.Task[None] | None = None

    def is_current(self) -> bool:
        """Whether requests can be judged now. Never blocks."""
        return self.tokens is None or self.tokens.is_current()

    def call_when_current(self, call: Callable[[], None]) -> None:
        """Call once, after the tokens were read again."""
        self._waiting.append(call)
        if self._refreshing is None:
            assert self.tokens is not None, "without tokens all is current"
            refresh = self.tokens.refresh(self._threads)
            self._refreshing = asyncio.get_running_loop().create_task(refresh)
            self._refreshing.add_done_callback(self._refreshed)

    def _refreshed(self, _: asyncio.Task[None]) -> None:
        self._refreshing = None
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def requires_tokens(self) -> bool:
        return self.tokens is not None and self.tokens.required

    def judge(self, session: Session) -> None:
        """Set what the client may do, by the tokens as they are now."""
        generation = 0 if self.tokens is None else self.tokens.generation
        if session.generation == generation:
            return
        session.generation = generation
        if self.tokens is None or not self.tokens.required:
            session.grant, session.is_authenticated = EVERYTHING, True
            return
        token = session.token
        known = None if token is None else self.tokens.entry_named(token.name)
        if known is not None and token is not None and known.hash == token.hash:
            session.token, session.grant, session.is_authenticated = known, known.grant, True
        else:
            session.token, session.grant, session.is_authenticated = None, NOBODY, False

    def refusal(self, session: Session, row: Row) -> str:
        """Why this request must end the connection; empty if it may be made."""
        self.judge(session)
        if session.exchange is not None and not row.continues_exchange:
            return "in the middle of SASL"
        if row.is_open:
            return ""
        if not session.is_authenticated:
            return "the client has not authenticated"
        if monotonic_ms() > session.ends_ms:
            return "connections.max.reauth.ms have passed since the client authenticated"
        return ""

    def admit(self, session: Session, token: TokenEntry) -> int:
        """The client has authenticated. Returns for how many milliseconds; 0: for ever."""
        lifetime_ms = self._settings.connections_max_reauth_ms
        session.token, session.exchange, session.generation = token, None, -1
        session.ends_ms = monotonic_ms() + lifetime_ms if lifetime_ms else NEVER
        self.judge(session)
        return lifetime_ms

    def throttle_ms(self, session: Session) -> int:
        """Count a request. Returns how long the client's next ones have to wait."""
        if self._rates is None:
            return 0
        client = session.grant.name or session.address
        return math.ceil(self._rates.take_in_advance(client) * 1000)


def may_show_secret(session: Session) -> bool:
    """Whether a token may cross this connection as it is."""
    return session.is_tls or is_loopback(session.address)
