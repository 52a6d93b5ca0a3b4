"""Varints round-trip, and others are corrupt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.varint import encoded, read_varint, read_varlong, size_of, zigzag


@given(st.integers(-(2**63), 2**63 - 1))
def test_varlongs_round_trip(value: int) -> None:
    data = zigzag(value)
    assert read_varlong(b"x" + data + b"y", 1) == (value, 1 + len(data))
    assert size_of(value) == len(data)
    assert encoded(value) == data


@pytest.mark.parametrize("value", [0, -1, 1, 63, 64, -64, -65, 8191, 8192, 2**31 - 1, -(2**31)])
def test_varints_round_trip(value: int) -> None:
    data = zigzag(value)
    assert read_varint(data, 0) == (value, len(data))
    assert size_of(value) == len(data)


def test_truncated_and_overlong_varints_are_corrupt() -> None:
    for data in (b"", b"\x80", b"\xff" * 4, b"\xff" * 4 + b"\x1f", b"\x80" * 5 + b"\0"):
        with pytest.raises(CorruptBatch):
            read_varint(data, 0)
    for data in (b"\xff" * 9, b"\xff" * 9 + b"\2", b"\x80" * 10 + b"\0"):
        with pytest.raises(CorruptBatch):
            read_varlong(data, 0)
