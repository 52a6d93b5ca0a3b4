"""Several brokers on one prefix in one process, which speak with each other directly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.fakes.faulty_object_store import FaultyObjectStore
from tierlog.broker.broker import Broker
from tierlog.broker.cluster.cluster import Cluster
from tierlog.broker.membership.peers import (
    GroupConfigCall,
    LeaderReport,
    Marker,
    Reassigned,
    SchemaCall,
    TransactionPart,
)
from tierlog.broker.partition.partition import Partition
from tierlog.broker.replication.messages import (
    NO_SESSION,
    Answered,
    Fetched,
    FetchedRows,
    ReplicaFetch,
)
from tierlog.broker.settings import BrokerSettings
from tierlog.host.file_slice import close_all
from tierlog.object_store.open import open_store
from tierlog.record_format.errors import PeerUnavailable
from tierlog.record_format.schema_state import SourceOfId
from tierlog.record_format.share_state import StateAnswer, StateCall
from tierlog.record_format.topic_rules import ConfigValue


class DirectPeers:
    """`cut`: the brokers' urls that do not answer."""

    def __init__(self) -> None:
        self.brokers: dict[str, Broker] = {}
        self.cut: set[str] = set()

    def cluster(self, url: str) -> Cluster:
        broker = self.brokers.get(url)
        if broker is None or broker.cluster is None or url in self.cut:
            raise PeerUnavailable(f"{url}: connection refused")
        return broker.cluster

    def read_leaders(self, url: str) -> LeaderReport:
        return self.cluster(url).report()

    def send_news(
        self,
        url: str,
        *,
        sender: int,
        topics: Sequence[str],
        assigned: Sequence[tuple[str, int]],
        led: Sequence[tuple[str, int]],
    ) -> LeaderReport:
        return self.cluster(url).hear_news(sender, topics, assigned, led=led)

    def hand_over(self, url: str, *, topic: str, partition: int, node_id: int) -> None:
        self.cluster(url).move(topic, partition, node_id=node_id)

    def reassign(
        self, url: str, *, topic: str, partition: int, replicas: Sequence[int]
    ) -> Reassigned:
        return self.cluster(url).reassign(topic, partition, replicas)

    def set_draining(self, url: str, node_id: int, *, draining: bool) -> None:
        self.cluster(url).moves.set_draining(node_id, draining=draining)

    def fetch_replicas(
        self, url: str, request: ReplicaFetch, *, asked: Collection[tuple[str, int]]
    ) -> FetchedRows:
        taken, news = self.cluster(url).replicas.take_fetch(request), threading.Event()
        if taken is None:
            return FetchedRows(NO_SESSION, [])
        found = taken.answer(is_over=not request.wait_ms)
        if not found:
            cancel = taken.wait_for_news(news.set)
            news.wait(request.wait_ms / 1000)
            cancel()
            self.cluster(url)
            found = taken.answer(is_over=True)
        assert {(one.answer.topic_id, one.answer.partition) for one in found} <= {*asked}
        return FetchedRows(taken.session_id, [_received(one) for one in found])

    def take_part(self, url: str, part: TransactionPart) -> str:
        self.cluster(url)
        return self.brokers[url].transactions.answer_part(part)

    def write_markers(self, url: str, markers: Sequence[Marker]) -> list[str]:
        self.cluster(url)
        return self.brokers[url].transactions.write_markers(markers)

    def call_group_configs(
        self, url: str, call: GroupConfigCall
    ) -> dict[str, dict[str, ConfigValue]]:
        self.cluster(url)
        return self.brokers[url].group_configs.answer(call)

    def ask_share_states(self, url: str, calls: Sequence[StateCall]) -> list[StateAnswer]:
        self.cluster(url)
        return self.brokers[url].share_groups.answer_states(calls)

    def find_schema(self, url: str, call: SchemaCall) -> list[SourceOfId]:
        self.cluster(url)
        found = self.brokers[url].schema_registry.find_here(call)
        return [] if found is None else [found]


def _received(one: Answered) -> Fetched:
    batches = b"".join(piece.read() for piece in one.slices)
    close_all(one.slices)
    assert len(batches) == one.answer.size_bytes
    return Fetched(one.answer, memoryview(batches))


