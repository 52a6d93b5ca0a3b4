"""The followers' side of `POST /v1/replica/fetch`: connections that are kept, and their answers.

* A connection is one call's at a time, and goes back when its answer was received whole: a thread
  that asks one leader again and again has one.
* An answer is refused before its bytes are received: rows that were not asked for, sizes that are
  not the body's, more than was asked for. A batch that is larger alone has to say so itself.
* A fetch may be repeated, so one on a connection that the leader has closed meanwhile is.
"""

from __future__ import annotations

import http.client
import ssl
import threading
import time
from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

import msgspec

from tierlog.api.http.header_values import JSON, REPLICA_FETCH
from tierlog.broker.data_folder.data_folder import TopicIdPartition
from tierlog.broker.replication.messages import Fetched, FetchedRows, FetchHead, ReplicaFetch
from tierlog.record_format.batch import LOG_OVERHEAD
from tierlog.record_format.errors import PeerUnavailable
from tierlog.record_format.workarounds import decode_json

PATH: Final = "/v1/replica/fetch"
PIECE_BYTES: Final = 256 << 10
RATE_MIN: Final = 256 << 10  # bytes a second of an answer that has begun, beside the time-out
HEAD_BASE_BYTES: Final = 64 << 10
HEAD_ROW_BYTES: Final = 1 << 10
_LENGTH_BYTES: Final = 4
_STALE: Final = (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError)


class ReplicaConnections:
    """Thread-safe. `headers` are sent with each fetch; `tls` trusts the cluster's brokers."""

    def __init__(self, *, headers: dict[str, str], tls: ssl.SSLContext) -> None:
        self._headers = {**headers, "content-type": JSON, "accept": REPLICA_FETCH}
        self._tls, self._lock = tls, threading.Lock()
        self._idle: dict[str, list[http.client.HTTPConnection]] = {}
        self._is_closed = False

    def close(self) -> None:
        with self._lock:
            self._is_closed, idle = True, self._idle
            self._idle = {}
        for connections in idle.values():
            for connection in connections:
                connection.close()

    def fetch_replicas(
        self,
        url: str,
        request: ReplicaFetch,
        *,
        asked: Collection[TopicIdPartition],
        timeout_s: float,
    ) -> FetchedRows:
        """`asked`: what is in the session; `timeout_s`: for the answer to begin, and for each of
        its pieces. Raises PeerUnavailable.
        """
        body = msgspec.json.encode(request)
        headers = self._headers | {"tierlog-forwarded": str(request.node_id)}
        try:
            connection = self._take(url, timeout_s)
        except ValueError as error:
            raise PeerUnavailable(f"{url}: {error}") from error
        try:
            answer = _asked(connection, body, headers)
            reader = _Reader(answer, asked, max_bytes=request.max_bytes, timeout_s=timeout_s)
            found = reader.read_answer()
        except (http.client.HTTPException, OSError, ValueError, msgspec.MsgspecError) as error:
            connection.close()
            raise PeerUnavailable(f"{url}: {error or type(error).__name__}") from error
        except BaseException:
            connection.close()
            raise
        self._give_back(url, connection)
        return found

    def _take(self, url: str, timeout_s: float) -> http.client.HTTPConnection:
        with self._lock:
            idle = self._idle.get(url)
            kept = idle.pop() if idle else None
        if kept is None:
            return self._new(url, timeout_s)
        kept.timeout = timeout_s
        kept.sock.settimeout(timeout_s)
        return kept

    def _new(self, url: str, timeout_s: float) -> http.client.HTTPConnection:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme == "https":
            return http.client.HTTPSConnection(
                host, parts.port, timeout=timeout_s, context=self._tls
            )
        return http.client.HTTPConnection(host, parts.port, timeout=timeout_s)

    def _give_back(self, url: str, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            if not self._is_closed and connection.sock is not None:
                self._idle.setdefault(url, []).append(connection)
                return
        connection.close()


def _asked(
    connection: http.client.HTTPConnection, body: bytes, headers: dict[str, str]
) -> http.client.HTTPResponse:
    is_kept = connection.sock is not None
    try:
        connection.request("POST", PATH, body, headers)
        return connection.getresponse()
    except _STALE:
        if not is_kept:
            raise
        connection.close()
        connection.request("POST", PATH, body, headers)
        return connection.getresponse()


class _Reader:
    """One answer. Raises ValueError for what no leader of ours would send."""

    def __init__(
        self,
        answer: http.client.HTTPResponse,
        asked: Collection[TopicIdPartition],
        *,
        max_bytes: int,
        timeout_s: float,
    ) -> None:
        self._answer, self._asked, self._max_bytes = answer, asked, max_bytes
        self._ends_s = time.monotonic() + timeout_s

    def read_answer(self) -> FetchedRows:
        if self._answer.status != 200:
            text = self._answer.read1(500).decode("utf-8", "replace")
            raise ValueError(f"{self._answer.status}: {text}")
        size_bytes = self._answer.length
        if self._answer.headers.get("content-type") != REPLICA_FETCH or size_bytes is None:
            raise ValueError("it is no answer to a replica")
        head, left = self._read_head(size_bytes), self._max_bytes
        found = []
        for row in head.partitions:
            found.append(Fetched(row, self._read_batches(row.size_bytes, left)))
            left -= row.size_bytes
        self._answer.close()
        return FetchedRows(head.session_id, found)

    def _read_head(self, size_bytes: int) -> FetchHead:
        length, asked = int.from_bytes(self._read(_LENGTH_BYTES), "big"), self._asked
        if length > HEAD_BASE_BYTES + HEAD_ROW_BYTES * len(asked):
            raise ValueError(f"its head has {length} bytes, for {len(asked)} partitions")
        head = decode_json(self._read(length), FetchHead)
        places = [(one.topic_id, one.partition) for one in head.partitions]
        if len(set(places)) < len(places) or not all(one in asked for one in places):
            raise ValueError("it has partitions that were not asked for, or one twice")
        batches = sum(one.size_bytes for one in head.partitions)
        if size_bytes != _LENGTH_BYTES + length + batches:
            raise ValueError(f"its body has {size_bytes} bytes, and its rows {batches}")
        return head

    def _read_batches(self, size_bytes: int, left: int) -> memoryview:
        """`left`: of what was asked for. Beyond it there may be one batch, if there is any left."""
        if size_bytes <= left:
            return self._read(size_bytes)
        begins = self._read(LOG_OVERHEAD) if left > 0 and size_bytes >= LOG_OVERHEAD else b""
        if not begins or LOG_OVERHEAD + int.from_bytes(begins[8:], "big") != size_bytes:
            raise ValueError(f"it has more than the {self._max_bytes} bytes asked for")
        return self._read(size_bytes, begins)

    def _read(self, size_bytes: int, begins: bytes | memoryview = b"") -> memoryview:
        """So many bytes, of which the first are known."""
        whole, at = memoryview(bytearray(size_bytes)), len(begins)
        whole[:at] = begins
        self._ends_s += size_bytes / RATE_MIN
        while at < size_bytes:
            piece = self._answer.read1(min(PIECE_BYTES, size_bytes - at))
            if not piece:
                raise ValueError("it is cut short")
            if time.monotonic() > self._ends_s:
                raise TimeoutError("it comes too slowly")
            whole[at : at + len(piece)] = piece
            at += len(piece)
        return whole
