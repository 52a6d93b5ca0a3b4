"""Kafka's assignors on the broker's side: which member of a consumer group gets which partitions.

* Pure functions. Every partition of a topic that somebody reads is given to exactly one reader; in
  a share group, to one at least.
* `uniform` is sticky: first balance, then as few moves as can be (UniformAssignor). Where all
  members read the same topics, their counts differ by one at most.
* `range` gives each reader of a topic a range of it, the same for topics of one size
  (RangeAssignor). Static members come first, by instance, so that a restarted one gets its range
  again.
* `simple`, of share groups, gives a partition to several members where there are fewer partitions
  than members, as many to each as can be, and takes away no more than it must (SimpleAssignor).
* Racks play no part, as in Kafka.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Final, NamedTuple

TopicPartition = tuple[bytes, int]
"""A topic's id, and a partition of it."""

Target = frozenset[TopicPartition]

NOTHING: Final[Target] = frozenset()
UNIFORM: Final = "uniform"
SIMPLE: Final = "simple"
RANGE: Final = "range"
_ROUNDS_MAX: Final = 16  # of balancing over all topics; one and one to see it suffice nearly always


class Reader(NamedTuple):
    """A member: the ids of the topics it reads, and the partitions that it was to have so far."""

    member_id: str
    instance_id: str | None
    topics: frozenset[bytes]
    had: Target = NOTHING


Partitions = Mapping[bytes, Sequence[int]]
"""The partitions of each topic that somebody reads."""

Assignor = Callable[[Sequence[Reader], Partitions], dict[str, Target]]


def range_assignor(readers: Sequence[Reader], partitions: Partitions) -> dict[str, Target]:
    given: dict[str, set[TopicPartition]] = {one.member_id: set() for one in readers}
    for topic, numbers in partitions.items():
        of_topic = sorted((one for one in readers if topic in one.topics), key=_static_first)
        size, longer = divmod(len(numbers), max(len(of_topic), 1))
        start = 0
        for position, reader in enumerate(of_topic):
            end = start + size + (position < longer)
            given[reader.member_id].update((topic, number) for number in numbers[start:end])
            start = end
    return {member: frozenset(places) for member, places in given.items()}


def _static_first(reader: Reader) -> tuple[bool, str]:
    return reader.instance_id is None, reader.instance_id or reader.member_id


def uniform_assignor(readers: Sequence[Reader], partitions: Partitions) -> dict[str, Target]:
    if len({one.topics for one in readers}) <= 1:
        return _balance_equal(readers, partitions)
    return _Balancer(readers, partitions).run()


# --- all read the same ----------------------------------------------------------------------------


def _balance_equal(readers: Sequence[Reader], partitions: Partitions) -> dict[str, Target]:
    """Who has more than its share gives up the rest; who has fewer gets what is free."""
    every = [(topic, number) for topic, numbers in partitions.items() for number in numbers]
    known = frozenset(every)
    share, extras = divmod(len(every), max(len(readers), 1))
    kept: dict[str, set[TopicPartition]] = {}
    room: dict[str, int] = {}
    taken: set[TopicPartition] = set()
    for position, reader in enumerate(readers):
        own = sorted(place for place in reader.had & known if place not in taken)
        quota = share + (extras > 0)
        # The last ones have to take what is left over; others leave it to who has it already.
        if extras and len(own) < quota and len(readers) - position > extras:
            quota = share
        extras -= quota > share
        kept[reader.member_id] = set(own[:quota])
        room[reader.member_id] = quota - len(kept[reader.member_id])
        taken |= kept[reader.member_id]
    free = iter([place for place in every if place not in taken])
    for member_id, count in room.items():
        kept[member_id].update(place for _, place in zip(range(count), free, strict=False))
    return {member: frozenset(places) for member, places in kept.items()}


# --- they read different topics -------------------------------------------------------------------


