"""Which broker is to lead which partition, and to have its replicas. Pure: brokers are given with
what they lead.

* Each topic is spread over all brokers, then all partitions are: a topic's load is its own, and a
  broker that joined lately must not get all of a new one.
* A new partition goes to the broker that leads fewest of its topic, then fewest of all; of equal
  ones, in turn from a place that the topic's id decides, so that small topics do not all begin with
  the same broker.
* After a balance no broker leads two partitions more than another, of a topic or of all. What is
  in balance stays where it is.
* Replicas of one partition are in different zones as far as there are enough, and a balance moves
  none into a zone that has one.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple

from tierlog.broker.data_folder.data_folder import TopicIdPartition

Led = Mapping[int, Sequence[TopicIdPartition]]
"""What each broker leads, by node id."""

Sets = Mapping[TopicIdPartition, Sequence[int]]
"""The brokers that are to have each partition's replicas; the first is to lead it."""


class Move(NamedTuple):
    """`replicas`: what there are to be, of a partition that has several."""

    place: TopicIdPartition
    source: int
    target: int
    replicas: tuple[int, ...] = ()


class _Spread:
    """Who leads what while a plan is made."""

    def __init__(self, led: Led) -> None:
        self.led = {node_id: sorted(led[node_id]) for node_id in sorted(led)}
        self._of_topic = Counter(
            (node_id, topic_id) for node_id, places in led.items() for topic_id, _ in places
        )

    def load(self, node_id: int, topic_id: str) -> tuple[int, int]:
        """How many it leads of the topic, and of all."""
        return self._of_topic[node_id, topic_id], len(self.led[node_id])

    def fewest(self, topic_id: str, nodes: Iterable[int]) -> int:
        """The first of those to which a partition of the topic is to go."""
        return min(nodes, key=lambda node_id: self.load(node_id, topic_id))

    def add(self, node_id: int, place: TopicIdPartition) -> None:
        self.led[node_id].append(place)
        self._of_topic[node_id, place[0]] += 1

    def move(self, place: TopicIdPartition, source: int, target: int) -> None:
        self.led[source].remove(place)
        self._of_topic[source, place[0]] -= 1
        self.add(target, place)


def place_new(places: Iterable[TopicIdPartition], led: Led) -> dict[TopicIdPartition, int]:
    """The node id for each new partition. `led`: of each possible broker."""
    spread, nodes = _Spread(led), sorted(led)
    placed: dict[TopicIdPartition, int] = {}
    for place in places:
        turn = zlib.crc32(place[0].encode()) + place[1]
        in_turn = [nodes[(turn + step) % len(nodes)] for step in range(len(nodes))]
        placed[place] = spread.fewest(place[0], in_turn)
        spread.add(placed[place], place)
    return placed


def place_replicas(
    leaders: Mapping[TopicIdPartition, int],
    brokers: Mapping[int, str],
    had: Mapping[int, int],
    *,
    factor: int,
) -> dict[TopicIdPartition, tuple[int, ...]]:
    """The brokers of each new partition's replicas, its leader first. `brokers`: their zones, by
    node id; `had`: how many replicas each has. Zones are taken in turn; in a zone the broker that
    has fewest; of equal ones, that which comes next.
    """
    counts = Counter({node_id: had.get(node_id, 0) for node_id in brokers})
    nodes, placed = sorted(brokers), dict[TopicIdPartition, tuple[int, ...]]()
    for place, leader in leaders.items():
        chosen = [leader]
        first = nodes.index(leader) + place[1]
        in_turn = [nodes[(first + step) % len(nodes)] for step in range(len(nodes))]
        while len(chosen) < min(factor, len(nodes)):
            zones = {brokers[one] for one in chosen if brokers[one]}
            chosen.append(
                min(
                    (one for one in in_turn if one not in chosen),
                    key=lambda one: (brokers[one] in zones, counts[one]),
                )
            )
        counts.update(chosen)
        placed[place] = tuple(chosen)
    return placed


def balance(led: Led) -> list[Move]:
    """The moves after which each topic is spread evenly, and so are all."""
    spread = _Spread(led)
    before = {place: node_id for node_id, places in spread.led.items() for place in places}
    for topic_id in sorted({topic_id for topic_id, _ in before}):
        for move in _evened(spread, topic_id):
            spread.move(*move[:3])
    while (even := _evening_all(spread)) is not None:
        spread.move(*even[:3])
    after = {place: node_id for node_id, places in spread.led.items() for place in places}
    return [
        Move(place, source, after[place])
        for place, source in before.items()
        if after[place] != source
    ]


