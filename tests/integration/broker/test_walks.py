"""The walks of docs/architecture.md, walked: each function that a step names has run.

What a folder in place of a bucket does not reach is left out: S3's own files.
"""

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import httpx2
import pytest

from tests.fakes.architecture_page import PAGE, ROOT, WALK, functions_in
from tests.fakes.two_tiers import TwoTiers, two_tiers
from tests.fakes.waiting import until

S3 = "object_store/s3"
RECORDS = "/v1/topics/walks/partitions/0/records"
RAW = {"Accept": "application/vnd.apache.kafka.recordbatch.v2"}


class Tracer:
    """Which functions of ours run while it is on, in any thread that began after it was made."""

    def __init__(self) -> None:
        self._codes: set[object] = set()
        self._is_on = False
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def _called(self, frame: FrameType, event: str, _argument: object) -> None:
        if self._is_on and event == "call":
            self._codes.add(frame.f_code)

    @contextmanager
    def on(self) -> Iterator[set[tuple[str, str]]]:
        """Yields what is filled with (file, name) at the end."""
        found: set[tuple[str, str]] = set()
        self._codes.clear()
        self._is_on = True
        try:
            yield found
        finally:
            self._is_on = False
            for code in tuple(self._codes):
                file = os.path.relpath(os.path.realpath(code.co_filename), ROOT)
                found.add((file, code.co_qualname))

    def end(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)


@pytest.fixture(scope="module")
def tracer() -> Iterator[Tracer]:
    tracer = Tracer()
    yield tracer
    tracer.end()


@pytest.fixture(scope="module")
def tiers(tracer: Tracer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoTiers]:
    with two_tiers(tmp_path_factory.mktemp("walks")) as tiers:
        tiers.create("walks", partitions=1)
        tiers.produce("walks", 500)
        yield tiers


def produce(tiers: TwoTiers) -> None:
    batch = httpx2.get(tiers.url + RECORDS, headers=RAW, params={"max_bytes": 1}).content
    sent = httpx2.post(tiers.url + RECORDS, content=batch, headers={"Content-Type": RAW["Accept"]})
    assert sent.status_code == 200, sent.text


def fetch(tiers: TwoTiers, tier: str, offset: int) -> None:
    read = httpx2.get(tiers.url + RECORDS, headers=RAW, params={"offset": offset, "max_bytes": 1})
    assert (read.status_code, read.headers["Log-Tier"]) == (200, tier)


def hot_fetch(tiers: TwoTiers) -> None:
    for _ in range(20):  # the kernel may say of any page, now and then, that it would have to wait
        fetch(tiers, "hot", 499)


def roll(tiers: TwoTiers) -> None:
    tiers.produce("walks", 500)  # several segments
    tiers.offload("walks")


def cold_fetch(tiers: TwoTiers) -> None:
    fetch(tiers, "cold", 0)


def spark(tiers: TwoTiers) -> None:
    from tierlog.spark_reader.source import TierlogSource

    tiers.produce("walks", 50)
    source = TierlogSource({"store": tiers.store_url, "server": tiers.url, "subscribe": "walks"})
    reader = source.reader(source.schema())
    rows = [batch.num_rows for part in reader.partitions() for batch in reader.read(part)]
    assert sum(rows) > 500


WALKS = {
    "Produce": produce,
    "Hot fetch": hot_fetch,
    "Roll to manifest": roll,
    "Cold fetch": cold_fetch,
    "Spark split to Arrow": spark,
}


@pytest.mark.parametrize("title", WALKS)
@pytest.mark.usefixtures("nowait_reads")
def test_each_function_of_a_walk_runs(tiers, tracer, title):
    if title == "Cold fetch":
        partition = tiers.broker.partition("walks", 0)
        until(lambda: partition.offsets().local_log_start_offset > 0)
    with tracer.on() as ran:
        WALKS[title](tiers)
    names = functions_in(dict(WALK.findall(PAGE))[title])
    named = {one for one in names if not one[0].startswith(S3)}
    assert named
    assert {one for one in named if not has_run(one, ran)} == set()


def has_run(named: tuple[str, str], ran: set[tuple[str, str]]) -> bool:
    """A class has if a method of it has."""
    file, name = named
    return named in ran or any(f == file and q.startswith(f"{name}.") for f, q in ran)
