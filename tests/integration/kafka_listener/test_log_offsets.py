"""ListOffsets and OffsetForLeaderEpoch where there are two tiers, and several leader epochs. What a
log of one tier and one epoch answers is compared with Kafka's in `tests/integration/kafka`.
"""

from pathlib import Path
from typing import Any

from tests.fakes.kafka_caller import KafkaCaller
from tests.fakes.served_broker import Served, served_broker
from tierlog.api.kafka.error_codes import Code
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.hot_tier.log_writer import Acks
from tierlog.object_store.open import open_store
from tierlog.record_format.kafka_messages.messages import (
    ListOffsetsRequest,
    OffsetForLeaderEpochRequest,
)
from tierlog.record_format.produced import build_produced

SMALL = {"segment.bytes": 4096, "local.retention.bytes": 4096, "retention.ms": -1}
TIMES = [5000, 1000, 9000, 3000]  # of a run: the greatest is not the last
RUNS = 4


def append_run(served: Served, first_ms: int) -> None:
    values, times = [bytes(1500)] * len(TIMES), [first_ms + time for time in TIMES]
    for value, time in zip(values, times, strict=True):
        batch = build_produced([value], timestamps=[time], max_message_bytes=1 << 20)
        served.broker.partition("a", 0).append(batch, acks=Acks.ALL).result(20)


def list_offset(caller: KafkaCaller, time: int) -> Any:
    wanted = [ListOffsetsRequest.ListOffsetsPartition(0, -1, time)]
    request = ListOffsetsRequest(-1, topics=[ListOffsetsRequest.ListOffsetsTopic("a", wanted)])
    return caller.ask(request, 11).topics[0].partitions[0]


def epoch_end(caller: KafkaCaller, epoch: int) -> tuple[int, int]:
    wanted = OffsetForLeaderEpochRequest.OffsetForLeaderPartition(0, -1, epoch)
    topic = OffsetForLeaderEpochRequest.OffsetForLeaderTopic("a", [wanted])
    found = caller.ask(OffsetForLeaderEpochRequest(-1, [topic]), 4).topics[0].partitions[0]
    return found.leader_epoch, found.end_offset


def test_offsets_of_both_tiers_and_of_every_epoch(tmp_path: Path) -> None:
    """Each start of a broker is a leader epoch; the last of them has no record."""
    store = open_store(f"file://{tmp_path / 'bucket'}")
    for run in range(RUNS):
        with served_broker(
            tmp_path / "data", store=store, kafka=KafkaSettings(), cache_bytes=64 << 20
        ) as served:
            if run == 0:
                served.broker.create_topic("a", config=SMALL)
            if run < RUNS - 1:
                # The first run has the greatest timestamp, and is in the bucket alone in the end.
                append_run(served, 10**12 - run * 10**6)
            served.broker.offload("a", wait_ms=20_000)
            if run == RUNS - 2:
                append_run(served, 0)
            if run < RUNS - 1:
                continue
            partition = served.broker.partition("a", 0)
            local, end = partition.offsets().local_log_start_offset, 4 * RUNS
            assert 4 < local < end
            with KafkaCaller(served.kafka_port) as caller:
                ask = [list_offset(caller, time) for time in (-1, -2, -3, -4, -5, -6)]
                found = [(one.offset, one.leader_epoch) for one in ask]
                greatest = ask[2]
                at_3 = list_offset(caller, 10**12 - 10**6 + 9000)
                past = list_offset(caller, 2**62)
                ends = [epoch_end(caller, epoch) for epoch in range(1, RUNS + 2)]
            cold_end = partition.cold_end_offset
    assert (greatest.offset, greatest.timestamp, greatest.leader_epoch) == (2, 10**12 + 9000, 1)
    assert (at_3.offset, at_3.timestamp) == (0, 10**12 + 5000), "the first at or after the time"
    assert (past.offset, past.timestamp, past.error_code) == (-1, -1, Code.NONE)
    epoch_of = {offset: min(offset // 4 + 1, 3) for offset in range(end)}
    assert found == [
        (end, RUNS),
        (0, 1),
        (2, 1),
        (local, epoch_of[local]),
        (cold_end - 1, epoch_of[cold_end - 1]),
        (cold_end, RUNS if cold_end == end else epoch_of[cold_end]),
    ]
    assert ends == [(1, 4), (2, 8), (3, 16), (RUNS, 16), (-1, -1)]
