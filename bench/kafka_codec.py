"""Claim: reading and writing Kafka's messages costs microseconds, less than with a library.

* Measured: messages of a broker's hot path, with 1 and with 50 partitions, on one thread: requests
  decoded, responses encoded. Compilation at the first use is left out, and so is building a value,
  in which libraries differ most.
* Peers: kafka-python, compiled from the same definitions, and kio, whose decoder is native. They
  get the bytes that we wrote, and encode what they decoded of them.

`python -m bench kafka_codec`; takes about half a minute, and the libraries of the tests.
"""

from __future__ import annotations

import importlib
import io
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec

from bench.report import Report, Target
from bench.rounds import interleave
from tierlog.record_format.kafka_messages.codec import decode, encode
from tierlog.record_format.kafka_messages.definitions import snake_case
from tierlog.record_format.kafka_messages.messages import (
    FetchRequest,
    FetchResponse,
    HeartbeatRequest,
    MetadataResponse,
    ProduceRequest,
    ProduceResponse,
)

ROUNDS: Final = 5
SECONDS: Final = 0.05
MANY: Final = 50


class Codec(Protocol):
    """What each contender does with one message in one version."""

    def decode(self, data: bytes) -> object: ...
    def encode(self, value: object) -> bytes: ...


class Case(NamedTuple):
    what: str
    version: int
    value: msgspec.Struct
    decodes: bool


def measure(folder: Path, *, rounds: int) -> Report:  # noqa: ARG001  no files
    report = Report(name="kafka_codec", title="Kafka's messages, one thread", peer="library")
    for case in _cases():
        kind, written = type(case.value), encode(case.value, case.version)
        codecs: dict[str, Codec] = {
            "tierlog": _Ours(kind, case.version),
            "kafka-python": _KafkaPython(kind.__name__, case.version),
            "kio": _Kio(kind.__name__, case.version),
        }
        runs = {name: _run(codec, written, case) for name, codec in codecs.items()}
        seen = interleave(runs, rounds=rounds)
        verb = "decode" if case.decodes else "encode"
        for peer in "kafka-python", "kio":
            target = Target(value=1.0, at_most=True) if peer == "kafka-python" else None
            what = f"{verb} {case.what}, against {peer}"
            report.add(what, "us", seen["tierlog"], seen[peer], target=target)
    return report


def _run(codec: Codec, written: bytes, case: Case) -> Callable[[], float]:
    """Microseconds per message."""
    value = codec.decode(written)
    assert codec.encode(value) == written

    def run() -> float:
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < SECONDS:
            for _ in range(20):
                if case.decodes:
                    codec.decode(written)
                else:
                    codec.encode(value)
            count += 20
        return (time.perf_counter() - began) / count * 1e6

    return run


class _Ours:
    def __init__(self, kind: type[msgspec.Struct], version: int) -> None:
        self._kind, self._version = kind, version

    def decode(self, data: bytes) -> object:
        return decode(self._kind, self._version, data)

    def encode(self, value: object) -> bytes:
        assert isinstance(value, msgspec.Struct)
        return encode(value, self._version)


class _KafkaPython:
    def __init__(self, name: str, version: int) -> None:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            modules = [
                importlib.import_module(f"kafka.protocol.{module}")
                for module in ("producer", "consumer", "metadata")
            ]
        self._kind = next(vars(module)[name] for module in modules if name in vars(module))
        self._version = version

    def decode(self, data: bytes) -> object:
        return self._kind.decode(data, version=self._version)

    def encode(self, value: object) -> bytes:
        value._header = None  # type: ignore[attr-defined]  # noqa: SLF001  a decoded one has none
        return bytes(value.encode(version=self._version))  # type: ignore[attr-defined]


class _Kio:
    def __init__(self, name: str, version: int) -> None:
        what = "request" if name.endswith("Request") else "response"
        api = snake_case(name.removesuffix("Request").removesuffix("Response"))
        kind = getattr(importlib.import_module(f"kio.schema.{api}.v{version}.{what}"), name)
        serial = importlib.import_module("kio.serial")
        self._read, self._write = serial.entity_reader(kind), serial.entity_writer(kind)

    def decode(self, data: bytes) -> object:
        return self._read(data, 0)[0]

    def encode(self, value: object) -> bytes:
        out = io.BytesIO()
        self._write(out, value)
        return out.getvalue()


# --- messages -------------------------------------------------------------------------------------


def _cases() -> list[Case]:
    cases = [Case("Heartbeat v4", 4, HeartbeatRequest(group_id="group", member_id="m" * 36), True)]
    for count in 1, MANY:
        cases += [
            Case(f"Produce v12, {count}", 12, _produce(count), True),
            Case(f"Fetch v12, {count}", 12, _fetch(count, topic="topic"), True),
            Case(f"Fetch v18, {count}", 18, _fetch(count, topic_id=b"i" * 16), True),
            Case(f"Produce v12, {count}", 12, _produced(count), False),
            Case(f"Fetch v12, {count}", 12, _fetched(count), False),
            Case(f"Metadata v12, {count}", 12, _metadata(count), False),
        ]
    return cases


def _produce(count: int) -> ProduceRequest:
    of, topic = ProduceRequest.PartitionProduceData, ProduceRequest.TopicProduceData
    partitions = [of(index=index, records=bytes(1024)) for index in range(count)]
    data = [topic(name="topic", partition_data=partitions)]
    return ProduceRequest(acks=-1, timeout_ms=30_000, topic_data=data)


def _fetch(count: int, *, topic: str = "", topic_id: bytes = bytes(16)) -> FetchRequest:
    of = FetchRequest.FetchPartition
    partitions = [of(partition=index, fetch_offset=index * 1000) for index in range(count)]
    topics = [FetchRequest.FetchTopic(topic=topic, topic_id=topic_id, partitions=partitions)]
    return FetchRequest(max_wait_ms=500, min_bytes=1, topics=topics)


def _produced(count: int) -> ProduceResponse:
    of, topic = ProduceResponse.PartitionProduceResponse, ProduceResponse.TopicProduceResponse
    partitions = [of(index=index, base_offset=index * 1000) for index in range(count)]
    return ProduceResponse(responses=[topic(name="topic", partition_responses=partitions)])


def _fetched(count: int) -> FetchResponse:
    of, topic = FetchResponse.PartitionData, FetchResponse.FetchableTopicResponse
    partitions = [of(partition_index=index, records=b"") for index in range(count)]
    return FetchResponse(responses=[topic(topic="topic", partitions=partitions)])


def _metadata(count: int) -> MetadataResponse:
    of, topic = MetadataResponse.MetadataResponsePartition, MetadataResponse.MetadataResponseTopic
    partitions = [
        of(partition_index=index, leader_id=0, replica_nodes=[0], isr_nodes=[0])
        for index in range(count)
    ]
    brokers = [MetadataResponse.MetadataResponseBroker(node_id=0, host="127.0.0.1", port=9092)]
    topics = [topic(name="topic", topic_id=b"i" * 16, partitions=partitions)]
    return MetadataResponse(brokers=brokers, cluster_id="cluster", topics=topics)
