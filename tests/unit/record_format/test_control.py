"""The end markers of transactions."""

from __future__ import annotations

import pytest

from tests.fakes.control_markers import marker_key, marker_value
from tierlog.record_format.batch import parse_header
from tierlog.record_format.decode import EndMarker, Record, control_type, end_marker, end_marker_of
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import CorruptBatch


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
