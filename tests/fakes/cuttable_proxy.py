"""A TCP proxy that can be cut, as if the network between a broker and its store failed."""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

PIECE_BYTES = 1 << 16


class CuttableProxy:
    """Forwards one loopback port to `target` (a URL). While it is cut, nothing connects and
    existing connections are reset. `see` gets what is sent to the target before it is sent, and may
    cut the line. A context manager.
    """

    def __init__(self, target: str, *, see: Callable[[bytes], None] = lambda _: None) -> None:
        self.see = see
        parts = urlsplit(target)
        self._target = (parts.hostname, parts.port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._is_cut = False

    def __enter__(self) -> "CuttableProxy":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        with self._lock:
            self._is_cut = True
            for pair in self._pairs:
                for end in pair:
                    with suppress(OSError):
                        end.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        with self._lock:
            self._is_cut = False

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._forward, args=(near,), daemon=True).start()

    def _forward(self, near: socket.socket) -> None:
        with near, suppress(OSError):
            if self._is_cut:
                return
            with socket.create_connection(self._target) as far:
                with self._lock:
                    self._pairs.add((near, far))
                try:
                    back = threading.Thread(target=_pump, args=(far, near), daemon=True)
                    back.start()
                    _pump(near, far, self._show)
                    back.join()
                finally:
                    with self._lock:
                        self._pairs.discard((near, far))

    def _show(self, piece: bytes) -> None:
        """Call the current `see`, which may be newer than the connection."""
        self.see(piece)


def _pump(
    source: socket.socket, target: socket.socket, see: Callable[[bytes], None] = lambda _: None
) -> None:
    """Forward bytes in one direction until their end. They are dropped once `target` is closed: a
    server may respond and close before it has read a body, and the response must still pass.
    """
    with suppress(OSError):
        while piece := source.recv(PIECE_BYTES):
            see(piece)
            with suppress(OSError):
                target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
