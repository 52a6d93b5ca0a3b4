"""Kafka and tierlog accept and refuse the same produce requests, return the same results for reads
and timestamp lookups, and write the same files.

`produce_requests.DIFFERENT` lists what only one of the two accepts, with the reason. The seed of
`kafka_workload` is printed; `TIERLOG_SEED` sets another.
"""

import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

from tests.fakes.kafka_wire import Appended
from tests.fakes.kafka_workload import (
    SEED,
    TOPICS,
    TRIMMED_TO,
    Results,
    requests_to,
    run_on_kafka,
    timestamps_to_look_up,
)
from tests.fakes.served_broker import served_broker
from tierlog.object_store.open import open_store
from tierlog.record_format.batch import BatchHeader, iter_headers, stamp
from tierlog.record_format.checkpoint_files import parse_snapshot
from tierlog.record_format.decode import decode_batch

pytestmark = pytest.mark.kafka

BATCHES = "application/vnd.apache.kafka.recordbatch.v2"
# Kafka's error, and our codes for it. An unnamed error is a fault of Kafka's.
OUR_CODES = {
    "CORRUPT_MESSAGE": {"corrupt-batch"},
    "INVALID_RECORD": {"corrupt-batch", "invalid-record"},
    "INVALID_TIMESTAMP": {"invalid-record", "corrupt-batch"},
    "MESSAGE_TOO_LARGE": {"record-too-large"},
    "OUT_OF_ORDER_SEQUENCE_NUMBER": {"out-of-order-sequence"},
    "INVALID_PRODUCER_EPOCH": {"producer-fenced", "corrupt-batch"},
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": {"invalid-record"},
    "error -1": {"corrupt-batch"},
}


@pytest.fixture(scope="module")
def theirs(kafka, tmp_path_factory):
    print(f"TIERLOG_SEED={SEED}")
    return run_on_kafka(kafka, tmp_path_factory.mktemp("theirs") / "kafka")


# --- our side -------------------------------------------------------------------------------------


class Ours(NamedTuple):
    data: Path
    topics: dict[str, Results]


@pytest.fixture(scope="module")
def ours(tmp_path_factory, theirs):
    data = tmp_path_factory.mktemp("ours") / "data"
    with api_on(data) as (broker, api):
        for topic, config in TOPICS.items():
            everything = {"max.message.bytes": 64 << 20, "retention.ms": -1, **config}
            broker.create_topic(topic, partitions=1, config=everything)
        return Ours(data, {topic: run_workload(broker, api, topic, theirs) for topic in TOPICS})


@contextmanager
def api_on(data, store=None):
    with (
        served_broker(data, store=store) as served,
        httpx2.Client(base_url=served.server.url, timeout=60) as api,
    ):
        yield served.broker, api


def run_workload(broker, api, topic, theirs):
    appended = [produce(api, topic, batch) for _, batch in requests_to(topic)]
    times = timestamps_to_look_up(topic)
    by_time = {time: list_offset(api, topic, time) for time in times}
    reads = theirs.topics[topic].fetched
    fetched = {(offset, size): fetch(api, topic, offset, size) for offset, size in reads}
    if topic.startswith("random"):
        broker.trim(topic, 0, TRIMMED_TO)
    by_time_trimmed = {time: list_offset(api, topic, time) for time in times}
    return Results(appended, by_time, by_time_trimmed, fetched)


def produce(api, topic, batch):
    path, headers = f"/v1/topics/{topic}/partitions/0/records", {"content-type": BATCHES}
    return api.post(path, content=batch, headers=headers).json()


def list_offset(api, topic, time):
    path = f"/v1/topics/{topic}/partitions/0/offsets"
    found = api.get(path, params={"timestamp": time}).raise_for_status().json()
    return None if found["offset"] is None else (found["offset"], found["timestamp"])


def fetch(api, topic, offset, max_bytes):
    path, headers = f"/v1/topics/{topic}/partitions/0/records", {"accept": BATCHES}
    params = {"offset": offset, "max_bytes": max_bytes}
    return api.get(path, params=params, headers=headers).raise_for_status().content


# --- the responses --------------------------------------------------------------------------------


def matches(topic: str, kafkas: Appended, response: dict[str, Any]) -> bool:
    if kafkas.error != "NONE":
        return response.get("code") in OUR_CODES[kafkas.error]
    if "results" not in response:
        return False
    (result,) = response["results"]
    has_time = result["log_append_time"] is not None
    return result["base_offset"] == kafkas.base_offset and has_time == (
        "stamped" in topic and kafkas.log_append_time >= 0
    )


@pytest.mark.parametrize("topic", [topic for topic in TOPICS if topic != "odd-different"])
def test_the_same_requests_are_accepted_at_the_same_offsets(theirs, ours, topic):
    different = [
        (number, name, kafkas, response)
        for number, ((name, _), kafkas, response) in enumerate(
            zip(
                requests_to(topic),
                theirs.topics[topic].appended,
                ours.topics[topic].appended,
                strict=True,
            )
        )
        if not matches(topic, kafkas, response)
    ]
    assert different == [], f"TIERLOG_SEED={SEED}"
    errors = {kafkas.error for kafkas in theirs.topics[topic].appended}
    assert errors == {"NONE"} if topic == "random-sound" else len(errors) > 1


def test_only_listed_requests_differ(theirs, ours):
    accepted_by = {
        name: (kafkas.error == "NONE", "results" in response)
        for (name, _), kafkas, response in zip(
            requests_to("odd-different"),
            theirs.topics["odd-different"].appended,
            ours.topics["odd-different"].appended,
            strict=True,
        )
    }
    assert {name for name, (kafka, us) in accepted_by.items() if kafka == us} == set()


