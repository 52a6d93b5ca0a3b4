"""Pictures of the console in docs/pictures, by a run of it: `make screenshots`. Needs chromium.

A broker of its own, with flights of 2013 in both tiers. What differs from run to run (times, rates)
differs in the pictures, too.
"""

from __future__ import annotations

import base64
import itertools
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.fakes.broker_harness import run_janitor
from tests.integration.console.chromium import Chromium, find_chromium
from tests.integration.console.conftest import Console, open_console
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


def main() -> int:
    program = find_chromium()
    if program is None:
        sys.stderr.write("no pictures of the console: chromium is missing\n")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        with open_console(root) as console, Chromium(program, root / "chromium") as browser:
            fill(console)
            for shot in SHOTS:
                take(browser, console.url, shot)
    return 0


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


def take(browser: Chromium, url: str, shot: Shot) -> None:
    browser.emulate(height=HEIGHT, dark=shot.dark)
    browser.open(f"{url}/{shot.address}")
    browser.until("document.querySelector('#view h1')")
    browser.until(shot.act)
    picture = browser.call("Page.captureScreenshot", format="webp", quality=70)
    (PICTURES / f"{shot.name}.webp").write_bytes(base64.b64decode(picture["data"]))


if __name__ == "__main__":
    raise SystemExit(main())
