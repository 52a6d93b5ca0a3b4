"""httpx2 under both clients: how they connect, and how its exceptions map to a call's outcomes.

* httpx2 is imported only here and in the two clients.
* Defaults are taken from the environment, with the same variables as on the command line.
* No text produced here contains a token: neither a repr nor an error.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import httpx2

from tierlog.client.exchange import ConnectionLost, NotSent, Outcome
from tierlog.client.wire import DEFAULT_SERVER, Request, Response
from tierlog.client.workarounds import is_without_response, text_of, tls_error_of
from tierlog.host.loopback import is_loopback
from tierlog.record_format.errors import ConfigurationError, SettingsError

Http = TypeVar("Http")

_NOT_TLS: Final = frozenset(("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"))  # OpenSSL 1 to 4
_UNKNOWN_CA: Final = frozenset((18, 19, 20))  # X509_V_ERR_: self-signed, or no local issuer
TIMEOUT_MAX_S: Final = 10**9  # a socket can wait longer, also with the wait of a long poll added
# Requests that wait in the broker must not keep others from a connection.
LONG_POLL_LIMITS: Final = httpx2.Limits(max_connections=None, max_keepalive_connections=100)
_NOT_SENT: Final = (
    httpx2.ConnectError,
    httpx2.ConnectTimeout,
    httpx2.PoolTimeout,
    httpx2.ProxyError,  # a proxy that cannot reach the broker
)


def _environment() -> Mapping[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("TIERLOG_")}


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class ConnectionConfig:
    """Where the broker is, and how to connect to it. `ca_file`: trust only this authority.
    `server`: of a cluster several, in a list or with commas between them.

    None stands for the environment's value as of now (`TIERLOG_SERVER`, `_TOKEN`, `_TOKEN_FILE`,
    `_CA_FILE`). If `token` or `token_file` is given, even empty, the environment's are ignored.
    """

    server: str | Sequence[str] | None = None
    token: str | None = None
    token_file: str | Path | None = None
    ca_file: str | Path | None = None
    timeout_s: float = 30.0
    environment: Mapping[str, str] = field(default_factory=_environment)

    def clients(self, kind: Callable[..., Http], transport: object) -> tuple[Http, Http]:
        """One for most requests, one for long polls. Raises ConfigurationError."""
        if not 0 < self.timeout_s <= TIMEOUT_MAX_S:
            raise SettingsError(
                f"timeout_s must be more than 0 and at most {TIMEOUT_MAX_S}, not {self.timeout_s}"
            )
        urls = self._urls()
        ca_file = self.ca_file or self.environment.get("TIERLOG_CA_FILE")
        create = partial(
            kind,
            base_url=urls[0],
            auth=self._auth(),
            timeout=self.timeout_s,
            verify=_authorities(urls, ca_file),
            # The environment's proxy is not for this machine.
            trust_env=not all(is_loopback(url.host) for url in urls),
            transport=transport,
        )
        try:
            return create(), create(limits=LONG_POLL_LIMITS)
        except (ImportError, ValueError, httpx2.InvalidURL) as error:
            raise SettingsError(f"the environment's proxy: {error}") from error

    def describe(self, client: object) -> str:
        """A client's repr, without its token and its URLs' passwords."""
        urls = ",".join(f"{url.scheme}://{url.netloc.decode()}" for url in self._urls())
        return f"<tierlog.{type(client).__name__} {urls}>"

    @property
    def servers(self) -> list[str]:
        """Raises SettingsError."""
        return [str(url).rstrip("/") for url in self._urls()]

    def _urls(self) -> list[httpx2.URL]:
        given = self.server
        if given is None:
            given = self.environment.get("TIERLOG_SERVER") or DEFAULT_SERVER
        named = given.split(",") if isinstance(given, str) else list(given)
        return [_server_url(one.strip()) for one in named] or [_server_url("")]

    def _auth(self) -> httpx2.Auth | None:
        token, file = self.token, self.token_file
        if token is None and file is None:
            token = self.environment.get("TIERLOG_TOKEN")
            file = self.environment.get("TIERLOG_TOKEN_FILE") or None
        if token or file is None:
            return _Bearer(lambda: _validated(token, "token")) if token else None
        return _Bearer(lambda: _validated(_read_token(file), f"token file {file}"))

    def http_arguments(self, request: Request) -> dict[str, Any]:
        """The arguments of `httpx2.Client.request`, also of the asynchronous one."""
        return {
            "method": request.method,
            "url": request.server + request.path,
            "params": request.query or None,
            "headers": request.headers,
            "content": request.body,
            "timeout": httpx2.Timeout(
                self.timeout_s,
                read=self.timeout_s + request.extra_wait_s,
                pool=None,  # any number of tasks may take turns
            ),
        }


class _Bearer(httpx2.Auth):
    """A token; read again when the broker refuses it, since its file may have been rewritten."""

    def __init__(self, read: Callable[[], str]) -> None:
        self._read, self._token = read, read()

    def auth_flow(
        self, request: httpx2.Request
    ) -> Generator[httpx2.Request, httpx2.Response, None]:
        sent = self._authorize(request)
        response = yield request
        if response.status_code != httpx2.codes.UNAUTHORIZED:
            return
        with suppress(ConfigurationError):  # the 401 is returned
            self._token = self._read()
        if self._token != sent:
            self._authorize(request)
            yield request

    def _authorize(self, request: httpx2.Request) -> str:
        token = self._token
        request.headers["authorization"] = f"Bearer {token}"
        return token


def to_response(response: httpx2.Response) -> Response:
    return Response(response.status_code, response.headers, response.content)


def to_outcome(error: httpx2.RequestError) -> Outcome:
    """Also for a response that cannot be decompressed, such as one that a proxy truncated."""
    reason = (text_of(error) or type(error).__name__) + _hint(error)
    if isinstance(error, _NOT_SENT):
        return NotSent(f"{error.request.url.netloc.decode()}: {reason}")
    return ConnectionLost(reason)


def _hint(error: httpx2.RequestError) -> str:
    """What to try if the server seems to use the other scheme, or an unknown authority."""
    tls = tls_error_of(error)
    if isinstance(tls, ssl.SSLCertVerificationError) and tls.verify_code in _UNKNOWN_CA:
        return " (for a private authority, give --ca-file or TIERLOG_CA_FILE)"
    if tls is not None and tls.reason in _NOT_TLS:
        return " (if the server does not use TLS, its address begins with http://)"
    if is_without_response(error) and error.request.url.scheme == "http":
        return " (if the server uses TLS, its address begins with https://)"
    return ""


def _server_url(server: str) -> httpx2.URL:
    try:
        url = httpx2.URL(server if "://" in server else f"http://{server}")
        url.raw_host.decode("ascii").encode("idna")  # as for the DNS lookup
    except (httpx2.InvalidURL, UnicodeError) as error:
        raise SettingsError(f"server {server!r}: {error}") from error
    if url.scheme not in {"http", "https"} or not url.host or url.query:
        raise SettingsError(f"server {server!r}: expected http://HOST:PORT or https://…")
    return url


def _read_token(file: str | Path) -> str:
    try:
        return Path(file).read_text()
    except OSError as error:
        raise SettingsError(f"token file {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(f"token file {file}: {error}") from error


def _validated(token: str, where: str) -> str:
    """Strips the line break at the end of a file."""
    token = token.strip()
    if not token.isascii() or not token.isprintable() or not token:
        raise SettingsError(f"{where}: does not contain a token")
    return token


def _authorities(urls: Sequence[httpx2.URL], file: str | Path | None) -> ssl.SSLContext:
    """The trusted authorities; none for http://, since the system's take 40 ms to load."""
    if not file and all(url.scheme == "http" for url in urls):
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if file:
            return ssl.create_default_context(cafile=str(file))
        return httpx2.create_ssl_context()
    except OSError as error:  # ssl.SSLError is one
        named = file or os.environ.get("SSL_CERT_FILE")
        raise SettingsError(f"CA file {named}: {error.strerror}") from error