@pytest.mark.parametrize("topic", [topic for topic in TOPICS if topic.startswith("random")])
def test_timestamp_lookups_and_reads_match(theirs, ours, topic):
    kafkas, own = theirs.topics[topic], ours.topics[topic]
    if "stamped" not in topic:  # the broker's own clock
        assert own.by_time == kafkas.by_time
        for time, found in kafkas.by_time_trimmed.items():
            # Kafka searches only one segment, even if its match lies below the log start.
            assert own.by_time_trimmed[time] == (found or own.by_time_trimmed[time])
        assert own.by_time != own.by_time_trimmed
    bases = {int(path.stem) for path in (theirs.data / f"{topic}-0").glob("*.log")}
    for request, data in kafkas.fetched.items():
        wanted = list(iter_headers(data))
        found = list(iter_headers(own.fetched[request]))
        assert [comparable(h) for h in found[: len(wanted)]] == [comparable(h) for h in wanted], (
            request
        )
        # Our reads continue past the end of a segment.
        assert len(found) == len(wanted) or found[len(wanted)].base_offset in bases, request


def comparable(header: BatchHeader) -> BatchHeader:
    """The header without what depends on the clock or the compressor. Our epochs begin at 1; unused
    attribute bits survive our recompression.
    """
    return header._replace(
        leader_epoch=0,
        attributes=header.attributes & 0x7F,
        position=0,
        crc=0,
        size_bytes=0,
        max_timestamp=0 if header.timestamp_type else header.max_timestamp,
    )


# --- the files ------------------------------------------------------------------------------------


@pytest.mark.parametrize("topic", [topic for topic in TOPICS if topic != "odd-different"])
def test_the_files_match(theirs, ours, topic):
    kafkas, own = theirs.data / f"{topic}-0", ours.data / f"{topic}-0"
    assert names(own) == names(kafkas)
    exact = not topic.endswith(("stamped", "zstd", "gzip"))
    for name in names(own):
        found, wanted = (own / name).read_bytes(), (kafkas / name).read_bytes()
        if name.endswith(".snapshot"):
            assert states(found, exact=exact) == states(wanted, exact=exact), name
        elif name.endswith(".log") and exact:
            assert in_epoch_0(found) == wanted, name
        elif exact:
            assert found == wanted, name
        elif name.endswith(".log"):
            assert batches(found) == batches(wanted), name


def in_epoch_0(data):
    changed = bytearray(data)
    for header in iter_headers(data):
        assert header.leader_epoch == 1
        stamp(changed, header.position, base_offset=header.base_offset, leader_epoch=0)
    return changed


def names(folder):
    suffixes = (".log", ".index", ".timeindex", ".snapshot")
    return sorted(path.name for path in folder.iterdir() if path.suffix in suffixes)


def states(data, *, exact):
    entries = parse_snapshot(data)
    return {entry if exact else entry._replace(timestamp=0) for entry in entries}


def batches(data):
    return [
        (
            comparable(header),
            [r._replace(timestamp=0) if header.timestamp_type else r for r in records],
        )
        for header in iter_headers(data)
        for records in (decode_batch(data, header),)
    ]


# --- transactions, in a data folder adopted from Kafka --------------------------------------------


@pytest.mark.parametrize("tier", ["hot", "cold", "recovered"])
def test_committed_reads_match(theirs, tmp_path, tier):
    data, wanted = tmp_path / "data", theirs.transactions
    shutil.copytree(theirs.data / "transactions-0", data / "transactions-0")
    shutil.copy(theirs.data / "meta.properties", data)
    if tier == "recovered":  # from the log only
        for path in (data / "transactions-0").iterdir():
            if path.suffix in (".index", ".timeindex", ".txnindex", ".snapshot"):
                path.unlink()
    else:
        for name in (".kafka_cleanshutdown", "recovery-point-offset-checkpoint"):
            shutil.copy(theirs.data / name, data)
    with api_on(data, open_store(f"file://{tmp_path}/bucket")) as (broker, api):
        if tier == "cold":
            broker.alter_topic("transactions", config={"local.retention.ms": 0})
            broker.offload("transactions", wait_ms=20_000)
        now = api.get("/v1/topics/transactions/partitions/0/offsets").json()
        assert (now["local_log_start_offset"] > wanted.last_stable_offset) == (tier == "cold")
        assert now["last_stable_offset"] == wanted.last_stable_offset < now["high_watermark"]
        assert now["high_watermark"] == wanted.high_watermark
        for start, offsets in wanted.committed.items():
            size = 1 << 20 if start else 1
            assert committed(api, start, size) == offsets, f"{start}, TIERLOG_SEED={SEED}"
        for time, found in wanted.by_time.items():
            assert list_offset(api, "transactions", time) == found


def committed(api, start, max_bytes):
    """Offsets from `start` on, checked to be the same for batches and for JSON."""
    found = {media_type: [] for media_type in (BATCHES, "application/json")}
    for media_type, offsets in found.items():
        at = start
        while True:
            path = "/v1/topics/transactions/partitions/0/records"
            params = {"offset": at, "max_bytes": max_bytes, "isolation": "read_committed"}
            response = api.get(
                path, params=params, headers={"accept": media_type}
            ).raise_for_status()
            offsets += offsets_of(response, media_type, start)
            if int(response.headers["log-next-offset"]) == at:
                break
            at = int(response.headers["log-next-offset"])
    assert found[BATCHES] == found["application/json"]
    return found[BATCHES]


def offsets_of(response, media_type, start):
    if media_type != BATCHES:
        return [record["offset"] for record in response.json()["records"]]
    data = response.content
    headers = [header for header in iter_headers(data) if not header.is_control]
    records = [record for header in headers for record in decode_batch(data, header)]
    return [record.offset for record in records if record.offset >= start]
