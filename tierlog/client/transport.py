"""httpx under both clients: how they connect, and what its exceptions mean to a call.

* Only here and in the two clients is httpx imported.
* What is not given is taken from the environment, under the same names as on the command line.
* A token is never in a text produced here: not in a repr, not in an error.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx

from record_format.errors import ConfigurationError, SettingsError
from record_format.loopback import is_loopback
from tierlog.client.exchange import Broken, Outcome, Unsent
from tierlog.client.wire import DEFAULT_SERVER, Reply, Request

Http = TypeVar("Http")

_ERRNO: Final = re.compile(r"^\[Errno -?\d+\] ")
_NO_TLS: Final = re.compile("WRONG_VERSION_NUMBER|record layer failure")  # by OpenSSL's version
_UNKNOWN_CA: Final = re.compile("local issuer certificate|self-signed certificate")
_HUNG_UP: Final = "Server disconnected without sending a response"
# Of one event loop at a time: more are no faster, and httpx looks at every connection and at every
# request that waits for one, whenever an answer comes.
AT_A_TIME: Final = 32
# For requests that wait in the broker: one of them keeps no connection from others.
WAITING: Final = httpx.Limits(max_connections=None, max_keepalive_connections=100)
_NEVER_LEFT: Final = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.ProxyError,  # one that makes no way to the broker
)


def _environment() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("TIERLOG_")}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Connection:
    """Where the broker is and how it is spoken to. `ca_file`: trust this authority alone.

    None: taken from the environment now (`TIERLOG_SERVER`, `_TOKEN`, `_TOKEN_FILE`, `_CA_FILE`), if
    it is set there. A token given in either way, even an empty one, is the only one used.
    """

    server: str | None = None
    token: str | None = None
    token_file: str | Path | None = None
    ca_file: str | Path | None = None
    timeout_s: float = 30.0
    environment: Mapping[str, str] = field(default_factory=_environment)

    def clients(self, kind: Callable[..., Http], transport: object) -> tuple[Http, Http]:
        """For most requests, and for those that wait in the broker. Raises ConfigurationError."""
        url = self._url()
        ca_file = self.ca_file or self.environment.get("TIERLOG_CA_FILE")
        make = partial(
            kind,
            base_url=url,
            auth=self._auth(),
            timeout=self.timeout_s,
            verify=_authorities(url, ca_file),
            # A proxy of the environment is for the world outside, not for this machine.
            trust_env=not is_loopback(url.host),
            transport=transport,
        )
        try:
            return make(), make(limits=WAITING)
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise SettingsError(f"the environment's proxy: {error}") from error

    def shown(self, client: object) -> str:
        """A client's repr: no token, and no password of its URL."""
        url = self._url()
        return f"<tierlog.{type(client).__name__} {url.scheme}://{url.netloc.decode()}>"

    def _url(self) -> httpx.URL:
        if self.server is not None:
            return _server_url(self.server)
        return _server_url(self.environment.get("TIERLOG_SERVER") or DEFAULT_SERVER)

    def _auth(self) -> httpx.Auth | None:
        token, file = self.token, self.token_file
        if token is None and file is None:
            token = self.environment.get("TIERLOG_TOKEN")
            file = self.environment.get("TIERLOG_TOKEN_FILE") or None
        if token or file is None:
            return _Bearer(lambda: _checked(token, "token")) if token else None
        return _Bearer(lambda: _checked(_read(file), f"token file {file}"))

    def sent_as(self, request: Request) -> dict[str, Any]:
        """What both clients of httpx take."""
        return {
            "method": request.method,
            "url": request.path,
            "params": request.query or None,
            "headers": request.headers,
            "content": request.body,
            "timeout": self.timeout_s + request.extra_wait_s,
        }


class _Bearer(httpx.Auth):
    """A token, read anew when the broker does not know it: its file may have been rewritten."""

    def __init__(self, read: Callable[[], str]) -> None:
        self._read, self._token = read, read()

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        sent = self._ask_with(request)
        response = yield request
        if response.status_code != httpx.codes.UNAUTHORIZED:
            return
        with suppress(ConfigurationError):  # then the answer is what it is
            self._token = self._read()
        if self._token != sent:
            self._ask_with(request)
            yield request

    def _ask_with(self, request: httpx.Request) -> str:
        token = self._token
        request.headers["authorization"] = f"Bearer {token}"
        return token


def to_reply(response: httpx.Response) -> Reply:
    return Reply(response.status_code, response.headers, response.content)


def to_outcome(error: httpx.RequestError) -> Outcome:
    """Also of an answer that came and cannot be expanded, as a proxy's that was cut."""
    reason = (_ERRNO.sub("", str(error)) or type(error).__name__) + _hint(error)
    if isinstance(error, _NEVER_LEFT):
        return Unsent(f"{error.request.url.netloc.decode()}: {reason}")
    return Broken(reason)


def _hint(error: httpx.RequestError) -> str:
    """What to try where the server seems to speak the other scheme, or is vouched for by nobody."""
    if _UNKNOWN_CA.search(str(error)):
        return " (an authority of your own: --ca-file or TIERLOG_CA_FILE)"
    if _NO_TLS.search(str(error)):
        return " (without TLS its address begins with http://)"
    if _HUNG_UP in str(error) and error.request.url.scheme == "http":
        return " (with TLS its address begins with https://)"
    return ""


def _server_url(server: str) -> httpx.URL:
    try:
        url = httpx.URL(server if "://" in server else f"http://{server}")
        url.raw_host.decode("ascii").encode("idna")  # as it is looked up
    except (httpx.InvalidURL, UnicodeError) as error:
        raise SettingsError(f"server {server!r}: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host or url.query:
        raise SettingsError(f"server {server!r}: expected http://HOST:PORT or https://…")
    return url


def _read(file: str | Path) -> str:
    try:
        return Path(file).read_text()
    except OSError as error:
        raise SettingsError(f"token file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"token file {file}: {error}") from error


def _checked(token: str, where: str) -> str:
    """Without the line break that a file, or a secret that was one, ends with."""
    token = token.strip()
    if not token.isascii() or not token.isprintable() or not token:
        raise SettingsError(f"{where}: contains no token")
    return token


def _authorities(url: httpx.URL, file: str | Path | None) -> ssl.SSLContext:
    """Who is trusted; without TLS nobody, as those of the system take 40 ms to load."""
    if not file and url.scheme == "http":
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if file:
            return ssl.create_default_context(cafile=str(file))
        return httpx.create_ssl_context()
    except OSError as error:  # ssl.SSLError is one
        named = file or os.environ.get("SSL_CERT_FILE")
        raise SettingsError(f"CA file {named}: {error.strerror}") from error
