"""Claim: a partition with a million segments opens, commits and is looked up like a small one.

* Measured in a separate process, over one versitygw on loopback: open (the newest version is found,
  read and checked) and the memory that this and a first lookup take; commits of one segment each,
  with their requests and bytes; a lookup of any offset in a loaded page.
* There are enough commits that some write a page. The janitor merges small pages into large ones in
  a step outside all commits (docs/decisions/0021); a unit test counts that.

`python -m bench manifest`; takes about half a minute.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from bench import s3
from bench.report import Report, Target
from bench.s3 import Bucket
from tierlog.manifest import transitions
from tierlog.manifest.codec import INLINE_MAX, PAGE_ENTRIES, SMALL_PAGE, build_page
from tierlog.manifest.keys import PartitionKeys
from tierlog.manifest.state import EpochStart, Manifest, PageRef
from tierlog.manifest.store import ManifestStore, StoreOptions, random_name
from tierlog.manifest.transitions import Claim
from tierlog.object_store.open import open_store
from tierlog.object_store.s3_connection import S3Options
from tierlog.record_format import native
from tierlog.record_format.segment_entry import SegmentEntry

ROUNDS: Final = 3
SEGMENTS: Final = 1_000_000
RECORDS: Final = 1000
COMMITS: Final = 3 * SMALL_PAGE
LOOKUPS: Final = 20_000
KEYS: Final = PartitionKeys("flights", "q7RrJ4VvQzW0aYy0uS1m2w", 0)


class Seen(NamedTuple):
    """The figures of one round."""

    open_s: float
    memory_mib: float
    commit_ms: float
    requests: float
    sent_bytes: float
    lookup_us: float


def measure(folder: Path, *, rounds: int) -> Report:
    report = Report(name="manifest", title="A manifest of 1,000,000 segments", peer="")
    with s3.versitygw(folder) as bucket:
        _create_manifest(_manifests(bucket))
        seen = [_in_child_process(bucket) for _ in range(rounds)]

    def add(what: str, unit: str, figure: Callable[[Seen], float], most: float | None) -> None:
        target = None if most is None else Target(value=most, at_most=True, of_ratio=False)
        report.add(what, unit, [figure(one) for one in seen], target=target)

    add("open", "s", lambda one: one.open_s, 1.5)
    add("open and a lookup, memory", "MiB", lambda one: one.memory_mib, 200)
    add("lookup in a loaded page", "us", lambda one: one.lookup_us, 50)
    add("commit, the most requests", "requests", lambda one: one.requests, 2)
    add("commit, the most bytes", "KiB", lambda one: one.sent_bytes / 1024, 256)
    add("commit, median", "ms", lambda one: one.commit_ms, None)
    return report


def _manifests(bucket: Bucket) -> ManifestStore:
    store = open_store(f"s3://{s3.BUCKET}/bench", S3Options(endpoint=bucket.endpoint))
    return ManifestStore(store, KEYS, StoreOptions(clock=lambda: time.time_ns() // 1_000_000))


def _create_manifest(manifests: ManifestStore) -> None:
    claim = Claim("owner", (EpochStart(0, 0, "owner"),), frozenset())
    state = manifests.claim_manifest(claim, log_start_offset=0)
    pages: list[PageRef] = []
    for first in range(0, SEGMENTS - INLINE_MAX, PAGE_ENTRIES):
        count = min(PAGE_ENTRIES, SEGMENTS - INLINE_MAX - first)
        entries = tuple(_entry(first + number) for number in range(count))
        page, body = build_page(KEYS, entries, unique=random_name())
        manifests.objects.put(page.key, body)
        pages.append(page)
    newest = tuple(_entry(number) for number in range(SEGMENTS - INLINE_MAX, SEGMENTS))
    end = newest[-1].next_offset
    manifests.commit_manifest(
        state, lambda m: replace(m, pages=tuple(pages), segments=newest, end_offset=end)
    )


def _entry(number: int) -> SegmentEntry:
    stem = f"{KEYS.segments}{number * RECORDS:020d}-0-{random_name()}"
    return SegmentEntry(
        base_offset=number * RECORDS,
        last_offset=(number + 1) * RECORDS - 1,
        size_bytes=1 << 30,
        record_count=RECORDS,
        min_timestamp=1_700_000_000_000 + number,
        max_timestamp=1_700_000_000_000 + number + 1,
        leader_epoch=0,
        log_key=f"{stem}.log",
        log_crc32c=random.getrandbits(32),
        indexes_key=f"{stem}.indexes",
        indexes_crc32c=random.getrandbits(32),
        indexes_size_bytes=700_000,
        chunk_table_position=690_000,
        chunk_table_size=8_000,
        modified_ms=1_700_000_000_000 + number,
    )


def _in_child_process(bucket: Bucket) -> Seen:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
        return child.submit(_run, bucket).result()


def _run(bucket: Bucket) -> Seen:
    native.load()
    manifests = _manifests(bucket)
    manifests.versions.newest_version()  # connected, and boto3 loaded
    before_mib, began = _resident_mib(), time.perf_counter()
    state = manifests.load_manifest()
    open_s = time.perf_counter() - began
    assert state is not None
    manifests.find_segment(state, 0)
    memory_mib = _resident_mib() - before_mib
    lookup_us = _lookup_us(manifests, state)
    return Seen(open_s, memory_mib, *_commit(manifests, state), lookup_us)


def _lookup_us(manifests: ManifestStore, state: Manifest) -> float:
    offsets = [random.randrange(PAGE_ENTRIES * RECORDS) for _ in range(LOOKUPS)]
    began = time.perf_counter()
    for offset in offsets:
        manifests.find_segment(state, offset)
    return (time.perf_counter() - began) / LOOKUPS * 1e6


def _commit(manifests: ManifestStore, state: Manifest) -> tuple[float, float, float]:
    """Median milliseconds of a commit, and the most requests and bytes that one took."""
    ledger, taken = manifests.objects.ledger, []
    requests = sent = 0
    number = state.segments[-1].next_offset // RECORDS
    for _ in range(COMMITS):
        before, began = ledger.usage(), time.perf_counter()
        add = partial(transitions.add_segments, entries=[_entry(number)])
        state = manifests.commit_manifest(state, add)
        taken.append((time.perf_counter() - began) * 1000)
        after = ledger.usage()
        requests = max(requests, _total(after, "requests") - _total(before, "requests"))
        sent = max(sent, _total(after, "sent_bytes") - _total(before, "sent_bytes"))
        number += 1
    return median(taken), requests, sent


def _total(usage: Any, field: str) -> int:
    return sum(getattr(one, field) for one in usage.values())


def _resident_mib() -> float:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * 4096 / (1 << 20)
