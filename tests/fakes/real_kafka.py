"""A real Apache Kafka that reads our files: fetched once from Maven Central, run on loopback.

* The jars go to the project's `.cache/kafka-<version>/`, which git ignores.
* The first broker leaves an archive of its classes there as it ends, with which the next, and each
  tool, starts at half the cost.
* A tool's exit code says little (DumpLogSegments prints `isvalid: false` and exits 0): `complaints`
  judges its output.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.fakes import fast_jvm
from tierlog.record_format.checkpoint_files import (
    format_partition_metadata,
    parse_partition_metadata,
)

HERE = Path(__file__).parents[1] / "integration" / "kafka"
CACHE = Path(__file__).parents[2] / ".cache"
JVM = ("-Xmx768m", *fast_jvm.OPTIONS)
START_TIMEOUT_S = 90.0
TOP_LEVEL = (
    "meta.properties",
    "recovery-point-offset-checkpoint",
    "replication-offset-checkpoint",
    "log-start-offset-checkpoint",
    ".kafka_cleanshutdown",
)

_BAD = re.compile(
    r"isvalid: false|invalid bytes|Mismatches in|mismatch|not found|out of order|corrupt"
    r"|Exception|Non-consecutive|magic: (?!2 )",
    re.IGNORECASE,
)
# Of its storage module. A new controller that counts leader epochs from 0 is no problem of a file.
_WARNINGS = re.compile(
    r"^.* (?:WARN|ERROR|FATAL) (?!.*LeaderEpochFileCache)"
    r".*\((?:kafka\.log|org\.apache\.kafka\.storage)\..*$",
    re.MULTILINE,
)
# Printed for every log that does not begin at offset 0.
_FALSE_ALARM = re.compile(
    r"Non-consecutive offsets in [^\n]*\n +-1 is followed by \d+\n(?! +\d+ is followed)"
)


def is_available() -> bool:
    return all(shutil.which(tool) for tool in ("mvn", "java", "javac"))


class Seen(NamedTuple):
    """A record read by Kafka's consumer; key, value and header values are base64."""

    partition: str
    offset: int
    timestamp: int
    timestamp_type: str
    key: str | None
    value: str | None
    headers: list[list[str | None]]


class Served(NamedTuple):
    """What a broker served, by partition. `offsets`: log start, high watermark, last stable."""

    records: dict[str, list[Seen]]
    committed: dict[str, list[Seen]]
    offsets: dict[str, tuple[int, int, int]]
    folder: Path  # the broker's data folder, as it left it
    warnings: list[str]  # what its log says about the files


