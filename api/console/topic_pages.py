"""The data of the pages on topics and partitions, and where a partition's offsets are, drawn to
scale: one lane for the disk, one for the bucket. May wait for disk or bucket: run in a thread.

* Bounded: a page of topics, of partitions, of segments, of versions; never all of them. Only to
  sort topics or partitions by a figure, it is computed for all of them.
* An offset in both tiers is in both lanes. An axis is `WIDTH` units wide, whatever the offsets.
* An extent is never narrower than `LEAST_WIDTH`, even for one record among billions, and never
  reaches beyond the axis.
* Long holes are not to scale: a restore may skip a billion offsets, so a hole takes at most a tenth
  of the width of the offsets that exist.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from operator import attrgetter
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

from tierlog.api.http.admin.topics import first_page
from tierlog.broker.broker import Broker
from tierlog.broker.groups import lag_of
from tierlog.broker.partition import Partition
from tierlog.broker.segment_listing import SegmentState, TierSizes, peek_segments, tier_sizes
from tierlog.broker.topics import Topic
from tierlog.hot_tier.log_state import Offsets
from tierlog.manifest.state import Manifest
from tierlog.manifest.versions import VersionStat
from tierlog.record_format.errors import UnknownTopic
from tierlog.record_format.segment_entry import SegmentEntry

T = TypeVar("T")
Numbered: TypeAlias = tuple[int, Partition | None]  # None: damaged
TOPICS_A_PAGE: Final = 50
PARTITIONS_A_PAGE: Final = 50
SEGMENTS_A_PAGE: Final = 100
VERSIONS_SHOWN: Final = 50
LANES: Final = 4  # partitions drawn in a topic's line


class Trouble(NamedTuple):
    """Why a partition is not served, and a short label for it."""

    mark: str
    reason: str


class PartitionLine(NamedTuple):
    number: int
    offsets: Offsets
    sizes: TierSizes
    map: TierMap
    trouble: Trouble | None


class DamagedLine(NamedTuple):
    """A partition that has no figures; `Topic.damaged` says why."""

    number: int


class TopicLine(NamedTuple):
    """`maps`: of the first partitions by number, on one axis; `more`: how many others there are.
    `marks`: why partitions are not served, and how many. `offset_count`: as many records, or fewer
    if compacted.
    """

    name: str
    partitions: int
    marks: list[tuple[str, int]]
    offset_count: int
    is_compacted: bool
    hot_bytes: int
    cold_bytes: int
    lag_bytes: int
    maps: dict[int, TierMap]
    more: int


class TopicPage(NamedTuple):
    lines: list[TopicLine]
    found: int
    page: int
    pages: int


class PartitionPage(NamedTuple):
    axis: Axis
    lines: list[PartitionLine | DamagedLine]
    page: int
    pages: int


class SegmentBox(NamedTuple):
    segment: SegmentState
    extent: Extent | None


class SegmentPage(NamedTuple):
    axis: Axis
    boxes: list[SegmentBox]
    next_from_offset: int | None


class ManifestPage(NamedTuple):
    """`changes`: since the previous version, if that still exists. `versions`: newest first."""

    manifest: Manifest
    in_force: int
    versions: list[VersionStat]
    entries: list[SegmentEntry]
    next_from_offset: int | None
    changes: list[str]


def topic_page(topics: Sequence[Topic], *, wanted: str, sort: str, page: int) -> TopicPage:
    """A page of the topics whose names contain `wanted`, ignoring case; `topics` are in the order
    of their names.

    `sort`: a key of TOPIC_KEYS, with a minus for descending. Equal topics stay in the given order.
    """
    wanted = wanted.casefold()
    matching = (topic for topic in topics if wanted in topic.record.name.casefold())
    found = sorted_by(sort, matching, TOPIC_KEYS)
    shown, page, pages = _page_of(found, page, size=TOPICS_A_PAGE)
    return TopicPage([_topic_line(topic) for topic in shown], len(found), page, pages)


def sorted_by(sort: str, items: Iterable[T], keys: Mapping[str, Callable[[T], Any]]) -> list[T]:
    """Sorted by one of `keys`, with a minus for descending. Equal items stay in the given order."""
    return sorted(items, key=keys[sort.removeprefix("-")], reverse=sort.startswith("-"))


def _page_of(items: Sequence[T], page: int, *, size: int) -> tuple[Sequence[T], int, int]:
    """The items of a page, its number, at most that of the last, and the number of pages."""
    pages = max(1, -(-len(items) // size))
    page = min(max(page, 1), pages)
    return items[(page - 1) * size : page * size], page, pages


def _topic_line(topic: Topic) -> TopicLine:
    partitions = list(topic.partitions.values())
    sizes = [tier_sizes(partition) for partition in partitions]
    drawn = {
        number: _places(partition) for number, partition in islice(topic.partitions.items(), LANES)
    }
    axis = axis_of(drawn.values())
    return TopicLine(
        name=topic.record.name,
        partitions=_partition_count(topic),
        marks=_marks(topic),
        offset_count=_offset_count(topic),
        is_compacted=topic.config.compacts,
        hot_bytes=sum(size.hot_bytes for size in sizes),
        cold_bytes=sum(size.cold_bytes for size in sizes),
        lag_bytes=sum(size.offload_lag_bytes for size in sizes),
        maps={number: tier_map(places, axis) for number, places in drawn.items()},
        more=len(partitions) - len(drawn),
    )


def _marks(topic: Topic) -> list[tuple[str, int]]:
    found = Counter({"damaged": len(topic.damaged)})
    found.update(one.mark for one in map(trouble_of, topic.partitions.values()) if one)
    return [(mark, count) for mark, count in found.items() if count]


def trouble_of(partition: Partition) -> Trouble | None:
    if partition.is_offline:
        return Trouble("offline", "its log is offline: the local disk failed")
    if partition.leadership_lost:
        return Trouble("leadership lost", f"leadership lost: {partition.leadership_lost}")
    return None


def _partition_count(topic: Topic) -> int:
    return len(topic.partitions) + len(topic.damaged)


def _offset_count(topic: Topic) -> int:
    def count(partition: Partition) -> int:
        now = partition.offsets()
        return lag_of(partition, now.log_start_offset, now.high_watermark)

    return sum(map(count, topic.partitions.values()))


def _size(field: str) -> Callable[[Topic], int]:
    """A sum of a field of TierSizes over a topic's partitions."""
    of = attrgetter(field)
    return lambda topic: sum(of(tier_sizes(one)) for one in topic.partitions.values())


