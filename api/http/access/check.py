"""Authentication, authorization and rate limits: by tokens if there are any, otherwise only for
loopback names.

* If the tokens file exists, every request is authenticated before its response reveals anything
  about paths, methods or topics. Health is open; without a token it says only yes or no.
* Once the file has changed, no request is authenticated before it was read again, by a thread:
  `is_current` tells, `refresh` waits.
* Requests without a valid token count against the rate limit of their address.
* A browser may change something only from a page of this server, with or without tokens.
"""

from __future__ import annotations

import re
from concurrent.futures import Executor
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from tierlog.api.http.access.scopes import NEEDS, OPEN_PATHS, UNLISTED
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.problems import ForeignHost, ForeignOrigin, Unauthorized
from tierlog.api.http.settings import HttpSettings
from tierlog.api.http.strict_json import refuse_field
from tierlog.api.serving.client_rates import ClientRates
from tierlog.api.serving.grants import EVERYTHING, NOBODY, Grant
from tierlog.api.serving.tokens import TokensFile
from tierlog.host.loopback import is_loopback
from tierlog.record_format.errors import Forbidden

_BEARER: Final = "bearer "
_MAX_TOKEN_LENGTH: Final = 256
_HOST_AND_PORT: Final = re.compile(r"(?:\[([^\[\]@]*)\]|([^\[\]:@]*))(?::\d*)?", re.ASCII)
_SAFE_METHODS: Final = frozenset(("GET", "HEAD", "OPTIONS"))  # RFC 9110, 9.2.1
_OWN_SITES: Final = ("same-origin", "none")  # none: the address bar


class Access:
    def __init__(self, settings: HttpSettings, threads: Executor) -> None:
        self._checks_host = settings.check_host
        file, required = settings.tokens_file, settings.tokens_required
        self.tokens = TokensFile(file, required=required) if file is not None else None
        self._threads = threads
        limit = settings.client_requests_max
        self.rates = None if limit is None else ClientRates(limit)

    def is_current(self) -> bool:
        """Whether requests can be authenticated now; otherwise `refresh` first. Never blocks."""
        return self.tokens is None or self.tokens.is_current()

    async def refresh(self) -> None:
        """Read the tokens again if they have changed."""
        if self.tokens is not None and not self.tokens.is_current():
            await self.tokens.refresh(self._threads)

    def authenticate(self, exchange: Exchange) -> None:
        """Set `exchange.grant`. Raises ForeignHost, ForeignOrigin, Unauthorized, Throttled."""
        host = exchange.header(b"host")
        if host is None and exchange.scope["http_version"] == "1.1":
            refuse_field("Host", "missing; HTTP/1.1 requires it (RFC 9112, 3.2)")
        if host is not None and "," in host:
            refuse_field("Host", "given more than once")
        is_open = exchange.scope["path"] in OPEN_PATHS
        if not self._tokens_required():
            if self._checks_host:
                _check_host(exchange)
            exchange.grant = EVERYTHING
        else:
            exchange.grant = self._grant_of(exchange) or NOBODY
        _check_same_origin(exchange)
        if is_open:
            return
        if self.rates is not None and not exchange.grant.is_broker:
            self.rates.take(exchange.grant.name or _address(exchange))
        if exchange.grant is NOBODY:
            raise Unauthorized(given=exchange.header(b"authorization") is not None)

    def authorize(self, exchange: Exchange, call: tuple[str, str] | None) -> None:
        """Check that the caller may make this call on this topic. Raises Forbidden.

        `call` is the method and the path template; None for a path without a call.
        """
        grant = exchange.grant
        if call is None or grant is EVERYTHING or exchange.scope["path"] in OPEN_PATHS:
            return
        need = NEEDS.get(call, UNLISTED)
        grant.check_scopes(need.scopes)
        if need.whole and grant.topics:
            raise Forbidden(
                f"this call is about all topics, but the token is limited to topics that begin "
                f"with {grant.topics!r}"
            )
        for name in "topic", "subject":
            if name in exchange.params:
                grant.check_topic(exchange.params[name])

    async def recheck(self, exchange: Exchange) -> None:
        """For responses that wait: a token may have been revoked meanwhile. Raises Unauthorized."""
        await self.refresh()
        if self._tokens_required() and self._grant_of(exchange) != exchange.grant:
            raise Unauthorized(given=True)

    def _tokens_required(self) -> bool:
        return self.tokens is not None and self.tokens.required

    def _grant_of(self, exchange: Exchange) -> Grant | None:
        assert self.tokens is not None, "tokens are required"
        header = exchange.header(b"authorization") or ""
        if header[: len(_BEARER)].lower() != _BEARER or len(header) > _MAX_TOKEN_LENGTH:
            return None
        return self.tokens.grant_of(header[len(_BEARER) :].strip())


def _address(exchange: Exchange) -> str:
    client = exchange.scope.get("client")
    return str(client[0]) if client else ""


def _check_host(exchange: Exchange) -> None:
    """Protect against DNS rebinding: a page of another site whose name resolves to 127.0.0.1 still
    sends that name in `Host` and `Origin`. A request without either (HTTP/1.0) does not come from a
    browser. Raises ForeignHost.
    """
    host = exchange.header(b"host")
    if host is not None and not _is_loopback(f"//{host}"):
        raise ForeignHost(
            f"Host {host[:200]!r} is not a loopback name: without tokens no other is accepted"
        )
    origin = exchange.header(b"origin")
    if origin is not None and not _is_loopback(origin):
        raise ForeignHost(f"Origin {origin[:200]!r} is not a loopback name")


def _check_same_origin(exchange: Exchange) -> None:
    """Refuse to change anything for a page of another site, or of another port of this machine.

    Browsers say where a request comes from: in `Sec-Fetch-Site`, which no proxy changes; where they
    leave it out (plain HTTP, not loopback), in `Origin`. Clients that send neither are no browsers.
    Raises ForeignOrigin.
    """
    if exchange.method in _SAFE_METHODS:
        return
    site, origin = exchange.header(b"sec-fetch-site"), exchange.header(b"origin")
    if site is not None:
        if site not in _OWN_SITES:
            raise ForeignOrigin(f"this request comes from a page of another site: {site[:40]!r}")
    elif origin is not None and origin.partition("://")[2] != exchange.header(b"host"):
        raise ForeignOrigin(f"this request comes from a page of {origin[:200]!r}")


def _name_of(url: str) -> str:
    """The host name; empty if there is more than a host and a port (invalid; RFC 9110, 7.2)."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return ""
    found = _HOST_AND_PORT.fullmatch(parts.netloc)
    if found is None or parts.path or parts.query or parts.fragment:
        return ""
    return (found[1] or found[2]).lower().rstrip(".")


@lru_cache(maxsize=256)  # every request has one of the same few
def _is_loopback(url: str) -> bool:
    name = _name_of(url)
    return name.endswith(".localhost") or is_loopback(name)
