"""Which broker is to lead which partition. Pure: brokers are given with what they lead.

* Each topic is spread over all brokers, then all partitions are: a topic's load is its own, and a
  broker that joined lately must not get all of a new one.
* A new partition goes to the broker that leads fewest of its topic, then fewest of all; of equal
  ones, in turn from a place that the topic's id decides, so that small topics do not all begin with
  the same broker.
* After a balance no broker leads two partitions more than another, of a topic or of all. What is
  in balance stays where it is.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from tierlog.broker.data_folder import TopicIdPartition

Led = Mapping[int, Sequence[TopicIdPartition]]
"""What each broker leads, by node id."""


class Move(NamedTuple):
    place: TopicIdPartition
    source: int
    target: int


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
            spread.move(*move)
    while (even := _evening_all(spread)) is not None:
        spread.move(*even)
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
