"""End markers, key hashes and varints."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from record_format.batch import parse_header
from record_format.control import (
    EndMarker,
    control_type,
    end_marker,
    end_marker_of,
)
from record_format.decode import Record
from record_format.encode import encode_batch
from record_format.errors import CorruptBatch
from record_format.murmur2 import murmur2, partition_for_key
from record_format.varint import encoded, read_varint, read_varlong, size_of, zigzag
from tests.fakes.control_markers import marker_key, marker_value
from tests.unit.record_format import golden

HASHES = json.loads((golden.ROOT / "murmur2.json").read_text())


def record(key: bytes | None, value: bytes | None) -> Record:
    return Record(7, 0, key, value, ())


@pytest.mark.parametrize("committed", [True, False])
def test_an_end_marker_is_decoded(committed: bool) -> None:
    data = encode_batch(
        [marker_value(coordinator_epoch=5)],
        keys=[marker_key(committed=committed)],
        timestamps=[1],
        transactional=True,
        control=True,
    )
    assert end_marker_of(data, parse_header(data)) == EndMarker(committed, 5)


def test_other_control_records_are_not_end_markers() -> None:
    for kind in (2, 3, 6, -1):
        key = b"\0\0" + kind.to_bytes(2, "big", signed=True)
        assert control_type(key) == kind
        assert end_marker(record(key, b"\0")) is None


def test_markers_of_newer_versions_are_decoded_by_their_common_fields() -> None:
    assert end_marker(record(b"\0\1\0\1\0", b"\0\1\0\0\0\x09\0")) == EndMarker(True, 9)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, b""),
        (b"\0\0\0", b""),
        (b"\xff\xff\0\0", b""),
        (b"\0\0\0\0", None),
        (b"\0\0\0\0", b"\0\0\0\0\0"),
        (b"\0\0\0\0", b"\xff\xff\0\0\0\0"),
    ],
)
def test_an_invalid_marker_is_corrupt(key: bytes | None, value: bytes | None) -> None:
    with pytest.raises(CorruptBatch):
        end_marker(record(key, value))


def test_hashes_are_those_of_kafkas_client() -> None:
    assert len(HASHES) == 200
    for item in HASHES:
        key = base64.b64decode(item["key_base64"])
        assert murmur2(key) == item["murmur2"]
        for partitions, partition in item["partition"].items():
            assert partition_for_key(key, int(partitions)) == partition


def test_keys_map_to_the_partitions_that_kafkas_client_chose() -> None:
    for partition in range(3):
        for item in golden.expected_records(golden.ROOT / f"keyed-{partition}"):
            assert partition_for_key(base64.b64decode(item["key_base64"]), 3) == partition


@given(st.binary(max_size=600), st.integers(1, 10_000))
def test_a_key_maps_to_an_existing_partition(key: bytes, partitions: int) -> None:
    assert -(2**31) <= murmur2(key) < 2**31
    assert 0 <= partition_for_key(key, partitions) < partitions


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
