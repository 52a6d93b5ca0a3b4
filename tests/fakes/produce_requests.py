"""Produce requests for a comparison with Kafka: one for each unusual case, and random ones.

`ODD` maps a case to the bytes of its request. `DIFFERENT` has the cases that only one of the two
brokers accepts, each with the reason.
"""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Iterator
from typing import Final

from tierlog.record_format import codecs
from tierlog.record_format.batch import HEADER_SIZE, LOG_OVERHEAD, MAX_SEQUENCE
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.varint import zigzag

NOW_MS: Final = int(time.time() * 1000)  # for limits that go by Kafka's own clock
HOUR_MS: Final = 3_600_000
# Offsets of header fields.
LENGTH, EPOCH, MAGIC, CRC, ATTRIBUTES, LAST_DELTA = 8, 12, 16, 17, 21, 23
BASE_TIME, MAX_TIME, PRODUCER, PRODUCER_EPOCH, SEQUENCE, COUNT = 27, 35, 43, 51, 53, 57


def with_field(batch: bytes, at: int, layout: str, value: int) -> bytes:
    """The batch with another value in its header, and the checksum corrected."""
    changed = bytearray(batch)
    struct.pack_into(f">{layout}", changed, at, value)
    struct.pack_into(">I", changed, CRC, crc32c_of(bytes(changed[ATTRIBUTES:])))
    return bytes(changed)


def plain(count: int = 3, *, times: list[int] | None = None, **fields: int) -> bytes:
    times = [NOW_MS + number for number in range(count)] if times is None else times
    names = [b"%d" % number for number in range(len(times))]
    return bytes(encode_batch(names, keys=names, timestamps=times, **fields))


def around(records: bytes, *, count: int, codec: int = codecs.NONE) -> bytes:
    """A batch with a valid header around these bytes."""
    body = codecs.compress(codec, records) if codec else records
    return _with_body(plain(count), body, codec)


def _with_body(batch: bytes, body: bytes, codec: int) -> bytes:
    whole = batch[:HEADER_SIZE] + body
    whole = with_field(whole, LENGTH, "i", len(whole) - LOG_OVERHEAD)
    return with_field(whole, ATTRIBUTES, "h", codec)


def record(
    offset_delta: int,
    *,
    time_delta: int = 0,
    key: bytes = b"\2k",
    value: bytes = b"\2v",
    headers: bytes = b"\0",
    length: int | None = None,
) -> bytes:
    """A record; its key, value and headers are given with their lengths."""
    fields = b"\0" + zigzag(time_delta) + zigzag(offset_delta) + key + value + headers
    return zigzag(len(fields) if length is None else length) + fields


def of_size(size_bytes: int) -> bytes:
    empty = len(encode_batch([b""], keys=[b"k"], timestamps=[NOW_MS]))
    for left in range(size_bytes - empty, 0, -1):
        batch = encode_batch([bytes(left)], keys=[b"k"], timestamps=[NOW_MS])
        if len(batch) == size_bytes:
            return bytes(batch)
    raise AssertionError(size_bytes)


def _odd_headers() -> Iterator[tuple[str, bytes]]:
    batch = plain()
    for magic in (0, 1, 3, -1):
        yield f"magic {magic}", with_field(batch, MAGIC, "b", magic)
    for length in (-(2**31), -1, 0, 13, 48, 49, len(batch), 2**31 - 1):
        yield f"length {length}", with_field(batch, LENGTH, "i", length)
    for count in (-(2**31), -1, 0, 2, 4, 2**31 - 1):
        yield f"count {count}", with_field(batch, COUNT, "i", count)
    for delta in (-1, 0, 1, 3, 2**31 - 1):
        yield f"last offset delta {delta}", with_field(batch, LAST_DELTA, "i", delta)
    for count in (0, 2, 4):
        both = with_field(batch, LAST_DELTA, "i", count - 1)
        yield f"count and delta of {count}", with_field(both, COUNT, "i", count)
    for offset in (-1, 1, 2**62):
        yield f"base offset {offset}", struct.pack(">q", offset) + batch[8:]
    for epoch in (-5, 0, 5):
        yield f"leader epoch {epoch}", with_field(batch, EPOCH, "i", epoch)
    for bit in range(3, 16):
        yield f"attribute bit {bit}", with_field(batch, ATTRIBUTES, "H", 1 << bit)
    for codec in (5, 6, 7):
        yield f"codec {codec}", with_field(batch, ATTRIBUTES, "h", codec)
    wrong = bytearray(batch)
    wrong[-1] ^= 1
    yield "checksum", bytes(wrong)


