"""A topic on a broker, its table of mode json, and kills of both: each committed record is in the
table, or in that of errors, once.
"""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import tierlog
from tests.fakes.broker_process import BrokerProcess
from tests.fakes.soak import PATIENT
from tests.fakes.topic_tables import TOPIC, JsonTable, dumps, runs_of
from tierlog.spark_reader.arrow_dataset import dataset

WRITERS = 4
RECORDS = 40  # in a round
CONFIG = {"segment.bytes": 20_000, "iceberg.mode": "json", "offload.max.lag.ms": 1000}


class KilledTable:
    """`broker` and the runs of four writers at once are killed; records are produced meanwhile."""

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self.broker = BrokerProcess(folder, "--retention-check-interval", "0.5").start()
        self.table = JsonTable(folder, server=self.broker.url)
        self._dice, self.kills, self.sent = dice, 0, 0
        self._client = tierlog.Client(self.broker.url, retries=PATIENT, timeout_s=20)
        self._client.create_topic(TOPIC, partitions=1, config=CONFIG)
        self.table.create()

    def run(self, *, kills: int, seconds: float = 600) -> None:
        """Until there were so many, or so long."""
        end = time.monotonic() + seconds
        with runs_of(self.table.folder) as runs:
            while self.kills < kills and time.monotonic() < end:
                self._produce()
                writers = [
                    runs.start(self.table, killed_at=self._dice.choice((0, *range(1, 16))))
                    for _ in range(WRITERS)
                ]
                if not self.kills or self._dice.random() < 0.5:
                    self._kill_broker()
                for pid in writers:
                    if self._dice.random() < 0.3:
                        time.sleep(self._dice.random())  # somewhere in its work
                        os.kill(pid, signal.SIGKILL)
                self.kills += sum(runs.wait(pid) == -signal.SIGKILL for pid in writers)
        self.table.run()
        self._read_log()

    def _produce(self) -> None:
        with self._client.producer() as producer:
            for _ in range(RECORDS):
                self.sent += 1
                value: Any = {"number": self.sent, "pad": "x" * self._dice.randrange(2000)}
                if self.sent % 7 == 0:
                    value = {"number": "seven"}
                producer.send(TOPIC, dumps(value), partition=0)

    def _kill_broker(self) -> None:
        self.broker.kill()
        self.broker.start()
        self.kills += 1

    def _read_log(self) -> None:
        """What was committed, by offset."""
        log = dataset(TOPIC, store=self.table.url, server=self.broker.url)
        rows = log.to_table(columns=["offset", "value"]).sort_by("offset")
        assert rows["offset"].to_pylist() == list(range(rows.num_rows))
        assert rows.num_rows >= self.sent
        self.table.values = rows["value"].to_pylist()

    def close(self) -> None:
        self._client.close()
        self.broker.kill()
