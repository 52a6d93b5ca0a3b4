"""Responses name an object by its full key in the bucket."""

from pathlib import Path

from tests.integration.http.conftest import Api, problem, records_path


def test_a_missing_object_is_named_by_its_full_key(api: Api) -> None:
    topic = api.cold_topic()
    first = api.get(f"/v1/topics/{topic}/partitions/0/segments").json()["segments"][0]
    key = first["object_key"]
    away = Path(key).rename(key + ".away")
    try:
        found = problem(api.fetch(topic, offset=0), 502, "cold-object-missing")
        assert found["object_key"] == key
        assert found["detail"].startswith(f"topics/{topic}/"), "no path of the host"
        assert Path(key).name in found["detail"]
        wanted = {"topic": topic, "partition": 0, "offset": 0}
        response = api.post("/v1/fetch", json={"partitions": [wanted]})
        assert response.json()["partitions"][0]["error"]["object_key"] == key
        tail = records_path(topic).replace("records", "tail")
        with api.stream("GET", tail, params={"offset": 0}) as events:
            error = next(line for line in events.iter_lines() if line.startswith("data: "))
        assert f'"object_key":"{key}"' in error
    finally:
        away.rename(key)
