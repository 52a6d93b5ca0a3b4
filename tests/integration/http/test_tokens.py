import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog.testing

from api.http.access import check
from api.http.access.grants import Scope
from api.http.access.scopes import NEEDS, OPEN_PATHS
from api.http.access.tokens import create_token, read_entries, revoke_token
from api.http.routes import CALLS
from api.http.settings import HttpSettings
from broker.broker import Broker
from tests.fakes.served_broker import served_broker
from tests.fakes.waiting import until_waiting
from tests.integration.http.conftest import problem, records_path
from tierlog.client import Client
from tierlog.client.problems import Unauthorized

READ, PRODUCE, ADMIN = Scope.READ, Scope.PRODUCE, Scope.ADMIN


class Door:
    """A broker with a tokens file, and clients with tokens."""

    def __init__(self, root: Path) -> None:
        self.file = root / "tokens.json"
        self.admin = self.make("admin", ADMIN)
        self.url = ""
        self.app: Any = None
        self.client: httpx.Client

    def make(self, name: str, *scopes: Scope, topics: str = "") -> str:
        return create_token(self.file, name, scopes=scopes, topics=topics, now_ms=1)

    def call(self, method: str, path: str, token: str | None = None, **rest) -> httpx.Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        headers |= rest.pop("headers", {})
        return self.client.request(method, self.url + path, headers=headers, **rest)


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    with open_door(tmp_path) as door:
        yield door


@pytest.fixture(scope="module")
def shut(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    """One for all who knock without a token."""
    with open_door(tmp_path_factory.mktemp("shut")) as door:
        yield door


@contextmanager
def open_door(root: Path) -> Iterator[Door]:
    door = Door(root)
    settings = HttpSettings(tokens_file=door.file)
    with (
        pytest.MonkeyPatch.context() as patch,
        served_broker(root / "data", http=settings) as one,
        httpx.Client() as door.client,
    ):
        patch.setattr(check, "CHECK_INTERVAL_S", 0.0)  # what was changed is in force at once
        door.app, door.url = one.app, one.server.url
        for topic in ("orders.eu", "orders.us", "private"):
            made = door.call("POST", "/v1/topics", door.admin, json={"name": topic})
            assert made.status_code == 201
        yield door


def test_every_call_stands_in_the_table_of_scopes(door: Door) -> None:
    calls = {(call.method, call.path) for call in door.app.table.calls}
    assert calls == set(NEEDS)
    files = {path for path in OPEN_PATHS if path.startswith(("/console/static/", "/docs/"))}
    assert {path for method, path in calls if path in OPEN_PATHS} == OPEN_PATHS - files
    assert OPEN_PATHS - files == {"/", "/docs", "/healthz", "/readyz"}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.method} {call.path}")
def test_no_call_but_health_answers_a_stranger(shut: Door, call) -> None:
    path = call.path.format(topic="private", partition=0, base_offset=0, group="g")
    for token in (None, "tierlog_guess"):
        answer = shut.call(call.method, path, token)
        if call.path in OPEN_PATHS:
            assert answer.status_code == 200
            continue
        problem(answer, 401, "unauthorized")
        expected = 'Bearer realm="tierlog"' + (', error="invalid_token"' if token else "")
        assert answer.headers["www-authenticate"] == expected
        assert "TIERLOG_TOKEN" not in answer.text, "advice for one kind of client is the client's"


@pytest.mark.parametrize(
    "path",
    [
        "/docs/none.js",
        "/openapi.json",
        "/v1",
        "/v1/topics/x/y",
        "/..%2f",
        "/console",
        "/console/topics",
        "/console/static/none.js",
    ],
)
def test_strangers_do_not_learn_which_paths_there_are(shut: Door, path: str) -> None:
    problem(shut.call("GET", path), 401, "unauthorized")
    problem(shut.call("PURGE", path), 401, "unauthorized")


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer  x y", "Basic dXNlcjpwdw==", "Token x", "Bearer " + "x" * 5000]
)
def test_what_is_no_token_is_unauthorized(shut: Door, header: str) -> None:
    answer = shut.call("GET", "/v1/topics", headers={"authorization": header})
    problem(answer, 401, "unauthorized")


