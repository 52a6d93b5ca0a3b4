"""Interprets the headers of S3 responses; no I/O.

* A ranged response is accepted only if its Content-Range is the one that was requested.
* A checksum counts only if it covers the whole object; composite checksums do not.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from tierlog.host.clock import wall_clock_ms
from tierlog.object_store.s3_connection import UnsupportedResponse
from tierlog.object_store.store import ObjectStat
from tierlog.record_format.errors import CorruptObject, StoreUnavailable

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


def check_range(content_range: str, size_bytes: int, *, start: int, end: int, key: str) -> None:
    """Raise unless a response with this Content-Range and length is the requested range: some
    servers and proxies return another range, or the whole object.
    """
    given = _CONTENT_RANGE.fullmatch(content_range)
    if given is None:
        if start == 0 and size_bytes == end:
            return
        raise StoreUnavailable(
            f"{key}: requested bytes {start}-{end - 1}, but the response is not a range"
        )
    if given[3] != "*" and int(given[3]) < end:
        raise CorruptObject(f"ends at {given[3]}, before {end}", file=key)
    if (int(given[1]), int(given[2]) + 1, size_bytes) != (start, end, end - start):
        raise StoreUnavailable(
            f"{key}: requested bytes {start}-{end - 1}, received {content_range}"
        )


def reported_crc32c(response: Any) -> int | None:
    """The CRC-32C of the whole object, if the store reports it."""
    crc = response.get("ChecksumCRC32C", "")
    if not crc or "-" in crc or response.get("ChecksumType") == "COMPOSITE":
        return None
    try:
        return int.from_bytes(base64.b64decode(crc, validate=True), "big")
    except binascii.Error:
        return None


def stat_of(key: str, headers: Mapping[str, str]) -> ObjectStat:
    """What the headers of a HEAD's response, names in lower case, say of the object."""
    described = {
        "ChecksumCRC32C": headers.get("x-amz-checksum-crc32c", ""),
        "ChecksumType": headers.get("x-amz-checksum-type"),
    }
    try:
        size_bytes = int(headers["content-length"])
        modified = parsedate_to_datetime(headers["last-modified"])
    except (KeyError, ValueError) as error:
        raise UnsupportedResponse(f"it does not describe the object: {error}") from error
    modified_ms = int(modified.timestamp() * 1000)
    return ObjectStat(key, size_bytes, reported_crc32c(described), modified_ms)


def member_of(response: Any, name: str, *, key: str) -> Any:
    """Raises StoreUnavailable if the store sent a response without the header."""
    try:
        return response[name]
    except KeyError:
        raise StoreUnavailable(f"{key}: the response has no {name}") from None


def response_time_ms(response: Any) -> int:
    """The `Date` of the response; the local clock if it has none."""
    try:
        stated = response["ResponseMetadata"]["HTTPHeaders"]["date"]
        return int(parsedate_to_datetime(stated).timestamp() * 1000)
    except (KeyError, ValueError):
        return wall_clock_ms()
