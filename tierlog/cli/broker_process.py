"""A broker as a process: opens it, serves until a signal, and closes it.

* The address is bound before anything is opened, and the store is checked before a data folder is
  created: a port in use, or refused credentials, leave nothing behind.
* A signal stops the server first, then the broker; what was acknowledged is flushed before exit 0.
  Before the server listens, a signal aborts the start. Further ones change nothing.
* The garbage collector is off until everything is loaded, which takes a tenth less without it, and
  never scans that: one scan would delay every request by a tenth of a second. The same holds for
  the compiled kernels, which are loaded once there is work for them.
* Threads that compute hand the interpreter over after half a millisecond, not after five: whoever
  answers a produce waits for it some six times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import gc
import os
import resource
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

import structlog

from tierlog.api.app import create_app, kafka_listener
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.server import Tls, serve
from tierlog.api.serving.listening import bind
from tierlog.broker.broker import Broker
from tierlog.broker.bucket.store_status import check_access
from tierlog.broker.membership.peers import Peers
from tierlog.host.loopback import is_loopback
from tierlog.object_store.ledger import StoreRequest
from tierlog.object_store.open import open_store
from tierlog.record_format import native
from tierlog.record_format.errors import ConfigurationError
from tierlog.settings import Settings, described

log = structlog.get_logger(__name__)

_DESCRIPTORS_MAX = 1 << 18
TURN_S: Final = 0.0005  # of a thread that computes


class _Stopped(BaseException):
    """A signal arrived before the server listened."""


class Listening(NamedTuple):
    """Where a broker listens. `kafka`: HOST:PORT as Kafka clients are given it; None: it does not
    serve them.
    """

    url: str
    kafka: str | None


def run_broker(
    settings: Settings,
    *,
    announce: Callable[[Listening], None],
    verbose: bool = False,
    kafka_ports: int = 1,
) -> None:
    """Serve until a signal. `announce` is called once the server is ready. `verbose` logs each
    request, and each request to the store. `kafka_ports`: how many ports are tried for Kafka
    clients, from the one in the settings on.

    Raises ConfigurationError and OSError if it cannot start.
    """
    end_start = _stop_on_signals()
    sys.setswitchinterval(TURN_S)
    gc.disable()
    try:
        tls = _tls(settings)
        if tls is None and not all(map(is_loopback, _hosts(settings))):
            log.warning("no TLS: tokens and records cross the network unencrypted")
        with _bound(settings) as sock, _bound_for_kafka(settings, kafka_ports) as kafka_sock:
            listening = Listening(_url(sock, tls), _kafka_address(settings, kafka_sock))

            def on_started() -> None:
                end_start()
                announce(listening)
                _collect_what_is_not_loaded()
                native.call_when_busy(_load_kernels_in_thread)

            settings = _advertising(settings, listening)
            broker = _open_broker(settings, verbose=verbose)
            try:
                app = create_app(broker, settings.http)
                if verbose:
                    app.on_finished = _log_request
                kafka = None
                if kafka_sock is not None:
                    resolved = dataclasses.replace(settings, broker=broker.settings)
                    configs = described(resolved)
                    kafka = kafka_listener(app, settings.kafka, kafka_sock, configs=configs)
                serve(app, sock=sock, tls=tls, beside=kafka, on_started=on_started)
            finally:
                broker.close()
            log.info("stopped")
    except _Stopped:
        log.info("stopped before listening")
    finally:
        gc.enable()


def _stop_on_signals() -> Callable[[], None]:
    """A signal during the start ends it: it raises `_Stopped`. While the broker serves, uvicorn has
    handlers of its own. Any other signal comes while it is being closed, and is ignored. Returns
    what to call at the end of the start.
    """
    is_starting = True

    def end_start() -> None:
        nonlocal is_starting
        is_starting = False

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if is_starting:
            end_start()
            raise _Stopped

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # a closed terminal; nohup ignores it
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    return end_start


def _url(sock: socket.socket, tls: Tls | None) -> str:
    return f"{'https' if tls else 'http'}://{_host_and_port(*sock.getsockname()[:2])}"


def _kafka_address(settings: Settings, sock: socket.socket | None) -> str | None:
    if sock is None:
        return None
    host, port = settings.kafka.advertised or sock.getsockname()[:2]
    return _host_and_port(host, port)


def _advertising(settings: Settings, listening: Listening) -> Settings:
    """What the other brokers of a cluster are told."""
    url = settings.broker.advertised_url or listening.url
    broker = replace(settings.broker, advertised_url=url, advertised_kafka=listening.kafka or "")
    return replace(settings, broker=broker)


def _host_and_port(host: str, port: int) -> str:
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def _hosts(settings: Settings) -> Iterator[str]:
    yield settings.host
    if settings.kafka_listen is not None:
        yield settings.kafka_listen[0]


def _collect_what_is_not_loaded() -> None:
    """Exempt from garbage collection what stays in memory."""
    gc.freeze()
    gc.enable()


def _load_kernels_in_thread() -> None:
    # numpy's OpenBLAS would start a thread per core, which nothing here needs.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    try:
        threading.Thread(target=load_kernels, name="native-kernels", daemon=True).start()
    except RuntimeError as error:
        log.warning("no compiled kernels: no thread to load them", error=str(error))


def load_kernels() -> None:
    """Load the compiled kernels; until then Python code does their work."""
    gc.disable()
    try:
        if not native.load() and native.is_available():
            log.warning(
                "no compiled kernels: numba needs a writable folder, set in NUMBA_CACHE_DIR"
            )
    except (ImportError, OSError) as error:  # numba refuses a newer numpy; too many open files
        log.warning("no compiled kernels: numba cannot be imported", error=str(error))
    finally:
        _collect_what_is_not_loaded()


def _bound(settings: Settings) -> socket.socket:
    return _bind(settings.host, settings.port)


def _bound_for_kafka(
    settings: Settings, ports: int
) -> contextlib.AbstractContextManager[socket.socket | None]:
    if settings.kafka_listen is None:
        return contextlib.nullcontext()
    host, first = settings.kafka_listen
    for port in range(first, first + ports - 1):
        with contextlib.suppress(ConfigurationError):
            return _bind(host, port)
    return _bind(host, first + ports - 1)


def _bind(host: str, port: int) -> socket.socket:
    try:
        return bind(host, port)
    except OSError as error:
        where = f"{host}:{port}"
        reason = f"cannot listen on {where}: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            reason += ", perhaps by another broker: stop it, or choose another port"
        raise ConfigurationError(reason) from error


def _open_broker(settings: Settings, *, verbose: bool) -> Broker:
    _raise_descriptor_limit()  # a thousand partitions take more than the usual 1,024 to open
    peers = _peers(settings) if settings.broker.cluster_join else None
    store = open_store(settings.store_url, settings.s3) if settings.store_url else None
    if store is not None and verbose:
        store.ledger.watch = _log_store_request
    data_dir = settings.broker.data_dir
    if data_dir.is_file():
        raise ConfigurationError(f"data.dir {data_dir} is a file, not a folder")
    broker, start_s = settings.broker, time.monotonic()
    if store is not None and not (data_dir / "meta.properties").exists():
        check_access(store, timeout_s=broker.store_start_timeout_ms / 1000)
        waited_ms = round((time.monotonic() - start_s) * 1000)  # one time-out covers both
        left_ms = max(1, broker.store_start_timeout_ms - waited_ms)
        broker = replace(broker, store_start_timeout_ms=left_ms)
    return Broker.open(broker, store=store, peers=peers)


def _peers(settings: Settings) -> Peers:
    from tierlog.api.http.cluster.peers import HttpPeers

    return HttpPeers(
        token=_peer_token(settings),
        ca_file=settings.http.peers_ca_file,
        session_timeout_ms=settings.broker.session_timeout_ms,
    )


def _peer_token(settings: Settings) -> str:
    """What the brokers of a cluster show each other. Raises ConfigurationError."""
    if settings.cluster_token_file is None:
        return ""
    try:
        return Path(settings.cluster_token_file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cluster.token.file: {error}") from error


def _raise_descriptor_limit() -> None:
    """Raise the soft limit of open files to the hard limit.

    The usual soft limit of 1,024 is for programs that use select(2); a broker has one or two
    descriptors per connection and per segment that is read.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS_MAX if hard == resource.RLIM_INFINITY else min(hard, _DESCRIPTORS_MAX)
    while soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return
        wanted //= 2  # macOS reports no limit, and refuses more than its kern.maxfilesperproc


