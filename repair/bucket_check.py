"""Checks one partition in the bucket: its manifest, pages, pins, and every segment.

* Segments are checked in parallel, a bounded number at a time; problems are in offset order.
* A check may take longer than dropped objects are retained, so a problem of a segment counts only
  if the manifest in force still names the segment afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from tierlog.cold_tier.segment_check import check_segment
from tierlog.host.threads import Threads
from tierlog.manifest.keys import PartitionKeys
from tierlog.manifest.partition_check import ManifestCheck
from tierlog.manifest.state import Manifest
from tierlog.manifest.store import ManifestStore, StoreOptions
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.errors import CorruptDataError
from tierlog.record_format.findings import Findings
from tierlog.record_format.segment_entry import SegmentEntry

WORKERS = 8

Progress = Callable[[int], None]
"""Called with the bytes of segments checked since the last call."""


def no_progress(_size_bytes: int) -> None:
    """Ignores progress."""


class CheckOptions(NamedTuple):
    """`at_least`: the manifest version that the caller has seen in force."""

    clock: Callable[[], int]
    deep: bool = False
    progress: Progress = no_progress
    at_least: int = 0


def check_partition(
    store: ObjectStore, keys: PartitionKeys, options: CheckOptions
) -> tuple[Findings, Manifest | None, list[SegmentEntry]]:
    """The findings, and the manifest and entries that could be read, for further checks.

    Raises StoreUnavailable, ConfigurationError.
    """
    check = ManifestCheck(store, keys, clock=options.clock, at_least=options.at_least)
    manifest = check.manifest()
    if manifest is None:
        return check.findings, None, []
    entries = list(check.checked_entries(manifest))
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
    """Check the objects of each entry; at most WORKERS at a time, results in order."""

    def check(entry: SegmentEntry) -> Findings:
        found = check_segment(store, entry, partition=findings.partition, deep=options.deep)
        options.progress(entry.size_bytes)
        if found.problems and not _is_still_named(manifests, entry):
            found.problems.clear()
        return found

    with Threads(WORKERS, name="verify") as pool:
        waiting: deque[Future[Findings]] = deque()
        try:
            for entry in entries:
                waiting.append(pool.submit(check, entry))
                if len(waiting) >= 2 * WORKERS:
                    findings.merge(waiting.popleft().result())
            while waiting:
                findings.merge(waiting.popleft().result())
        finally:
            for one in waiting:
                one.cancel()


def _is_still_named(manifests: ManifestStore, entry: SegmentEntry) -> bool:
    """Whether the manifest in force names this object; True if no manifest can be read."""
    there = entry_in_force(manifests, entry)
    return there is not None and there.log_key == entry.log_key


def entry_in_force(manifests: ManifestStore, entry: SegmentEntry) -> SegmentEntry | None:
    """The manifest's present entry for the offsets of `entry`; `entry` if it cannot be read."""
    try:
        manifest = manifests.load_manifest()
        return manifests.find_segment(manifest, entry.base_offset) if manifest else entry
    except CorruptDataError:
        return entry
