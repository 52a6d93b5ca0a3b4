"""s2-lite as a peer: its server on a local folder, by its own HTTP API.

* It listens on all addresses, so it runs in its own network namespace (root, `unshare` and `ip`); a
  client's socket is opened by a thread that entered that namespace, and used anywhere.
* Its JSON is compared with our JSON; its protobuf, its fastest encoding, with our raw batches.
* It accepts at most 1,000 records and 1 MiB per request.
"""

from __future__ import annotations

import ctypes
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench.children import MissingPeer, Server, peer_program, program, running
from bench.wire import Append, Wire

VERSION: Final = "0.43.4"
_INSTALL: Final = f"cargo install s2-cli --version {VERSION} --locked"
_PORT: Final = 8080  # in a namespace of its own, where every port is free
_BASIN: Final = "bench-basin"
_JSON: Final = "application/json"
_PROTOBUF: Final = "application/protobuf"
_START_TIMEOUT_S: Final = 30
_CLONE_NEWNET: Final = 0x40000000
_READ_RECORDS: Final = 1000


@contextmanager
def s2(folder: Path) -> Iterator[Wires]:
    """A server on an empty folder, with one basin. Raises MissingPeer."""
    path = peer_program("s2", "BENCH_S2", _INSTALL)
    if os.geteuid() != 0:
        raise MissingPeer("s2 lite listens on all addresses: its own network namespace needs root")
    data = folder / "s2"
    data.mkdir()
    inside = [path, "lite", "--port", str(_PORT), "--local-root", str(data), "--no-dashboard"]
    command = [program("unshare"), "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "s2"]
    with running([*command, *inside], log=folder / "s2.log") as child:
        wires = Wires(child.pid)
        _await_basin(wires, folder / "s2.log")
        yield wires


class Wires:
    """Connections to a server in the namespace of process `pid`."""

    def __init__(self, pid: int) -> None:
        self._server = Server(pid, "127.0.0.1", _PORT)

    def open(self) -> Wire:
        """Raises OSError if nobody listens there."""
        with ThreadPoolExecutor(1) as entered:
            return entered.submit(self._open_inside).result()

    def _open_inside(self) -> Wire:
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/proc/{self._server.pid}/ns/net", "rb") as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        return Wire(self._server)


def _await_basin(wires: Wires, log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            with wires.open() as wire:
                body = json.dumps({"basin": _BASIN}).encode()
                wire.timed(wire.request("POST /v1/basins", body, Content_Type=_JSON))
                return
        except OSError:
            time.sleep(0.05)
    raise RuntimeError(f"s2 lite did not start: {log.read_text()[-2000:]}")


class S2Log:
    """Streams of one basin, as JSON or protobuf."""

    def __init__(self, wires: Wires, *, protobuf: bool) -> None:
        self._wires = wires
        self._form = _PROTOBUF if protobuf else _JSON
        self._streams_created = 0

    def recreate(self, log: str) -> None:
        """Create an empty stream under a new name, because deletion is slow."""
        self._streams_created += 1
        body = json.dumps({"stream": self._stream(log)}).encode()
        with self._wires.open() as wire:
            headers = {"Content_Type": _JSON, "S2_Basin": _BASIN}
            wire.timed(wire.request("POST /v1/streams", body, **headers))

    @contextmanager
    def appender(self, log: str, values: list[bytes]) -> Iterator[Append]:
        with self._wires.open() as wire:
            line = f"POST /v1/streams/{self._stream(log)}/records"
            headers = {"Content_Type": self._form, "Accept": _JSON, "S2_Basin": _BASIN}
            request = wire.request(line, self._body(values), **headers)
            yield partial(wire.timed, request)

    def read(self, log: str, count: int) -> None:
        with self._wires.open() as wire:
            seen = 0
            while seen < count:
                line = f"GET /v1/streams/{self._stream(log)}/records"
                line += f"?seq_num={seen}&count={_READ_RECORDS}"
                request = wire.request(line, Accept=self._form, S2_Basin=_BASIN)
                got = self._records(wire.timed(request).body)
                if not got:
                    raise RuntimeError(f"{line}: no records")
                seen += got

    def _stream(self, log: str) -> str:
        form = self._form.rpartition("/")[2]
        return f"{log}-{form}-{self._streams_created if log == 'append' else 0}"

    def _body(self, values: list[bytes]) -> bytes:
        if self._form == _JSON:
            return json.dumps({"records": [{"body": value.decode()} for value in values]}).encode()
        return b"".join(_field(1, _field(3, value)) for value in values)

    def _records(self, body: bytes) -> int:
        """How many records a response has, counted by what precedes each body of 1,024 bytes."""
        return body.count(b'"body":"' if self._form == _JSON else b"\x22\x80\x08")


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field of a protobuf message."""
    size, length = len(content), b""
    while size > 0x7F:
        length += bytes([size & 0x7F | 0x80])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content