class Line:
    """How one broker speaks with the others; `is_cut`: it reaches none of them."""

    def __init__(self, peers: DirectPeers) -> None:
        self._peers, self.is_cut = peers, False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def speak(url: str, *args: Any, **named: Any) -> Any:
            if self.is_cut:
                raise PeerUnavailable(f"{url}: no route to host")
            return getattr(self._peers, name)(url, *args, **named)

        return speak


class BrokerCluster:
    """`start` returns a broker; `close` closes all that still run."""

    def __init__(self, root: Path, *, bucket: str | None = None) -> None:
        self.root, self.bucket = root, bucket or (root / "bucket").as_uri()
        self.peers = DirectPeers()
        self.stores: dict[str, FaultyObjectStore] = {}
        self.lines: dict[str, Line] = {}
        self.lost: list[Broker] = []

    def start(self, name: str, *, meets: bool = True, **settings: object) -> Broker:
        """`meets`: all know each other when this returns."""
        url = f"http://{name}:8640"
        self.lines[name] = Line(self.peers)
        self.stores[name] = store = FaultyObjectStore(open_store(self.bucket))
        given: dict[str, object] = {
            "disk_reserve_bytes": 0,
            "cache_bytes": 16 << 20,
            "offsets_topic_num_partitions": 1,
            "transaction_state_log_num_partitions": 1,
            "heartbeat_interval_ms": 200,
            "session_timeout_ms": 2_000,
            **settings,
        }
        broker = Broker.open(
            BrokerSettings(
                data_dir=self.root / name,
                cluster_join=True,
                advertised_url=url,
                **given,  # type: ignore[arg-type]
            ),
            store=store,
            peers=self.lines[name],
        )
        self.peers.brokers[url] = broker
        if meets:
            self.meet()
        return broker

    def start_alone(self, name: str, **given: object) -> Broker:
        """Without the cluster; the caller closes it."""
        settings = BrokerSettings(data_dir=self.root / name, disk_reserve_bytes=0, **given)  # type: ignore[arg-type]
        return Broker.open(settings, store=open_store(self.bucket))

    def restart(self, broker: Broker) -> Broker:
        self.stop(broker)
        return self.start(broker.folder.path.name)

    def start_all(self, names: Iterable[str], **settings: object) -> list[Broker]:
        return [self.start(name, **settings) for name in names]

    def meet(self) -> None:
        """All know of all, and what each leads."""
        for broker in self.running:
            cluster_of(broker).members.refresh()
        for broker in self.running:
            cluster_of(broker).news.read_reports()

    @property
    def running(self) -> list[Broker]:
        return list(self.peers.brokers.values())

    def stop(self, broker: Broker) -> None:
        self.peers.brokers = {
            url: one for url, one in self.peers.brokers.items() if one is not broker
        }
        broker.close()

    def lose(self, broker: Broker) -> None:
        """Nobody reaches it, and it reaches nobody: as if it were killed."""
        (url,) = [url for url, one in self.peers.brokers.items() if one is broker]
        del self.peers.brokers[url]
        self.lost.append(broker)
        name = broker.folder.path.name
        self.lines[name].is_cut = True
        self.stores[name].go_down()

    def find(self, broker: Broker) -> None:
        """It is back, as if it had only been cut off."""
        name = broker.folder.path.name
        self.stores[name].heal()
        self.lines[name].is_cut = False
        self.lost.remove(broker)
        self.peers.brokers[f"http://{name}:8640"] = broker

    def leader(self, topic: str, number: int) -> Broker:
        (found,) = [broker for broker in self.running if number in broker.topic(topic).partitions]
        return found

    def partition(self, topic: str, number: int) -> Partition:
        return self.leader(topic, number).partition(topic, number)

    def close(self) -> None:
        for broker in self.running:
            self.stop(broker)
        for broker in self.lost:
            broker.close()


def cluster_of(broker: Broker) -> Cluster:
    assert broker.cluster is not None
    return broker.cluster


def node_id_of(broker: Broker) -> int:
    return cluster_of(broker).members.me.node_id
