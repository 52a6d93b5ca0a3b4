"""franz-go's own tests, unmodified, on our listener: what a Kafka 4.3.1 passes here, ours passes.

They are built from the module's published source, with Go from the PATH or from PyPI.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.fakes.broker_process import BrokerProcess, free_port
from tests.fakes.forked import ROOT
from tests.fakes.tools import find_go

MODULE, VERSION = "github.com/twmb/franz-go", "v1.22.3"
CACHE = ROOT / ".cache" / "franz-go"
PASSED_MIN = 400  # subtests among them; a run that was cut short has not passed
BUILD_S, RUN_S = 600, 420


@pytest.mark.judge
def test_franz_go_finds_a_kafka(tmp_path: Path) -> None:
    folder, program = built()
    port = free_port()
    settings = {"TIERLOG_GROUP_MIN_SESSION_TIMEOUT_MS": "100", "TIERLOG_NUM_PARTITIONS": "4"}
    broker = BrokerProcess(tmp_path, "--kafka-listen", f"127.0.0.1:{port}", **settings).start()
    environment = {
        "KGO_SEEDS": f"127.0.0.1:{port}",
        "KGO_TEST_RF": "1",
        "KGO_TEST_RECORDS": "50000",
        "KGO_LOG_LEVEL": "none",
    }
    try:
        run = subprocess.run(
            [program, "-test.v", "-test.timeout", f"{RUN_S}s"],
            cwd=folder,  # some read their own source
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_S + 60,
            check=False,
        )
        failed = re.findall(r"^ *--- FAIL: .+$|^panic: .+$", run.stdout, re.M)
        passed = len(re.findall(r"^ *--- PASS: ", run.stdout, re.M))
        assert (run.returncode, failed) == (0, []), run.stdout[-4000:]
        assert passed >= PASSED_MIN
    finally:
        assert broker.stop() == 0
    log = (tmp_path / "broker.log").read_text()
    errors = [line for line in log.splitlines() if '"level": "error"' in line]
    assert not errors, errors[:3]


def built() -> tuple[Path, Path]:
    """The module's folder of sources, and the program."""
    go = find_go()
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / "go.mod").write_text(f"module judge\n\ngo 1.25\n\nrequire {MODULE} {VERSION}\n")
    program = CACHE / f"kgo-{VERSION}.test"
    if not program.exists():
        call(go, "get", "-t", f"{MODULE}/pkg/kgo@{VERSION}")
        call(go, "test", "-c", "-o", str(program), f"{MODULE}/pkg/kgo")
    else:
        call(go, "get", "-t", f"{MODULE}/pkg/kgo@{VERSION}")
    folder = call(go, "list", "-f", "{{.Dir}}", f"{MODULE}/pkg/kgo")
    return Path(folder.strip()), program


def call(*command: str) -> str:
    done = subprocess.run(
        command, cwd=CACHE, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