class RealKafka:
    def __init__(self, cache: Path = CACHE) -> None:
        version = re.search(r"<kafka.version>(.+)</", (HERE / "pom.xml").read_text())
        assert version
        self._home = cache / f"kafka-{version[1]}"
        self._judge = self._home / "judge.jar"
        self._loaded = self._home / "loaded.jsa"
        self.formatted: dict[str, bytes] = {}
        if not self._judge.exists():
            self._fetch()

    def _fetch(self) -> None:
        libs, classes = self._home / "libs", self._home / "classes"
        classes.mkdir(parents=True, exist_ok=True)
        self._loaded.unlink(missing_ok=True)
        goal = "dependency:copy-dependencies"
        pom = str(HERE / "pom.xml")
        command = ["mvn", "-q", "-B", "-f", pom, goal, f"-DoutputDirectory={libs}"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        source = HERE / "KafkaJudge.java"
        subprocess.run(["javac", "-cp", f"{libs}/*", "-d", str(classes), str(source)], check=True)
        with _published(self._judge) as jar:  # an archive takes no classes of a folder
            subprocess.run(["jar", "--create", "--file", jar, "-C", classes, "."], check=True)

    def _command(self, main: str, *arguments: str, level: str = "WARN") -> list[str]:
        path = f"{self._judge}:{self._home}/libs/*"
        settings = (f"-Dlog4j2.configurationFile={HERE / 'log4j2.yaml'}", f"-Djudge.level={level}")
        loaded = [f"-XX:SharedArchiveFile={self._loaded}"] if self._loaded.exists() else []
        return ["java", *JVM, *loaded, *settings, "-cp", path, main, *arguments]

    @contextmanager
    def broker_command(self, settings: Path) -> Iterator[list[str]]:
        """Must have ended with the block."""
        command = self._command("kafka.Kafka", str(settings), level="INFO")
        if self._loaded.exists():
            yield command
            return
        with _published(self._loaded) as archive:
            yield [command[0], f"-XX:ArchiveClassesAtExit={archive}", *command[1:]]

    def run(self, main: str, *arguments: str, given: str = "") -> subprocess.CompletedProcess[str]:
        command = self._command(main, *arguments)
        return subprocess.run(command, input=given, capture_output=True, text=True, check=False)

    def script(self, main: str) -> str:
        """A shell script that runs a tool with the arguments it is given."""
        return f'#!/bin/sh\nexec {shlex.join(self._command(main))} "$@"\n'

    # --- the dump tool ----------------------------------------------------------------------------

    def dump(self, files: Iterable[Path]) -> str:
        """The output of DumpLogSegments for the files, with deep iteration."""
        names = ",".join(map(str, files))
        done = self.run(
            "org.apache.kafka.tools.DumpLogSegments", "--deep-iteration", "--files", names
        )
        if done.returncode:
            return f"{done.stdout}\nException: exit {done.returncode}\n{done.stderr}"
        return f"{done.stdout}\n{done.stderr}"  # mismatches and gaps go to stderr

    # --- a broker ---------------------------------------------------------------------------------

    def prepare(
        self,
        names: Iterable[str],
        data: Path,
        *,
        topics: Mapping[str, Mapping[str, object]] | None = None,
        top_level: Path | None = None,
    ) -> Path:
        """Make `data` a broker's folder with these partitions (`<topic>-<partition>`), empty.

        `topics`: settings by topic. `top_level`: a data folder whose identity the broker gets.
        """
        broker = _Broker(self, data)
        broker.format()
        if top_level is not None:
            shutil.copy(top_level / "meta.properties", data)
        with broker.running():
            broker.create_topics(list(names), topics or {})
        return data

    @contextmanager
    def broker(self, data: Path, topics: Mapping[str, Mapping[str, object]]) -> Iterator[str]:
        """A broker on an empty folder with these topics, of one partition each: its address."""
        broker = _Broker(self, data)
        broker.format()
        with broker.running():
            broker.create_topics([f"{topic}-0" for topic in topics], topics)
            yield broker.server

    @contextmanager
    def opened(self, data: Path) -> Iterator[str]:
        """A broker on a folder that `prepare` made, and others wrote to since: its address."""
        broker = _Broker(self, data)
        with broker.running():
            yield broker.server

    def serve(
        self,
        folders: Mapping[str, Path],
        prepared: Path,
        *,
        top_level: Path | None = None,
        clean: bool = True,
        cleaned_to: Mapping[str, int] | None = None,
    ) -> Served:
        """Let a broker serve copies of the folders, by name, in a copy of the prepared folder.

        `top_level`: a data folder whose own files the broker gets too. `clean` False: it checks
        everything and rebuilds the indexes. `cleaned_to`: wait until its cleaner has reached these.
        """
        data = Path(tempfile.mkdtemp(prefix="served-", dir=prepared.parent)) / "data"
        broker = _Broker(self, data)
        shutil.copytree(prepared, data, dirs_exist_ok=True)
        _put_in_place(folders, data)
        (data / "recovery-point-offset-checkpoint").unlink(missing_ok=True)
        for name in TOP_LEVEL if top_level is not None else ():
            assert top_level is not None
            if (top_level / name).exists():
                shutil.copy(top_level / name, data)
        if not clean:
            (data / ".kafka_cleanshutdown").unlink(missing_ok=True)
        with broker.running():
            if cleaned_to:
                _wait_for_cleaner(data, cleaned_to)
            return broker.read()


class _Broker:
    def __init__(self, kafka: RealKafka, data: Path) -> None:
        self._kafka, self._data = kafka, data
        self._settings = data.with_name(f"{data.name}.properties")
        port, controller = _free_ports(2)
        self.server = f"127.0.0.1:{port}"
        data.mkdir(parents=True, exist_ok=True)
        listeners = f"PLAINTEXT://{self.server},CONTROLLER://127.0.0.1:{controller}"
        settings = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "listeners": listeners,
            "advertised.listeners": f"PLAINTEXT://{self.server}",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.retention.ms": -1,
            "log.cleaner.backoff.ms": 100,
            "transaction.state.log.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "group.initial.rebalance.delay.ms": 0,
            "offsets.topic.num.partitions": 1,
            "offsets.topic.replication.factor": 1,
            "group.consumer.assignment.interval.ms": 0,
            "group.share.assignment.interval.ms": 0,
            "share.coordinator.state.topic.num.partitions": 1,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            "broker.heartbeat.interval.ms": 100,  # start and stop each wait for some
            "log.dirs": data,
        }
        lines = [f"{name}={value}\n" for name, value in settings.items()]
        self._settings.write_text("".join(lines))

    def format(self) -> None:
        """By Kafka's tool once: every broker gets the same cluster and the same files."""
        formatted = self._kafka.formatted
        for name, content in formatted.items():
            (self._data / name).write_bytes(content)
        if not formatted:
            arguments = ("format", "-t", "MkU3OEVBNTcwNTJENDM2Qg", "-c", str(self._settings))
            done = self._kafka.run("kafka.tools.StorageTool", *arguments)
            assert done.returncode == 0, done.stderr
            formatted |= {path.name: path.read_bytes() for path in self._data.iterdir()}

    def create_topics(
        self, names: Sequence[str], topics: Mapping[str, Mapping[str, object]]
    ) -> None:
        partitions: dict[str, int] = {}
        for name in names:
            topic, _, number = name.rpartition("-")
            partitions[topic] = max(partitions.get(topic, 0), int(number) + 1)
        lines = []
        for topic, count in partitions.items():
            settings = {"max.message.bytes": 64 << 20, "retention.ms": -1, **topics.get(topic, {})}
            words = (topic, str(count), *(f"{key}={value}" for key, value in settings.items()))
            lines.append(" ".join(words))
        done = self._kafka.run("KafkaJudge", "create", self.server, given="\n".join(lines))
        assert done.returncode == 0, done.stderr
        deadline = time.monotonic() + START_TIMEOUT_S
        while any(not (self._data / name / "partition.metadata").exists() for name in names):
            assert time.monotonic() < deadline, "the topics' folders do not appear"
            time.sleep(0.05)

    def read(self) -> Served:
        out = self._data.with_name(f"{self._data.name}.seen")
        out.mkdir()
        done = self._kafka.run("KafkaJudge", "read", self.server, str(out))
        assert done.returncode == 0, done.stderr
        offsets = json.loads((out / "offsets.json").read_text())
        return Served(
            _seen(out / "read_uncommitted.jsonl"),
            _seen(out / "read_committed.jsonl"),
            {name: tuple(found) for name, found in offsets.items()},
            self._data,
            _WARNINGS.findall(self._data.with_name(f"{self._data.name}.log").read_text()),
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        with self._kafka.broker_command(self._settings) as command:
            yield from self._running(command)

    def _running(self, command: Sequence[str]) -> Iterator[None]:
        log = self._data.with_name(f"{self._data.name}.log")
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + START_TIMEOUT_S
            while "Kafka Server started" not in log.read_text():
                text = log.read_text()[-4000:]
                assert process.poll() is None, text
                assert time.monotonic() < deadline, text
                time.sleep(0.1)
            yield
            process.terminate()
            process.wait(START_TIMEOUT_S)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


@contextmanager
def _published(path: Path) -> Iterator[Path]:
    """A file to make, which then appears whole: several processes may make it."""
    part = path.with_name(f"{path.stem}-{os.getpid()}{path.suffix}")
    yield part
    if part.exists():
        part.replace(path)


def complaints(text: str, *, gaps_are_valid: bool = False) -> list[str]:
    """The lines of a dump that report something wrong. Compaction leaves gaps."""
    text = text.replace("Non-consecutive", "") if gaps_are_valid else _FALSE_ALARM.sub("", text)
    return [line for line in text.splitlines() if _BAD.search(line)]


def _seen(path: Path) -> dict[str, list[Seen]]:
    found: dict[str, list[Seen]] = {}
    for line in path.read_text().splitlines():
        seen = Seen(*json.loads(line))
        found.setdefault(seen.partition, []).append(seen)
    return found


def _put_in_place(folders: Mapping[str, Path], data: Path) -> None:
    """Replace the broker's files by the folders'; topic ids are the broker's, in our format."""
    for name, folder in folders.items():
        target = data / name
        topic_id = parse_partition_metadata((target / "partition.metadata").read_bytes())
        shutil.rmtree(target)
        shutil.copytree(folder, target)
        (target / "partition.metadata").write_bytes(format_partition_metadata(topic_id))


def _wait_for_cleaner(data: Path, cleaned_to: Mapping[str, int]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        found = _checkpoint(data / "cleaner-offset-checkpoint")
        if all(found.get(name, -1) >= offset for name, offset in cleaned_to.items()):
            return
        assert time.monotonic() < deadline, f"the cleaner is at {found}"
        time.sleep(0.1)


def _checkpoint(path: Path) -> dict[str, int]:
    lines = path.read_text().split("\n")[2:] if path.exists() else []
    fields = [line.split() for line in lines if len(line.split()) == 3]
    return {f"{topic}-{number}": int(offset) for topic, number, offset in fields}


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
