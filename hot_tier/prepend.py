"""Prepending a segment that was brought back from the other tier to the local log.

* It arrives complete and synced in a folder of its own on the same disk, and is moved in by
  renames, its `.log` last: a crash leaves either the whole segment or only indexes, which the next
  open removes.
* Like every sealed segment it ends where the next one begins, whatever lies between.
* The newest segment is brought back first, so that no new gap appears between local segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tierlog.hot_tier.file_names import LOG, OFFSET_INDEX, TIME_INDEX, TRANSACTION_INDEX
from tierlog.hot_tier.log_state import LogState, Segments
from tierlog.hot_tier.roll import disk_error
from tierlog.hot_tier.segment import Segment, SegmentEnd
from tierlog.hot_tier.segment_views import SegmentFiles
from tierlog.record_format.checkpoint_files import EpochEntry


def prepend_segment(
    state: LogState, files: SegmentFiles, *, epochs: Sequence[EpochEntry], crc32c: int
) -> bool:
    """Make `files` (sealed, synced) the first segment. False if the log start has passed it or the
    log was closed.

    `epochs`: those of its records. Raises DiskFull, LogOfflineError.
    """
    with state.lock:
        state.check_online()
        first = state.segments.items[0]
        assert files.last_offset < first.base_offset, "it precedes the local segments"
        if state.closing or files.last_offset < state.log_start_offset:
            return False
        end = SegmentEnd(files.size_bytes, first.base_offset)
        segment = Segment(state.folder, files.base_offset, end)
        segment.record_count, segment.min_timestamp = files.record_count, files.min_timestamp
        segment.crc32c, segment.has_transactions = crc32c, files.txnindex is not None
        try:
            state.epochs.prepend(epochs)
            for suffix, path in _renames(files):
                state.disk.rename(path, segment.path(suffix))
            state.disk.sync_folder(state.folder)
        except OSError as error:
            raise disk_error(state, error) from error
        state.segments = Segments.of((segment, *state.segments.items))
        return True


def _renames(files: SegmentFiles) -> list[tuple[str, Path]]:
    transactions = [(TRANSACTION_INDEX, files.txnindex)] if files.txnindex else []
    return [
        *transactions,
        (TIME_INDEX, files.timeindex),
        (OFFSET_INDEX, files.index),
        (LOG, files.log),
    ]
