"""A TCP proxy that can be cut, as if the network between a broker and its store failed."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Literal
from urllib.parse import urlsplit

PIECE_BYTES = 1 << 16


class Line:
    """Forwards connections to `target` (a URL). While it `is_cut`, what connects is closed at once,
    and existing connections are reset. While one way of it is held, nothing arrives that way; it
    does once the line is mended. `see` gets what is sent to the target before it is sent, and may
    cut the line.
    """

    def __init__(self, target: str, *, see: Callable[[bytes], None] = lambda _: None) -> None:
        self.see = see
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self.is_cut = False
        self._flows = {"requests": threading.Event(), "answers": threading.Event()}
        for flow in self._flows.values():
            flow.set()

    def cut(self) -> None:
        with self._lock:
            self.is_cut = True
            for pair in self._pairs:
                for end in pair:
                    with suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)
            for flow in self._flows.values():
                flow.set()

    def hold(self, way: Literal["requests", "answers"]) -> None:
        self._flows[way].clear()

    def mend(self) -> None:
        with self._lock:
            self.is_cut = False
            for flow in self._flows.values():
                flow.set()

    def forward(self, near: socket.socket) -> None:
        """Returns when the connection has ended."""
        with near, suppress(OSError):
            for flow in self._flows.values():
                flow.wait()  # as what connects does not hear that it is heard
            if self.is_cut:
                return
            with socket.create_connection(self._target) as far:
                with self._lock:
                    self._pairs.add((near, far))
                try:
                    back = threading.Thread(target=self._pump, args=(far, near, "answers"))
                    back.daemon = True
                    back.start()
                    self._pump(near, far, "requests")
                    back.join()
                finally:
                    with self._lock:
                        self._pairs.discard((near, far))

    def _pump(self, source: socket.socket, target: socket.socket, way: str) -> None:
        """Forward bytes in one direction until their end. They are dropped once `target` is closed:
        a server may respond and close before it has read a body, and the response must still pass.
        """
        with suppress(OSError):
            while piece := source.recv(PIECE_BYTES):
                if way == "requests":
                    self.see(piece)  # which may be newer than the connection
                self._flows[way].wait()
                with suppress(OSError):
                    target.sendall(piece)
            target.shutdown(socket.SHUT_WR)


class Listener:
    """Calls `serve` in a thread for each connection to `url`, on loopback. A context manager."""

    def __init__(self, serve: Callable[[socket.socket], None]) -> None:
        self._serve = serve
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Listener:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()


class CuttableProxy(Line):
    """A line from a loopback port. A context manager."""

    def __init__(self, target: str, *, see: Callable[[bytes], None] = lambda _: None) -> None:
        super().__init__(target, see=see)
        self._listener = Listener(self.forward)
        self.url = self._listener.url

    def __enter__(self) -> CuttableProxy:
        self._listener.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.__exit__()
        self.cut()
