"""Spark's readers over a cluster, with the store alone: three brokers, twelve partitions, and
hand-overs between planning and reading, equal what was acknowledged.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.fakes.broker_cluster import cluster_of
from tests.fakes.served_broker import served_broker
from tests.fakes.waiting import until
from tierlog.client.client import Client
from tierlog.object_store.open import open_store
from tierlog.record_format.errors import InvalidOption
from tierlog.spark_reader.arrow_dataset import read_arrow
from tierlog.spark_reader.options import parse_options

PARTITIONS = 12
COLUMNS = ("partition", "offset", "value")
Row = tuple[int, int, bytes]


class Cluster(NamedTuple):
    """`rows`: of all that was acknowledged."""

    store: str
    client: Client
    rows: list[Row]

    def produce(self, count: int) -> None:
        for partition in range(PARTITIONS):
            values = [b"%d-%d" % (partition, number) for number in range(count)]
            (result,) = self.client.produce("t", values, partition=partition).results
            first = result.base_offset
            self.rows.extend((partition, first + n, value) for n, value in enumerate(values))

    def move_all(self) -> None:
        for one in self.client.describe_topic("t").partitions:
            assert one.leader is not None
            node_id = (one.leader.node_id + 1) % 3
            self.client.move_leader("t", one.partition, node_id=node_id)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    bucket = (tmp_path / "bucket").as_uri()
    soon = {"heartbeat_interval_ms": 200, "session_timeout_ms": 2000, "rebalance_interval_ms": 0}
    with ExitStack() as stack:
        served = [
            stack.enter_context(
                served_broker(tmp_path / name, store=open_store(bucket), cluster_join=True, **soon)
            )
            for name in "abc"
        ]
        for one in served:  # all know of all
            members = cluster_of(one.broker).members
            until(lambda members=members: len(members.members()) == 3)
        client = stack.enter_context(Client([one.server.url for one in served]))
        client.create_topic("t", partitions=PARTITIONS)
        made = Cluster(bucket, client, [])
        made.produce(50)
        client.offload("t")
        made.produce(30)
        yield made


def test_a_read_equals_what_was_acknowledged_also_during_hand_overs(cluster: Cluster) -> None:
    def read(batches: Iterator) -> list[Row]:
        rows = [row for batch in batches for row in batch.to_pylist()]
        return [(row["partition"], row["offset"], row["value"]) for row in rows]

    planned = read_arrow("t", store=cluster.store, columns=COLUMNS)
    cluster.move_all()
    got = read(itertools.islice(planned, 2))
    cluster.move_all()
    got += read(planned)
    assert sorted(got) == sorted(cluster.rows)
    cluster.produce(20)  # at the leaders of now
    again = read(read_arrow("t", store=cluster.store, columns=COLUMNS))
    assert sorted(again) == sorted(cluster.rows)


def test_a_stream_goes_on_over_hand_overs(cluster: Cluster) -> None:
    stream_source = pytest.importorskip("tierlog.spark_reader.stream_source")
    given = {"store": cluster.store, "subscribe": "t", "startingOffsets": "earliest"}
    options = parse_options(given, streaming=True)
    stream = stream_source.TierlogStreamReader(options, COLUMNS)
    got: list[Row] = []
    start = stream.initialOffset()
    for _ in range(3):
        cluster.produce(10)
        end = stream.latestOffset(start, stream_source.ReadAllAvailable())
        splits = stream.partitions(start, end)
        cluster.move_all()
        rows = [row for one in splits for batch in stream.read(one) for row in batch.to_pylist()]
        got += [(row["partition"], row["offset"], row["value"]) for row in rows]
        start = end
    assert sorted(got) == sorted(cluster.rows)


def test_without_a_registered_broker_the_tail_has_to_be_left_out(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="tier=cold"):
        read_arrow("t", store=tmp_path)
