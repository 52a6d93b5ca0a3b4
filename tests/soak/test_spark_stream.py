"""A Spark stream from a topic into Parquet, while the broker is killed, frozen and stopped, the
connection to the store is cut, and Spark itself is killed and restarted from its checkpoint.

At the end the rows are exactly the acknowledged records, each once, with their acknowledged
partition and offset.
"""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("pyspark.sql.streaming.datasource", reason="streams need pyspark 4.2")

import pyarrow.parquet as pq

from tests.fakes import spark_process
from tests.fakes.broker_process import BrokerProcess
from tests.fakes.cuttable_proxy import CuttableProxy
from tests.fakes.forked import ROOT
from tests.fakes.soak import MINUTES, cause_fault, client_of, soak_broker, soak_seed
from tierlog.spark_reader.environment import prepare

pytestmark = [pytest.mark.soak, pytest.mark.s3, pytest.mark.spark]

PARTITIONS, PRODUCERS, BURST = 3, 2, 200
CONFIG = {"segment.bytes": 1 << 18, "local.retention.bytes": 1 << 18, "retention.ms": -1}
FLAGS = ("--retention-check-interval", "0.5")
STREAM = """
import json, sys
from pyspark.sql import SparkSession
options, root, how = json.loads(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
rows = spark.readStream.format("tierlog").options(**options).load()
rows = rows.select("partition", "offset", "value")
stream = rows.writeStream.format("parquet").option("checkpointLocation", root + "/checkpoint")
stream.trigger(**how).start(root + "/rows").awaitTermination()
spark.read.parquet(root + "/rows").coalesce(1).write.parquet(root + "/all")
"""


class Stream:
    """The Spark process, restarted from its checkpoint."""

    def __init__(self, root: Path, broker: BrokerProcess, proxy: CuttableProxy) -> None:
        self.root, self.lives = root, 0
        self._options = {
            "store": broker.store,
            "server": broker.url,
            "endpoint": proxy.url,
            "region": broker.env["AWS_DEFAULT_REGION"],
            "accessKeyId": broker.env["AWS_ACCESS_KEY_ID"],
            "secretAccessKey": broker.env["AWS_SECRET_ACCESS_KEY"],
            "subscribe": "t",
            "startingOffsets": "earliest",
            "maxOffsetsPerTrigger": "20000",
        }
        self.process: subprocess.Popen | None = None

    def start(self, **how: object) -> None:
        self.lives += 1
        command = [sys.executable, "-W", "ignore", "-c", STREAM]
        command += [json.dumps(self._options), str(self.root), json.dumps(how)]
        environment = spark_process.environment() | {"PYTHONPATH": str(ROOT)}
        prepare(environment)
        with (self.root / "spark.log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def ensure_running(self) -> None:
        """Restart it as a supervisor does: it may end while its sources are unavailable."""
        if self.process is None or self.process.poll() is not None:
            self.start(processingTime="1 second")

    def kill(self) -> None:
        """Kill it with its JVM and its workers."""
        if self.process is not None:
            with suppress(ProcessLookupError):  # all of it has ended by itself
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def finish(self) -> list[tuple[int, int, bytes]]:
        """Run to the end of the log, and return all rows."""
        for _ in range(3):  # Spark gives its Python worker 10 s to start, however busy the machine
            self.kill()
            self.start(availableNow=True)
            if (code := self.process.wait(900)) == 0:
                break
        assert code == 0, (self.root / "spark.log").read_text()[-3000:]
        table = pq.read_table(self.root / "all")
        return list(zip(*(table[name].to_pylist() for name in table.column_names), strict=True))


class Producer(threading.Thread):
    """Sends numbered records in bursts until `ending` is set."""

    def __init__(self, broker: BrokerProcess, number: int) -> None:
        super().__init__(daemon=True)
        self.broker, self.number, self.ending = broker, number, threading.Event()
        self.acknowledged: list[tuple[int, int, bytes]] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self._produce()
        except BaseException as error:
            self.failure = error

    def _produce(self) -> None:
        count = 0
        with client_of(self.broker) as client, client.producer() as producer:
            while not self.ending.wait(0.05):
                values = [b"%d-%d" % (self.number, count + n) for n in range(BURST)]
                sent = [producer.send("t", value, key=value[-2:]) for value in values]
                for delivery, value in zip(sent, values, strict=True):
                    at = delivery.result()
                    self.acknowledged.append((at.partition, at.offset, value))
                count += BURST


def test_a_spark_stream_writes_each_acknowledged_record_once(tmp_path):
    seed = soak_seed()
    dice = random.Random(seed)
    with soak_broker(tmp_path, *FLAGS) as (broker, proxy):
        with client_of(broker) as client:
            client.create_topic("t", partitions=PARTITIONS, config=CONFIG)
        producers = [Producer(broker, number) for number in range(PRODUCERS)]
        for producer in producers:
            producer.start()
        stream = Stream(tmp_path, broker, proxy)
        try:
            end = time.monotonic() + MINUTES * 60
            while time.monotonic() < end and not any(producer.failure for producer in producers):
                stream.ensure_running()
                time.sleep(dice.uniform(5, 20))  # Spark needs ten seconds to start
                done = cause_fault(broker, proxy, dice)
                if dice.random() < 0.3:
                    stream.kill()
                    done += ", Spark killed"
                print(f"{end - time.monotonic():6.0f} s left: {done}; Spark's life {stream.lives}")
            for producer in producers:
                producer.ending.set()
                producer.join(180)
                assert not producer.is_alive(), "a producer did not end"
                assert producer.failure is None, producer.failure
            rows = stream.finish()
        finally:
            stream.kill()
        assert broker.stop() == 0
    acknowledged = [record for producer in producers for record in producer.acknowledged]
    assert sorted(rows) == sorted(acknowledged)
    print(len(rows), "rows, each once, in", stream.lives, "lives of Spark")
