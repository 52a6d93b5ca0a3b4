"""Records of batches, as a consumer sees them."""

from __future__ import annotations

from collections.abc import Iterator

from tierlog.record_format.batch import Buffer, iter_headers
from tierlog.record_format.decode import Record, decode_columns


def iter_records(
    buf: Buffer, *, from_offset: int = 0, end_offset: int | None = None
) -> Iterator[Record]:
    """The records of the whole batches in `buf` with from_offset <= offset < end_offset.

    Control batches are skipped. Raises CorruptBatch.
    """
    for header in iter_headers(buf):
        if header.last_offset < from_offset or header.is_control:
            continue
        if end_offset is not None and header.base_offset >= end_offset:
            return
        columns = decode_columns(buf, header, from_offset=from_offset, end_offset=end_offset)
        yield from map(Record, *columns)
