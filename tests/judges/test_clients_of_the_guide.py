"""docs/guides/kafka-clients.md: its programs for a JVM, Go and kcat run as printed.

* Each client comes from its registry, once: jars by Maven, from the page's own dependencies; kcat
  from the PATH or from Debian's archive.
* Every broker is a new one: topics are made by a client's first request.
* What a client wrote is read over HTTP, committed records alone.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.fakes import fast_jvm, real_kafka, spark_process, waiting
from tests.fakes.broker_process import BrokerProcess, free_port
from tests.fakes.command_line import Program
from tests.fakes.forked import ROOT
from tests.fakes.kafka_caller import KafkaCaller
from tests.fakes.page_blocks import blocks_of
from tests.fakes.tools import find_go
from tests.judges.test_franz_go import MODULE, VERSION
from tierlog.record_format.kafka_messages import messages as m

GUIDE = blocks_of(ROOT / "docs/guides/kafka-clients.md")
CACHE = ROOT / ".cache" / "clients"
SPARK_KAFKA = "4.2.0"  # the newest that is published
FETCH_S, RUN_S = 600, 120

KAFKA_CLIENTS, STREAMS, FLINK = (text for kind, text in GUIDE if kind == "pom")
WITH_CLIENTS, WITH_SHARES, WITH_STREAMS, WITH_FLINK = (
    text for kind, text in GUIDE if kind == "java"
)
[KAFKA_VERSION] = re.findall("<version>(.+)</version>", KAFKA_CLIENTS)
PROJECT = """<project xmlns="http://maven.apache.org/POM/4.0.0">
<modelVersion>4.0.0</modelVersion><groupId>tierlog.tests</groupId><artifactId>guide</artifactId>
<version>1</version><dependencies>{}</dependencies></project>"""
TOOLS = {
    "kafka-topics.sh": "org.apache.kafka.tools.TopicCommand",
    "kafka-console-consumer.sh": "org.apache.kafka.tools.consumer.ConsoleConsumer",
    "kafka-consumer-groups.sh": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
}

pytestmark = pytest.mark.judge


class Guided:
    """A broker, and a folder to run what the page prints in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.broker = BrokerProcess(folder, "--kafka-listen", f"127.0.0.1:{self.port}").start()

    def put(self, name: str, printed: str) -> Path:
        path = self.folder / name
        path.write_text(printed.replace("127.0.0.1:9092", f"127.0.0.1:{self.port}"))
        return path

    def run(self, *command: str | Path, **more: str) -> str:
        return call(self.folder, *command, timeout_s=RUN_S, **more)

    def compile_java(self, printed: str, class_path: Path) -> tuple[str, ...]:
        """The command that runs it."""
        self.run("javac", "-cp", f"{class_path}/*", self.put("Kitchen.java", printed))
        return "java", *fast_jvm.OPTIONS, "-cp", f"{class_path}/*:.", "Kitchen"

    def run_until(self, is_done: Callable[[], bool], *command: str) -> None:
        """For a program that runs in the foreground until it is told to end."""
        output = self.folder / "output"
        with output.open("wb") as log:
            process = subprocess.Popen(command, cwd=self.folder, stdout=log, stderr=log)

        def is_done_or_broken() -> bool:
            assert process.poll() is None, output.read_text()[-4000:]
            return is_done()

        try:
            waiting.until(is_done_or_broken, patience_s=RUN_S)
        finally:
            process.terminate()
            process.wait(RUN_S)

    def fill(self, topic: str, lines: str) -> None:
        program = Program(self.broker.url)
        program.ok("topic", "create", topic)
        program.ok("produce", topic, stdin=lines.encode())

    def committed(self, topic: str) -> list[str]:
        program = Program(self.broker.url)
        return program.ok("consume", topic, "--isolation", "read_committed").decode().splitlines()


@pytest.fixture
def guided(tmp_path: Path) -> Iterator[Guided]:
    found = Guided(tmp_path)
    try:
        yield found
    finally:
        assert found.broker.stop() == 0
    log = (tmp_path / "broker.log").read_text()
    assert "Traceback" not in log, log[-4000:]


def test_java_produces_consumes_in_a_group_and_answers_in_a_transaction(guided: Guided) -> None:
    guided.run(*guided.compile_java(WITH_CLIENTS, jars(KAFKA_CLIENTS)))
    assert guided.committed("orders") == ["tea"]
    assert guided.committed("meals") == ["tea is served"]
    described = json.loads(Program(guided.broker.url).ok("group", "describe", "cooks"))
    assert [each["offset"] for each in described["offsets"]] == [1]


def test_java_takes_records_as_a_member_of_a_share_group(guided: Guided) -> None:
    guided.fill("orders", "tea\ncoffee\n")
    group = m.IncrementalAlterConfigsRequest
    row = group.AlterableConfig("share.auto.offset.reset", 0, "earliest")
    with KafkaCaller(guided.port) as caller:
        caller.ask(group([group.AlterConfigsResource(32, "cooks", [row])]), 1)
    served = guided.run(*guided.compile_java(WITH_SHARES, jars(KAFKA_CLIENTS)))
    assert served.splitlines()[-2:] == ["tea is served", "coffee is served"]
    described = json.loads(Program(guided.broker.url).ok("group", "describe", "cooks"))
    assert [each["lag"] for each in described["offsets"]] == [0]


def test_kafka_streams_counts_exactly_once(guided: Guided) -> None:
    guided.fill("orders", "tea\ntea\ntea\n")
    guided.fill("meals", "")
    command = guided.compile_java(WITH_STREAMS, jars(STREAMS))
    guided.run_until(lambda: guided.committed("meals")[-1:] == ["3 so far"], *command)


