"""A client of Kafka's wire protocol, with the few calls that a comparison with a broker needs.

* One call at a time, in the last version before the compact encoding: requests and responses follow
  Kafka's message definitions, field by field.
* Nothing is retried or corrected: the broker's error code is returned.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from typing import NamedTuple

PRODUCE, FETCH, LIST_OFFSETS, FIND_COORDINATOR = 0, 1, 2, 10
DELETE_RECORDS, INIT_PRODUCER_ID, ADD_PARTITIONS_TO_TXN, END_TXN = 21, 22, 24, 26

ERRORS = {
    0: "NONE",
    1: "OFFSET_OUT_OF_RANGE",
    2: "CORRUPT_MESSAGE",
    10: "MESSAGE_TOO_LARGE",
    14: "COORDINATOR_LOAD_IN_PROGRESS",
    15: "COORDINATOR_NOT_AVAILABLE",
    16: "NOT_COORDINATOR",
    18: "RECORD_LIST_TOO_LARGE",
    32: "INVALID_TIMESTAMP",
    42: "INVALID_REQUEST",
    45: "OUT_OF_ORDER_SEQUENCE_NUMBER",
    47: "INVALID_PRODUCER_EPOCH",
    48: "INVALID_TXN_STATE",
    51: "CONCURRENT_TRANSACTIONS",
    53: "TRANSACTIONAL_ID_AUTHORIZATION_FAILED",
    59: "UNKNOWN_PRODUCER_ID",
    76: "UNSUPPORTED_COMPRESSION_TYPE",
    87: "INVALID_RECORD",
}
_NOT_YET = (14, 15, 16, 51)


class Appended(NamedTuple):
    error: str
    base_offset: int
    log_append_time: int
    log_start_offset: int


class Fetched(NamedTuple):
    error: str
    high_watermark: int
    last_stable_offset: int
    aborted: list[tuple[int, int]]  # (producer id, first offset)
    records: bytes  # the last batch may be truncated


class Wire:
    def __init__(self, server: str) -> None:
        host, _, port = server.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), timeout=60)
        self._responses = self._socket.makefile("rb")

    def close(self) -> None:
        self._responses.close()
        self._socket.close()

    def produce(
        self, topic: str, records: bytes | None, *, transactional_id: str | None = None
    ) -> Appended:
        """To partition 0, with acks=all."""
        body = _text(transactional_id) + struct.pack(">hi", -1, 60_000)
        body += _array([_text(topic) + _array([struct.pack(">i", 0) + _bytes(records)])])
        response = self._call(PRODUCE, 8, body)
        response.topic()
        found = Appended(_error(response.take("ih")[1]), *response.take("qqq"))
        return found

    def fetch(self, topic: str, offset: int, *, max_bytes: int, committed: bool) -> Fetched:
        body = struct.pack(">iiiib", -1, 0, 0, max_bytes, committed)
        partition = struct.pack(">iqi", 0, offset, max_bytes)
        response = self._call(FETCH, 4, body + _array([_text(topic) + _array([partition])]))
        response.take("i")
        response.topic()
        _, error, high_watermark, stable, aborted = response.take("ihqqi")
        pairs = [response.take("qq") for _ in range(max(aborted, 0))]
        return Fetched(_error(error), high_watermark, stable, pairs, response.bytes())

    def list_offset(self, topic: str, timestamp: int) -> tuple[int, int] | None:
        """(offset, timestamp) of the first record at or after `timestamp`, or None."""
        body = struct.pack(">ib", -1, 0)
        partition = struct.pack(">iq", 0, timestamp)
        response = self._call(LIST_OFFSETS, 2, body + _array([_text(topic) + _array([partition])]))
        response.take("i")
        response.topic()
        _, error, found, offset = response.take("ihqq")
        assert not error, _error(error)
        return (offset, found) if offset >= 0 else None

    def delete_records(self, topic: str, before_offset: int) -> None:
        partition = struct.pack(">iq", 0, before_offset)
        body = _array([_text(topic) + _array([partition])]) + struct.pack(">i", 60_000)
        response = self._call(DELETE_RECORDS, 0, body)
        response.take("i")
        response.topic()
        assert not response.take("iqh")[2]

    # --- transactions -----------------------------------------------------------------------------

    def begin_producer(self, transactional_id: str) -> tuple[int, int]:
        """(producer id, epoch), once there is a coordinator to ask."""
        self._until_done(FIND_COORDINATOR, 1, _text(transactional_id) + b"\1")
        body = _text(transactional_id) + struct.pack(">i", 60_000)
        response = self._until_done(INIT_PRODUCER_ID, 0, body)
        producer_id, epoch = response.take("qh")
        return producer_id, epoch

    def add_to_transaction(
        self, transactional_id: str, producer: tuple[int, int], topic: str
    ) -> None:
        body = _text(transactional_id) + struct.pack(">qh", *producer)
        body += _array([_text(topic) + _array([struct.pack(">i", 0)])])
        deadline = time.monotonic() + 60
        while True:
            response = self._call(ADD_PARTITIONS_TO_TXN, 0, body)
            response.take("i")
            response.topic()
            error = response.take("ih")[1]
            if error not in _NOT_YET:
                assert not error, _error(error)
                return
            assert time.monotonic() < deadline
            time.sleep(0.01)  # the previous transaction's markers are not written yet

    def end_transaction(self, transactional_id: str, producer: tuple[int, int], *, commit: bool):
        body = _text(transactional_id) + struct.pack(">qhb", *producer, commit)
        self._until_done(END_TXN, 0, body)

    def _until_done(self, key: int, version: int, body: bytes) -> _Response:
        """For calls whose response has a throttle time and an error."""
        deadline = time.monotonic() + 60
        while True:
            response = self._call(key, version, body)
            error = response.take("ih")[1]
            if error not in _NOT_YET:
                assert not error, _error(error)
                return response
            assert time.monotonic() < deadline, _error(error)
            time.sleep(0.05)

    def _call(self, key: int, version: int, body: bytes) -> _Response:
        request = struct.pack(">hhi", key, version, 7) + _text("tierlog-tests") + body
        self._socket.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", self._responses.read(4))
        response = _Response(self._responses.read(size))
        assert response.take("i") == (7,)
        return response


class _Response:
    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, layout: str) -> tuple[int, ...]:
        found = struct.unpack_from(f">{layout}", self._data, self._at)
        self._at += struct.calcsize(f">{layout}")
        return found

    def bytes(self) -> bytes:
        (size,) = self.take("i")
        self._at += max(size, 0)
        return self._data[self._at - max(size, 0) : self._at]

    def topic(self) -> None:
        """Skip to the fields of the only partition of the only topic."""
        topics, size = self.take("ih")
        self._at += size
        assert (topics, *self.take("i")) == (1, 1)


def _error(code: int) -> str:
    return ERRORS.get(code, f"error {code}")


def _text(text: str | None) -> bytes:
    return b"\xff\xff" if text is None else struct.pack(">h", len(text)) + text.encode()


def _bytes(data: bytes | None) -> bytes:
    return b"\xff\xff\xff\xff" if data is None else struct.pack(">i", len(data)) + data


def _array(items: Sequence[bytes]) -> bytes:
    return struct.pack(">i", len(items)) + b"".join(items)
