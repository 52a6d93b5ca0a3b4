"""What the headers of an S3 answer say, and whether it answers what was asked; no I/O.

* Only a Content-Range that is the one asked for is believed.
* A checksum counts only if it is over the whole object; a composite one does not.
"""

from __future__ import annotations

import base64
import binascii
import re
from email.utils import parsedate_to_datetime
from typing import Any

from cold_tier.object_store import Checksum
from record_format.clock import wall_clock_ms
from record_format.errors import CorruptObject, StoreUnavailable

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


def check_range(answer: Any, start: int, end: int, *, key: str) -> None:
    """Some servers and proxies answer with another range, or with everything."""
    given = _CONTENT_RANGE.fullmatch(answer.get("ContentRange", ""))
    whole = not given and start == 0 and answer["ContentLength"] == end
    if whole:
        return
    if given is None:
        raise StoreUnavailable(
            f"{key}: asked for bytes {start}-{end - 1}, answered without a range"
        )
    if given[3] != "*" and int(given[3]) < end:
        raise CorruptObject(f"ends at {given[3]}, before {end}", file=key)
    if (int(given[1]), int(given[2]) + 1) != (start, end) or answer["ContentLength"] != end - start:
        raise StoreUnavailable(
            f"{key}: asked for bytes {start}-{end - 1}, answered {answer.get('ContentRange')}"
        )


def checksum_of(answer: Any) -> Checksum | None:
    """CRC-32C of the whole object if the store gives it, else the MD5 that an ETag may be."""
    crc = answer.get("ChecksumCRC32C", "")
    if crc and "-" not in crc and answer.get("ChecksumType") != "COMPOSITE":
        try:
            return Checksum("crc32c", base64.b64decode(crc, validate=True).hex())
        except binascii.Error:
            return None
    etag = answer.get("ETag", "").strip('"').lower()
    encrypted = answer.get("ServerSideEncryption", "AES256") != "AES256"
    if re.fullmatch(r"[0-9a-f]{32}", etag) and not encrypted:
        return Checksum("md5", etag)
    return None


def now_of(answer: Any) -> int:
    """The store's clock when it answered; ours if it did not say."""
    try:
        stated = answer["ResponseMetadata"]["HTTPHeaders"]["date"]
        return int(parsedate_to_datetime(stated).timestamp() * 1000)
    except (KeyError, ValueError):
        return wall_clock_ms()
