"""`tierlog cluster dev` from outside: watched, broken by its scripts, and asked by commands."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes.broker_process import free_port
from tests.fakes.command_line import ENVIRONMENT, ROOT, Program
from tests.fakes.forked import Forked
from tests.fakes.page_blocks import Shell, blocks_of
from tests.fakes.waiting import until
from tierlog.cli.cluster_dev import DevBroker
from tierlog.client.client import Client

ALONE = ("--replication-factor", "1")


class Lab:
    def __init__(self, folder: Path, shown: Path, process: Forked) -> None:
        self.folder, self.shown, self.process = folder, shown, process
        until(lambda: "TIERLOG_SERVER=" in self.output(), patience_s=60)
        line = next(one for one in self.output().splitlines() if "TIERLOG_SERVER=" in one)
        self.servers = line.partition("=")[2].split(",")
        self.programs = [Program(server) for server in self.servers]

    def output(self) -> str:
        return self.shown.read_text()

    def script(self, name: str, node: int) -> str:
        done = subprocess.run(
            [ROOT / "scripts" / "break" / f"{name}-broker.sh", str(node), self.folder],
            capture_output=True,
            text=True,
            check=True,
            env=ENVIRONMENT,
        )
        return done.stdout

    def brokers(self, *, asked: int = 0) -> list[tuple[str, bool, int]]:
        with Client(self.servers[asked]) as client:
            found = client.describe_cluster().brokers
        return [(one.state, one.is_alive, one.leads) for one in found]

    def wait_for(self, *leads: int, asked: int = 0) -> None:
        until(lambda: [one[2] for one in self.brokers(asked=asked)] == list(leads), patience_s=60)


@contextmanager
def lab(folder: Path, shown: Path, *, brokers: int = 3, with_ports: bool = True) -> Iterator[Lab]:
    command = ["cluster", "dev", "--data-dir", folder, "--brokers", brokers]
    if with_ports:
        command += ["--port", free_port(), "--kafka-port", free_port()]
    with shown.open("wb") as out:
        process = Forked(list(map(str, command)), stdout=out, stderr=out, env=ENVIRONMENT)
    try:
        yield Lab(folder, shown, process)
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(90) == 130, shown.read_text()
    for pid in folder.glob("*.pid"):
        command = ["ps", "-p", pid.read_text().strip(), "-o", "stat="]
        left = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        assert left.strip()[:1] in ("", "Z"), "nothing is left behind"


def test_a_broker_whose_port_another_took_meanwhile_has_one_of_its_own(tmp_path: Path) -> None:
    port = free_port()
    broker = DevBroker(tmp_path, 0, port=port, kafka_port=free_port())
    with socket.create_server(("127.0.0.1", port)):
        broker.start([f"--store={(tmp_path / 'bucket').as_uri()}"])
        try:
            until(broker.check_started, patience_s=60)
            assert broker.url != f"http://127.0.0.1:{port}"
            again = DevBroker(tmp_path, 0)
            assert again.process() == broker.process(), "it is started there again"
            given = DevBroker(tmp_path, 0, port=port)
            given.client.close()
            assert (given.url, given.kafka) == (f"http://127.0.0.1:{port}", broker.kafka)
            with again.client, broker.client:
                assert again.client.readiness().ready
        finally:
            broker.terminate()
            assert broker._child is not None
            broker._child.wait(60)


def test_the_death_of_a_leader_is_seen_within_ten_seconds_and_a_consumer_goes_on(
    tmp_path: Path,
) -> None:
    with lab(tmp_path / "lab", tmp_path / "shown") as running:
        program = Program(",".join(running.servers))
        program.ok("topic", "create", "flights")
        with (
            following(program, tmp_path / "read") as read,
            Client(program.server) as client,
            client.producer() as producer,
        ):
            (before,) = client.describe_topic("flights").partitions
            assert (sorted(before.in_sync_replicas), len(before.replicas)) == ([0, 1, 2], 3)
            assert before.leader is not None
            for value in range(100):
                producer.send("flights", b"%d" % value)
            producer.flush()
            until(lambda: len(read()) == 100)
            dead = before.leader.node_id
            until(lambda: "leads under epoch 1" in running.output())
            running.script("kill", dead)
            killed_s = time.monotonic()
            for value in range(100, 200):
                producer.send("flights", b"%d" % value)

            def is_seen() -> bool:
                return any(
                    now.leader_epoch > before.leader_epoch and dead not in now.in_sync_replicas
                    for now in client.describe_topic("flights").partitions
                )

            until(is_seen)
            assert time.monotonic() - killed_s < 10
            (now,) = client.describe_topic("flights").partitions
            assert now.leader is not None
            assert now.leader.node_id != dead
            producer.flush()
            until(lambda: len(read()) == 200)
            assert read() == [str(value) for value in range(200)], "each once, in order"
        until(lambda: "in sync 0,1,2 -> " in running.output())
        assert "under epoch 2" in running.output()


@contextmanager
def following(program: Program, file: Path) -> Iterator[Callable[[], list[str]]]:
    """Yields what a consumer has printed so far."""
    command = ["consume", "flights", "--follow", "--offset", "earliest"]
    with file.open("wb") as out, file.with_suffix(".err").open("wb") as err:
        process = Forked(command, stdout=out, stderr=err, env=program.environment)
    try:
        yield lambda: file.read_text().splitlines()
    finally:
        process.kill()


@pytest.mark.soak  # it waits for time-outs and for balances, with every change
def test_a_lab_is_watched_broken_and_goes_on_with_its_folder(tmp_path: Path) -> None:
    with lab(tmp_path / "lab", tmp_path / "first") as first:
        one = first.programs[0]
        one.ok("topic", "create", "flights", "--partitions", "6", *ALONE)
        first.wait_for(2, 2, 2)
        until(lambda: "broker 1 leads" in first.output())
        assert "killed broker 1" in first.script("kill", 1)
        until(lambda: "broker 1 -> no leader" in first.output(), patience_s=90)
        assert "started broker 1" in first.script("start", 1)
        until(lambda: first.output().count("broker 1 leads") == 2, patience_s=90)
        assert json.loads(one.ok("cluster", "drain", "2")) == {"drained": 2}
        first.wait_for(3, 3, 0, asked=1)
        assert "broker 0 -> " not in first.output()
        assert "runs" in one.fails(1, "cluster", "remove", "2", "--yes")
        first.script("stop", 2)
        until(lambda: first.brokers()[2][0] == "stopped", patience_s=60)
        assert json.loads(one.ok("cluster", "remove", "2", "--yes")) == {"removed": 2}
        assert len(first.brokers()) == 2
        assert json.loads(one.ok("cluster", "rebalance", "--dry-run")) == {"moves": []}
        assert "node id 7" in one.fails(1, "cluster", "drain", "7")
        assert "TOPIC:PARTITION" in one.fails(2, "cluster", "move", "flights", "--to", "1")


def test_a_lab_goes_on_with_the_same_folder_and_ports(tmp_path: Path) -> None:
    with lab(tmp_path / "lab", tmp_path / "first", brokers=2) as first:
        first.programs[1].ok("topic", "create", "flights", "--partitions", "3")
        servers = first.servers
    with lab(tmp_path / "lab", tmp_path / "second", brokers=2, with_ports=False) as second:
        assert second.servers == servers
        until(lambda: sum(leads for _, _, leads in second.brokers()) == 3, patience_s=60)


def test_the_blocks_of_the_guide_run_as_printed(tmp_path: Path) -> None:
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    with lab(tmp_path / ".tierlog-cluster", tmp_path / "shown") as running:
        running.programs[0].ok("topic", "create", "flights", "--partitions", "6", *ALONE)
        shell = Shell(tmp_path, ",".join(running.servers))
        blocks = blocks_of(ROOT / "docs/guides/several-brokers.md")
        assert len(blocks) == 4
        for kind, script in blocks:
            shell.run(kind, script)
        assert len(running.brokers()) == 2
