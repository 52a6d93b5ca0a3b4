"""The HTTP contract through a broker that leads nothing: the tests of a broker alone, as they are.
In the soak through each of three, on a folder and on a real S3 server.

Those that reach into the broker, its store or its clock are left to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from tests.fakes.broker_cluster import cluster_of
from tests.fakes.named_s3 import open_named_s3
from tests.fakes.openapi_document import OpenApiDocument
from tests.fakes.served_cluster import served_cluster
from tests.fakes.waiting import until
from tests.integration.http import (
    test_fetch,
    test_groups,
    test_produce,
    test_segments,
    test_tail,
    test_transactions,
)
from tests.integration.http.conftest import LIMITS, Api

MODULES = (test_fetch, test_groups, test_produce, test_segments, test_tail, test_transactions)
# Brokers of a cluster have no local topics, each has its share of a request's `max_bytes`, and a
# client's disconnect is passed on a moment later; a lag elsewhere is up to a second old. The last
# one reads the last of all groups.
ALONE = (
    "test_a_topic_that_stays_local_says_why_it_has_no_manifest",
    "test_max_bytes_of_a_multi_partition_fetch_is_a_total",
    "test_max_bytes_of_a_multi_partition_fetch_limits_decompressed_records",
    "test_a_client_that_goes_away_while_it_joins_has_left",
    "test_offsets_are_committed_listed_with_lag_and_deleted",
    "test_a_consumer_of_committed_records_waits_for_the_offsets_of_a_transaction",
)
INSIDE = ("api.broker", "api.store", "tierlog_http_", "Context", "api.port")


class Through(NamedTuple):
    """Which broker is asked; None: one that leads nothing."""

    bucket: str
    broker: int | None


EACH = [Through(kind, broker) for kind in ("folder", "s3") for broker in range(3)]


@pytest.fixture(
    scope="module",
    params=[
        Through("folder", None),
        *(pytest.param(one, marks=pytest.mark.soak) for one in EACH),
    ],
    ids=lambda one: f"{one.bucket}-{one.broker}",
)
def api(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Api]:
    kind, asked = request.param
    bucket = open_named_s3() if kind == "s3" else None
    root = tmp_path_factory.mktemp("cluster")
    with served_cluster(root, http=LIMITS, bucket=bucket) as cluster:
        gateway = cluster.brokers[asked or 0]
        if asked is None:
            cluster_of(gateway.broker).members.set_state("draining")
            for one in cluster.brokers[1:]:
                cluster_of(one.broker).members.refresh()
        with Api(base_url=gateway.server.url, timeout=30) as client:
            client.document = OpenApiDocument(client.get("/openapi.json").json())
            yield client
            assert bool(list(gateway.broker.partitions())) == (asked is not None)
            until(lambda: all(one.app.context.inflight.held == 0 for one in cluster.brokers))


def is_outside(test: Callable[..., Any]) -> bool:
    """Whether a test knows nothing of the broker but its answers."""
    marks = {name for mark in getattr(test, "pytestmark", ()) for name in mark.args[:1]}
    chosen = {
        name.strip() for names in marks if isinstance(names, str) for name in names.split(",")
    }
    fixtures = inspect.signature(test).parameters.keys() - chosen
    source = inspect.getsource(test)
    return fixtures == {"api"} and not any(word in source for word in INSIDE)


def outside_tests() -> Iterator[tuple[str, Callable[..., Any]]]:
    for module in MODULES:
        for name, test in inspect.getmembers(module, inspect.isfunction):
            is_own = name.startswith("test_") and test.__module__ == module.__name__
            if is_own and name not in ALONE and is_outside(test):
                yield name, test


globals().update(outside_tests())