def _odd_producers() -> Iterator[tuple[str, bytes]]:
    batch = plain(producer_id=70, producer_epoch=0, base_sequence=0)
    for number in (-(2**63), -2, 0, 2**63 - 1):
        yield f"producer id {number}", with_field(batch, PRODUCER, "q", number)
    for number, epoch in enumerate((-2, -1, 2**15 - 1)):
        other = with_field(batch, PRODUCER, "q", 71 + number)
        yield f"producer epoch {epoch}", with_field(other, PRODUCER_EPOCH, "h", epoch)
    for sequence in (-2, -1):
        yield f"sequence {sequence}", with_field(batch, SEQUENCE, "i", sequence)
    yield "sequence without a producer", with_field(plain(), SEQUENCE, "i", 5)
    yield "epoch without a producer", with_field(plain(), PRODUCER_EPOCH, "h", 5)


def _odd_times() -> Iterator[tuple[str, bytes]]:
    for at in (-1, 0, NOW_MS - 2 * HOUR_MS, NOW_MS + 2 * HOUR_MS, 2**62, 2**63 - 1):
        yield f"time {at}", plain(times=[at])
    for at in (-2, -(10**6)):
        batch = with_field(plain(1), BASE_TIME, "q", at)
        yield f"time {at}", with_field(batch, MAX_TIME, "q", at)
    yield "a time below -1 by its delta", around(record(0, time_delta=-NOW_MS - 5), count=1)
    yield "a time beyond 64 bits", around(record(0, time_delta=2**63 - 1), count=1)
    yield "no time, then now", plain(times=[-1, NOW_MS])
    yield "now, then no time", plain(times=[NOW_MS, -1])
    yield "now, then long ago", plain(times=[NOW_MS, NOW_MS - 2 * HOUR_MS])
    for codec in range(5):
        for wrong in (-1, NOW_MS - 9, NOW_MS + 9):
            batch = with_field(plain(codec=codec), MAX_TIME, "q", wrong)
            yield f"max timestamp {wrong}, codec {codec}", batch


def _odd_records() -> Iterator[tuple[str, bytes]]:
    two = record(0) + record(1)
    for codec in range(5):
        name = codecs.CODEC_NAMES[codec]
        yield f"{name}: good", around(two, count=2, codec=codec)
        yield f"{name}: offset deltas 0, 2", around(record(0) + record(2), count=2, codec=codec)
        yield f"{name}: bytes behind the records", around(two + b"tail", count=2, codec=codec)
        if codec:
            body = codecs.compress(codec, two)
            yield f"{name}: garbage", _with_body(plain(2), b"garbage", codec)
            yield f"{name}: cut frame", _with_body(plain(2), body[:-1], codec)
            yield f"{name}: bytes behind the frame", _with_body(plain(2), body + b"x", codec)
    yield "offset deltas 1, 0", around(record(1) + record(0), count=2)
    yield "offset deltas 0, 0", around(record(0) + record(0), count=2)
    yield "key of length -2", around(record(0, key=b"\3"), count=1)
    yield "value of length -2", around(record(0, value=b"\3"), count=1)
    yield "key longer than the record", around(record(0, key=b"\x50k"), count=1)
    yield "value longer than the record", around(record(0, value=b"\x50v"), count=1)
    yield "null key", around(record(0, key=b"\1"), count=1)
    yield "null key second, zstd", around(record(0) + record(1, key=b"\1"), count=2, codec=4)
    yield "null value", around(record(0, value=b"\1"), count=1)
    yield "header count -1", around(record(0, headers=b"\1"), count=1)
    yield "header count beyond the record", around(record(0, headers=b"\6"), count=1)
    yield "null header name", around(record(0, headers=b"\2\1\1"), count=1)
    yield "header name that is not UTF-8", around(record(0, headers=b"\2\2\xff\1"), count=1)
    yield "fields shorter than the record", around(record(0, headers=b"\0zz"), count=1)
    yield "record length too small", around(record(0, length=3), count=1)
    yield "record length -1", around(record(0, length=-1), count=1)


def _odd_requests() -> Iterator[tuple[str, bytes]]:
    batch = plain()
    yield "nothing", b""
    yield "two batches", batch * 2
    for size in (11, 12, HEADER_SIZE - 1, HEADER_SIZE, len(batch) - 1):
        yield f"cut to {size}", batch[:size]
    for count in (1, 20, 61):
        yield f"{count} zero bytes behind", batch + bytes(count)
    for size in (499, 500, 501, 4095, 4096, 4097):
        yield f"size {size}", of_size(size)


ODD: Final = dict(
    [*_odd_headers(), *_odd_producers(), *_odd_times(), *_odd_records(), *_odd_requests()]
)

