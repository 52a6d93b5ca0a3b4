"""A real S3 server for claims about the bucket, and a proxy that makes it slow.

* versitygw is built once by `localstack/s3_server.py`; without it and without Go, claims are
  skipped.
* The proxy passes bytes through unchanged and delays each request's head by the given time: it adds
  latency, but does not limit throughput. It counts the GETs of segments and their indexes, not of
  manifests, which are also requested without reads.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

import boto3
from botocore.config import Config

from bench.children import ROOT, MissingPeer, free_port, running

BUCKET: Final = "tierlog"
PART_BYTES: Final = 16 << 20
_SETTINGS: Final = {
    "AWS_ACCESS_KEY_ID": "tierlog",
    "AWS_SECRET_ACCESS_KEY": "tierlog-secret",
    "AWS_REGION": "us-east-1",
    "VGW_KEEP_ALIVE": "true",  # as AWS and MinIO do; its default is one connection per request
}
_READY_S: Final = 60
_PIECE: Final = 256 << 10
_LINE: Final = 512


class Bucket(NamedTuple):
    endpoint: str
    pid: int  # the server's parent process

    @property
    def flags(self) -> tuple[str, ...]:
        """For `children.broker`."""
        return ("--store", f"s3://{BUCKET}/bench", "--s3-endpoint", self.endpoint)


@contextmanager
def versitygw(folder: Path) -> Iterator[Bucket]:
    """The server on a free port with an empty bucket; sets its credentials in the environment."""
    built = list((ROOT / ".cache" / "s3").glob("versitygw-*/versitygw"))
    if not built and shutil.which("go") is None:
        raise MissingPeer("versitygw is not built: localstack/s3_server.py builds it, with Go")
    port = free_port()
    program = str(ROOT / "localstack" / "s3_server.py")
    command = [sys.executable, program, "--port", str(port), "--data-dir", str(folder / "s3")]
    os.environ.update(_SETTINGS)
    log = folder / "s3.log"
    with running(command, log=log) as child:
        deadline = time.monotonic() + _READY_S
        while b"listens on" not in log.read_bytes():
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no S3 server: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        yield Bucket(f"http://127.0.0.1:{port}", child.pid)


def client(bucket: Bucket) -> object:
    """boto3's own client, with its defaults."""
    config = Config(s3={"addressing_style": "path"}, max_pool_connections=32)
    return boto3.client("s3", endpoint_url=bucket.endpoint, config=config)


class SlowProxy:
    """`delay_s(n)` says how long the nth request waits. A context manager."""

    def __init__(self, bucket: Bucket, delay_s: Callable[[int], float]) -> None:
        host, _, port = bucket.endpoint.removeprefix("http://").partition(":")
        self._bucket, self._upstream, self._delay_s = bucket, (host, int(port)), delay_s
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._lock, self.gets, self._requests = threading.Lock(), 0, 0

    def __enter__(self) -> SlowProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    @property
    def bucket(self) -> Bucket:
        return self._bucket._replace(endpoint=f"http://127.0.0.1:{self._listener.getsockname()[1]}")

    def _accept(self) -> None:
        while True:
            try:
                downstream, _ = self._listener.accept()
            except OSError:
                return
            upstream = socket.create_connection(self._upstream)
            for sock in downstream, upstream:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for args in (downstream, upstream, True), (upstream, downstream, False):
                threading.Thread(target=self._pump, args=args, daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, to_store: bool) -> None:
        """Copy one direction of a connection, until its source ends. A store may respond and close
        before it has read everything: the rest is dropped, or its response would be lost.
        """
        buffer, is_reading = memoryview(bytearray(_PIECE)), True
        with suppress(OSError):
            while size := source.recv_into(buffer):
                if to_store:
                    self._delay(bytes(buffer[:_LINE]))
                try:
                    if is_reading:
                        sink.sendall(buffer[:size])
                except OSError:
                    is_reading = False
        with suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def _delay(self, head: bytes) -> None:
        """Delay a request. It is at the start of what was received, since clients here send the
        next one after the response.
        """
        if not head.startswith((b"GET ", b"PUT ", b"HEAD ", b"POST ", b"DELET")):
            return
        with self._lock:
            number, self._requests = self._requests, self._requests + 1
            self.gets += head.startswith(b"GET ") and b"/segments/" in head
        time.sleep(self._delay_s(number))