TOPIC_KEYS: Final[Mapping[str, Callable[[Topic], Any]]] = {
    "name": lambda topic: topic.record.name,
    "partitions": _partition_count,
    "records": _offset_count,
    "hot": _size("hot_bytes"),
    "cold": _size("cold_bytes"),
    "lag": _size("offload_lag_bytes"),
}


def _figure(of: Callable[[Partition], int]) -> Callable[[Numbered], int]:
    return lambda item: of(item[1]) if item[1] else -1


PARTITION_KEYS: Final[Mapping[str, Callable[[Numbered], int]]] = {
    "partition": lambda item: item[0],
    "start": _figure(lambda one: one.offsets().log_start_offset),
    "local": _figure(lambda one: one.offsets().local_log_start_offset),
    "watermark": _figure(lambda one: one.offsets().high_watermark),
    "hot": _figure(lambda one: tier_sizes(one).hot_bytes),
    "cold": _figure(lambda one: tier_sizes(one).cold_bytes),
    "lag": _figure(lambda one: tier_sizes(one).offload_lag_bytes),
    "segments": _figure(lambda one: tier_sizes(one).segments),
}


def partition_page(topic: Topic, *, sort: str, page: int) -> PartitionPage:
    """`sort`: a key of PARTITION_KEYS, with a minus for descending."""
    every: dict[int, Partition | None] = dict.fromkeys(topic.damaged) | topic.partitions
    ordered = sorted_by(sort, sorted(every.items()), PARTITION_KEYS)
    shown, page, pages = _page_of(ordered, page, size=PARTITIONS_A_PAGE)
    axis = axis_of(_places(partition) for _, partition in shown if partition)
    lines = [
        partition_line(partition, axis) if partition else DamagedLine(number)
        for number, partition in shown
    ]
    return PartitionPage(axis, lines, page, pages)