def test_the_scheme_is_read_in_any_case(door: Door) -> None:
    for scheme in ("bearer", "BEARER", "Bearer"):
        header = {"authorization": f"{scheme} {door.admin}"}
        assert door.call("GET", "/v1/topics", headers=header).status_code == 200


def test_scopes_allow_what_they_name_and_admin_all(door: Door) -> None:
    tokens = {scope: door.make(f"t-{scope}", scope) for scope in Scope}
    record = {"records": [{"value": "x"}]}
    commit = {"offsets": [{"topic": "private", "partition": 0, "offset": 0}]}
    calls = [
        ("GET", "/v1/topics", READ, {}),
        ("GET", records_path("private"), READ, {}),
        ("HEAD", records_path("private"), READ, {}),
        ("PUT", "/v1/groups/g/offsets", READ, {"json": commit}),
        ("GET", "/v1/storage", READ, {}),
        ("GET", "/openapi.json", READ, {}),
        ("POST", records_path("private"), PRODUCE, {"json": record}),
        ("POST", "/v1/producers", PRODUCE, {}),
        ("PATCH", "/v1/topics/private", ADMIN, {"json": {"config": {"retention.ms": 1000000}}}),
        ("POST", records_path("private")[: -len("records")] + "trim", ADMIN, {"json": TRIM}),
    ]
    for method, path, needed, rest in calls:
        for scope, token in tokens.items():
            answer = door.call(method, path, token, **rest)
            if scope in (needed, ADMIN):
                assert answer.status_code < 300, (method, path, scope, answer.text)
            elif method == "HEAD":
                assert answer.status_code == 403
            else:
                problem(answer, 403, "forbidden")
    for token in tokens.values():
        problem(door.call("GET", "/v1/nope", token), 404, "not-found")


TRIM = {"before_offset": 0}


def test_who_may_produce_can_make_a_producer(door: Door) -> None:
    """It asks how many partitions the topic has; of its records it learns nothing."""
    token = door.make("writer", PRODUCE, topics="orders.")
    with Client(door.url, token=token) as client, client.producer() as producer:
        assert producer.send("orders.eu", "value", key="key").result().offset == 0
    problem(door.call("GET", "/v1/topics/private", token), 403, "forbidden")
    problem(door.call("GET", records_path("orders.eu"), token), 403, "forbidden")


