"""The data of the pages on topics and partitions, and where a partition's offsets are, drawn to
scale: one lane for the disk, one for the bucket. May wait for disk or bucket: run in a thread.

* Bounded: a page of topics, of partitions, of segments, of versions; never all of them. Only to
  sort topics or partitions by a figure, it is computed for all of them.
* In a cluster each broker has a part of a topic, and of a topic's line: `topic_parts` and
  `partition_parts` are what one of them says, and pages are made of what all say.
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

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from tierlog.api.http.admin.topics import first_page
from tierlog.api.http.cluster.splitting import added
from tierlog.broker.broker import Broker
from tierlog.broker.group_coordinator.groups import lag_of
from tierlog.broker.partition.partition import Partition
from tierlog.broker.partition.segment_listing import SegmentState, peek_segments, tier_sizes
from tierlog.broker.topics.topics import Topic
from tierlog.hot_tier.log_state import Offsets
from tierlog.manifest.state import Manifest
from tierlog.manifest.versions import VersionStat
from tierlog.record_format.errors import UnknownTopic
from tierlog.record_format.segment_entry import SegmentEntry

T = TypeVar("T")
Numbered: TypeAlias = tuple[int, "PartitionPart | None"]  # None: it has no figures
TOPICS_A_PAGE: Final = 50
PARTITIONS_A_PAGE: Final = 50
SEGMENTS_A_PAGE: Final = 100
VERSIONS_SHOWN: Final = 50
LANES: Final = 4  # partitions drawn in a topic's line
NO_LEADER: Final = "without a leader"


class Trouble(NamedTuple):
    """Why a partition is not served, and a short label for it."""

    mark: str
    reason: str


class Sizes(NamedTuple):
    """As in TierSizes."""

    hot_bytes: int
    cold_bytes: int
    segments: int
    offload_lag_bytes: int


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


class PartitionPart(NamedTuple):
    """A partition, as its leader says."""

    number: int
    offsets: Offsets
    sizes: Sizes
    places: Places
    trouble: Trouble | None


class PartitionParts(msgspec.Struct):
    """What a broker has of a topic's partitions. `damaged`: those that it cannot serve, and why."""

    partitions: list[PartitionPart]
    damaged: dict[int, str]


class TopicPart(msgspec.Struct):
    """What a broker has of a topic. `served`: of how many partitions. `marks`: why others are not
    served, and how many. `places`: of the first.
    """

    name: str
    served: int
    marks: dict[str, int]
    offset_count: int
    hot_bytes: int
    cold_bytes: int
    lag_bytes: int
    places: dict[int, Places]


class PartitionLine(NamedTuple):
    """`leader`: its node id, in a cluster."""

    number: int
    offsets: Offsets
    sizes: Sizes
    map: TierMap
    trouble: Trouble | None
    leader: int = -1


class BareLine(NamedTuple):
    """A partition that has no figures, and why: it is damaged, or nobody leads it."""

    number: int
    mark: str
    reason: str


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
    lines: list[PartitionLine | BareLine]
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


def topic_parts(topics: Sequence[Topic], *, wanted: str, sort: str, page: int) -> list[TopicPart]:
    """What this broker has of the topics that such a page may show."""
    found = _matching(topics, wanted, sort)
    if _is_known(sort):
        found = page_of(found, page, size=TOPICS_A_PAGE)[0]
    return [_topic_part(topic) for topic in found]


def topic_page(
    topics: Sequence[Topic],
    *,
    wanted: str,
    sort: str,
    page: int,
    others: Iterable[TopicPart] = (),
    lacking: Callable[[Topic], Mapping[str, int]] = lambda _: {},
) -> TopicPage:
    """A page of the topics whose names contain `wanted`, ignoring case; `topics` are in the order
    of their names. `others`: what the other brokers have of them; `lacking`: how many partitions
    of a topic lack what.

    `sort`: one of TOPIC_KEYS, with a minus for descending. Equal topics stay in the given order.
    """
    parts: dict[str, list[TopicPart]] = {}
    for part in others:
        parts.setdefault(part.name, []).append(part)

    def whole(topic: Topic) -> TopicPart:
        return _whole(topic, [_topic_part(topic), *parts.get(topic.record.name, ())])

    matching = _matching(topics, wanted, sort)
    if _is_known(sort):
        shown, page, pages = page_of(matching, page, size=TOPICS_A_PAGE)
        those: Iterable[tuple[Topic, TopicPart]] = [(topic, whole(topic)) for topic in shown]
    else:
        both = [(topic, whole(topic)) for topic in matching]
        figure = _FIGURES[sort.removeprefix("-")]
        both.sort(key=lambda one: figure(one[1]), reverse=sort.startswith("-"))
        those, page, pages = page_of(both, page, size=TOPICS_A_PAGE)
    lines = [_topic_line(topic, part, lacking(topic)) for topic, part in those]
    return TopicPage(lines, len(matching), page, pages)


