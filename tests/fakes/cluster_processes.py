"""Brokers of one cluster as processes, on a bucket that can be cut off; and a load on them."""

from __future__ import annotations

import secrets
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx2

from tests.fakes.broker_process import BrokerProcess
from tests.fakes.command_line import ENVIRONMENT
from tests.fakes.cuttable_proxy import CuttableProxy
from tests.fakes.forked import Forked
from tests.fakes.named_s3 import named_s3
from tests.fakes.waiting import until
from tierlog.client.client import Client

FLAGS = (
    *("--join", "--heartbeat-interval-ms=200", "--session-timeout-ms=2000"),
    "--store-start-timeout-ms=60000",  # a first start is refused without the store
)


class CuttableBucket(NamedTuple):
    """`flags`, `env`: of a broker that uses it."""

    store: str
    cut: Callable[[], object]
    mend: Callable[[], object]
    flags: Sequence[str] = ()
    env: Mapping[str, str] = MappingProxyType({})


@contextmanager
def folder_bucket(root: Path) -> Iterator[CuttableBucket]:
    """A folder; cut, it is as a disk that is not mounted."""
    folder, away = root / "bucket", root / "unmounted"
    yield CuttableBucket(
        folder.as_uri(), cut=lambda: folder.rename(away), mend=lambda: away.rename(folder)
    )


@contextmanager
def s3_bucket(root: Path) -> Iterator[CuttableBucket]:
    """A new prefix of the S3 server that the environment names, behind a proxy."""
    s3 = named_s3()
    with CuttableProxy(s3["ENDPOINT"]) as proxy:
        yield CuttableBucket(
            f"s3://{s3['BUCKET']}/cluster-{secrets.token_hex(4)}",
            cut=proxy.cut,
            mend=proxy.mend,
            flags=("--s3-endpoint", proxy.url),
            env={
                "AWS_ACCESS_KEY_ID": s3["ACCESS_KEY"],
                "AWS_SECRET_ACCESS_KEY": s3["SECRET_KEY"],
                "AWS_DEFAULT_REGION": "us-east-1",
            },
        )


BUCKETS = {"folder": folder_bucket, "s3": s3_bucket}


class ClusterOfProcesses:
    def __init__(self, root: Path, bucket: CuttableBucket, http: httpx2.Client) -> None:
        self.root, self.bucket, self.http = root, bucket, http
        self.brokers: list[BrokerProcess] = []

    @property
    def servers(self) -> str:
        return ",".join(one.url for one in self.brokers)

    def add(self) -> BrokerProcess:
        """Another broker, with the next node id; all know of it when this returns."""
        root = self.root / f"broker-{len(self.brokers)}"
        root.mkdir()
        flags = (*FLAGS, *self.bucket.flags)
        broker = BrokerProcess(root, *flags, store=self.bucket.store, **self.bucket.env)
        self.brokers.append(broker.start())
        until(lambda: all(self.sees_all_alive(one) for one in self.brokers))
        return broker

    def sees_all_alive(self, broker: BrokerProcess) -> bool:
        return [one["is_alive"] for one in self.members(broker)] == [True] * len(self.brokers)

    def call(self, broker: BrokerProcess, method: str, path: str, **given: Any) -> Any:
        answer = self.http.request(method, f"{broker.url}{path}", **given)
        assert answer.status_code < 300, f"{path}: {answer.status_code} {answer.text}"
        return answer.json()

    def members(self, broker: BrokerProcess) -> list[dict[str, Any]]:
        return self.call(broker, "GET", "/v1/cluster")["brokers"]

    def create(self, topic: str, *, partitions: int, **config: object) -> None:
        document = {"name": topic, "partitions": partitions, "config": config}
        self.call(self.brokers[0], "POST", "/v1/topics", json=document)
        until(lambda: all(-1 not in self.leaders(topic, one) for one in self.brokers))

    def leaders(self, topic: str, asked: BrokerProcess | None = None) -> list[int]:
        """The node ids by partition; -1 where none is known."""
        state = self.call(asked or self.brokers[0], "GET", f"/v1/topics/{topic}")
        led = {one["partition"]: one["leader"]["node_id"] for one in state["partitions"]}
        missing = {one["partition"]: -1 for one in state.get("damaged_partitions", ())}
        return [(led | missing)[number] for number in range(len(led | missing))]

    def move(self, topic: str, number: int, node_id: int) -> int:
        """How long appends were refused, in ms."""
        path = f"/v1/topics/{topic}/partitions/{number}/leader"
        moved = self.call(self.brokers[0], "POST", path, json={"node_id": node_id})
        return int(moved["paused_ms"])

    def verify(self, topic: str) -> None:
        """The topic is whole in both tiers, and wholly in the bucket, every byte of it."""
        path = f"/v1/topics/{topic}/offload"
        offloaded = self.call(self.brokers[0], "POST", path, params={"wait_ms": 60_000})
        assert offloaded["remaining_segments"] == 0
        report = self.call(self.brokers[0], "POST", f"/v1/topics/{topic}/verify?deep=1")
        assert report["ok"], report


