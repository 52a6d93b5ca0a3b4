"""Claim: batches become Arrow about as fast as their bytes can be decompressed and checked at all.

* Measured: records per CPU second, one thread, from batches in memory to Arrow record batches: all
  columns, only values, only offsets; CRC-32C and codec included.
* Peer: the least that any reader has to do: CRC-32C and decompression of the same batches, without
  parsing the records.

A million records of 16-byte keys and values of about 130 bytes, in batches of 1 MiB (none, lz4,
zstd) and of 16 KiB (lz4, zstd).

`python -m bench spark_decode`; takes about half a minute, and the extra `arrow`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from bench.records import START_MS
from bench.report import Report, Target
from bench.rounds import interleave
from tierlog.record_format import codecs
from tierlog.record_format.arrow import ArrowDecoder, DecodeRequest, warm
from tierlog.record_format.arrow_schema import COLUMNS
from tierlog.record_format.batch import CRC_START, HEADER_SIZE, iter_headers, stamp
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.encode import encode_batches

ROUNDS: Final = 7
RECORDS: Final = 1_000_000
KIB: Final = 1024
ALL: Final = COLUMNS[:-1]

# size of a batch before compression, codec, target in millions of records per second
SHAPES: Final = (
    (1024 * KIB, codecs.NONE, 7.0),
    (1024 * KIB, codecs.LZ4, 5.0),
    (1024 * KIB, codecs.ZSTD, 3.3),
    (16 * KIB, codecs.LZ4, 2.8),
    (16 * KIB, codecs.ZSTD, 2.4),
)


def measure(_: Path, *, rounds: int) -> Report:
    report = Report(
        name="spark_decode",
        title="Batches to Arrow, one core, a million records",
        peer="CRC and codec alone",
    )
    warm()
    for batch_bytes, codec, target in SHAPES:
        log = _log(batch_bytes, codec)
        name = f"{batch_bytes // KIB} KiB, {codecs.CODEC_NAMES[codec]}"
        wanted = {"all columns": ALL, "value": ("value",), "offset": ("offset",)}
        runs: dict[str, Callable[[], float]] = {
            what: partial(_rate, partial(_decode, log, columns)) for what, columns in wanted.items()
        }
        runs["peer"] = partial(_rate, partial(_decompress, log))
        seen = interleave(runs, rounds=rounds)
        for what in wanted:
            limit = Target(value=target, of_ratio=False) if what == "all columns" else None
            report.add(f"{name}: {what}", "M records/s", seen[what], seen["peer"], target=limit)
    report.notes.append("values alone and offsets alone leave out work that the peer does not do")
    return report


def _log(batch_bytes: int, codec: int) -> bytes:
    """A segment's contents: batch after batch."""
    rng = random.Random(7)
    parts: list[bytes] = []
    step = 50_000
    for first in range(0, RECORDS, step):
        values = [_value(rng, number) for number in range(first, first + step)]
        keys = [b"%016d" % rng.randrange(1_000_000) for _ in values]
        times = [START_MS + number * 10 for number in range(first, first + step)]
        for one in encode_batches(
            values, keys=keys, timestamps=times, codec=codec, max_bytes=batch_bytes
        ):
            stamp(one.batch, 0, base_offset=first + one.start, leader_epoch=0)
            parts.append(bytes(one.batch))
    return b"".join(parts)


def _value(rng: random.Random, number: int) -> bytes:
    return b'{"id":%d,"user":"u%06d","amount":%d.%02d,"note":"%x","city":"Coimbra","ok":true}' % (
        number,
        rng.randrange(500_000),
        rng.randrange(10_000),
        rng.randrange(100),
        rng.getrandbits(200),
    )


def _rate(work: Callable[[], None]) -> float:
    """Millions of records per second of this thread's CPU."""
    began = time.thread_time()
    work()
    return RECORDS / 1e6 / (time.thread_time() - began)


def _decode(log: bytes, columns: tuple[str, ...]) -> None:
    decoder = ArrowDecoder(DecodeRequest("t", 0, columns=columns))
    rows = sum(batch.num_rows for batch in decoder.decode(log))
    assert rows == RECORDS, rows


def _decompress(log: bytes) -> None:
    view = memoryview(log)
    for header in iter_headers(log):
        end = header.position + header.size_bytes
        assert crc32c_of(view[header.position + CRC_START : end]) == header.crc
        if header.codec:
            body = view[header.position + HEADER_SIZE : end]
            codecs.decompress(header.codec, body, max_bytes=1 << 30)
