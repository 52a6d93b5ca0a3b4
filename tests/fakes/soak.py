"""For the soak tests: a broker on a real S3 server behind a connection that can be cut, faults of
both, and a second broker restored from the bucket alone.
"""

import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path

import tierlog
from tests.fakes.broker_process import BrokerProcess
from tests.fakes.cuttable_proxy import CuttableProxy
from tests.fakes.named_s3 import named_s3
from tierlog.client.exchange import RetryPolicy

MINUTES = float(os.environ.get("TIERLOG_SOAK_MINUTES", "10"))
PATIENT = RetryPolicy(attempts=100_000, max_pause_s=5, deadline_s=inf)


def soak_seed() -> int:
    seed = int(os.environ.get("TIERLOG_SOAK_SEED", secrets.randbelow(10**6)))
    print("TIERLOG_SOAK_SEED", seed, flush=True)
    return seed


@contextmanager
def soak_broker(root: Path, *flags: str) -> Iterator[tuple[BrokerProcess, CuttableProxy]]:
    """A running broker, and the proxy to its store; the broker is killed at the end."""
    s3 = named_s3()
    with CuttableProxy(s3["ENDPOINT"]) as proxy:
        broker = BrokerProcess(
            root,
            *(*flags, "--s3-endpoint", proxy.url),
            store=f"s3://{s3['BUCKET']}/soak-{secrets.token_hex(4)}",
            AWS_ACCESS_KEY_ID=s3["ACCESS_KEY"],
            AWS_SECRET_ACCESS_KEY=s3["SECRET_KEY"],
            AWS_DEFAULT_REGION="us-east-1",
        )
        try:
            yield broker.start(), proxy
        finally:
            broker.kill()


@contextmanager
def restored_broker(broker: BrokerProcess) -> Iterator[BrokerProcess]:
    """A second broker, on a folder restored from the bucket alone."""
    other = BrokerProcess(broker.root / "second", *broker.flags, store=broker.store, **broker.env)
    other.root.mkdir()
    command = [sys.executable, "-m", "tierlog.cli.main", "storage", "restore"]
    command += ["--store", broker.store, "--data-dir", str(other.root / "data"), *broker.flags[-2:]]
    subprocess.run(command, check=True, env={**os.environ, **broker.env})
    try:
        yield other.start()
    finally:
        other.kill()


def cause_fault(broker: BrokerProcess, proxy: CuttableProxy, dice: random.Random) -> str:
    """Cause one fault, and end it; return its name."""
    kind = dice.choice(("kill", "kill", "stop", "freeze", "cut", "cut and kill"))
    if kind == "freeze":
        broker.process.send_signal(signal.SIGSTOP)
        time.sleep(dice.uniform(0.5, 5))
        broker.process.send_signal(signal.SIGCONT)
        return kind
    if kind.startswith("cut"):
        proxy.cut()
        time.sleep(dice.uniform(0.5, 10))
    if kind.endswith("kill"):
        broker.kill()
        broker.start()
    if kind == "stop":
        assert broker.stop() == 0
        broker.start()
    proxy.mend()
    return kind


def client_of(broker: BrokerProcess) -> tierlog.Client:
    """A client that retries through whatever happens."""
    return tierlog.Client(broker.url, retries=PATIENT, timeout_s=20)
