"""librdkafka's own tests on our listener: what passes on a Kafka 4.3.1 here passes on ours.

* They are built from the sources that a package of npm carries, with a compiler from the PATH. One
  thing is changed: a replication factor of 3, which some have in their text, is 1.
* Each runs in a process of its own, whose number names it: 0045 is five tests. All of those that
  need a broker and are not named here run.
* An empty pass is none: a test that skips itself has failed, unless it is left out with a reason.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fakes import real_kafka
from tests.fakes.broker_process import BrokerProcess, free_port
from tests.fakes.forked import ROOT

PACKAGE, VERSION = "@confluentinc/kafka-javascript", "1.10.1"  # it has librdkafka 2.15.1
CACHE = ROOT / ".cache" / f"librdkafka-{VERSION}"
KAFKA_VERSION = "4.1.0"  # from 4.2 on they try share groups
BUILD_S, RUN_S = 900, 1800

# In their quick form, in which each of these has something to do.
TEN = ("0017", "0030", "0054", "0056", "0086", "0090", "0113", "0118", "0129", "0137")
LEFT_OUT = {
    # As on a real Kafka 4.3.1 here.
    "0028": "its authors' known issue",
    "0047": "its authors' known issue",
    "0053": "it needs RapidJSON, which is no part of the package",
    "0098": "it needs RapidJSON, which is no part of the package",
    "0101": "it needs RapidJSON, which is no part of the package",
    "0110": "it needs RapidJSON, which is no part of the package",
    "0055": "it measures time, and skips itself in CI",
    "0092": "it writes records of Kafka 0.10, which Kafka 4 refuses",
    "0097": "it needs certificates; TLS is judged in test_security.py",
    "0126": "it needs a server of OpenID; OAUTHBEARER is judged in test_security.py",
    "0135": "it needs SASL; PLAIN and SCRAM are judged in test_security.py",
    "0142": "it needs SASL; re-authentication is judged in test_security.py",
    "0139": "its broker is a mock of its own",
    "0150": "its broker is a mock of its own",
    # As on a Kafka without an authorizer: rights are those of tokens, and shown as ACLs.
    "0109": "it creates ACLs",
    "0115": "it creates ACLs",
    "0119": "it creates ACLs",
}
# Besides, with KIP-848's protocol.
LEFT_OUT_OF_KIP_848 = {
    "0045": "on a Kafka 4.3.1, too, it sees an assignment where it wants none, or a revocation",
    "0084": "its authors have a FIXME there",
    "0132": "it is about the classic protocol's assignors",
}
# Races of their own, which they lose now and then with KIP-848's protocol.
MAY_TRY_AGAIN = {
    "0113": "a consumer that is destroyed, but not closed, waits for ever if it got partitions of "
    "one that was closed just before: nobody serves its rebalance callback",
    "0118": "on a busy machine the second to subscribe may be the first to join: then it commits "
    "as a member, where the test wants it to be closing",
}
# Of 0081, by subtests: not those that create ACLs or SCRAM credentials, which are tokens here, or
# alter a broker, whose settings are read when it starts, or a group.
ADMIN = (
    *("unclean", "CreateTopics", "DeleteTopics", "CreatePartitions", "do_test_DescribeConfigs:"),
    *("DeleteRecords", "ListConsumerGroups", "DescribeConsumerGroups", "DescribeTopics"),
    *("DescribeCluster", "DeleteGroups", "DeleteConsumerGroupOffsets", "ListOffsets"),
    *("AlterConsumerGroupOffsets", "ListConsumerGroupOffsets"),
)
WITH_KAFKAS_TOOLS = ("0045", "0052", "0077")
SETTINGS = {
    "TIERLOG_GROUP_MIN_SESSION_TIMEOUT_MS": "100",
    "TIERLOG_NUM_PARTITIONS": "4",
    # As on a Kafka with its default, but sooner: two that join together are in one first rebalance.
    "TIERLOG_GROUP_INITIAL_REBALANCE_DELAY_MS": "1000",
}
RF_THREE = re.compile(r"(create_topic\w*\(.+), 3(, 5000)?\);")
STILL_RUNNING = re.compile(r"^.*test\(s\) running: .*\n", re.MULTILINE)  # a line a second
ANSI = re.compile(r"\x1b\[[0-9;]*[mK]")


@pytest.mark.judge
def test_ten_of_librdkafkas_tests_find_a_kafka(tmp_path: Path) -> None:
    folder = built()
    every = names_of(folder, "default")
    tests = {number: every[number] for number in TEN}
    with served(tmp_path) as address:
        assert failures(folder, tests, address, "-Q") == []


@pytest.mark.soak
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
@pytest.mark.parametrize("scenario", ["default", "noautocreate"])
def test_all_of_librdkafkas_tests_find_a_kafka(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scenario: str, protocol: str
) -> None:
    monkeypatch.setenv("TEST_CONSUMER_GROUP_PROTOCOL", protocol)
    folder = built()
    tests = names_of(folder, scenario)
    if protocol == "consumer":
        for number in LEFT_OUT_OF_KIP_848:
            tests.pop(number, None)
    is_default = str(scenario == "default").lower()
    with served(tmp_path, TIERLOG_AUTO_CREATE_TOPICS_ENABLE=is_default) as address:
        assert failures(folder, tests, address, "-s", scenario) == []


@contextmanager
def served(root: Path, **settings: str) -> Iterator[str]:
    port = free_port()
    listen = ("--kafka-listen", f"127.0.0.1:{port}")
    broker = BrokerProcess(root, *listen, **SETTINGS, **settings).start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        assert broker.stop() == 0
    log = (root / "broker.log").read_text()
    errors = [line for line in log.splitlines() if '"level": "error"' in line]
    assert not errors, errors[:3]


def failures(folder: Path, tests: Mapping[str, set[str]], address: str, *flags: str) -> list[str]:
    """The numbers that did not pass; the end of their output is printed."""
    failed = []
    for number, names in tests.items():
        for subtests in ADMIN if number == "0081" else ("",):
            passed, output = run(folder, number, address, *flags, subtests=subtests)
            if passed != names and number in MAY_TRY_AGAIN:
                passed, output = run(folder, number, address, *flags, subtests=subtests)
            if passed != names:
                failed.append(f"{number} {subtests}".strip())
                print(f"{failed[-1]}: {names - passed}", output[-6000:], sep="\n", flush=True)
    return failed


def run(
    folder: Path, number: str, address: str, *flags: str, subtests: str
) -> tuple[set[str], str]:
    """The names of those that passed, and the output."""
    settings = folder / "tests" / f"{address}.conf"
    settings.write_text(f"bootstrap.servers={address}\n")
    environment = {
        "RDKAFKA_TEST_CONF": str(settings),
        "TESTS": number,
        "TEST_KAFKA_VERSION": KAFKA_VERSION,
        "LD_LIBRARY_PATH": f"{folder / 'src'}:{folder / 'src-cpp'}",
        "CI": "true",  # more patience
    }
    if subtests:
        environment["SUBTESTS"] = subtests
    if number in WITH_KAFKAS_TOOLS:
        environment |= {"KAFKA_PATH": str(tools()), "BROKERS": address}
    try:
        done = subprocess.run(
            ["./test-runner", "-L", "-K", "-p1", *flags],
            cwd=folder / "tests",
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=RUN_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return set(), f"it did not end in {RUN_S} s: {error.stdout!r}"
    output = ANSI.sub("", done.stdout.decode(errors="replace"))
    output = STILL_RUNNING.sub("", output)
    passed = set(re.findall(r"Test (\w+) PASSED", output))
    return passed if done.returncode == 0 else set(), output


def names_of(folder: Path, scenario: str) -> dict[str, set[str]]:
    """The names of those that need a broker, by number; without share groups' and manual ones."""
    source = (folder / "tests" / "test.c").read_text()
    tests: dict[str, set[str]] = {}
    table = source[source.index("struct test tests[]") : source.index("{NULL}};")]
    for entry in table.split(" _TEST(")[1:]:
        name = entry.partition(",")[0]
        (scenarios,) = re.findall(r'scenario = "(.+)"', entry) or ["default"]
        is_other = re.search("LOCAL|MANUAL|share_consumer", entry)
        if not is_other and name[:4] not in LEFT_OUT and scenario in scenarios.split(","):
            tests.setdefault(name[:4], set()).add(name)
    return tests


