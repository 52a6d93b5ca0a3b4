"""Manifest states and entries for tests: small, regular, easy to read in a failure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from tests.fakes.clock import Clock
from tierlog.manifest.keys import PartitionKeys
from tierlog.manifest.state import EpochStart, Manifest, PageRef
from tierlog.manifest.store import ManifestStore, StoreOptions
from tierlog.manifest.transitions import Claim, add_segments, create
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.segment_entry import SegmentEntry

KEYS = PartitionKeys("flights", "q7RrJ4VvQzW0aYy0uS1m2w", 3)
SEGMENT_RECORDS = 100


class NoPages:
    def page_entries(self, page: PageRef) -> tuple[SegmentEntry, ...]:
        raise AssertionError(f"page {page.key} must not be read")


def entry(base_offset: int, *, records: int = SEGMENT_RECORDS, **other: object) -> SegmentEntry:
    """A segment of `records` offsets; `unique=` distinguishes two uploads of it."""
    unique = other.pop("unique", "a")
    epoch = other.get("leader_epoch", 0)
    stem = f"{KEYS.segments}{base_offset:020d}-{epoch}-{unique}"
    fields: dict[str, object] = {
        "base_offset": base_offset,
        "last_offset": base_offset + records - 1,
        "size_bytes": records * 10,
        "record_count": records,
        "min_timestamp": 1_000 + base_offset,
        "max_timestamp": 1_000 + base_offset + records,
        "leader_epoch": 0,
        "log_key": f"{stem}.log",
        "log_crc32c": base_offset & 0xFFFFFFFF,
        "indexes_key": f"{stem}.indexes",
        "indexes_crc32c": 7,
        "indexes_size_bytes": 500,
        "chunk_table_position": 400,
        "chunk_table_size": 100,
        **other,
    }
    return SegmentEntry(**fields)  # type: ignore[arg-type]


def run_of(count: int, *, start: int = 0, **other: object) -> list[SegmentEntry]:
    return [entry(start + i * SEGMENT_RECORDS, **other) for i in range(count)]


def claim(
    owner: str = "owner-a",
    epoch: int = 0,
    *,
    start_offset: int = 0,
    recorded: Sequence[tuple[str, int]] = (),
    take_over: bool = False,
) -> Claim:
    epochs = (EpochStart(epoch, start_offset, owner),)
    return Claim(owner, epochs, frozenset(recorded), take_over=take_over)


def manifest(count: int = 0, *, log_start_offset: int = 0) -> Manifest:
    state = create(KEYS, claim=claim(), log_start_offset=log_start_offset)
    return add_segments(state, run_of(count, start=log_start_offset))


def names(prefix: str = "u") -> Callable[[], str]:
    numbers = itertools.count()
    return lambda: f"{prefix}{next(numbers):08d}"


def manifest_store(
    store: ObjectStore, *, clock: Clock | None = None, writer: str = "u", **options: object
) -> ManifestStore:
    clock = clock or Clock()
    return ManifestStore(
        store,
        KEYS,
        StoreOptions(
            clock=clock,
            boot_clock=clock,
            unique=names(writer),
            pause=lambda s: None,
            **options,  # type: ignore[arg-type]
        ),
    )