def _matching(topics: Sequence[Topic], wanted: str, sort: str) -> Sequence[Topic]:
    """Sorted if they can be without anybody's figures."""
    wanted = wanted.casefold()
    found = [topic for topic in topics if wanted in topic.record.name.casefold()]
    return sorted_by(sort, found, _KNOWN) if _is_known(sort) else found


def _is_known(sort: str) -> bool:
    return sort.removeprefix("-") in _KNOWN


def sorted_by(sort: str, items: Iterable[T], keys: Mapping[str, Callable[[T], Any]]) -> list[T]:
    """Sorted by one of `keys`, with a minus for descending. Equal items stay in the given order."""
    return sorted(items, key=keys[sort.removeprefix("-")], reverse=sort.startswith("-"))


def sort_of(keys: Iterable[str]) -> Meta:
    """One of `keys`, with a minus for descending."""
    return Meta(pattern=f"^-?({'|'.join(keys)})$")


def page_of(items: Sequence[T], page: int, *, size: int) -> tuple[Sequence[T], int, int]:
    """The items of a page, its number, at most that of the last, and the number of pages."""
    pages = max(1, -(-len(items) // size))
    page = min(max(page, 1), pages)
    return items[(page - 1) * size : page * size], page, pages


def _topic_part(topic: Topic) -> TopicPart:
    partitions = list(topic.partitions.values())
    sizes = [tier_sizes(partition) for partition in partitions]
    marks = Counter({"damaged": len(topic.damaged)})
    marks.update(one.mark for one in map(trouble_of, partitions) if one)
    return TopicPart(
        name=topic.record.name,
        served=len(partitions),
        marks=+marks,
        offset_count=_offset_count(topic),
        hot_bytes=sum(size.hot_bytes for size in sizes),
        cold_bytes=sum(size.cold_bytes for size in sizes),
        lag_bytes=sum(size.offload_lag_bytes for size in sizes),
        places={
            number: _places(partition)
            for number, partition in islice(topic.partitions.items(), LANES)
        },
    )


def _whole(topic: Topic, parts: Sequence[TopicPart]) -> TopicPart:
    """Of all brokers that answered; the rest of its partitions nobody leads, as far as is known."""
    if len(parts) == 1 and not topic.is_shared:
        return parts[0]
    whole = added(*parts)
    marks = sum((Counter(one.marks) for one in parts), Counter[str]())
    marks[NO_LEADER] = len(topic.numbers) - whole.served - marks["damaged"]
    places = sorted(one for part in parts for one in part.places.items())
    return replace(whole, marks=+marks, places=dict(places[:LANES]))


def _topic_line(topic: Topic, part: TopicPart, lacking: Mapping[str, int]) -> TopicLine:
    axis, count = axis_of(part.places.values()), len(topic.numbers)
    return TopicLine(
        name=topic.record.name,
        partitions=count,
        marks=[*part.marks.items(), *lacking.items()],
        offset_count=part.offset_count,
        is_compacted=topic.config.compacts,
        hot_bytes=part.hot_bytes,
        cold_bytes=part.cold_bytes,
        lag_bytes=part.lag_bytes,
        maps={number: tier_map(places, axis) for number, places in part.places.items()},
        more=count - len(part.places),
    )


def trouble_of(partition: Partition) -> Trouble | None:
    if partition.is_offline:
        return Trouble("offline", "its log is offline: the local disk failed")
    if partition.leadership_lost:
        return Trouble("leadership lost", f"leadership lost: {partition.leadership_lost}")
    return None


def _offset_count(topic: Topic) -> int:
    def count(partition: Partition) -> int:
        now = partition.offsets()
        return lag_of(partition, now.log_start_offset, now.high_watermark)

    return sum(map(count, topic.partitions.values()))


# What a broker knows without the others, and the rest.
_KNOWN: Final[Mapping[str, Callable[[Topic], Any]]] = {
    "name": lambda topic: topic.record.name,
    "partitions": lambda topic: len(topic.numbers),
}
_FIGURES: Final[Mapping[str, Callable[[TopicPart], int]]] = {
    "records": attrgetter("offset_count"),
    "hot": attrgetter("hot_bytes"),
    "cold": attrgetter("cold_bytes"),
    "lag": attrgetter("lag_bytes"),
}
TOPIC_KEYS: Final = (*_KNOWN, *_FIGURES)


def _figure(name: str) -> Callable[[Numbered], int]:
    of = attrgetter(name)
    return lambda item: of(item[1]) if item[1] else -1


PARTITION_KEYS: Final[Mapping[str, Callable[[Numbered], int]]] = {
    "partition": lambda item: item[0],
    "start": _figure("offsets.log_start_offset"),
    "local": _figure("offsets.local_log_start_offset"),
    "watermark": _figure("offsets.high_watermark"),
    "hot": _figure("sizes.hot_bytes"),
    "cold": _figure("sizes.cold_bytes"),
    "lag": _figure("sizes.offload_lag_bytes"),
    "segments": _figure("sizes.segments"),
}


def partition_parts(topic: Topic, *, sort: str, page: int) -> list[PartitionPart]:
    """What this broker has of the partitions that such a page may show."""
    wanted = set(topic.numbers)
    if sort.removeprefix("-") == "partition":
        in_order = sorted(wanted, reverse=sort.startswith("-"))
        wanted = set(page_of(in_order, page, size=PARTITIONS_A_PAGE)[0])
    return [_partition_part(one) for n, one in topic.partitions.items() if n in wanted]


def partition_page(
    topic: Topic,
    parts: Mapping[int, Iterable[PartitionPart]],
    bare: Mapping[int, BareLine],
    *,
    sort: str,
    page: int,
) -> PartitionPage:
    """`parts`: what each broker has, by node id. `bare`: those without
    figures. `sort`: a key of PARTITION_KEYS, with a minus for descending.
    """
    led: dict[int, tuple[PartitionPart, int]] = {}
    for node_id, those in parts.items():
        for one in those:  # a partition that has just moved may be twice here
            before = led.get(one.number)
            if before is None or before[0].offsets.leader_epoch < one.offsets.leader_epoch:
                led[one.number] = one, node_id
    every: list[Numbered] = [(n, led[n][0] if n in led else None) for n in topic.numbers]
    shown, page, pages = page_of(
        sorted_by(sort, every, PARTITION_KEYS), page, size=PARTITIONS_A_PAGE
    )
    axis = axis_of(part.places for _, part in shown if part)
    lines = [
        _partition_line(part, axis, led[number][1])
        if part
        else bare.get(number) or unled_line(number, "it is being handed over")
        for number, part in shown
    ]
    return PartitionPage(axis, lines, page, pages)


def damaged_line(number: int) -> BareLine:
    return BareLine(number, "damaged", "not served")


def unled_line(number: int, reason: str) -> BareLine:
    return BareLine(number, NO_LEADER, reason)


def partition_line(partition: Partition) -> PartitionLine:
    """A partition's line, on its own axis."""
    part = _partition_part(partition)
    return _partition_line(part, axis_of([part.places]))


def _partition_part(partition: Partition) -> PartitionPart:
    sizes = tier_sizes(partition)
    return PartitionPart(
        number=partition.number,
        offsets=partition.offsets(),
        sizes=Sizes._make(getattr(sizes, field) for field in Sizes._fields),
        places=_places(partition),
        trouble=trouble_of(partition),
    )


def _partition_line(part: PartitionPart, axis: Axis, leader: int = -1) -> PartitionLine:
    return PartitionLine(
        number=part.number,
        offsets=part.offsets,
        sizes=part.sizes,
        map=tier_map(part.places, axis),
        trouble=part.trouble,
        leader=leader,
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
