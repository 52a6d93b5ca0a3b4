"""A real Kafka as a peer: brokers on loopback, with the JVM's defaults and 1 GiB of heap each.

* Its jars are those that the tests check our files with (`make test` fetches them, with Maven). The
  one with LocalTieredStorage is fetched when it is first needed.
* Kafka's own tools generate the load in a separate JVM: only the broker's CPU is counted.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final, NamedTuple

from bench.children import ROOT, MissingPeer, free_port, program, running
from bench.maven import fetch

VERSION: Final = "4.3.1"
CLUSTER_ID: Final = "MkU3OEVBNTcwNTJENDM2Qg"
START_TIMEOUT_S: Final = 60
MAINTENANCE_INTERVAL_MS: Final = 2_000
_HOME: Final = ROOT / ".cache" / f"kafka-{VERSION}"
_TIERED: Final = _HOME / "tiered"
_TIERED_JAR: Final = f"org.apache.kafka:kafka-storage:{VERSION}:jar:test"
_LOGGING: Final = ROOT / "tests" / "integration" / "kafka" / "log4j2.yaml"


class Kafka(NamedTuple):
    pid: int
    server: str

    def tool(self, name: str, *arguments: str) -> str:
        """Run one of Kafka's tools: its output. Raises RuntimeError with it if it fails."""
        command = [*_java("WARN"), f"org.apache.kafka.tools.{name}"]
        command += ["--bootstrap-server", self.server, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name} failed: {done.stdout[-1000:]}{done.stderr[-1000:]}")
        return done.stdout


@contextmanager
def kafka(folder: Path, settings: Mapping[str, object] | None = None) -> Iterator[Kafka]:
    """A broker on an empty folder; topics are created on first use, with one partition."""
    with _broker(folder / "kafka", controller=free_port(), settings=settings or {}) as broker:
        yield broker


@contextmanager
def kafka_cluster(folder: Path, *, brokers: int) -> Iterator[list[Kafka]]:
    """As `kafka`, several; the first is the controller too."""
    controller = free_port()
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                _broker(folder / f"kafka-{node_id}", controller=controller, node_id=node_id)
            )
            for node_id in range(1, brokers + 1)
        ]


@contextmanager
def _broker(
    data: Path,
    *,
    controller: int,
    node_id: int = 1,
    settings: Mapping[str, object] = MappingProxyType({}),
) -> Iterator[Kafka]:
    if not (_HOME / "judge.jar").exists():
        raise MissingPeer(
            f"Kafka {VERSION} is not in .cache: `make test` fetches it, with Maven and a JDK"
        )
    program("java")
    port = free_port()
    written, log = data.with_suffix(".properties"), data.with_suffix(".log")
    named = _settings(data, node_id, port=port, controller=controller) | dict(settings)
    written.write_text("".join(f"{name}={value}\n" for name, value in named.items()))
    storage = [*_java("WARN"), "kafka.tools.StorageTool"]
    subprocess.run(
        [*storage, "format", "-t", CLUSTER_ID, "-c", str(written)], check=True, capture_output=True
    )
    with running([*_java("INFO"), "kafka.Kafka", str(written)], log=log) as child:
        deadline = time.monotonic() + START_TIMEOUT_S
        while b"Kafka Server started" not in log.read_bytes():
            if child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Kafka did not start: {log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield Kafka(child.pid, f"127.0.0.1:{port}")


@contextmanager
def tiered_kafka(folder: Path, settings: Mapping[str, object] | None = None) -> Iterator[Kafka]:
    """As `kafka`, with tiered storage in a local folder, by Kafka's own LocalTieredStorage."""
    fetch(_TIERED_JAR, into=_TIERED)
    storage = "org.apache.kafka.server.log.remote.storage.LocalTieredStorage"
    tiered = {
        "remote.log.storage.system.enable": "true",
        "remote.log.storage.manager.class.name": storage,
        "remote.log.storage.manager.class.path": f"{_TIERED}/*",
        "remote.log.metadata.manager.listener.name": "PLAINTEXT",
        "rlmm.config.remote.log.metadata.topic.replication.factor": 1,
        "rlmm.config.remote.log.metadata.topic.num.partitions": 1,
        "rsm.config.dir": folder / "kafka-tiered",
        "remote.log.manager.task.interval.ms": MAINTENANCE_INTERVAL_MS,
        "log.retention.check.interval.ms": MAINTENANCE_INTERVAL_MS,
    }
    with kafka(folder, {**tiered, **(settings or {})}) as broker:
        yield broker


def _java(level: str) -> list[str]:
    options = ["-Xmx1g", f"-Dlog4j2.configurationFile={_LOGGING}", f"-Djudge.level={level}"]
    return ["java", *options, "-cp", f"{_HOME}/libs/*"]


def _settings(data: Path, node_id: int, *, port: int, controller: int) -> dict[str, object]:
    controls = node_id == 1
    also = f",CONTROLLER://127.0.0.1:{controller}" if controls else ""
    return {
        "process.roles": "broker,controller" if controls else "broker",
        "node.id": node_id,
        "listeners": f"PLAINTEXT://127.0.0.1:{port}{also}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "controller.listener.names": "CONTROLLER",
        "controller.quorum.voters": f"1@127.0.0.1:{controller}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "offsets.topic.replication.factor": 1,
        "offsets.topic.num.partitions": 1,
        "group.initial.rebalance.delay.ms": 0,
        "message.max.bytes": 8 << 20,
        "log.dirs": data,
    }
