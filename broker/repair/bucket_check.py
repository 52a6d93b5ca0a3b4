"""Checks what the bucket holds of one partition: manifest, pages, pins, and every segment.

* Segments are checked side by side, a bounded number at a time; problems come in offset order.
* A check may take longer than dropped objects are kept: what is wrong with a segment counts only if
  the manifest in force still names it afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from cold_tier.object_store import ObjectStore
from cold_tier.segment_check import check_segment
from manifest.keys import PartitionKeys
from manifest.partition_check import ManifestCheck
from manifest.state import Manifest, SegmentEntry
from manifest.store import ManifestStore, StoreOptions
from record_format.errors import CorruptDataError
from record_format.findings import Findings

WORKERS = 8

Progress = Callable[[int], None]
"""Told of so many more bytes of segments that were looked at."""


def no_progress(_size_bytes: int) -> None:
    """For callers that do not watch."""


class CheckOptions(NamedTuple):
    """`at_least`: the manifest version that the caller has seen in force."""

    clock: Callable[[], int]
    deep: bool = False
    progress: Progress = no_progress
    at_least: int = 0


def check_partition(
    store: ObjectStore, keys: PartitionKeys, options: CheckOptions
) -> tuple[Findings, Manifest | None, list[SegmentEntry]]:
    """The findings, and the manifest and entries that could be read, for further comparison.

    Raises StoreUnavailable, ConfigurationError.
    """
    check = ManifestCheck(store, keys, clock=options.clock, at_least=options.at_least)
    manifest = check.manifest()
    if manifest is None:
        return check.findings, None, []
    entries = list(check.entries(manifest))
    manifests = ManifestStore(store, keys, StoreOptions(clock=options.clock))
    _check_segments(store, manifests, entries, check.findings, options=options)
    check.pins()
    return check.findings, manifest, entries


def _check_segments(
    store: ObjectStore,
    manifests: ManifestStore,
    entries: list[SegmentEntry],
    findings: Findings,
    *,
    options: CheckOptions,
) -> None:
    """Check the objects of each; at most WORKERS at a time, results in order."""

    def check(entry: SegmentEntry) -> Findings:
        found = check_segment(store, entry, partition=findings.partition, deep=options.deep)
        options.progress(entry.size_bytes)
        if found.problems and not _is_still_named(manifests, entry):
            found.problems.clear()
        return found

    with ThreadPoolExecutor(WORKERS, thread_name_prefix="verify") as pool:
        waiting: deque[Future[Findings]] = deque()
        given = iter(entries)
        try:
            for entry in given:
                waiting.append(pool.submit(check, entry))
                if len(waiting) >= 2 * WORKERS:
                    findings.merge(waiting.popleft().result())
            while waiting:
                findings.merge(waiting.popleft().result())
        finally:
            for one in waiting:
                one.cancel()


def _is_still_named(manifests: ManifestStore, entry: SegmentEntry) -> bool:
    """Whether the manifest in force names this very object; where nobody can say, it does."""
    there = entry_in_force(manifests, entry)
    return there is not None and there.log_key == entry.log_key


def entry_in_force(manifests: ManifestStore, entry: SegmentEntry) -> SegmentEntry | None:
    """What the manifest in force has in place of `entry`; `entry` if nobody can say."""
    try:
        manifest = manifests.load()
        return manifests.find(manifest, entry.base_offset) if manifest else entry
    except CorruptDataError:
        return entry
