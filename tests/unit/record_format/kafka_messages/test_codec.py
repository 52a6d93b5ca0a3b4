"""Heads, frames with slices of files, what is stored, and the tables beside the definitions."""

import struct
import subprocess
import sys
from pathlib import Path

import pytest

from tierlog.host.file_slice import FileSlice, OpenFile
from tierlog.record_format import consumer_offsets
from tierlog.record_format.kafka_messages import apis, messages
from tierlog.record_format.kafka_messages.codec import (
    MessageError,
    UnsupportedVersion,
    decode,
    decode_record_key,
    decode_versioned,
    encode,
    encode_record_key,
    encode_versioned,
    read_request_head,
    record_type,
    response_frame,
    size_of_parts,
)
from tierlog.record_format.kafka_messages.decoder import least_size
from tierlog.record_format.kafka_messages.definitions import FOLDER, definition, names
from tierlog.record_format.kafka_messages.messages import (
    ApiVersionsResponse,
    ConsumerGroupMemberMetadataKey,
    ConsumerGroupMemberMetadataValue,
    FetchResponse,
    HeartbeatResponse,
    OffsetCommitKey,
    OffsetCommitValue,
    ProduceRequest,
    ProduceResponse,
)


def request(key, version, *, client_id=b"\0\x02me", body=b""):
    flexible = apis.APIS[key].is_flexible(version)
    return struct.pack(">hhi", key, version, 77) + client_id + b"\0" * flexible + body


# --- heads ----------------------------------------------------------------------------------------


def test_the_table_of_apis_says_what_the_definitions_say():
    for api in apis.APIS.values():
        of = definition(f"{api.name}Request")
        assert of.api_key == api.key
        last = of.versions[-1] - (api.name == "InitProducerId")  # its last is unstable
        assert (of.versions[0], last) == (api.min_version, api.max_version)
        answer = definition(f"{api.name}Response")
        for version in of.versions:
            flexible = api.is_flexible(version)
            assert flexible == (version in of.flexible) == (version in answer.flexible)
            assert version in answer.versions
    assert len(apis.APIS) == sum(name.endswith("Request") for name in names())


@pytest.mark.parametrize("key", apis.APIS)
def test_each_request_has_its_header(key):
    api = apis.APIS[key]
    for version in range(api.min_version, api.max_version + 1):
        frame = request(key, version, body=b"body")
        head = read_request_head(frame)
        assert head == (api, version, 77, "me", len(frame) - 4)


def test_a_client_without_a_name_has_none():
    assert read_request_head(request(18, 3, client_id=b"\xff\xff")).client_id is None


def test_a_version_that_is_not_served_can_be_answered():
    with pytest.raises(UnsupportedVersion, match="served are 0 to 4") as raised:
        read_request_head(struct.pack(">hhi", 18, 99, 5))
    assert (raised.value.api.name, raised.value.correlation_id) == ("ApiVersions", 5)
    with pytest.raises(UnsupportedVersion, match="ProduceRequest v2: served are 3 to 13"):
        read_request_head(struct.pack(">hhi", 0, 2, 5))
    assert apis.APIS[0].advertised_min_version == 0
    assert apis.APIS[17].advertised_min_version == 1
    with pytest.raises(MessageError, match="API 7 is not served"):
        read_request_head(struct.pack(">hhi", 7, 0, 5))


@pytest.mark.parametrize(
    ("key", "version", "size"), [(18, 3, 0), (18, 0, 0), (12, 4, 1), (12, 3, 0)]
)
def test_the_head_of_a_response_to_api_versions_has_no_tags(key, version, size):
    head = read_request_head(request(key, version))
    value = ApiVersionsResponse() if key == 18 else HeartbeatResponse()
    (frame,) = response_frame(value, head)
    body = encode(value, version)
    assert frame == struct.pack(">ii", 4 + size + len(body), 77) + b"\0" * size + body


# --- records --------------------------------------------------------------------------------------


def test_produced_records_are_a_slice_of_the_frame():
    data = ProduceRequest.TopicProduceData
    value = ProduceRequest(
        topic_data=[
            data(name="t", partition_data=[ProduceRequest.PartitionProduceData(records=b"batch")])
        ]
    )
    frame = bytearray(encode(value, 9))
    records = decode(ProduceRequest, 9, frame).topic_data[0].partition_data[0].records
    assert isinstance(records, memoryview)
    frame[frame.index(b"batch")] = ord("B")
    assert bytes(records) == b"Batch"


@pytest.mark.parametrize("version", [4, 11, 12, 13, 18])
def test_fetched_slices_come_between_the_encoded_parts(version, tmp_path):
    path = tmp_path / "log"
    path.write_bytes(bytes(range(256)) * 4)
    file = OpenFile(path)
    slices = [FileSlice(file, 0, 10), FileSlice(file, 100, 300)]

    def response(first, second):
        of = FetchResponse.PartitionData
        partitions = [
            of(partition_index=0, records=first),
            of(partition_index=1, records=None),
            of(partition_index=2, records=b""),
            of(partition_index=3, records=second),
        ]
        answer = FetchResponse.FetchableTopicResponse
        topic = "t" if version < 13 else ""
        return FetchResponse(responses=[answer(topic=topic, partitions=partitions)])

    head = read_request_head(request(1, version))
    parts = response_frame(response(slices, (slices[1],)), head)
    assert [part for part in parts if isinstance(part, FileSlice)] == [*slices, slices[1]]
    sent = b"".join(p.read() if isinstance(p, FileSlice) else p for p in parts)
    first, second = slices[0].read() + slices[1].read(), slices[1].read()
    (copied,) = response_frame(response(first, memoryview(second)), head)
    assert sent == copied
    assert size_of_parts(parts) == len(sent) == 4 + struct.unpack_from(">i", sent)[0]
    file.close()


