"""The `.txnindex` of a segment: the aborted transactions whose marker is in the segment.

A segment without one has no file. Recovery and compaction write it, appends never do: there is no
transaction coordinator here, so no markers are appended.
"""

from __future__ import annotations

from tierlog.host.disk import Disk
from tierlog.host.durable_file import read_whole, write_atomically
from tierlog.hot_tier.file_names import TRANSACTION_INDEX
from tierlog.hot_tier.segment import Segment
from tierlog.record_format.errors import CorruptIndex
from tierlog.record_format.index_layouts import AbortedTxn, pack_txn_index, parse_txn_index


def read_entries(segment: Segment) -> list[AbortedTxn]:
    """Raises CorruptIndex, and FileNotFoundError if the segment was deleted meanwhile."""
    if not segment.has_transactions:
        return []
    path = segment.path(TRANSACTION_INDEX)
    data = read_whole(path, CorruptIndex)
    return parse_txn_index(data, base_offset=segment.base_offset, file=str(path))


def write_entries(segment: Segment, entries: list[AbortedTxn], *, disk: Disk) -> None:
    """Replace the file by `entries` unless it has them already; no file if there are none."""
    try:
        if read_entries(segment) == entries:
            return
    except (CorruptIndex, FileNotFoundError):
        pass
    path = segment.path(TRANSACTION_INDEX)
    segment.has_transactions = bool(entries)
    if entries:
        write_atomically(path, pack_txn_index(entries), disk=disk, sync=True)
    else:
        disk.unlink(path)
