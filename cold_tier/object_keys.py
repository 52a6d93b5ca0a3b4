"""Keys of the objects that the cold tier writes; `manifest` names its own objects.

    <partition's segments folder>/<20-digit base offset>-<epoch>-<unique>.log
    <partition's segments folder>/<same>.indexes

* Keys are relative to the store's prefix. Offsets have 20 digits, so that keys sort by offset.
* `<unique>` is random, so no two uploads ever share a key, whichever broker uploads.
"""

from __future__ import annotations

import re
import secrets
from typing import NamedTuple

_LOG = re.compile(r"([0-9]{20}-[0-9]{1,10}-[0-9a-z]{1,64})\.log")


class SegmentKeys(NamedTuple):
    """The two objects of one upload of one segment."""

    log: str
    indexes: str


def segment_keys(folder: str, *, base_offset: int, leader_epoch: int, unique: str) -> SegmentKeys:
    """`folder` is the partition's `…/segments/`, with its slash."""
    assert folder.endswith("/")
    stem = f"{folder}{base_offset:020d}-{leader_epoch}-{unique}"
    return SegmentKeys(log=f"{stem}.log", indexes=f"{stem}.indexes")


def segment_keys_of(log_key: str) -> SegmentKeys:
    """Both keys of the upload that `log_key` belongs to."""
    return SegmentKeys(log=log_key, indexes=log_key.removesuffix(".log") + ".indexes")


def name_of(log_key: str) -> str | None:
    """The name in the key of a segment's log object, without its suffix; None for any other key."""
    match = _LOG.fullmatch(log_key.rpartition("/")[2])
    return match[1] if match else None


def new_unique() -> str:
    """80 random bits in 20 hex digits."""
    return secrets.token_hex(10)
