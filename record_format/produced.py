"""Validates the record batches of a produce request, all of them before any is appended.

Rules that keep it honest:

* After `check_produced`, every batch is one that Kafka's own broker would accept, and the log can
  append it without reading its records: lengths, checksum, codec, count, offset deltas 0, 1, 2,
  ..., timestamps and headers were checked.
* The bytes stay as they were sent. There is one exception, which is also Kafka's: a maximum
  timestamp that is not the records' maximum is corrected, because the time index relies on it.
* The minimum timestamp of each batch is computed on the way, so that no later step has to
  decompress a batch for it.
* The decompressed size is bounded for the whole request.

The checks are those of Kafka's LogValidator and UnifiedLog.analyzeAndValidateRecords.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tierlog.record_format import codecs
from tierlog.record_format.batch import (
    CODEC_MASK,
    HEADER_SIZE,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    BatchHeader,
    iter_headers,
    parse_header,
    set_max_timestamp,
)
from tierlog.record_format.decode import expand
from tierlog.record_format.encode import Headers, encode_batch, encode_batches
from tierlog.record_format.errors import RequestTooLarge
from tierlog.record_format.produced_checks import (
    KEY_REQUIRED,
    ProduceLimits,
    check_headers,
    timestamp_problem,
    too_large,
    walk_all,
)

__all__ = [
    "KEY_REQUIRED",
    "ProduceLimits",
    "ProducedBatches",
    "build_produced",
    "check_produced",
    "check_sizes",
    "recompress",
    "timestamp_problem",
]


@dataclass(slots=True)
class ProducedBatches:
    """Validated batches, contiguous in `body`. Each list has one entry per batch.

    `min_timestamps[i]` is the minimum over batch i's records, unless the log then sets its own time
    (LogAppendTime).
    """

    body: bytearray
    headers: list[BatchHeader]
    min_timestamps: list[int | None]

    @property
    def record_count(self) -> int:
        return sum(header.record_count for header in self.headers)


def check_produced(body: bytearray, limits: ProduceLimits) -> ProducedBatches:
    """Check every batch of a produce request.

    Raises InvalidBatch (bytes that are not a valid batch, with the position), InvalidRecord (a
    batch that may not be appended), RecordTooLarge (a batch above `max_message_bytes`) and
    RequestTooLarge (too many records, or too large when decompressed). `body` is modified only if
    all of it is valid.
    """
    headers = check_headers(body, limits)
    walks = walk_all(body, headers, limits)
    # Every batch is valid: from here on the body may be modified.
    for index, found in enumerate(walks):
        if headers[index].max_timestamp != found.max_timestamp:
            headers[index] = set_max_timestamp(body, headers[index], timestamp=found.max_timestamp)
    return ProducedBatches(body, headers, [found.min_timestamp for found in walks])


def recompress(produced: ProducedBatches, codec: int) -> ProducedBatches:
    """The same batches compressed with `codec` (a topic's `compression.type`).

    Returns `produced` itself if all batches have that codec. The caller checks the sizes again,
    since a batch may grow.
    """
    if all(header.codec == codec for header in produced.headers):
        return produced
    body = bytearray()
    headers = [_recompress_one(produced.body, header, codec, body) for header in produced.headers]
    return ProducedBatches(body, headers, produced.min_timestamps)


def _recompress_one(
    source: bytearray, header: BatchHeader, codec: int, target: bytearray
) -> BatchHeader:
    """Append the batch to `target`, compressed with `codec`; return its new header."""
    position = len(target)
    if header.codec == codec:
        target += source[header.position : header.end_position]
        return header.at(position)
    records = codecs.compress(codec, expand(source, header))
    changed = header._replace(
        size_bytes=HEADER_SIZE + len(records), attributes=header.attributes & ~CODEC_MASK | codec
    )
    target += changed.pack()
    target += records
    return set_max_timestamp(target, parse_header(target, position), timestamp=header.max_timestamp)


def check_sizes(produced: ProducedBatches, *, max_message_bytes: int) -> None:
    """Raise RecordTooLarge if a batch is above the limit. Call after `recompress`."""
    for header in produced.headers:
        if header.size_bytes > max_message_bytes:
            raise too_large(header, max_message_bytes)


def build_produced(
    values: Sequence[bytes | None],
    *,
    timestamps: Sequence[int],
    max_message_bytes: int,
    keys: Sequence[bytes | None] | None = None,
    headers: Sequence[Headers | None] | None = None,
    codec: int = codecs.NONE,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = -1,
    base_sequence: int = NO_SEQUENCE,
) -> ProducedBatches:
    """Encode columns into batches within the limit: the JSON counterpart of `check_produced`.

    Raises RecordTooLarge for a record that does not fit a batch, and RequestTooLarge if an
    idempotent producer's records do not fit in a single batch: they share one base sequence.
    The caller checks keys (`KEY_REQUIRED`) and timestamps (`timestamp_problem`) of each record.
    """
    if producer_id != NO_PRODUCER_ID:
        body = encode_batch(
            values,
            timestamps=timestamps,
            keys=keys,
            headers=headers,
            codec=codec,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=base_sequence,
        )
        if len(body) <= max_message_bytes:
            return ProducedBatches(body, [parse_header(body)], [min(timestamps)])
    ranges = encode_batches(
        values,
        timestamps=timestamps,
        keys=keys,
        headers=headers,
        codec=codec,
        max_bytes=max_message_bytes,
    )
    if producer_id != NO_PRODUCER_ID:
        raise _not_one_batch(len(body), max_message_bytes)  # each record fits one of its own
    body = ranges[0].batch if len(ranges) == 1 else bytearray().join(r.batch for r in ranges)
    return ProducedBatches(
        body,
        list(iter_headers(body)),
        [min(timestamps[item.start : item.end]) for item in ranges],
    )


def _not_one_batch(size_bytes: int, max_message_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"an idempotent producer's request must fit one batch; it makes one of {size_bytes} bytes, "
        f"and max.message.bytes is {max_message_bytes}",
        limit_bytes=max_message_bytes,
        size_bytes=size_bytes,
    )
