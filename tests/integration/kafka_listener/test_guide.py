"""docs/guides/kafka-clients.md: its programs run as printed."""

import subprocess
import sys

import pytest

from tests.fakes.command_line import ENVIRONMENT, ROOT
from tests.fakes.page_blocks import blocks_of
from tests.fakes.served_broker import Served

PROGRAMS = [
    text for kind, text in blocks_of(ROOT / "docs/guides/kafka-clients.md") if kind == "python"
]


@pytest.mark.parametrize("program", PROGRAMS, ids=["kafka-python", "confluent-kafka", "aiokafka"])
def test_a_program_of_the_guide_runs_as_printed(served: Served, program: str) -> None:
    """Its topic is created by the client's first request."""
    given = program.replace("127.0.0.1:9092", f"127.0.0.1:{served.kafka_port}")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", given],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    partition, offset, key, _ = run.stdout.split()
    assert (partition, offset, key[:4]) == ("0", "0", "b'47")