def _tls(settings: Settings) -> Tls | None:
    """Check the files before anything is opened. Raises ConfigurationError."""
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    what = f"tls.cert {settings.tls_cert} with tls.key {settings.tls_key}"

    def passphrase() -> str:  # OpenSSL's default would prompt on the terminal
        raise ConfigurationError(
            f"{what}: the key is encrypted; a broker's key must not have a passphrase"
        )

    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.tls_cert, settings.tls_key, passphrase)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigurationError(f"{what}: {error.strerror or error}") from error
    return Tls(certificate=settings.tls_cert, key=settings.tls_key)


# --- `--verbose`; otherwise no callback is set: logging a line takes longer than a small fetch ----


def _log_request(exchange: Exchange, status: str) -> None:
    """Log a request after its response; without its query, which may contain record keys."""
    scope = exchange.scope
    client = scope.get("client")
    log.debug(
        "request",
        method=exchange.method,
        path=(scope.get("raw_path") or b"").decode("ascii", "backslashreplace"),
        status=status,
        ms=round(exchange.timings.elapsed_s * 1000, 1),
        request_id=exchange.request_id,
        client=client[0] if client else None,
    )


def _log_store_request(request: StoreRequest) -> None:
    """Log each attempt; a ranged GET is timed until its response begins."""
    log.debug(
        "store request",
        operation=request.operation,
        key=request.key,
        outcome=request.outcome,
        ms=round(request.took_s * 1000, 1),
        **({"error": request.error} if request.error else {}),
    )
