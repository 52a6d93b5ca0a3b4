"""Whatever the bytes are: a message or a MessageError, and memory of the order of the frame."""

import contextlib
import random
import struct
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.kafka_values import messages
from tierlog.record_format.kafka_messages.apis import APIS
from tierlog.record_format.kafka_messages.codec import (
    MessageError,
    decode,
    encode,
    read_request_head,
)
from tierlog.record_format.kafka_messages.definitions import definition, names
from tierlog.record_format.kafka_messages.encoder import uvarint
from tierlog.record_format.kafka_messages.messages import (
    AlterClientQuotasRequest,
    ApiVersionsRequest,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    FetchRequest,
    HeartbeatRequest,
    MetadataRequest,
    ProduceRequest,
    SyncGroupRequest,
    struct_types,
)

BYTES_PER_BYTE = 160
READ_BY_A_BROKER = [
    name for name in names() if name.endswith(("Request", "Header", "Key", "Value"))
]

some_values = settings(
    max_examples=2, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


def problem_of(kind, version, data):
    with pytest.raises(MessageError) as raised:
        decode(kind, version, data)
    assert raised.value.message == kind.__name__
    return str(raised.value)


@pytest.mark.parametrize("name", READ_BY_A_BROKER)
def test_a_frame_that_is_cut_or_changed_is_a_message_or_our_error(name):
    kind = struct_types(name)[name]
    for version in definition(name).versions:
        some_values(
            given(messages(name, version), st.integers(0, 1 << 32))(spoilt(kind, version))
        )()


def spoilt(kind, version):
    def check(value, seed):
        whole, chance = encode(value, version), random.Random(seed)
        cuts = range(len(whole)) if len(whole) < 60 else chance.sample(range(len(whole)), 20)
        for cut in cuts:
            problem_of(kind, version, whole[:cut])
        for _ in range(20 if whole else 0):
            changed = bytearray(whole)
            for _ in range(chance.randint(1, 3)):
                changed[chance.randrange(len(changed))] = chance.choice([0, 1, 127, 128, 255])
            with contextlib.suppress(MessageError):
                decode(kind, version, changed)

    return check


@given(st.binary(max_size=200))
def test_noise_is_a_head_or_our_error(noise):
    with contextlib.suppress(MessageError):
        read_request_head(noise)


@pytest.mark.parametrize("name", READ_BY_A_BROKER)
def test_memory_is_bounded_by_the_frame(name):
    kind = struct_types(name)[name]
    for version in {definition(name).versions[0], definition(name).versions[-1]}:
        for byte in 0, 1, 2, 3, 127, 255:
            for frame in bytes([byte]) * 20_000, _head_then(byte, version, name):
                assert _peak(kind, version, frame) < BYTES_PER_BYTE * len(frame) + (64 << 10)


def _head_then(byte, version, name):
    """A message, then what the last count in it would make of as many bytes."""
    whole = encode(struct_types(name)[name](), version)
    return whole[:-2] + bytes([255, 255, 255, 255, 7]) + bytes([byte]) * 20_000


def _peak(kind, version, frame):
    def attempt():
        with contextlib.suppress(MessageError):
            decode(kind, version, frame)

    attempt()  # compiled
    tracemalloc.start()
    attempt()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_a_full_array_of_the_smallest_elements_takes_memory_of_the_order_of_the_frame():
    entry, part = AlterClientQuotasRequest.EntryData, CreatePartitionsRequest.CreatePartitionsTopic
    assignment = CreatePartitionsRequest.CreatePartitionsAssignment
    for value, version in (
        (MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic()] * 10_000), 9),
        (AlterClientQuotasRequest(entries=[entry()] * 10_000), 1),
        (CreatePartitionsRequest(topics=[part(assignments=[assignment()] * 10_000)]), 3),
    ):
        frame = encode(value, version)
        assert len(frame) < 31_000
        assert _peak(type(value), version, frame) < BYTES_PER_BYTE * len(frame)


