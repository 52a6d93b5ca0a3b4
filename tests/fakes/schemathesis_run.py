"""Runs schemathesis's command line over a real broker: examples, edge cases, random and stateful
requests, with all its checks.
"""

import subprocess
import sys
from pathlib import Path

from tests.fakes.command_line import ENVIRONMENT
from tests.fakes.schemathesis_hooks import PARTITIONS, RECORDS, TOPICS
from tests.fakes.served_broker import served_broker
from tierlog.client.client import Client
from tierlog.client.records import NewRecord
from tierlog.object_store.open import open_store

_CONFIG = Path(__file__).with_name("schemathesis.toml")


def run_schemathesis(
    root: Path, *options: str, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """Findings are its exit code and output. Ends after a number of requests, or with `--max-time`
    after that time.
    """
    store = open_store(f"file://{root / 'bucket'}")
    with served_broker(root / "data", store=store) as served:
        with Client(served.server.url) as client:
            for topic in TOPICS:
                client.create_topic(topic, partitions=PARTITIONS)
                for partition in range(PARTITIONS):
                    client.produce(topic, [NewRecord("v")] * RECORDS, partition=partition)
        command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(_CONFIG), "run"]
        command += [f"{served.server.url}/openapi.json", "--checks", "all", "--no-color"]
        return subprocess.run(
            [*command, *options],
            env=ENVIRONMENT,
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
