"""Which cold segments retention has passed: pure decisions over a manifest.

* Kafka's rules: whole segments from the oldest on; by time while the newest record of a segment is
  older than `retention.ms` (its file's age where no record has a time); by size while what remains
  without the segment is still at least `retention.bytes`. The first segment that stays ends the
  walk.
* Pages are decided by their sums where they go or stay as a whole, and read only at the border.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from manifest.state import LoosePage, Manifest, PageRef, SegmentEntry
from manifest.transitions import PageSource, live_entries


class RetentionLimits(NamedTuple):
    """Topic settings; -1 is no limit. `newer_bytes` lie past the cold end, in the hot tier."""

    retention_ms: int
    retention_bytes: int
    newer_bytes: int = 0


def expired_before(
    manifest: Manifest, limits: RetentionLimits, *, pages: PageSource, now_ms: int
) -> int:
    """The offset below which everything has expired; the log start where nothing has."""
    by_time = _by_time(manifest, limits.retention_ms, pages=pages, now_ms=now_ms)
    by_size = _by_size(manifest, limits, pages=pages)
    return max(manifest.log_start_offset, by_time, by_size)


def _by_time(manifest: Manifest, retention_ms: int, *, pages: PageSource, now_ms: int) -> int:
    if retention_ms < 0:
        return 0

    def passed(timestamp: int | None) -> bool:
        # Strictly older, as in Kafka. Without any time there is nothing to go by: it stays.
        return timestamp is not None and 0 <= timestamp < now_ms - retention_ms

    def page_goes(page: PageRef | LoosePage) -> bool:
        return isinstance(page, PageRef) and passed(page.age_timestamp)

    return _walk(manifest, page_goes, lambda entry: passed(entry.age_timestamp), pages=pages)


def _by_size(manifest: Manifest, limits: RetentionLimits, *, pages: PageSource) -> int:
    if limits.retention_bytes < 0:
        return 0
    total = sum(item.size_bytes for item in (*manifest.pages, *manifest.segments))
    surplus = total + limits.newer_bytes - limits.retention_bytes

    def goes(item: PageRef | LoosePage | SegmentEntry) -> bool:
        nonlocal surplus
        if surplus < item.size_bytes:
            return False
        surplus -= item.size_bytes
        return True

    return _walk(manifest, goes, goes, pages=pages)


def _walk(
    manifest: Manifest,
    page_goes: Callable[[PageRef | LoosePage], bool],
    entry_goes: Callable[[SegmentEntry], bool],
    *,
    pages: PageSource,
) -> int:
    """The offset after the last item, from the oldest on, that goes; 0 where the first stays."""
    before = 0
    for page in manifest.pages:
        if page_goes(page):
            before = page.next_offset
            continue
        for entry in live_entries(page, pages):
            if not entry_goes(entry):
                return before
            before = entry.next_offset
    for entry in manifest.segments:
        if not entry_goes(entry):
            return before
        before = entry.next_offset
    return before