@pytest.mark.parametrize(
    ("kind", "version", "frame", "problem"),
    [
        (
            FetchRequest,
            4,
            struct.pack(">iiiibi", -1, 0, 0, 0, 0, 1 << 30),
            "FetchRequest v4, topics[]: the frame ends inside it",
        ),
        (
            FetchRequest,
            12,
            struct.pack(">iiiibii", -1, 0, 0, 0, 0, 0, 0) + b"\xff\xff\xff\xff\xff\x0f",
            "FetchRequest v12, topics[]: its length is longer than five bytes",
        ),
        (
            FetchRequest,
            12,
            struct.pack(">iiiibii", -1, 0, 0, 0, 0, 0, 0) + b"\xff\xff\xff\xff\x0f",
            "FetchRequest v12, topics[]: its length is 4294967295, more than 2147483647",
        ),
        (
            FetchRequest,
            12,
            struct.pack(">iiiibii", -1, 0, 0, 0, 0, 0, 0) + b"\x02\x03\xff\xfe\x01\0\0\0\0",
            "FetchRequest v12, topics[].topic: it is not UTF-8",
        ),
        (
            FetchRequest,
            12,
            struct.pack(">iiiibii", -1, 0, 0, 0, 0, 0, 0) + b"\x02\x00\0\0\0\0\0\0\0\0\0",
            "FetchRequest v12, topics[].topic: it is null, which this version does not admit",
        ),
        (
            HeartbeatRequest,
            0,
            struct.pack(">h", -1),
            "HeartbeatRequest v0, group_id: it is null, which this version does not admit",
        ),
        (
            HeartbeatRequest,
            4,
            b"\x02g\0\0\0\x01\x02m\x00\xff\xff\xff\xff\x07",
            "HeartbeatRequest v4, tags: the frame ends inside it",
        ),
        (
            HeartbeatRequest,
            4,
            b"\x02g\0\0\0\x01\x02m\x00\x01\x63\x05abc!",
            "HeartbeatRequest v4, tags: the frame ends inside it",
        ),
        (
            HeartbeatRequest,
            4,
            b"\x02g\0\0\0\x01\x02m\x00\x00!!",
            "HeartbeatRequest v4: 2 bytes follow it",
        ),
        (
            FetchRequest,
            15,
            encode(FetchRequest(), 15)[:-1] + b"\x01\x01\x0e" + bytes(14),
            "FetchRequest v15, replica_state: its tag gives another size",
        ),
        (
            ProduceRequest,
            3,
            struct.pack(">hhiih", -1, 1, 0, 1, 1),
            "ProduceRequest v3, topic_data[]: the frame ends inside it",
        ),
    ],
)
def test_an_error_names_the_api_the_version_the_field_and_what_is_wrong(
    kind, version, frame, problem
):
    assert problem_of(kind, version, frame) == problem


def test_an_unknown_tag_is_skipped():
    plain = encode(ApiVersionsRequest(client_software_name="x"), 3)
    tagged = plain[:-1] + b"\x02" + b"\x07\x03abc" + uvarint(300) + uvarint(200) + bytes(200)
    assert decode(ApiVersionsRequest, 3, tagged).client_software_name == "x"


def test_more_tags_than_one_byte_counts_are_skipped():
    plain = encode(ApiVersionsRequest(), 3)
    assert decode(ApiVersionsRequest, 3, plain[:-1] + uvarint(200) + b"\x09\x00" * 200)
    fetch = encode(FetchRequest(), 17)
    assert decode(FetchRequest, 17, fetch[:-1] + uvarint(200) + b"\x09\x00" * 200) == FetchRequest()


@pytest.mark.parametrize(
    ("value", "version", "problem"),
    [
        (SyncGroupRequest(protocol_name="p", group_instance_id="i"), 0, "group_instance_id: this"),
        (HeartbeatRequest(group_id=None), 4, "group_id: it is null"),
        (HeartbeatRequest(generation_id=1 << 31), 4, "generation_id to member_id"),
        (HeartbeatRequest(group_id="\ud800"), 4, "group_id: it cannot be UTF-8"),
        (HeartbeatRequest(group_id=b"g"), 4, "group_id: "),
        (HeartbeatRequest(group_id="g" * 40_000), 0, "group_id"),
        (
            FetchRequest(topics=[FetchRequest.FetchTopic(topic_id=b"1")]),
            13,
            "topics[].topic_id: an id",
        ),
        (CreateTopicsRequest(), 1, "there is no such version"),
    ],
)
def test_what_a_version_cannot_carry_is_not_written(value, version, problem):
    with pytest.raises(MessageError, match=f"{type(value).__name__} v{version}") as raised:
        encode(value, version)
    assert problem in str(raised.value)


def test_ignorable_fields_are_left_out_of_versions_that_lack_them():
    request = FetchRequest(topics=[FetchRequest.FetchTopic(topic="t", topic_id=b"i" * 16)])
    assert decode(FetchRequest, 12, encode(request, 12)).topics[0].topic_id == bytes(16)
    assert decode(FetchRequest, 13, encode(request, 13)).topics[0].topic == ""


def test_every_frame_of_an_api_has_a_head_that_is_checked():
    for api in APIS.values():
        head = struct.pack(">hhih", api.key, api.max_version, 7, 3) + b"cl"
        with pytest.raises(MessageError, match="RequestHeader"):
            read_request_head(head)
