"""A broker in memory for tests of producers, and what its responses are made of."""

from functools import partial

import httpx2
import msgspec

import tierlog
from tierlog.client import responses
from tierlog.client.batching import prepare_record
from tierlog.client.exchange import RetryPolicy
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.decode import decode_batch

record = partial(prepare_record, key=None, timestamp=None, headers=(), now_ms=1)
QUICK = RetryPolicy(attempts=3, first_pause_s=0.0, max_pause_s=0.5)


class TinyBroker:
    """Two partitions; recognises duplicates by producer and sequence, like the real one.

    `faults`: for each produce in turn, None, a response to return instead of it, or "lost" or
    "shutdown": the batch is appended, but the connection breaks or the broker stops.
    `identity_faults`: the same for requests of producer ids after the first.
    """

    def __init__(self, *faults) -> None:
        self.faults, self.logs, self.seen = list(faults), {0: [], 1: []}, {}
        self.next_sequences, self.identity_faults, self.identities = {}, [], 0

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/v1/producers":
            if self.identities and self.identity_faults:
                return self.identity_faults.pop(0)
            self.identities += 1
            return httpx2.Response(
                200, json={"producer_id": 2**33 + self.identities, "producer_epoch": 0}
            )
        if request.method == "GET":
            return httpx2.Response(200, json=description())
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, httpx2.Response):
            return fault
        response = self.append(int(request.url.path.split("/")[5]), request.content)
        if fault == "lost":
            raise httpx2.ReadError("gone", request=request)
        if fault == "shutdown":
            return httpx2.Response(503, json={"code": "shutting-down", "outcome": "unknown"})
        return response

    def append(self, partition: int, body: bytes) -> httpx2.Response:
        (header,) = iter_headers(body)
        key = (partition, header.producer_id, header.base_sequence)
        duplicate = key in self.seen
        if not duplicate:
            assert header.base_sequence == self.next_sequences.get(key[:2], 0)
            self.next_sequences[key[:2]] = header.base_sequence + header.record_count
            self.seen[key] = len(self.logs[partition])
            self.logs[partition] += [r.value for r in decode_batch(body, header)]
        base = self.seen[key]
        result = {
            "partition": partition,
            "base_offset": base,
            "last_offset": base + header.record_count - 1,
            "records": header.record_count,
            "duplicate": duplicate,
        }
        return httpx2.Response(200, json={"topic": "t", "results": [result], "warnings": []})


def description(*numbers, damaged=(), name="t"):
    zeros = dict.fromkeys(responses.PartitionDescription.__struct_fields__, 0)
    nodes = {"replicas": [0], "in_sync_replicas": [0], "replica_lags": [0]}
    zeros |= {"leader": None, "adding_replicas": [], "removing_replicas": [], **nodes}
    zeros["store_in_sync"] = False
    return {
        "name": name,
        "topic_id": "x",
        "config": {},
        "effective_config": {},
        "partitions": [{**zeros, "partition": number} for number in numbers or (0, 1)],
        "damaged_partitions": [{"partition": number, "detail": "bad"} for number in damaged],
    }


def topic(name, count):
    return msgspec.convert(description(*range(count), name=name), responses.TopicDescription)


def refused(status: int, code: str, **members: object) -> httpx2.Response:
    """A problem document, or without a `code` a gateway's response."""
    document = {"code": code, "detail": code, **members} if code else {}
    return httpx2.Response(status, json=document)


def client(broker: TinyBroker) -> tierlog.Client:
    return tierlog.Client(retries=QUICK, transport=httpx2.MockTransport(broker))
