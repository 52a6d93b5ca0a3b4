"""`tierlog consume --isolation` on a folder with transactions that Kafka wrote."""

import json
import shutil
from pathlib import Path

import pytest

from record_format.batch import iter_headers
from tests.fakes.command_line import Program, RunningBroker

KAFKA = Path(__file__).parents[2] / "fixtures" / "kafka"
NAMES = ("txn-0", "txn-multi-1")


@pytest.fixture(scope="module")
def adopted(tmp_path_factory):
    root = tmp_path_factory.mktemp("adopted")
    for name in NAMES:
        shutil.copytree(KAFKA / name, root / "data" / name)
    broker = RunningBroker(
        *("serve", "--data-dir", "data", "--listen", "127.0.0.1:0", "--disk-reserve-bytes", "0"),
        cwd=root,
    )
    yield Program(broker.server)
    broker.stop()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_printed_is_what_kafkas_consumer_read(adopted, name):
    topic, _, partition = name.rpartition("-")
    command = ("consume", topic, "-p", partition, "--isolation")

    def offsets(isolation):
        found = adopted.ok(*command, isolation, "--format", "json").splitlines()
        return [json.loads(line)["offset"] for line in found]

    committed = json.loads((KAFKA / f"{name}.read_committed.offsets.json").read_text())
    all_of_it = [
        json.loads(line)["offset"]
        for line in (KAFKA / f"{name}.records.jsonl").read_text().splitlines()
    ]
    assert offsets("read_committed") == committed
    assert offsets("read_uncommitted") == all_of_it != committed
    batches = adopted.ok(*command, "read_committed", "--format", "batches")
    headers = [one for one in iter_headers(batches) if not one.is_control]
    held = {offset for one in headers for offset in range(one.base_offset, one.next_offset)}
    assert held == set(committed)
    assert "is not one of" in adopted.fails(2, *command, "committed")