def test_flink_copies_a_topic_exactly_once(guided: Guided) -> None:
    guided.fill("orders", "tea\ncoffee\n")
    guided.run(*guided.compile_java(WITH_FLINK, jars(FLINK)))
    assert guided.committed("meals") == ["tea is served", "coffee is served"]


def test_go_produces_and_consumes_in_a_group(guided: Guided) -> None:
    go = find_go()
    [program] = (text for kind, text in GUIDE if kind == "go")
    guided.put("main.go", program)
    guided.run(go, "mod", "init", "kitchen")
    guided.run(go, "get", f"{MODULE}/pkg/kgo@{VERSION}")
    guided.run(go, "build", "-o", "kitchen", ".")
    assert guided.run(guided.folder / "kitchen") == "0 0 4715 milk\n"


def test_sparks_own_kafka_source_and_sink_run_a_stream(guided: Guided) -> None:
    [program] = (text for kind, text in GUIDE if kind == "spark")
    found = ",".join(map(str, spark_jars().glob("*.jar")))
    environment = spark_process.environment()
    environment["PYSPARK_SUBMIT_ARGS"] = f"--jars {found} pyspark-shell"
    guided.run(sys.executable, "-W", "ignore", guided.put("kitchen.py", program), **environment)
    assert guided.committed("meals") == ["juice is served"]


def test_connect_moves_lines_from_a_file_to_a_topic_and_back(guided: Guided) -> None:
    names = ("worker.properties", "source.properties", "sink.properties")
    printed = [text for kind, text in GUIDE if kind == "connect"]
    for name, text in zip(names, printed, strict=True):
        guided.put(name, text.replace("127.0.0.1:8083", f"127.0.0.1:{free_port()}"))
    class_path = connect_jars()
    (guided.folder / "libs").symlink_to(class_path)
    (guided.folder / "orders.txt").write_text("tea\ncoffee\n")
    copies = guided.folder / "copies.txt"
    main = "org.apache.kafka.connect.cli.ConnectStandalone"
    command = ("java", *fast_jvm.OPTIONS, "-cp", f"{class_path}/*", main, *names)

    def is_copied() -> bool:
        return copies.exists() and copies.read_text() == "tea\ncoffee\n"

    guided.run_until(is_copied, *command)
    assert guided.committed("orders") == ["tea", "coffee"]


def test_kcat_and_kafkas_own_tools_share_a_topic(guided: Guided) -> None:
    [script] = (text for kind, text in GUIDE if kind == "tools")
    kafka = real_kafka.RealKafka()
    programs = {name: kafka.script(main) for name, main in TOOLS.items()}
    for name, text in (programs | {"kcat": kcat()}).items():
        (guided.folder / name).write_text(text)
        (guided.folder / name).chmod(0o755)
    path = f"{guided.folder}:{os.environ['PATH']}"
    printed = guided.run("bash", "-e", "-o", "pipefail", guided.put("script", script), PATH=path)
    assert printed.count("tea\n") == 2  # kcat's, and the console consumer's
    assert re.search(r"^kitchen +orders +\d +1 +1 +0 ", printed, re.M), printed


# --- what the registries have -----------------------------------------------------------------


def jars(dependencies: str) -> Path:
    folder = CACHE / hashlib.sha256(dependencies.encode()).hexdigest()[:12]
    if not (folder / "ready").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pom.xml").write_text(PROJECT.format(dependencies))
        goal = ("dependency:copy-dependencies", "-DoutputDirectory=libs")
        call(folder, "mvn", "-q", "-B", *goal, timeout_s=FETCH_S)
        (folder / "ready").touch()
    return folder / "libs"


def dependency(group: str, name: str, version: str, *, without: Sequence[str] = ()) -> str:
    coordinates = elements(groupId=group, artifactId=name, version=version)
    excluded = (elements(exclusion=elements(groupId=each, artifactId="*")) for each in without)
    return elements(dependency=coordinates + elements(exclusions="".join(excluded)))


def elements(**found: str) -> str:
    return "".join(f"<{name}>{text}</{name}>" for name, text in found.items())


def connect_jars() -> Path:
    names = ("connect-runtime", "connect-file")
    found = [dependency("org.apache.kafka", name, KAFKA_VERSION) for name in names]
    return jars("".join([*found, dependency("org.slf4j", "slf4j-simple", "1.7.36")]))


def spark_jars() -> Path:
    """What `--packages` would bring: the connector without Spark, which is installed."""
    name = "spark-sql-kafka-0-10_2.13"
    without = ("org.apache.hadoop", "org.scala-lang", "org.scala-lang.modules", "org.slf4j")
    return jars(dependency("org.apache.spark", name, SPARK_KAFKA, without=without))


def kcat() -> str:
    """A script that runs it."""
    if found := shutil.which("kcat"):
        return f'#!/bin/sh\nexec {found} "$@"\n'
    folder = CACHE / "kcat"
    if not (folder / "usr").exists():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            packages = ("kcat", "librdkafka1", "libyajl2")
            call(folder, "apt-get", "download", *packages, timeout_s=FETCH_S)
        except (AssertionError, FileNotFoundError):
            pytest.skip("no kcat on this machine, nor one to be had from Debian's archive")
        for archive in folder.glob("*.deb"):
            call(folder, "dpkg-deb", "-x", archive, folder, timeout_s=FETCH_S)
    [libraries] = folder.glob("usr/lib/*-linux-gnu*")
    return f'#!/bin/sh\nLD_LIBRARY_PATH={libraries} exec {folder}/usr/bin/kcat "$@"\n'


def call(folder: Path, *command: str | Path, timeout_s: float, **more: str) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout
