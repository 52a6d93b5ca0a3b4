"""The producer against a real broker, over a connection that loses answers: exactly once."""

import random
import subprocess
import sys

import httpx

from tests.fakes.command_line import ENVIRONMENT
from tierlog.client import Batching, Client, RetryPolicy


class LossyTransport(httpx.HTTPTransport):
    """Loses the answer, after the request was done, one time in three."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = random.Random(seed)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = super().handle_request(request)
        if request.url.path.endswith("/records") and self._chance.random() < 1 / 3:
            answer.read()
            answer.close()
            raise httpx.ReadError("the answer was lost", request=request)
        return answer


def test_records_are_there_once_and_in_order_whatever_answers_are_lost(broker):
    patient = RetryPolicy(attempts=20, first_pause_s=0.001)
    with Client(broker.server) as plain:
        plain.create_topic("exactly-once", partitions=3)
        with (
            Client(broker.server, retries=patient, transport=LossyTransport(7)) as client,
            client.producer(Batching(batch_bytes=2000, compression="lz4")) as producer,
        ):
            futures = [
                producer.send("exactly-once", f"{n}", key=f"key-{n % 10}") for n in range(5000)
            ]
        found = list(plain.consume("exactly-once"))
        places = {(r.partition, r.offset): r.value for r in found}
        assert len(found) == 5000
        for n, future in enumerate(futures):
            placed = future.result(0)
            assert places[placed.partition, placed.offset] == b"%d" % n
        by_key: dict[bytes | None, list[int]] = {}
        for record in found:
            by_key.setdefault(record.key, []).append(int(record.value or b""))
        assert all(values == sorted(values) for values in by_key.values())


def test_a_producer_that_nobody_closes_is_flushed_when_the_interpreter_ends(broker):
    script = """
import sys, tierlog
producer = tierlog.Client(sys.argv[1]).producer(tierlog.Batching(linger_ms=60_000))
for n in range(1000):
    producer.send("left-open", str(n), partition=0)
"""
    with Client(broker.server) as plain:
        plain.create_topic("left-open")
        command = [sys.executable, "-c", script, broker.server]
        subprocess.run(command, env=ENVIRONMENT, check=True, timeout=60)
        found = [int(record.value or b"") for record in plain.consume("left-open")]
    assert found == list(range(1000))