def built() -> Path:
    """The folder of sources, where the tests are."""
    missing = [program for program in ("npm", "make", "cc", "c++") if not shutil.which(program)]
    assert not missing, f"librdkafka's tests cannot be built without {', '.join(missing)}"
    folder = CACHE / "package" / "deps" / "librdkafka"
    if not (folder / "built").exists():
        shutil.rmtree(CACHE, ignore_errors=True)
        CACHE.mkdir(parents=True)
        call(CACHE, "npm", "pack", "--silent", f"{PACKAGE}@{VERSION}")
        (archive,) = CACHE.glob("*.tgz")
        shutil.unpack_archive(archive, CACHE, filter="data")
        for path in (folder / "tests").glob("0*.c*"):
            path.write_text(re.sub(RF_THREE, r"\1, 1\2);", path.read_text()))
        settings = ("--disable-curl", "--disable-sasl", "--disable-optimization")
        call(folder, "bash", "configure", *settings, "--disable-debug-symbols", "--CPPFLAGS=-w")
        call(folder, "make", f"-j{os.cpu_count()}", "libs")
        call(folder, "make", f"-j{os.cpu_count()}", "-C", "tests", "build")
        (folder / "built").touch()
    return folder


def tools() -> Path:
    """What a Kafka has in its folder, as far as the tests look for it."""
    assert real_kafka.is_available(), "Kafka's command lines cannot run without a JDK and Maven"
    script = CACHE / "kafka" / "bin" / "kafka-topics.sh"
    if not script.exists():
        script.parent.mkdir(parents=True)
        script.write_text(real_kafka.RealKafka().script("org.apache.kafka.tools.TopicCommand"))
        script.chmod(0o755)
    return script.parents[1]


def call(folder: Path, *command: str) -> None:
    done = subprocess.run(
        command,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