def test_a_topic_without_slices_is_one_part():
    head = read_request_head(request(1, 12))
    value = FetchResponse(
        responses=[
            FetchResponse.FetchableTopicResponse(
                partitions=[FetchResponse.PartitionData(records=[])]
            )
        ]
    )
    assert [type(part) for part in response_frame(value, head)] == [bytearray]


# --- tags -----------------------------------------------------------------------------------------


def test_a_tagged_field_is_written_if_it_differs_from_its_default():
    plain, leader = encode(ProduceResponse(), 10), ProduceResponse.LeaderIdAndEpoch
    of = ProduceResponse.PartitionProduceResponse
    topic = ProduceResponse.TopicProduceResponse

    def answer(**fields):
        return ProduceResponse(responses=[topic(partition_responses=[of(**fields)])])

    assert encode(answer(current_leader=leader()), 10) == encode(answer(), 10)
    told = answer(current_leader=leader(leader_id=3, leader_epoch=4))
    assert decode(ProduceResponse, 10, encode(told, 10)) == told
    node = ProduceResponse.NodeEndpoint(node_id=1, host="h", port=2)
    assert len(encode(ProduceResponse(node_endpoints=[node]), 10)) > len(plain)
    with pytest.raises(MessageError, match=r"current_leader: this version cannot carry it"):
        encode(told, 9)


# --- what is stored: bytes that Kafka 4.3.1's own classes wrote -----------------------------------


@pytest.mark.parametrize("members", [False, None, True])
def test_a_member_is_stored_as_kafka_stores_it(members):
    """None is no default: its generator takes "null" for it, and not null as it stands there."""
    of = ConsumerGroupMemberMetadataValue
    value = of(
        instance_id="i",
        rack_id=None,
        client_id="c",
        client_host="h",
        subscribed_topic_names=["t", "u"],
        subscribed_topic_regex=None,
        rebalance_timeout_ms=5,
        server_assignor="range",
    )
    kafkas = "000002690002630268030274027500000000050672616e6765"
    if members:
        protocol = of.ClassicProtocol(name="p", metadata=b"\1\2")
        value.classic_member_metadata = of.ClassicMemberMetadata(
            session_timeout_ms=7, supported_protocols=[protocol]
        )
        kafkas += "01000d01000000070202700301020000"
    elif members is None:
        value.classic_member_metadata = None
        kafkas += "01000100"
    else:
        kafkas += "00"
    assert encode_versioned(value, 0).hex() == kafkas
    assert decode_versioned(of, bytes.fromhex(kafkas)) == value


def test_a_records_key_begins_with_its_type():
    key = ConsumerGroupMemberMetadataKey(group_id="g", member_id="m")
    assert encode_record_key(key).hex() == "000500016700016d"
    assert record_type(encode_record_key(key)) == 5
    assert decode_record_key(ConsumerGroupMemberMetadataKey, encode_record_key(key)) == key
    with pytest.raises(MessageError, match="its type is 5"):
        decode_record_key(OffsetCommitKey, encode_record_key(key))


@pytest.mark.parametrize(
    "kafkas",
    [
        "0000000000000000002a00026d640000000000000063",
        "0001000000000000002a00026d640000000000000063ffffffffffffffff",
        "0002000000000000002a00026d640000000000000063",
        "0003000000000000002affffffff00026d640000000000000063",
        "0004000000000000002affffffff036d64000000000000006300",
    ],
)
def test_a_commit_is_stored_as_kafka_stores_it(kafkas):
    value = OffsetCommitValue(offset=42, metadata="md", commit_timestamp=99)
    assert encode_versioned(value, int(kafkas[:4], 16)).hex() == kafkas
    assert decode_versioned(OffsetCommitValue, bytes.fromhex(kafkas)) == value


def test_the_commits_of_the_http_groups_are_the_same_bytes():
    key = consumer_offsets.CommitKey("group", "topic", 3)
    ours = OffsetCommitKey(group="group", topic="topic", partition=3)
    assert encode_record_key(ours) == consumer_offsets.encode_key(key)


@pytest.mark.parametrize("data", [b"", b"\0", b"\0\x63", b"\xff\xff"])
def test_a_value_of_an_unknown_version_is_refused(data):
    with pytest.raises(MessageError):
        decode_versioned(OffsetCommitValue, data)
    with pytest.raises(MessageError):
        decode_record_key(OffsetCommitKey, data)


# --- definitions and types ------------------------------------------------------------------------


def test_no_array_has_elements_of_no_size():
    def fields(struct):
        for field in struct.fields:
            yield field
            if field.struct is not None:
                yield from fields(field.struct)

    for name in names():
        of = definition(name)
        for version in of.versions:
            for field in fields(of.struct):
                if field.is_array and version in field.versions:
                    assert least_size(field, version, flexible=version in of.flexible) > 0


def test_what_mypy_sees_is_what_there_is():
    stub = Path(messages.__file__).with_suffix(".pyi").read_text()
    assert stub == messages.stub(), "run python -m tierlog.record_format.kafka_messages.messages"


def test_a_message_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="NoSuchRequest"):
        _ = messages.NoSuchRequest


def test_the_definitions_carry_their_licence():
    assert "Version 2.0, January 2004" in (FOLDER / "LICENSE").read_text()
    assert "Apache Software Foundation" in (FOLDER / "NOTICE").read_text()
    for name in names():
        assert "Licensed to the Apache Software Foundation" in (FOLDER / f"{name}.json").read_text()


def test_nothing_is_parsed_by_an_import():
    program = (
        "from tierlog.record_format.kafka_messages import codec, definitions as d\n"
        "print(d.definition.cache_info().currsize)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert int(done.stdout) <= 1  # the header's
