"""Hashes of keys, and the partitions that they choose, are those of Kafka's client."""

from __future__ import annotations

import base64
import json

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.record_format import golden
from tierlog.record_format.topic_rules import murmur2, partition_for_key

HASHES = json.loads((golden.ROOT / "murmur2.json").read_text())


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