class _Balancer:
    def __init__(self, readers: Sequence[Reader], partitions: Partitions) -> None:
        self._readers, self._partitions = readers, partitions
        self._owners: dict[TopicPartition, int] = {}
        self._counts = [0] * len(readers)
        self._of_topic: dict[bytes, list[int]] = {topic: [] for topic in partitions}
        for index, reader in enumerate(readers):
            for topic in reader.topics:
                self._of_topic[topic].append(index)

    def run(self) -> dict[str, Target]:
        self._keep()
        topics = sorted((one for one in self._partitions if self._of_topic[one]), key=self._urgency)
        for topic in topics:
            self._give_free(topic)
        shared = [topic for topic in topics if len(self._of_topic[topic]) > 1]
        for _ in range(_ROUNDS_MAX):
            if not sum([self._balance(topic) for topic in shared]):
                break
        given: list[set[TopicPartition]] = [set() for _ in self._readers]
        for place, owner in self._owners.items():
            given[owner].add(place)
        return {
            reader.member_id: frozenset(places)
            for reader, places in zip(self._readers, given, strict=True)
        }

    def _urgency(self, topic: bytes) -> tuple[float, int, bytes]:
        """Topics of which each reader has many come first: they leave no choice."""
        readers = len(self._of_topic[topic])
        return -len(self._partitions[topic]) / readers, readers, topic

    def _keep(self) -> None:
        existing = {topic: frozenset(numbers) for topic, numbers in self._partitions.items()}
        for index, reader in enumerate(self._readers):
            for topic, number in reader.had:
                place = topic, number
                is_read = topic in reader.topics and number in existing.get(topic, ())
                if is_read and place not in self._owners:
                    self._set(place, index)

    def _give_free(self, topic: bytes) -> None:
        fewest = self._heap(self._of_topic[topic])
        for number in self._partitions[topic]:
            if (topic, number) not in self._owners:
                self._set((topic, number), self._top(fewest))

    def _balance(self, topic: bytes) -> int:
        """How many partitions moved, from who has most of all to who has fewest."""
        own: dict[int, list[TopicPartition]] = {}
        for number in self._partitions[topic]:
            own.setdefault(self._owners[topic, number], []).append((topic, number))
        most, fewest = self._heap(own, sign=-1), self._heap(self._of_topic[topic])
        moved = 0
        while most:
            giver, taker = self._top(most, sign=-1), self._top(fewest)
            if self._counts[giver] - self._counts[taker] <= 1:
                break
            self._set(own[giver].pop(), taker)
            moved += 1
            if not own[giver]:
                heappop(most)
        return moved

    def _heap(self, readers: Iterable[int], *, sign: int = 1) -> list[tuple[int, int]]:
        """By what they have of all topics: fewest first, or most."""
        heap = [(sign * self._counts[one], one) for one in readers]
        heapify(heap)
        return heap

    def _top(self, heap: list[tuple[int, int]], *, sign: int = 1) -> int:
        """The first, where counts have changed since."""
        while heap[0][0] != sign * self._counts[heap[0][1]]:
            heapreplace(heap, (sign * self._counts[heap[0][1]], heap[0][1]))
        return heap[0][1]

    def _set(self, place: TopicPartition, owner: int) -> None:
        before = self._owners.get(place)
        if before is not None:
            self._counts[before] -= 1
        self._owners[place] = owner
        self._counts[owner] += 1


# --- share groups ---------------------------------------------------------------------------------


def simple_assignor(readers: Sequence[Reader], partitions: Partitions) -> dict[str, Target]:
    given: dict[str, set[TopicPartition]] = {one.member_id: set() for one in readers}
    if len({one.topics for one in readers}) <= 1:
        every = [(topic, number) for topic, numbers in partitions.items() for number in numbers]
        _share(readers, every, given)
    else:
        for topic, numbers in partitions.items():
            of_topic = [one for one in readers if topic in one.topics]
            _share(of_topic, [(topic, number) for number in numbers], given)
    return {member: frozenset(places) for member, places in given.items()}


def _share(
    readers: Sequence[Reader],
    places: Sequence[TopicPartition],
    given: dict[str, set[TopicPartition]],
) -> None:
    if not readers or not places:
        return
    sharing = -(-len(readers) // len(places))
    counts = dict.fromkeys(places, 0)
    bounds = [-(-sharing * len(places) * i // len(readers)) for i in range(len(readers) + 1)]
    room = {}
    for reader, begin, end in zip(readers, bounds, bounds[1:], strict=False):
        had = sorted(one for one in reader.had if counts.get(one, sharing) < sharing)
        kept = had[: end - begin]
        given[reader.member_id].update(kept)
        counts.update((one, counts[one] + 1) for one in kept)
        room[reader.member_id] = end - begin - len(kept)
    waiting = deque(member for member, count in room.items() if count)
    for place in places:
        for _ in range(len(waiting)):
            if counts[place] >= sharing:
                break
            member = waiting.popleft()
            if place not in given[member]:
                given[member].add(place)
                counts[place] += 1
                room[member] -= 1
            if room[member]:
                waiting.append(member)


ASSIGNORS: Final[Mapping[str, Assignor]] = {UNIFORM: uniform_assignor, RANGE: range_assignor}
"""Of consumer groups, by Kafka's names; the first is the default."""
