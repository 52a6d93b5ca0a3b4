"""Kafka's assignors: who gets which partitions. Expected values are worked out by Kafka's rules."""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.broker.group_coordinator.assignors import (
    ASSIGNORS,
    RANGE,
    UNIFORM,
    Assignor,
    Partitions,
    Reader,
    Target,
)

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def readers(**topics: bytes) -> list[Reader]:
    """By member, the first letters of its topics."""
    return [Reader(name, None, ids(which)) for name, which in topics.items()]


def ids(letters: bytes) -> frozenset[bytes]:
    return frozenset(bytes([one]) * 16 for one in letters)


def places(topic: bytes, *numbers: int) -> Target:
    return frozenset((topic, number) for number in numbers)


RANGES: dict[str, tuple[list[Reader], Partitions, Mapping[str, Target]]] = {
    "co-partitioned": (
        readers(m0=b"ab", m1=b"ab"),
        {A: range(3), B: range(3)},
        {"m0": places(A, 0, 1) | places(B, 0, 1), "m1": places(A, 2) | places(B, 2)},
    ),
    "more members than partitions": (
        readers(m2=b"a", m0=b"a", m1=b"a"),
        {A: range(2)},
        {"m0": places(A, 0), "m1": places(A, 1), "m2": frozenset()},
    ),
    "different topics": (
        readers(m0=b"a", m1=b"ab", m2=b"b"),
        {A: range(3), B: range(4)},
        {"m0": places(A, 0, 1), "m1": places(A, 2) | places(B, 0, 1), "m2": places(B, 2, 3)},
    ),
    "static members first, by instance": (
        [Reader("m0", None, ids(b"a")), Reader("z", "i2", ids(b"a")), Reader("y", "i3", ids(b"a"))],
        {A: range(4)},
        {"z": places(A, 0, 1), "y": places(A, 2), "m0": places(A, 3)},
    ),
    "nobody": ([], {}, {}),
    "a topic without partitions": (readers(m0=b"a"), {A: ()}, {"m0": frozenset()}),
}


@pytest.mark.parametrize("what", RANGES)
def test_range_gives_each_reader_a_range_of_each_topic(what: str) -> None:
    members, partitions, expected = RANGES[what]
    assert ASSIGNORS[RANGE](members, partitions) == expected


def test_uniform_lets_members_keep_what_their_share_allows() -> None:
    had = {"m0": places(A, 0, 1, 2, 3, 4, 5), "m1": places(A, 6)}
    members = [Reader(name, None, ids(b"a"), old) for name, old in had.items()]
    found = ASSIGNORS[UNIFORM](members, {A: range(8)})
    assert found == {"m0": places(A, 0, 1, 2, 3), "m1": places(A, 4, 5, 6, 7)}


def test_uniform_leaves_the_odd_partition_where_it_is() -> None:
    had = {"m0": places(A, 0, 1), "m1": places(A, 2, 3, 4)}
    members = [Reader(name, None, ids(b"a"), old) for name, old in had.items()]
    assert ASSIGNORS[UNIFORM](members, {A: range(5)}) == had


def test_uniform_balances_members_that_read_different_topics() -> None:
    members = readers(m0=b"ab", m1=b"b", m2=b"bc")
    found = ASSIGNORS[UNIFORM](members, {A: range(4), B: range(6), C: range(2)})
    assert sorted(map(len, found.values())) == [4, 4, 4]


def test_the_first_assignor_is_the_default() -> None:
    assert next(iter(ASSIGNORS)) == UNIFORM


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[Reader], Partitions]:
    counts = draw(st.dictionaries(st.sampled_from(b"abcd"), st.integers(0, 9), min_size=1))
    topics = st.frozensets(st.sampled_from(sorted(counts)))
    wanted = draw(st.lists(topics, min_size=1, max_size=6))
    if draw(st.booleans()):
        wanted = [wanted[0]] * len(wanted)
    every = [(bytes([topic]) * 16, number) for topic in counts for number in range(10)]
    olds = [draw(st.frozensets(st.sampled_from(every), max_size=12)) for _ in wanted]
    members = [
        Reader(f"m{index}", draw(st.sampled_from((None, f"i{index}"))), ids(bytes(topics)), old)
        for index, (topics, old) in enumerate(zip(wanted, olds, strict=True))
    ]
    read = set().union(*(one.topics for one in members))
    return members, {
        bytes([topic]) * 16: range(count)
        for topic, count in counts.items()
        if bytes([topic]) * 16 in read
    }


@given(groups(), st.sampled_from(sorted(ASSIGNORS)))
def test_every_partition_goes_to_one_reader_of_its_topic(
    group: tuple[list[Reader], Partitions], name: str
) -> None:
    members, partitions = group
    found = ASSIGNORS[name](members, partitions)
    assert list(found) == [one.member_id for one in members]
    given_out = [place for one in members for place in found[one.member_id]]
    assert sorted(given_out) == sorted((t, n) for t, numbers in partitions.items() for n in numbers)
    for one in members:
        assert {topic for topic, _ in found[one.member_id]} <= one.topics


@given(groups())
def test_uniform_is_balanced_and_stays_as_it_is(group: tuple[list[Reader], Partitions]) -> None:
    members, partitions = group
    uniform: Assignor = ASSIGNORS[UNIFORM]
    found = uniform(members, partitions)
    if len({one.topics for one in members}) == 1:
        sizes = [len(places) for places in found.values()]
        assert max(sizes) - min(sizes) <= 1
    again = uniform([one._replace(had=found[one.member_id]) for one in members], partitions)
    assert again == found


@given(groups(), st.data())
def test_uniform_moves_only_what_a_leaver_had(
    group: tuple[list[Reader], Partitions], data: st.DataObject
) -> None:
    members, partitions = group
    members = [one._replace(topics=members[0].topics) for one in members]
    partitions = {topic: count for topic, count in partitions.items() if topic in members[0].topics}
    before = ASSIGNORS[UNIFORM](members, partitions)
    left = data.draw(st.sampled_from(members))
    stayed = [one._replace(had=before[one.member_id]) for one in members if one is not left]
    after = ASSIGNORS[UNIFORM](stayed, partitions)
    for one in stayed:
        assert before[one.member_id] <= after[one.member_id]
