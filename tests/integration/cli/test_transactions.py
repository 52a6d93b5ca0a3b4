"""`tierlog consume --isolation` on transactions written by Kafka."""

import json
import shutil
from pathlib import Path

import pytest

from tests.fakes.command_line import Program, RunningBroker
from tierlog.record_format.batch import iter_headers

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
def test_consume_isolation_matches_kafkas_consumer(adopted, name):
    topic, _, partition = name.rpartition("-")
    command = ("consume", topic, "-p", partition, "--isolation")

    def offsets(isolation):
        found = adopted.ok(*command, isolation, "--format", "json").splitlines()
        return [json.loads(line)["offset"] for line in found]

    committed = json.loads((KAFKA / f"{name}.read_committed.offsets.json").read_text())
    all_offsets = [
        json.loads(line)["offset"]
        for line in (KAFKA / f"{name}.records.jsonl").read_text().splitlines()
    ]
    assert offsets("read_committed") == committed
    assert offsets("read_uncommitted") == all_offsets != committed
    batches = adopted.ok(*command, "read_committed", "--format", "batches")
    headers = [header for header in iter_headers(batches) if not header.is_control]
    batch_offsets = {
        offset for header in headers for offset in range(header.base_offset, header.next_offset)
    }
    assert batch_offsets == set(committed)
    assert "is not one of" in adopted.fails(2, *command, "committed")
