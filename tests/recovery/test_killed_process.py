"""After kill -9 at any moment, every record acknowledged with acks=all is at its offset."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

CHILD = Path(__file__).with_name("appending_child.py")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("seed", range(4))
def test_every_acknowledged_record_survives_a_kill(seed, tmp_path, open_log, records_of):
    random = Random(seed)
    folder = tmp_path / "t-0"
    acknowledged: dict[int, str] = {}
    for _ in range(3):
        acknowledged |= _run_and_kill(folder, lines=random.randint(1, 400))
    log = open_log(folder, clean=False)
    values = {record.offset: record.value.rstrip(b".").decode() for record in records_of(log)}
    assert list(values) == list(range(log.log_end_offset))
    assert {offset: values.get(offset) for offset in acknowledged} == acknowledged


def _run_and_kill(folder: Path, *, lines: int) -> dict[int, str]:
    """Start a child, kill it after this many acknowledgements, and return its output."""
    child = subprocess.Popen(
        [sys.executable, str(CHILD), str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None
    with child.stdout as output:
        printed = [output.readline() for _ in range(lines)]
        child.send_signal(signal.SIGKILL)
        printed += output.readlines()
    assert child.wait() == -signal.SIGKILL
    whole = [line.split() for line in printed if line.endswith("\n")]
    return {int(offset): value for offset, value in whole}