TWO_BATCHES: Final = "HTTP accepts several batches in a request"
OFFSETS_ARE_OURS: Final = "a client may send fetched batches with their offsets"
STRICTER: Final = "validation is stricter, decision 8"
"""Cases that Kafka accepts and we refuse, or the reverse, on topics where neither refuses them for
another reason.
"""
DIFFERENT: Final = {
    "two batches": TWO_BATCHES,
    "base offset 1": OFFSETS_ARE_OURS,
    f"base offset {2**62}": OFFSETS_ARE_OURS,
    **dict.fromkeys(
        (
            "1 zero bytes behind",
            "attribute bit 3",
            "attribute bit 6",
            f"producer id {-(2**63)}",
            "producer id -2",
            "producer epoch -1",
            "time -2",
            "time -1000000",
            "a time below -1 by its delta",
            "none: offset deltas 0, 2",
            "offset deltas 1, 0",
            "offset deltas 0, 0",
            "key of length -2",
            "value of length -2",
            *(f"{name}: bytes behind the frame" for name in ("gzip", "snappy", "lz4")),
        ),
        STRICTER,
    ),
}

SOUND: Final = ("next", "no producer", "epoch above", "forgotten")

# --- at random ------------------------------------------------------------------------------------


class _Producer:
    def __init__(self, number: int, *, sequence: int) -> None:
        self.number, self.epoch, self.sequence = number, 0, sequence
        self.sent: list[bytes] = []


class RandomRequests:
    """Idempotent producers, each sound most of the time, and one without an id."""

    KINDS: Final = {
        "next": 60,
        "no producer": 10,
        "repeat": 16,
        "gap": 3,
        "overlap": 3,
        "epoch above": 3,
        "epoch above, not from 0": 1,
        "epoch below": 2,
        "forgotten": 2,
    }

    def __init__(self, rng: random.Random, *, sound: bool = False) -> None:
        """`sound`: only requests that are accepted."""
        self._rng, self._time_ms = rng, NOW_MS - 200 * HOUR_MS
        self._kinds = {kind: self.KINDS[kind] for kind in (SOUND if sound else self.KINDS)}
        begins = (0, 0, 0, MAX_SEQUENCE - 20)
        self._producers = [_Producer(2**32 + i, sequence=begin) for i, begin in enumerate(begins)]

    def next(self) -> tuple[str, bytes]:
        kind = self._rng.choices(list(self._kinds), list(self._kinds.values()))[0]
        producer = self._rng.choice(self._producers)
        if kind == "no producer":
            return kind, self._batch(self._count())
        if kind == "repeat" and producer.sent:
            return kind, self._rng.choice(producer.sent[-8:])
        if kind == "epoch below" and not producer.epoch:
            kind = "next"
        return kind, self._sent(kind, producer)

    def _sent(self, kind: str, producer: _Producer) -> bytes:
        rng, count, epoch, sequence = self._rng, self._count(), producer.epoch, producer.sequence
        if kind == "gap":
            sequence += rng.randint(1, 9)
        elif kind == "overlap":
            sequence -= rng.randint(1, 9)
        elif kind.startswith("epoch above"):
            epoch, sequence = epoch + rng.randint(1, 3), 0 if kind == "epoch above" else 7
        elif kind == "epoch below":
            epoch -= 1
        elif kind == "forgotten":  # to the log its next request is its first, with any sequence
            producer = _Producer(rng.randrange(2**33, 2**34), sequence=rng.choice((0, 5)))
            self._producers[rng.randrange(len(self._producers))] = producer
            epoch, sequence = 0, producer.sequence
        sequence &= MAX_SEQUENCE
        batch = self._batch(
            count,
            producer_id=producer.number,
            producer_epoch=epoch,
            base_sequence=sequence,
        )
        if kind in (*SOUND, "repeat"):
            producer.sent = [] if epoch > producer.epoch else producer.sent
            producer.sent.append(batch)
            producer.epoch, producer.sequence = epoch, sequence + count & MAX_SEQUENCE
        return batch

    def _count(self) -> int:
        return self._rng.choice((1, 1, 2, 5, 17))

    def _batch(self, count: int, **fields: int) -> bytes:
        rng = self._rng
        times = []
        for _ in range(count):
            self._time_ms += rng.choice((0, 0, 0, 1, 1000, -500, 60_000, -90_000))
            times.append(self._time_ms)
        values = [rng.choice((None, b"", rng.randbytes(rng.randint(1, 99)))) for _ in times]
        keys = [rng.choice((b"", rng.randbytes(3))) for _ in times]
        headers = [rng.choice(((), (("a", b"1"), ("a", None)))) for _ in times]
        if rng.random() < 0.01:
            self._time_ms += rng.choice((2 * HOUR_MS, -HOUR_MS))
        codec = rng.choice((0, 0, 1, 2, 3, 4))
        return bytes(
            encode_batch(
                values, keys=keys, headers=headers, timestamps=times, codec=codec, **fields
            )
        )