def partition_line(partition: Partition, axis: Axis | None = None) -> PartitionLine:
    """A partition's line, on its own axis if none is given."""
    places = _places(partition)
    return PartitionLine(
        number=partition.number,
        offsets=partition.offsets(),
        sizes=tier_sizes(partition),
        map=tier_map(places, axis_of([places]) if axis is None else axis),
        trouble=trouble_of(partition),
    )


def axis_of(many: Iterable[Places]) -> Axis:
    return Axis.over(written for one in many for written in one.written())


def _places(partition: Partition) -> Places:
    now = partition.offsets()
    manifest = partition.manifest
    gaps = manifest.gaps if manifest is not None else ()
    return Places(
        log_start_offset=now.log_start_offset,
        local_log_start_offset=now.local_log_start_offset,
        log_end_offset=now.log_end_offset,
        bucket_end_offset=manifest.end_offset if manifest is not None else now.log_start_offset,
        gaps=tuple((gap.start_offset, gap.end_offset) for gap in gaps),
    )


def segment_page(partition: Partition, *, from_offset: int) -> SegmentPage:
    found = peek_segments(partition, from_offset=from_offset)
    shown, following = first_page(found, SEGMENTS_A_PAGE)
    axis = Axis.over((one.base_offset, one.last_offset + 1) for one in shown)
    boxes = [SegmentBox(one, axis.extent(one.base_offset, one.last_offset + 1)) for one in shown]
    return SegmentPage(axis, boxes, following)


def manifest_page(
    partition: Partition, *, version: int | None, from_offset: int
) -> ManifestPage | None:
    """None if there is no manifest (yet). Raises UnknownManifestVersion, StoreUnavailable."""
    in_force = partition.manifest
    if in_force is None:
        return None
    manifest = partition.manifest_version(version)
    newest = max(manifest.version, in_force.version)
    after = max(0, newest - VERSIONS_SHOWN)
    versions = partition.manifest_history(after=after, limit=VERSIONS_SHOWN)
    entries = partition.manifest_entries(manifest, from_offset=from_offset)
    shown, following = first_page(entries, SEGMENTS_A_PAGE)
    before = None
    if any(one.version == manifest.version - 1 for one in versions):
        before = partition.manifest_version(manifest.version - 1)
    return ManifestPage(
        manifest=manifest,
        in_force=in_force.version,
        versions=versions[::-1],
        entries=shown,
        next_from_offset=following,
        changes=changes(before, manifest) if before is not None else [],
    )


def changes(before: Manifest, after: Manifest) -> list[str]:
    """What a version changed, in words."""
    found = []
    if after.leader_epoch != before.leader_epoch:
        found.append(f"epoch {before.leader_epoch} → {after.leader_epoch}, owner {after.owner}")
    if after.end_offset != before.end_offset:
        found.append(f"end of the bucket {before.end_offset} → {after.end_offset}")
    if after.log_start_offset != before.log_start_offset:
        found.append(f"log start {before.log_start_offset} → {after.log_start_offset}")
    if after.segment_count != before.segment_count:
        found.append(f"segments {before.segment_count} → {after.segment_count}")
    if len(after.gaps) != len(before.gaps):
        found.append(f"gaps {len(before.gaps)} → {len(after.gaps)}")
    if len(after.pages) != len(before.pages):
        found.append(f"pages {len(before.pages)} → {len(after.pages)}")
    if (after.removed, after.removed_pages) != (before.removed, before.removed_pages):
        waiting = len(after.removed) + len(after.removed_pages)
        found.append(f"objects, or pages of them, waiting for deletion: {waiting}")
    return found or ["no visible changes"]


