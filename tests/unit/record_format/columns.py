"""Hypothesis strategies for columns of records."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import strategies as st

from tierlog.record_format.encode import Headers

nullable = st.none() | st.binary(max_size=300)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
headers = st.none() | st.lists(st.tuples(names, nullable), max_size=4).map(tuple)
timestamps = st.one_of(
    st.integers(1_700_000_000_000, 1_700_000_100_000), st.integers(-1, 2**63 - 1)
)


class Rows(NamedTuple):
    values: list[bytes | None]
    timestamps: list[int]
    keys: list[bytes | None] | None
    headers: list[Headers | None] | None


@st.composite
def rows(draw: st.DrawFn, *, max_size: int = 20) -> Rows:
    size = draw(st.integers(1, max_size))

    def column(items: st.SearchStrategy) -> st.SearchStrategy:
        return st.lists(items, min_size=size, max_size=size)

    one_time = timestamps.map(lambda time: [time] * size)
    return Rows(
        draw(column(nullable) | column(st.binary(max_size=300))),
        draw(one_time | column(timestamps)),
        draw(st.none() | column(nullable)),
        draw(st.none() | column(headers)),
    )