@contextmanager
def cluster_of_processes(root: Path, kind: str) -> Iterator[ClusterOfProcesses]:
    """Three, on a bucket of this kind."""
    with ExitStack() as stack:
        bucket = stack.enter_context(BUCKETS[kind](root))
        http = stack.enter_context(httpx2.Client(timeout=90))
        cluster = ClusterOfProcesses(root, bucket, http)
        stack.callback(lambda: [one.kill() for one in cluster.brokers])
        for _ in range(3):
            cluster.add()
        yield cluster


class Load:
    """A producer, and `tierlog consume --follow`, of a topic through all brokers. At the end of the
    block the consumer still runs, and has read what was produced: all of it, once, in order.
    """

    def __init__(self, cluster: ClusterOfProcesses, topic: str, *, partitions: int) -> None:
        self._cluster, self._topic, self._partitions = cluster, topic, partitions
        self._sent: defaultdict[int, list[int]] = defaultdict(list)
        self._stop, self._shown = threading.Event(), cluster.root / f"{topic}.txt"
        self._thread = threading.Thread(target=self._produce, args=(cluster.servers,))

    def _produce(self, servers: str) -> None:
        with Client(servers) as client, client.producer() as producer:
            for number in count():
                partition = number % self._partitions
                producer.send(self._topic, b"%d %d" % (partition, number), partition=partition)
                self._sent[partition].append(number)
                if self._stop.wait(0.02):
                    return

    def __enter__(self) -> Load:
        command = ["consume", self._topic, "--follow", "--server", self._cluster.servers]
        with self._shown.open("wb") as out:
            self._consumer = Forked(command, stdout=out, stderr=out, env=ENVIRONMENT)
        self._thread.start()
        self.wait_for_more()
        return self

    def read(self) -> dict[int, list[int]]:
        """What the consumer has printed, by partition."""
        found: defaultdict[int, list[int]] = defaultdict(list)
        for line in self._shown.read_text().splitlines(keepends=True):
            assert line.replace(" ", "").strip().isdigit(), line
            if line.endswith("\n"):
                partition, number = line.split()
                found[int(partition)].append(int(number))
        return found

    def wait_for_more(self, count: int = 20) -> None:
        wanted = sum(map(len, self.read().values())) + count
        until(lambda: sum(map(len, self.read().values())) >= wanted, patience_s=60)

    def __exit__(self, failed: object, *_: object) -> None:
        self._stop.set()
        self._thread.join(120)
        try:
            if failed is None:
                assert not self._thread.is_alive(), "the producer ended"
                until(lambda: self.read() == self._sent, patience_s=60)
                assert self._consumer.poll() is None, "the consumer never ended"
        finally:
            self._consumer.send_signal(signal.SIGINT)
            assert self._consumer.wait(60) == 130
