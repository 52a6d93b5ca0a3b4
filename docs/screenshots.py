"""Pictures of the console in docs/pictures, by a run of it: `make screenshots`. Needs chromium.

A broker of its own, with flights of 2013 in both tiers; and three of a cluster, of which one is
killed. What differs from run to run (times, rates) differs in the pictures, too.
"""

from __future__ import annotations

import base64
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.fakes.broker_cluster import cluster_of
from tests.fakes.broker_harness import run_janitor
from tests.fakes.broker_process import BrokerProcess
from tests.fakes.served_cluster import served_cluster
from tests.fakes.waiting import until
from tests.integration.console.chromium import Chromium, find_chromium
from tests.integration.console.conftest import Console, open_console
from tierlog.api.http.settings import HttpSettings
from tierlog.cli.demo_flights import as_records, load_flights
from tierlog.client.client import Client

PICTURES = Path(__file__).parent / "pictures"
REQUESTS = 60  # of a thousand flights
HEIGHT = 800


class Shot(NamedTuple):
    """`act` is run until it is true."""

    name: str
    address: str
    act: str
    dark: bool = False
    height: int = HEIGHT


SHOTS = (
    Shot(
        "console-topic",
        "#/topics/flights",
        "document.querySelectorAll('[data-chart] canvas').length === 4",
    ),
    Shot(
        "console-search",
        "#/topics/flights/search?text=&json=carrier+%3D+HA&limit=100",
        "document.querySelector('[data-search]').dataset.ended"
        " && ((document.querySelector('.found details') ?? {}).open = true)"
        " && document.querySelector('.found .json-number')",
        dark=True,
    ),
)
SCHEMAS = Shot(
    "console-schemas",
    "#/subject?subject=flights-value&version=2&against=1",
    "document.querySelector('.diff')",
    height=560,
)
BROKERS = Shot(
    "console-brokers",
    "#/brokers",
    "document.querySelector('#brokers')?.innerText.includes('is down')",
    height=460,
)


def main() -> int:
    program = find_chromium()
    if program is None:
        sys.stderr.write("no pictures of the console: chromium is missing\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with open_console(root) as console, Chromium(program, root / "chromium") as browser:
            fill(console)
            register(console)
            for shot in (*SHOTS, SCHEMAS):
                take(browser, console.url, shot)
            take_cluster(browser, root / "cluster")
    return 0


def take_cluster(browser: Chromium, root: Path) -> None:
    """Two brokers that are produced to, and one that was killed: a process."""
    (root / "third").mkdir(parents=True)
    flags = ("--join", "--heartbeat-interval-ms", "200", "--session-timeout-ms", "2000")
    third = BrokerProcess(root / "third", *flags, store=(root / "bucket").as_uri())
    http = HttpSettings(console_sample_ms=500)
    with served_cluster(root, brokers=2, http=http) as cluster:
        first, _ = cluster.brokers
        members = cluster_of(first.broker).members
        third.start()
        until(lambda: len(members.members()) == 3)
        with Client(first.server.url) as client:
            client.create_topic("flights", partitions=12)
            for records in itertools.islice(as_records(load_flights()), REQUESTS // 3):
                client.produce("flights", records)
            third.kill()
            until(lambda: not cluster_of(first.broker).leaders.led_by(2), patience_s=30)
            client.create_topic("delays", partitions=4)  # of those that live
            for records in itertools.islice(as_records(load_flights()), REQUESTS // 3):
                client.produce("delays", records)
        take(browser, first.server.url, BROKERS)
    third.stop()


def fill(console: Console) -> None:
    sizes = {"segment_bytes": 1 << 20, "local_retention_bytes": 2 << 20}
    topic = console.topic("flights", partitions=3, retention_ms=-1, **sizes)
    with Client(console.url) as client:
        for records in itertools.islice(as_records(load_flights()), REQUESTS):
            client.produce(topic, records)
    console.post(f"/v1/topics/{topic}/offload", params={"wait_ms": 60_000}).raise_for_status()
    run_janitor(console.broker)
    read = [{"topic": topic, "partition": n, "offset": 15_000} for n in range(3)]
    console.put("/v1/groups/delays/offsets", json={"offsets": read}).raise_for_status()


def register(console: Console) -> None:
    fields = [
        {"name": "carrier", "type": "string"},
        {"name": "tailnum", "type": ["null", "string"]},
        {"name": "delay", "type": "int"},
    ]
    later = [
        *fields[:2],
        {"name": "delay", "type": "double"},
        {"name": "gate", "type": "string", "default": ""},
    ]
    for version in (fields, later):
        schema = json.dumps({"type": "record", "name": "Flight", "fields": version})
        path = "/subjects/flights-value/versions"
        console.post(path, json={"schema": schema}).raise_for_status()


def take(browser: Chromium, url: str, shot: Shot) -> None:
    browser.emulate(height=shot.height, dark=shot.dark)
    browser.open(f"{url}/{shot.address}")
    browser.until("document.querySelector('#view h1')")
    browser.until(shot.act)
    picture = browser.call("Page.captureScreenshot", format="webp", quality=70)
    (PICTURES / f"{shot.name}.webp").write_bytes(base64.b64decode(picture["data"]))


if __name__ == "__main__":
    raise SystemExit(main())
