"""An HTTP server on loopback with scripted responses to S3 calls: those that real servers rarely
send.

    with scripted_s3([Reply(503, code="SlowDown"), Reply(200)]) as (endpoint, requests): ...

The last reply is repeated. A script may also be a function of a `Request`.
`tls` is a certificate and its key. `requests` has (method, path, headers) of every request.
"""

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple


@dataclass
class Reply:
    status: int
    code: str = ""
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "scripted"
    more: str = ""
    """More XML elements of an error."""
    claims_bytes: int | None = None
    """A wrong Content-Length: the connection is closed after the body."""

    @property
    def content(self) -> bytes:
        if not self.code:
            return self.body
        elements = f"<Code>{self.code}</Code><Message>{self.message}</Message>{self.more}"
        return f"<Error>{elements}</Error>".encode()


@dataclass
class HangUp:
    """The request is read, then the connection is closed."""


class Request(NamedTuple):
    method: str
    path: str
    headers: Message
    body: bytes


@contextmanager
def scripted_s3(
    script: list | Callable[[Request], Reply], *, tls: tuple[Path, Path] | None = None
) -> Iterator[tuple[str, list]]:
    requests: list = []
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                if callable(script):
                    reply = script(Request(self.command, self.path, self.headers, body))
                else:
                    reply = script[min(len(requests), len(script) - 1)]
                requests.append((self.command, self.path, dict(self.headers)))
            if isinstance(reply, HangUp):
                self.close_connection = True
                return
            content = reply.content
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            length = len(content) if reply.claims_bytes is None else reply.claims_bytes
            self.send_header("Content-Length", str(length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
            self.close_connection = reply.claims_bytes is not None

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = respond

        def log_message(self, *_) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
