"""A topic's pins over HTTP: all partitions that have a manifest, or none."""

from pathlib import Path

from tests.integration.console.conftest import Console, console, open_console
from tests.integration.http.conftest import problem

__all__ = ["console"]  # a broker with a bucket


def test_a_name_is_pinned_in_every_partition_with_a_manifest(console: Console) -> None:
    topic = console.claimed(console.topic("three", partitions=3))
    path = f"/v1/topics/{topic}/pins"
    made = console.post(path, json={"name": "june", "expires_ms": None})
    assert made.status_code == 201
    listed = console.get(path).json()
    assert listed == made.json()
    assert [one["partition"] for one in listed["pins"]] == [0, 1, 2]
    assert {one["name"] for one in listed["pins"]} == {"june"}

    problem(console.post(path, json={"name": "june"}), 409, "pin-exists")
    assert console.get(path).json() == listed, "a name that is taken stays as it was"
    refused = problem(console.post(path, json={"name": "a/b"}), 400, "invalid-request")
    assert refused["errors"][0]["loc"] == "name"
    for _ in range(2):  # one that is gone is not an error
        assert console.delete(f"{path}/june").status_code == 204
    assert console.get(path).json()["pins"] == []
    refused = problem(console.delete(f"{path}/a%20b"), 400, "invalid-request")
    assert refused["errors"][0]["loc"] == "pin"


def test_a_name_that_one_partition_has_already_is_pinned_in_no_other(console: Console) -> None:
    topic = console.claimed(console.topic("half", partitions=2))
    taken = console.broker.topic(topic).partitions[1].pins
    assert taken is not None
    taken.pin_newest("june", expires_ms=None)
    path = f"/v1/topics/{topic}/pins"
    problem(console.post(path, json={"name": "june"}), 409, "pin-exists")
    assert [one["partition"] for one in console.get(path).json()["pins"]] == [1]


def test_without_a_bucket_there_is_nothing_to_pin(tmp_path: Path) -> None:
    with open_console(tmp_path, bucket=False) as console:
        path = f"/v1/topics/{console.topic('local')}/pins"
        assert console.get(path).json()["pins"] == []
        problem(console.post(path, json={"name": "june"}), 404, "unknown-manifest-version")


def test_pins_of_no_topic(console: Console) -> None:
    problem(console.get("/v1/topics/nobody/pins"), 404, "unknown-topic")
