"""`POST /v1/topics/{topic}/verify` and `/repair` over HTTP, of a running broker."""

from tests.fakes.damage import flip


def test_an_intact_topic_is_ok_and_a_missing_object_is_reported(api):
    name = api.cold_topic()
    response = api.post(f"/v1/topics/{name}/verify", params={"deep": 1})
    assert response.status_code == 200, response.text
    assert response.json()["ok"] is True
    assert response.json()["problems"] == []
    assert response.json()["checked"]["chunks"] > 0
    cold = api.broker.partition(name, 0)._cold
    lost = next(cold.reads.cold_entries(0)).log_key
    api.store.delete([lost])
    report = api.post(f"/v1/topics/{name}/verify").json()
    assert report["ok"] is False
    assert [(one["kind"], one["object_key"]) for one in report["problems"]] == [
        ("object-missing", cold.reads.object_key(lost))
    ]


def test_a_local_file_is_named_without_the_data_folder(api):
    name = api.topic(segment_bytes=1024)
    for _ in range(3):
        api.values(name, "x" * 900)
    path = api.broker.partition(name, 0).local_segments()[0].path
    flip(path, -1)
    (found,) = api.post(f"/v1/topics/{name}/verify?deep=1").json()["problems"]
    assert found["file"] == f"{name}-0/{path.name}"
    assert found["detail"].startswith(found["file"])
    assert str(path.parent.parent) not in found["detail"]


def test_an_unknown_topic_is_refused_by_name(api):
    assert api.post("/v1/topics/nobody/verify").json()["code"] == "unknown-topic"


def test_a_running_broker_plans_a_repair_and_carries_out_what_loses_nothing(api):
    name = api.cold_topic()
    cold = api.broker.partition(name, 0)._cold
    api.store.delete([next(cold.reads.cold_entries(0)).indexes_key])
    url = f"/v1/topics/{name}/repair"
    planned = api.post(url).json()
    assert [(one["action"], one.get("done", False)) for one in planned["steps"]] == [
        ("make-indexes", False)
    ]
    assert planned["applied"] is False
    assert api.post(f"/v1/topics/{name}/verify").json()["ok"] is False, "a plan changes nothing"
    api.values(name, "meanwhile")
    done = api.post(url, params={"apply": "true"}).json()
    assert [(one["action"], one["done"]) for one in done["steps"]] == [("make-indexes", True)]
    assert api.post(f"/v1/topics/{name}/verify", params={"deep": 1}).json()["ok"] is True
    assert api.post(url).json()["steps"] == []


def test_a_running_broker_gives_up_no_record(api):
    name = api.topic(segment_bytes=1024, remote_storage_enable=False)
    for _ in range(3):
        api.values(name, "x" * 900)
    path = api.broker.partition(name, 0).local_segments()[0].path
    flip(path, -1)
    before = path.read_bytes()
    url, deep = f"/v1/topics/{name}/repair", {"deep": 1, "apply": "true"}
    report = api.post(url, params=deep).json()
    (step,) = report["steps"]
    assert (step["action"], step.get("done", False)) == ("drop-batches", False)
    assert step["action"] not in report["running"]
    assert step["detail"].endswith("requires --accept-loss")
    assert path.read_bytes() == before
