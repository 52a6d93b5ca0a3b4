"""The producer against a real broker that it loses responses of: exactly once."""

import random
import subprocess
import sys

import httpx2

from tests.fakes.command_line import ENVIRONMENT
from tierlog.client.batching import Batching
from tierlog.client.client import Client
from tierlog.client.exchange import RetryPolicy


class LossyTransport(httpx2.HTTPTransport):
    """Loses one response in three, after the broker has handled the request."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = random.Random(seed)

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        response = super().handle_request(request)
        if request.url.path.endswith("/records") and self._chance.random() < 1 / 3:
            response.read()
            response.close()
            raise httpx2.ReadError("the response was lost", request=request)
        return response


def test_records_are_stored_exactly_once_in_order_despite_lost_responses(broker):
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
        by_offset = {(r.partition, r.offset): r.value for r in found}
        assert len(found) == 5000
        for n, future in enumerate(futures):
            metadata = future.result(0)
            assert by_offset[metadata.partition, metadata.offset] == b"%d" % n
        by_key: dict[bytes | None, list[int]] = {}
        for record in found:
            by_key.setdefault(record.key, []).append(int(record.value or b""))
        assert all(values == sorted(values) for values in by_key.values())


def test_an_unclosed_producer_is_flushed_at_exit(broker):
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
