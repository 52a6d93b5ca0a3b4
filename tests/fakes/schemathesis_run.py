"""Runs schemathesis's command line over a real broker: examples, edge cases, random and stateful
requests, with all its checks.
"""

import subprocess
import sys
from pathlib import Path

from tests.fakes.command_line import ENVIRONMENT
from tests.fakes.schemathesis_hooks import ALTERED, DELETED, PARTITIONS, TOPIC
from tests.fakes.served_broker import served_broker
from tierlog.client.client import Client
from tierlog.client.records import NewRecord
from tierlog.object_store.open import open_store

_CONFIG = Path(__file__).with_name("schemathesis.toml")


def run_schemathesis(root: Path, *options: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Findings are its exit code and output."""
    store = open_store(f"file://{root / 'bucket'}")
    with served_broker(root / "data", store=store) as served:
        with Client(served.server.url) as client:
            for topic in (TOPIC, ALTERED, DELETED):
                client.create_topic(topic, partitions=PARTITIONS)
            for partition in range(PARTITIONS):
                client.produce(TOPIC, [NewRecord("v")] * 5, partition=partition)
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(_CONFIG), "run"]
        command += [f"{served.server.url}/openapi.json", "--checks", "all", "--no-color"]
        return subprocess.run(
            [*command, "--max-time", str(int(seconds)), *options],
            env=ENVIRONMENT,
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=2 * seconds + 300,
            check=False,
        )