def _evened(spread: _Spread, topic_id: str) -> Iterator[Move]:
    """Moves of a topic's partitions, until no broker leads two more than another."""
    while True:
        source = max(spread.led, key=lambda node_id: spread.load(node_id, topic_id))
        target = spread.fewest(topic_id, spread.led)
        if spread.load(source, topic_id)[0] - spread.load(target, topic_id)[0] < 2:
            return
        place = next(one for one in reversed(spread.led[source]) if one[0] == topic_id)
        yield Move(place, source, target)


def _evening_all(spread: _Spread) -> Move | None:
    """A move from the broker that leads most to the one that leads fewest, of a topic of which it
    leads more: there is one, and the topic stays even.
    """
    counts = {node_id: len(places) for node_id, places in spread.led.items()}
    (source, most), (target, least) = (
        choose(counts.items(), key=itemgetter(1), default=(-1, 0)) for choose in (max, min)
    )
    if most - least < 2:
        return None
    place = next(
        one
        for one in reversed(spread.led[source])
        if spread.load(source, one[0])[0] > spread.load(target, one[0])[0]
    )
    return Move(place, source, target)


def drain(node_id: int, led: Led) -> list[Move]:
    """The moves after which this broker leads nothing: each goes where a new one would."""
    others = {other: places for other, places in led.items() if other != node_id}
    places = sorted(led.get(node_id, ())) if others else []
    return [Move(place, node_id, target) for place, target in place_new(places, others).items()]


# --- replicas -------------------------------------------------------------------------------------


def drain_replicas(
    node_id: int, sets: Sets, zones: Mapping[int, str], *, may_have: Iterable[int]
) -> list[Move]:
    """The moves after which this broker has no replica: each goes to the broker that has fewest, of
    those in other zones if there are any. One for which no broker is left stays.
    """
    counts = _count_replicas(sets)
    moves = list[Move]()
    for place, replicas in sorted(sets.items()):
        others = [one for one in may_have if one != node_id and one not in replicas]
        if node_id in replicas and others:
            crowds = partial(_crowds, replicas, node_id, zones=zones)
            target = min(others, key=lambda one: (crowds(one), counts[one], one))
            counts[target] += 1
            moves.append(Move(place, node_id, target, _replaced(replicas, node_id, target)))
    return moves


def balance_replicas(sets: Sets, zones: Mapping[int, str]) -> list[Move]:
    """The moves after which no broker has two replicas more than another, and then is the first of
    two partitions more, as far as single moves get there. `zones`: of the brokers that may be given
    more, by node id.
    """
    now, moves = {place: tuple(sets[place]) for place in sorted(sets)}, list[Move]()
    for evening in (_evening_replicas, _evening_first):
        while (move := evening(now, zones)) is not None:
            now[move.place] = move.replicas
            moves.append(move)
    return moves


def _evening_replicas(
    now: Mapping[TopicIdPartition, tuple[int, ...]], zones: Mapping[int, str]
) -> Move | None:
    for source, target in _uneven(_count_replicas(now), zones):
        for place, replicas in now.items():
            if source not in replicas or target in replicas:
                continue
            if not _crowds(replicas, source, target, zones=zones):
                return Move(place, source, target, _replaced(replicas, source, target))
    return None


def _evening_first(
    now: Mapping[TopicIdPartition, tuple[int, ...]], zones: Mapping[int, str]
) -> Move | None:
    for source, target in _uneven(Counter(one[0] for one in now.values()), zones):
        for place, replicas in now.items():
            if replicas[0] == source and target in replicas:
                rest = (one for one in replicas if one != target)
                return Move(place, source, target, (target, *rest))
    return None


def _uneven(counts: Mapping[int, int], nodes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Two brokers of which the first has two more than the second: the farthest apart first."""
    order = sorted((counts.get(one, 0), one) for one in nodes)
    for most, source in reversed(order):
        yield from ((source, target) for least, target in order if most - least >= 2)


def _crowds(replicas: Sequence[int], source: int, target: int, *, zones: Mapping[int, str]) -> bool:
    """Whether two would be in one zone that are not now, if the one took the other's place."""
    others = {zones.get(one) for one in replicas if one != source}
    zone = zones.get(target)
    return bool(zone) and zone in others and zones.get(source) not in others


def _replaced(replicas: Sequence[int], old: int, new: int) -> tuple[int, ...]:
    return tuple(new if one == old else one for one in replicas)


def _count_replicas(sets: Sets) -> Counter[int]:
    return Counter(one for replicas in sets.values() for one in replicas)
