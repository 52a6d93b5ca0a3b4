"""The same frames, sent to a real Kafka and to our listener, are answered the same.

What depends on the clock, on ids or on the leader epoch (Kafka's first is 0, ours 1) is made
comparable; `DIFFERENT` lists what is answered otherwise, with the reason.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import msgspec
import pytest

from tests.fakes.kafka_caller import KafkaCaller
from tests.fakes.kafka_workload import TOPICS, kafka_config, requests_to
from tests.fakes.produce_requests import NOW_MS, plain
from tests.fakes.served_broker import served_broker
from tierlog.api.kafka.error_codes import Code
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.kafka_messages.messages import (
    FetchRequest,
    ListOffsetsRequest,
    MetadataRequest,
    OffsetForLeaderEpochRequest,
    ProduceRequest,
)

pytestmark = pytest.mark.kafka

ODD: Final = [topic for topic in TOPICS if topic.startswith("odd") and topic != "odd-different"]
MORE: Final = {"plain": {}, "other": {}, "stamped": {"message.timestamp.type": "LogAppendTime"}}
CONFIGS: Final = {
    topic: {"max.message.bytes": 64 << 20, "retention.ms": -1, **config}
    for topic, config in ({topic: TOPICS[topic] for topic in ODD} | MORE).items()
}
NO_ID: Final = bytes(16)


class Side(NamedTuple):
    """One of the two. `epoch`: of its leader."""

    caller: KafkaCaller
    topic_ids: dict[str, bytes]
    epoch: int

    def produce(
        self, topic: str, records: Any, *, version: int = 9, acks: int = -1, partition: int = 0
    ) -> Any:
        data = [ProduceRequest.PartitionProduceData(partition, records)]
        topic_id = self.topic_ids.get(topic, b"?" * 16) if version >= 13 else NO_ID
        named = ProduceRequest.TopicProduceData("" if version >= 13 else topic, topic_id, data)
        request = ProduceRequest(None, acks, 30_000, [named])
        return self.caller.ask(request, version)

    def fetch(
        self,
        *partitions: tuple[Any, ...],
        version: int = 12,
        session: tuple[int, int] = (0, -1),
        forgotten: tuple[str, ...] = (),
        **limits: int,
    ) -> Any:
        """`partitions`: (topic, offset, and then fields of FetchPartition as a dict)."""
        topics = []
        for topic, offset, *more in partitions:
            wanted = {"partition": 0, "partition_max_bytes": 1 << 20, **(more[0] if more else {})}
            asked = FetchRequest.FetchPartition(fetch_offset=offset, **wanted)
            topics.append(FetchRequest.FetchTopic(*self._named(topic, version), [asked]))
        gone = [FetchRequest.ForgottenTopic(*self._named(one, version), [0]) for one in forgotten]
        settings = {"max_wait_ms": 0, "min_bytes": 1, "max_bytes": 50 << 20, **limits}
        request = FetchRequest(
            topics=topics,
            session_id=session[0],
            session_epoch=session[1],
            forgotten_topics_data=gone,
            **settings,
        )
        return self.caller.ask(request, version)

    def _named(self, topic: str, version: int) -> tuple[str, bytes]:
        return ("", self.topic_ids.get(topic, b"?" * 16)) if version >= 13 else (topic, NO_ID)

    def list_offsets(
        self, *times: int, topic: str = "plain", version: int = 11, epoch: int = -1, **fields: int
    ) -> list[Any]:
        answers = []
        for time in times:
            wanted = ListOffsetsRequest.ListOffsetsPartition(0, epoch, time)
            named = ListOffsetsRequest.ListOffsetsTopic(topic, [wanted])
            request = ListOffsetsRequest(-1, topics=[named], **fields)
            answers.append(self.caller.ask(request, version))
        return answers

    def epoch_end(self, epoch: int, *, current: int = -1, topic: str = "plain") -> Any:
        wanted = OffsetForLeaderEpochRequest.OffsetForLeaderPartition(0, current, epoch)
        named = OffsetForLeaderEpochRequest.OffsetForLeaderTopic(topic, [wanted])
        return self.caller.ask(OffsetForLeaderEpochRequest(-1, [named]), 4)


Step = Callable[[Side], Any]


def produced(side: Side) -> Iterator[tuple[str, Any]]:
    batch = plain(producer_id=70, producer_epoch=1, base_sequence=0)
    for version in range(3, 14):
        yield f"version {version}", side.produce("plain", plain(), version=version)
    yield "acks 1", side.produce("plain", plain(), acks=1)
    yield "acks 2", side.produce("plain", plain(), acks=2)
    yield "acks -2", side.produce("plain", plain(), acks=-2)
    yield "no such topic", side.produce("none", plain())
    yield "no such id", side.produce("none", plain(), version=13)
    yield "no such partition", side.produce("plain", plain(), partition=7)
    yield "an internal topic", side.produce("__consumer_offsets", plain())
    yield "zstd in version 6", side.produce("plain", plain(codec=4), version=6)
    yield "zstd in version 7", side.produce("plain", plain(codec=4), version=7)
    yield "stamped", side.produce("stamped", plain())
    yield "first", side.produce("plain", batch)
    yield "a duplicate", side.produce("plain", batch)
    again = plain(producer_id=70, producer_epoch=1, base_sequence=3)
    yield "next", side.produce("plain", again)
    yield "the duplicate before", side.produce("plain", batch)
    gap = plain(producer_id=70, producer_epoch=1, base_sequence=9)
    yield "a gap", side.produce("plain", gap)
    fenced = plain(producer_id=70, producer_epoch=0, base_sequence=6)
    yield "an older epoch", side.produce("plain", fenced)


def fetched(side: Side) -> Iterator[tuple[str, Any]]:
    for version in range(4, 19):
        yield f"version {version}", side.fetch(("plain", 0), version=version)
    end = side.fetch(("plain", 0)).responses[0].partitions[0].high_watermark
    yield "at the end", side.fetch(("plain", end))
    yield "past the end", side.fetch(("plain", end + 1))
    yield "a negative offset", side.fetch(("plain", -5))
    yield "in a batch", side.fetch(("plain", 4))
    yield "one byte", side.fetch(("plain", 0, {"partition_max_bytes": 1}))
    yield "one byte in all", side.fetch(("plain", 0), ("other", 0), max_bytes=1)
    yield "no bytes", side.fetch(("plain", 0, {"partition_max_bytes": 0}), max_bytes=0)
    yield "two batches", side.fetch(("plain", 0, {"partition_max_bytes": 250}))
    yield "committed", side.fetch(("plain", 0), isolation_level=1)
    yield "no such topic", side.fetch(("none", 0), ("plain", 0))
    yield "no such id", side.fetch(("none", 0), ("plain", 0), version=13)
    yield "no such partition", side.fetch(("plain", 0, {"partition": 5}))
    for name, epoch in ("the", side.epoch), ("a newer", 50):
        yield f"{name} epoch", side.fetch(("plain", 0, {"current_leader_epoch": epoch}))
    last = {"last_fetched_epoch": side.epoch}
    yield "the last epoch", side.fetch(("plain", 3, last))
    yield "an unknown last epoch", side.fetch(("plain", 3, {"last_fetched_epoch": 60}))


def in_sessions(side: Side) -> Iterator[tuple[str, Any]]:
    for version in 7, 12, 18:
        ends = {"max_wait_ms": 20, "version": version}
        end = side.fetch(("other", 0)).responses[0].partitions[0].high_watermark
        first = side.fetch(("plain", 0), ("other", end), session=(0, 0), version=version)
        mine = first.session_id
        yield f"{version}: full", first
        yield f"{version}: the same again", side.fetch(session=(mine, 1), **ends)
        far = side.fetch(("plain", 0)).responses[0].partitions[0].high_watermark
        yield f"{version}: at the end", side.fetch(("plain", far), session=(mine, 2), **ends)
        side.produce("other", plain())
        yield f"{version}: one has more", side.fetch(session=(mine, 3), **ends)
        yield f"{version}: a wrong epoch", side.fetch(session=(mine, 3), **ends)
        yield f"{version}: no such session", side.fetch(session=(mine ^ 1, 4), **ends)
        gone = side.fetch(session=(mine, 4), forgotten=("other",), **ends)
        yield f"{version}: without one", gone
        unknown = side.fetch(("none", 0), session=(mine, 5), **ends)
        yield f"{version}: with an unknown one", unknown
        all_gone = side.fetch(session=(mine, 6), forgotten=("plain", "none"), **ends)
        yield f"{version}: without any", all_gone
        yield f"{version}: after its end", side.fetch(session=(mine, 7), **ends)
    with_ids = side.fetch(("plain", 0), session=(0, 0), version=13).session_id
    yield "names in a session of ids", side.fetch(session=(with_ids, 1), version=12)
    yield "ended by its client", side.fetch(("plain", 0), session=(with_ids, -1), version=13)
    yield "it has ended", side.fetch(session=(with_ids, 1), version=13)


def by_time(side: Side) -> Iterator[tuple[str, Any]]:
    times = (-1, -2, -3, -4, -5, -6, -7, -100, 0, NOW_MS, NOW_MS + 2, 2**62)
    for version in range(1, 12):
        for time in times:
            yield f"{time}, version {version}", side.list_offsets(time, version=version)
    yield "committed", side.list_offsets(-1, isolation_level=1)
    yield "empty", side.list_offsets(-1, -2, -3, 0, topic="odd")
    yield "no such topic", side.list_offsets(-1, topic="none")
    yield "a newer epoch", side.list_offsets(-1, epoch=40)
    one = ListOffsetsRequest.ListOffsetsPartition(0, -1, -1)
    twice = ListOffsetsRequest.ListOffsetsTopic("plain", [one, one])
    yield "a partition twice", side.caller.ask(ListOffsetsRequest(-1, topics=[twice]), 11)
    yield "the epoch", side.list_offsets(-1, epoch=side.epoch)


def of_epochs(side: Side) -> Iterator[tuple[str, Any]]:
    for name, epoch in ("the epoch", side.epoch), ("a newer epoch", 40), ("none", -1):
        yield name, side.epoch_end(epoch)
        yield f"{name} as the current one", side.epoch_end(side.epoch, current=epoch)
        yield f"{name} of an empty log", side.epoch_end(epoch, topic="odd")
    yield "no such topic", side.epoch_end(0, topic="none")


def everything(side: Side) -> dict[str, Any]:
    parts = (produced, fetched, in_sessions, by_time, of_epochs)
    found = {
        f"{part.__name__}: {name}": comparable(answer, side)
        for part in parts
        for name, answer in part(side)
    }
    for topic in ODD:
        for number, (name, records) in enumerate(requests_to(topic)):
            found[f"{topic} {number}: {name}"] = comparable(side.produce(topic, records), side)
    return found


EPOCHS: Final = {"leader_epoch", "epoch"}
ALWAYS_LEFT_OUT: Final = {"throttle_time_ms"}
ERRORS_LEFT_OUT: Final = {"log_start_offset", "error_message"}


def value_is_refused(fields: dict[str, Any]) -> bool:
    return fields.get("error_code", "NONE") != "NONE"


def is_fetched(name: str, value: list[Any]) -> bool:
    """Topics that Kafka knows come first in its answers."""
    return name == "responses" and bool(value) and hasattr(value[0], "partitions")


def comparable(value: Any, side: Side, name: str = "") -> Any:
    if isinstance(value, msgspec.Struct):
        fields = {
            field: comparable(getattr(value, field), side, field)
            for field in value.__struct_fields__
        }
        left_out = ALWAYS_LEFT_OUT | (ERRORS_LEFT_OUT if value_is_refused(fields) else set())
        return {field: one for field, one in fields.items() if field not in left_out}
    if name == "records":
        return None if value is None else [header[1:3] + header[6:9] for header in headers(value)]
    if name == "aborted_transactions":
        return value or []
    if isinstance(value, list):
        found = [comparable(one, side, name) for one in value]
        return (
            sorted(found, key=lambda topic: (topic["topic"], str(topic["topic_id"])))
            if is_fetched(name, value)
            else found
        )
    if name == "error_code":
        return Code(value).name
    if name in EPOCHS and value >= 0:
        return value - side.epoch
    if name in ("session_id", "error_message", "batch_index_error_message"):
        return bool(value)
    if name == "topic_id":
        return {topic_id: topic for topic, topic_id in side.topic_ids.items()}.get(value, value)
    if name == "log_append_time_ms":
        return value > 0
    return value


def headers(records: Any) -> list[Any]:
    return list(iter_headers(bytes(records)))


@pytest.fixture(scope="module")
def answers(kafka, tmp_path_factory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("answers")
    topics = {topic: kafka_config(config) for topic, config in CONFIGS.items()}
    with kafka.broker(folder / "kafka", topics) as server:
        theirs = asked(int(server.rpartition(":")[2]), epoch=0)
    with served_broker(folder / "data", kafka=KafkaSettings(auto_create_topics=False)) as served:
        for topic, config in CONFIGS.items():
            served.broker.create_topic(topic, config=config)
        ours = asked(served.kafka_port, epoch=1)
    return theirs, ours


def asked(port: int, *, epoch: int) -> dict[str, Any]:
    with KafkaCaller(port) as caller:
        topics = caller.ask(MetadataRequest(topics=None), 12).topics
        side = Side(caller, {one.name: one.topic_id for one in topics}, epoch)
        return everything(side)


OWN_TIMES: Final = "the time of a duplicate's records is their own, not the broker's"
DIFFERENT: Final = {
    "produced: a duplicate": OWN_TIMES,
    "produced: the duplicate before": OWN_TIMES,
}
# What is wrong with a batch has one of these codes, UNKNOWN_SERVER_ERROR if Kafka did not expect
# it. Clients send only a CORRUPT_MESSAGE again.
OF_BATCHES: Final = {
    "CORRUPT_MESSAGE",
    "INVALID_PRODUCER_EPOCH",
    "INVALID_RECORD",
    "INVALID_TIMESTAMP",
    "UNKNOWN_SERVER_ERROR",
}


def test_the_same_frames_have_the_same_answers(answers) -> None:
    theirs, ours = answers
    assert theirs.keys() == ours.keys()
    named = {name for name in theirs if not name.startswith("odd")}
    different = [name for name in sorted(named) if theirs[name] != ours[name]]
    assert different == sorted(DIFFERENT), _in_words(theirs, ours, different)


def test_odd_batches_are_refused_with_the_same_codes(answers) -> None:
    theirs, ours = answers
    odd = [name for name in theirs if name.startswith("odd")]
    different = [name for name in odd if not _are_alike(theirs[name], ours[name])]
    assert different == [], _in_words(theirs, ours, different)
    checksum = [name for name in odd if name.endswith(": checksum")]
    assert {_code(answers[name]) for answers in (theirs, ours) for name in checksum} == {
        "CORRUPT_MESSAGE"
    }


def _are_alike(theirs: Any, ours: Any) -> bool:
    codes = {_code(theirs), _code(ours)}
    return theirs == ours if len(codes) == 1 else codes <= OF_BATCHES


def _code(answer: Any) -> str:
    return answer["responses"][0]["partition_responses"][0]["error_code"]


def _in_words(theirs: Any, ours: Any, names: list[str]) -> str:
    return "\n".join(
        f"{name}\n  Kafka: {theirs[name]}\n  ours:  {ours[name]}"
        for name in names
        if name not in DIFFERENT
    )
