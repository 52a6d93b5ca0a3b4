"""Claim: each page of the console is there within 200 ms on a broker with 1,000 partitions.

* Measured: the time of one request, of each page, with 20 topics of 50 partitions, 20 records in
  each partition, and 5 groups that committed an offset of every partition.

`python -m bench console_pages`; takes some seconds.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import httpx2

from bench.children import broker
from bench.report import Report, Target

TOPICS: Final = 20
PARTITIONS: Final = 50
RECORDS: Final = 1000
GROUPS: Final = 5
ROUNDS: Final = 10  # requests of a page
WITHIN: Final = Target(value=200, at_most=True, of_ratio=False)
PAGES: Final = {
    "topics": "overview",
    "topics, sorted by size": "topics?sort=-hot",
    "groups": "groups",
    "store": "store",
    "a topic": "topics/t0",
    "a topic, sorted by size": "topics/t0?sort=-hot",
    "records": "topics/t0/partitions/0/records",
    "segments": "topics/t0/partitions/0/segments",
    "manifest": "topics/t0/partitions/0/manifest",
    "search": "topics/t0/search",
}


def measure(folder: Path, *, rounds: int) -> Report:
    report = Report(name="console_pages", title="The console on 1,000 partitions", peer="")
    with broker(folder) as server, httpx2.Client(base_url=server.url, timeout=60) as client:
        _fill(client)
        for name, path in PAGES.items():
            times = [_request_ms(client, path) for _ in range(rounds)]
            report.add(name, "ms", times, target=WITHIN)
    return report


def _fill(client: httpx2.Client) -> None:
    records = [{"key": str(n), "value": "x" * 100} for n in range(RECORDS)]
    every = [(f"t{topic}", number) for topic in range(TOPICS) for number in range(PARTITIONS)]
    for topic in range(TOPICS):
        made = client.post("/v1/topics", json={"name": f"t{topic}", "partitions": PARTITIONS})
        made.raise_for_status()
        sent = client.post(f"/v1/topics/t{topic}/records", json={"records": records})
        sent.raise_for_status()
    offsets = [{"topic": topic, "partition": number, "offset": 1} for topic, number in every]
    for group in range(GROUPS):
        put = client.put(f"/v1/groups/g{group}/offsets", json={"offsets": offsets})
        put.raise_for_status()


def _request_ms(client: httpx2.Client, path: str) -> float:
    began = time.perf_counter()
    client.get(f"/console/{path}").raise_for_status()
    return (time.perf_counter() - began) * 1000