def test_a_client_goes_on_with_a_token_file_that_was_written_anew(
    door: Door, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(door.make("first", READ) + "\n")
    with Client(door.url, token_file=file) as client:
        assert client.describe_topic("private").name == "private"
        revoke_token(door.file, "first")
        with pytest.raises(Unauthorized):
            client.describe_topic("private")
        file.unlink()
        with pytest.raises(Unauthorized):
            client.describe_topic("private")
        file.write_text(door.make("second", READ))
        assert client.describe_topic("private").name == "private"


def test_several_scopes_are_all_there(door: Door) -> None:
    token = door.make("both", READ, PRODUCE)
    body = {"records": [{"value": "x"}]}
    assert door.call("POST", records_path("private"), token, json=body).status_code == 200
    assert door.call("GET", records_path("private"), token).status_code == 200
    problem(door.call("DELETE", "/v1/topics/private", token), 403, "forbidden")


def test_a_prefix_hides_all_other_topics(door: Door) -> None:
    token = door.make("orders", ADMIN, topics="orders.")
    get = "GET"
    names = door.call(get, "/v1/topics", token).json()["topics"]
    assert [one["name"] for one in names] == ["orders.eu", "orders.us"]
    assert door.call(get, records_path("orders.eu"), token).status_code == 200
    for topic in ("private", "no-such-topic", "order"):
        problem(door.call(get, f"/v1/topics/{topic}", token), 403, "forbidden")
        problem(door.call(get, records_path(topic), token), 403, "forbidden")
    for path in ("/v1/storage", "/metrics"):
        problem(door.call(get, path, token), 403, "forbidden")
    problem(door.call("POST", "/v1/topics", token, json={"name": "mine"}), 403, "forbidden")
    assert door.call("POST", "/v1/topics", token, json={"name": "orders.cn"}).status_code == 201


def test_a_prefix_holds_within_a_fetch_of_many_partitions(door: Door) -> None:
    token = door.make("orders", READ, topics="orders.")
    wanted = [{"topic": topic, "partition": 0} for topic in ("orders.eu", "private", "nothing")]
    answer = door.call("POST", "/v1/fetch", token, json={"partitions": wanted}).json()
    codes = [one.get("error", {}).get("code") for one in answer["partitions"]]
    assert codes == [None, "forbidden", "forbidden"]


def test_a_prefix_holds_within_groups(door: Door) -> None:
    token = door.make("orders", ADMIN, topics="orders.")

    def rows(*topics: str) -> dict[str, object]:
        return {"offsets": [{"topic": t, "partition": 0, "offset": 1} for t in topics]}

    put = "/v1/groups/{}/offsets"
    door.call("PUT", put.format("mixed"), door.admin, json=rows("orders.eu", "private"))
    door.call("PUT", put.format("theirs"), door.admin, json=rows("private"))
    problem(
        door.call("PUT", put.format("g"), token, json=rows("orders.eu", "private")),
        403,
        "forbidden",
    )
    assert door.call("PUT", put.format("g"), token, json=rows("orders.us")).status_code == 204
    groups = door.call("GET", "/v1/groups", token).json()["groups"]
    assert [one["group"] for one in groups] == ["g", "mixed"]
    shown = door.call("GET", "/v1/groups/mixed", token).json()["offsets"]
    assert [one["topic"] for one in shown] == ["orders.eu"]
    problem(door.call("GET", "/v1/groups/theirs", token), 404, "unknown-group")
    problem(door.call("DELETE", "/v1/groups/mixed", token), 403, "forbidden")
    problem(door.call("DELETE", "/v1/groups/theirs", token), 404, "unknown-group")
    assert door.call("DELETE", "/v1/groups/g", token).status_code == 204


def test_new_and_revoked_tokens_take_force_at_once(door: Door) -> None:
    token = door.make("late", READ)
    assert door.call("GET", "/v1/topics", token).status_code == 200
    revoke_token(door.file, "late")
    problem(door.call("GET", "/v1/topics", token), 401, "unauthorized")


def test_a_tail_ends_when_its_token_is_revoked(door: Door) -> None:
    token = door.make("follower", READ)
    headers = {"authorization": f"Bearer {token}"}
    url = f"{door.url}/v1/topics/private/partitions/0/tail"
    with httpx.stream("GET", url, headers=headers, timeout=10) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith(":")
        door.make("another", READ)  # a change of the file that is none of its own
        body = {"records": [{"value": "shown"}]}
        door.call("POST", records_path("private"), door.admin, json=body)
        assert "shown" in next(line for line in lines if line.startswith("data:"))
        revoke_token(door.file, "follower")
        body = {"records": [{"value": "hidden"}]}
        door.call("POST", records_path("private"), door.admin, json=body)
        rest = "\n".join(lines)
    assert "event: error" in rest
    assert '"code":"unauthorized"' in rest
    assert "hidden" not in rest


@pytest.mark.parametrize("of_many", [False, True])
def test_a_long_poll_shows_nothing_once_its_token_is_revoked(door: Door, of_many: bool) -> None:
    name = f"waiter-{of_many}"
    token = door.make(name, READ)
    body = {"partitions": [{"topic": "private", "partition": 0, "offset": "latest"}]}
    answers: list[httpx.Response] = []

    def wait() -> None:
        if of_many:
            answers.append(
                door.call("POST", "/v1/fetch", token, json={**body, "wait_ms": 20_000}, timeout=30)
            )
        else:
            path = records_path("private") + "?offset=latest&wait_ms=20000"
            answers.append(door.call("GET", path, token, timeout=30))

    waiting = threading.Thread(target=wait)
    waiting.start()
    until_waiting(lambda: door.call("GET", "/metrics", door.admin).text)
    revoke_token(door.file, name)
    records = {"records": [{"value": "hidden"}]}
    door.call("POST", records_path("private"), door.admin, json=records)
    waiting.join()
    assert "hidden" not in problem(answers[0], 401, "unauthorized")["detail"]


def test_a_file_that_vanished_or_cannot_be_read_lets_nobody_in(door: Door) -> None:
    whole = door.file.read_bytes()
    for broken in (b"", b"{", b'{"format_version":2,"tokens":[]}', whole[:-20]):
        door.file.write_bytes(broken)
        problem(door.call("GET", "/v1/topics", door.admin), 401, "unauthorized")
    door.file.unlink()
    problem(door.call("GET", "/v1/topics", door.admin), 401, "unauthorized")
    problem(door.call("GET", "/v1/topics"), 401, "unauthorized")
    door.file.write_bytes(whole)
    assert door.call("GET", "/v1/topics", door.admin).status_code == 200


def test_with_tokens_any_host_name_is_served(door: Door) -> None:
    foreign = {"host": "broker.example:8640", "origin": "https://console.example"}
    answer = door.call("GET", "/v1/topics", door.admin, headers=foreign)
    assert answer.status_code == 200
    problem(door.call("GET", "/v1/topics", headers=foreign), 401, "unauthorized")


def test_tokens_that_appear_are_required_from_then_on(tmp_path: Path) -> None:
    settings = HttpSettings(tokens_file=tmp_path / "new" / "tokens.json")
    with served_broker(tmp_path / "data", http=settings) as one:
        assert httpx.get(one.server.url + "/v1/topics").status_code == 200
        create_token(settings.tokens_file, "a", scopes=(READ,), now_ms=1)
        assert httpx.get(one.server.url + "/v1/topics").status_code == 401


def test_strangers_see_no_reasons_in_readyz(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Broker, "readiness", lambda _: (["private-0: lost its leadership"], ["store"])
    )
    told = door.call("GET", "/readyz", door.admin)
    untold = door.call("GET", "/readyz")
    assert (told.status_code, untold.status_code) == (503, 503)
    assert told.json()["reasons"]
    assert untold.json() == {"ready": False, "reasons": [], "degraded": []}


def test_the_file_holds_hashes_only_is_private_and_nothing_is_logged(door: Door) -> None:
    with structlog.testing.capture_logs() as lines:
        token = door.make("quiet", READ)
        door.call("GET", "/v1/topics", token)
        door.call("GET", "/v1/topics", "tierlog_wrong")
        door.call("GET", "/v1/topics/none", token)
    stored = door.file.read_text()
    assert token not in stored
    assert token.removeprefix("tierlog_") not in stored
    assert door.file.stat().st_mode & 0o777 == 0o600
    (entry,) = (one for one in read_entries(door.file) if one.name == "quiet")
    for line in lines:
        assert token not in str(line)
        assert "tierlog_wrong" not in str(line)
        assert entry.hash not in str(line)
    assert json.loads(stored)["format_version"] == 1


def test_one_client_may_ask_so_often_and_health_always_answers(tmp_path: Path) -> None:
    with (
        served_broker(tmp_path / "data", http=HttpSettings(client_requests_max=5)) as one,
        httpx.Client(base_url=one.server.url) as client,
    ):
        answers = [client.get("/v1/topics") for _ in range(30)]
        refused = [answer for answer in answers if answer.status_code == 429]
        assert answers[0].status_code == 200
        assert refused
        assert problem(refused[0], 429, "throttled")
        assert int(refused[0].headers["retry-after"]) >= 1
        assert client.get("/healthz").status_code == 200