def live_topics(broker: Broker) -> list[Topic]:
    """All topics by name, except those deleted meanwhile."""
    found = []
    for one in broker.list_topics():
        with suppress(UnknownTopic):
            found.append(broker.topic(one.name))
    return found


WIDTH: Final = 1000.0
LEAST_WIDTH: Final = 2.0
HOLE_SHARE: Final = 10  # a hole is drawn as at most one tenth of the rest


class Extent(NamedTuple):
    """Offsets [start_offset, end_offset), and their place on the axis."""

    start_offset: int
    end_offset: int
    x: float
    width: float


class Axis(NamedTuple):
    """Offsets along a line. `left_out`: the parts of long holes that are not drawn."""

    start_offset: int
    end_offset: int
    left_out: tuple[tuple[int, int], ...] = ()

    @classmethod
    def over(cls, ranges: Iterable[tuple[int, int]]) -> Axis:
        """From the lowest start to the highest end; empty without ranges."""
        found = sorted(ranges)
        start, end = min((a for a, _ in found), default=0), max((b for _, b in found), default=0)
        there = [(a, b) for a, b in found if a < b]
        holes = list(_without(start, end, there))
        held = end - start - sum(b - a for a, b in holes if a < b)
        longest = max(1, held // HOLE_SHARE)
        cut = ((a + longest, b) for a, b in holes)
        return cls(start, end, tuple((a, b) for a, b in cut if a < b))

    def extent(self, start_offset: int, end_offset: int) -> Extent | None:
        """None if no part of the range is on the axis."""
        start, end = max(start_offset, self.start_offset), min(end_offset, self.end_offset)
        if start >= end:
            return None
        scale = WIDTH / self._length_to(self.end_offset)
        width = max((self._length_to(end) - self._length_to(start)) * scale, LEAST_WIDTH)
        x = min(self._length_to(start) * scale, WIDTH - width)
        return Extent(start, end, round(x, 2), round(width, 2))

    def _length_to(self, offset: int) -> int:
        left_out = sum(max(0, min(b, offset) - a) for a, b in self.left_out)
        return offset - self.start_offset - left_out


class Places(NamedTuple):
    """The offsets in each tier. Without a bucket, `bucket_end_offset` is the log start."""

    log_start_offset: int
    local_log_start_offset: int
    log_end_offset: int
    bucket_end_offset: int
    gaps: Sequence[tuple[int, int]] = ()

    def written(self) -> Iterable[tuple[int, int]]:
        """The log's ranges between the gaps; some may be empty."""
        return _without(self.log_start_offset, self.log_end_offset, self.gaps)


class TierMap(NamedTuple):
    disk: tuple[Extent, ...]
    bucket: tuple[Extent, ...]


def tier_map(places: Places, axis: Axis) -> TierMap:
    """Both lanes. Gaps recorded in the manifest are holes in the bucket's lane."""
    local_start = max(places.local_log_start_offset, places.log_start_offset)
    disk = axis.extent(local_start, places.log_end_offset)
    bucket_end = min(places.bucket_end_offset, places.log_end_offset)
    pieces = _without(places.log_start_offset, bucket_end, places.gaps)
    bucket = (axis.extent(start, end) for start, end in pieces)
    return TierMap((disk,) if disk else (), tuple(one for one in bucket if one))


def _without(
    start_offset: int, end_offset: int, gaps: Sequence[tuple[int, int]]
) -> Iterable[tuple[int, int]]:
    for gap_start, gap_end in sorted(gaps):
        yield start_offset, min(gap_start, end_offset)
        start_offset = max(start_offset, gap_end)
    yield start_offset, end_offset
