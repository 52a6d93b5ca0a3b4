"""Protection against DNS rebinding: without tokens, only requests to loopback names are accepted.

A page of another site whose name resolves to 127.0.0.1 still sends that name in `Host` and
`Origin`. A request without either (HTTP/1.0) does not come from a browser.
"""

from __future__ import annotations

from functools import lru_cache
from urllib.parse import urlsplit

from api.http.exchange import Exchange
from api.http.http_errors import ForeignHost
from api.http.settings import HttpSettings
from record_format.loopback import is_loopback


def check_host(exchange: Exchange, settings: HttpSettings) -> None:
    """Raise ForeignHost if `Host` or `Origin` is not a loopback name."""
    if not settings.check_host:
        return
    host = exchange.header(b"host")
    if host is not None and not _is_loopback(f"//{host}"):
        raise ForeignHost(
            f"Host {host[:200]!r} is not a loopback name: without tokens no other is accepted"
        )
    origin = exchange.header(b"origin")
    if origin is not None and not _is_loopback(origin):
        raise ForeignHost(f"Origin {origin[:200]!r} is not a loopback name")


def _name_of(url: str) -> str:
    """The host name; empty if there is more than a host and a port (invalid; RFC 9110, 7.2)."""
    try:
        parts = urlsplit(url)
        name = (parts.hostname or "").rstrip(".")
    except ValueError:
        return ""
    return "" if "@" in parts.netloc or parts.path or parts.query or parts.fragment else name


@lru_cache(maxsize=256)  # every request has one of the same few
def _is_loopback(url: str) -> bool:
    name = _name_of(url)
    return name.endswith(".localhost") or is_loopback(name)
