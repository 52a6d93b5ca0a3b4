"""Who is let in: with tokens if there are any, by loopback names if there are none; and how often.

* If the tokens file exists, every request is authenticated before anything is said about paths,
  methods or topics. Health is open, and answers strangers with nothing but yes or no.
* The file is checked at most every five milliseconds: a revoked token is refused from then on.
* Wrong tokens are counted against the address that they come from.
"""

from __future__ import annotations

import time
from typing import Final

from api.http.access.client_rates import ClientRates
from api.http.access.grants import EVERYTHING, NOBODY, Grant
from api.http.access.host_check import check_host
from api.http.access.scopes import NEEDS, OPEN_PATHS, UNLISTED
from api.http.access.tokens import TokensFile
from api.http.exchange import Exchange
from api.http.refusals import Unauthorized
from api.http.settings import HttpSettings
from api.http.strict_json import refuse_field
from record_format.errors import Forbidden

LOOK_EVERY_S: Final = 0.005
_BEARER: Final = "bearer "
_MAX_TOKEN_LENGTH: Final = 256


class Access:
    def __init__(self, settings: HttpSettings) -> None:
        self._settings = settings
        file, required = settings.tokens_file, settings.tokens_required
        self._tokens = TokensFile(file, required=required) if file is not None else None
        self._next_look_s = 0.0
        self._rates = ClientRates(settings.client_requests_max)

    def admit(self, exchange: Exchange) -> None:
        """Set `exchange.grant` to who is asking. Raises ForeignHost, Unauthorized, Throttled."""
        host = exchange.header(b"host")
        if host is None and exchange.scope["http_version"] == "1.1":
            refuse_field("Host", "missing; a request of HTTP/1.1 has one (RFC 9112, 3.2)")
        if host is not None and "," in host:
            refuse_field("Host", "given more than once")
        is_open = exchange.scope["path"] in OPEN_PATHS
        if not self._asks_for_tokens():
            check_host(exchange, self._settings)
            exchange.grant = EVERYTHING
        else:
            exchange.grant = self._grant_of(exchange) or NOBODY
        if is_open:
            return
        if self._rates.bounded:
            self._rates.take(exchange.grant.name or _address(exchange))
        if exchange.grant is NOBODY:
            raise Unauthorized(given=exchange.header(b"authorization") is not None)

    def check(self, exchange: Exchange, call: tuple[str, str] | None) -> None:
        """Check that the caller may make this call, on this topic. Raises Forbidden.

        `call` is its method and the template of its path; None for a path that nothing serves.
        """
        grant = exchange.grant
        if call is None or grant is EVERYTHING or exchange.scope["path"] in OPEN_PATHS:
            return
        need = NEEDS.get(call, UNLISTED)
        grant.check_scopes(need.scopes)
        if need.whole and grant.topics:
            raise Forbidden(
                f"a token for topics {grant.topics!r} may not make a call about all topics"
            )
        topic = exchange.params.get("topic")
        if topic is not None:
            grant.check_topic(topic)

    def recheck(self, exchange: Exchange) -> None:
        """For answers that wait: a token revoked meanwhile gets no more. Raises Unauthorized."""
        if self._asks_for_tokens() and self._grant_of(exchange) != exchange.grant:
            raise Unauthorized(given=True)

    def _asks_for_tokens(self) -> bool:
        if self._tokens is None:
            return False
        now_s = time.monotonic()
        if now_s >= self._next_look_s:
            self._next_look_s = now_s + LOOK_EVERY_S
            self._tokens.refresh()
        return self._tokens.required

    def _grant_of(self, exchange: Exchange) -> Grant | None:
        assert self._tokens is not None, "tokens are asked for"
        header = exchange.header(b"authorization") or ""
        if header[: len(_BEARER)].lower() != _BEARER or len(header) > _MAX_TOKEN_LENGTH:
            return None
        return self._tokens.grant_of(header[len(_BEARER) :].strip())


def _address(exchange: Exchange) -> str:
    client = exchange.scope.get("client")
    return str(client[0]) if client else ""
