"""The expected bytes come from Kafka 4.3.1's own classes (OffsetCommitKey, OffsetCommitValue)."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.record_format.checkpoint_files import parse_topic_id
from tierlog.record_format.consumer_offsets import (
    Commit,
    CommitKey,
    decode_key,
    decode_value,
    encode_key,
    encode_value,
    partition_for_group,
)
from tierlog.record_format.errors import CorruptDataError

KEYS = {
    "g": "00010001670007666c696768747300000003",
    "console-consumer-12345": (
        "00010016636f6e736f6c652d636f6e73756d65722d31323334350007666c696768747300000003"
    ),
    "größe/日本 🚀": ("000100136772c3b6c39f652fe697a5e69cac20f09f9a800007666c696768747300000003"),
    "polygenelubricants": "00010012706f6c7967656e656c7562726963616e74730007666c696768747300000003",
}
VALUES = {
    0: "00000000011f71fb04cb00036dc3a90000018bcfe5687b",
    1: "00010000011f71fb04cb00036dc3a90000018bcfe5687b0000018bcff4aa3f",
    2: "00020000011f71fb04cb00036dc3a90000018bcfe5687b",
    3: "00030000011f71fb04cb0000000700036dc3a90000018bcfe5687b",
    4: "00040000011f71fb04cb00000007046dc3a90000018bcfe5687b00",
}
WITH_ID = (
    "00040000011f71fb04cb00000007046dc3a90000018bcfe5687b010010bd78f019c1b34a73824b710be561d93d"
)
COMMIT = Commit(1234567890123, "mé", 1700000000123, 7)
TOPIC_ID = parse_topic_id("vXjwGcGzSnOCS3EL5WHZPQ")


@pytest.mark.parametrize("group", KEYS)
def test_keys_have_kafkas_bytes(group):
    key = CommitKey(group, "flights", 3)
    assert encode_key(key).hex() == KEYS[group]
    assert decode_key(bytes.fromhex(KEYS[group])) == key


def test_values_have_kafkas_bytes():
    assert encode_value(COMMIT).hex() == VALUES[4]
    with_id = COMMIT._replace(topic_id=TOPIC_ID)
    assert encode_value(with_id).hex() == WITH_ID
    assert decode_value(bytes.fromhex(WITH_ID)) == with_id
    long = encode_value(Commit(5, "x" * 200, 1))
    assert long[14:16] == b"\xc9\x01"
    assert decode_value(long).metadata == "x" * 200


def test_a_zero_topic_id_is_none_and_unknown_tags_are_skipped():
    plain = bytes.fromhex(VALUES[4])[:-1]
    assert decode_value(plain + b"\x01\0\x10" + bytes(16)) == COMMIT
    assert decode_value(plain + b"\x02\x01\x02ab\x05\0") == COMMIT
    for bad in (b"\x01\0\x0f" + bytes(15), b"\x65", b"\xff" * 6, b"\x01\0\x10"):
        with pytest.raises(CorruptDataError):
            decode_value(plain + bad)


@pytest.mark.parametrize("version", VALUES)
def test_every_version_of_a_value_is_decoded(version):
    expected = COMMIT if version >= 3 else COMMIT._replace(leader_epoch=-1)
    assert decode_value(bytes.fromhex(VALUES[version])) == expected


@pytest.mark.parametrize(
    ("group", "of_50", "of_7"),
    [
        ("g", 3, 5),
        ("console-consumer-12345", 6, 6),
        ("größe/日本 🚀", 42, 3),
        ("polygenelubricants", 0, 0),  # its hash is -2**31, which has no absolute value in Java
    ],
)
def test_groups_map_to_the_partitions_that_kafka_chooses(group, of_50, of_7):
    assert partition_for_group(group, 50) == of_50
    assert partition_for_group(group, 7) == of_7
    assert partition_for_group(group, 1) == 0


def test_a_key_of_another_type_is_not_a_commit():
    assert decode_key(b"\0\x02\0\x01g") is None


def test_a_key_of_version_0_is_a_commit():
    assert decode_key(b"\0\0" + bytes.fromhex(KEYS["g"])[2:]) == CommitKey("g", "flights", 3)


@pytest.mark.parametrize("version", VALUES)
def test_a_truncated_value_is_refused_and_trailing_bytes_are_ignored(version):
    whole = bytes.fromhex(VALUES[version])
    unread = 8 if version == 1 else 0  # the expiry timestamp
    for size in range(len(whole) - unread):
        with pytest.raises(CorruptDataError):
            decode_value(whole[:size])
    assert decode_value(whole + b"more") == decode_value(whole)


def test_a_truncated_key_is_refused():
    whole = bytes.fromhex(KEYS["g"])
    for size in range(len(whole)):
        with pytest.raises(CorruptDataError):
            decode_key(whole[:size])


@pytest.mark.parametrize(
    "data", [b"\0\x05" + bytes(40), b"\xff\xff" + bytes(40), b"\0\x03" + b"\xff" * 40]
)
def test_values_of_unknown_versions_and_invalid_strings_are_refused(data):
    with pytest.raises(CorruptDataError):
        decode_value(data)


@given(
    group=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=255),
    partition=st.integers(0, 2**31 - 1),
    offset=st.integers(0, 2**63 - 1),
    metadata=st.text(st.characters(exclude_categories=["Cs"]), max_size=1000),
)
def test_commits_round_trip(group, partition, offset, metadata):
    key, commit = CommitKey(group, "t", partition), Commit(offset, metadata, 5, -1, TOPIC_ID)
    assert decode_key(encode_key(key)) == key
    assert decode_value(encode_value(commit)) == commit


@given(st.binary(max_size=64))
def test_any_bytes_are_decoded_or_refused(data):
    for decode in (decode_key, decode_value):
        with suppress(CorruptDataError):
            decode(data)
