import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import structlog.testing

from tests.fakes.served_broker import served_broker
from tests.fakes.waiting import until_waiting
from tests.integration.http.conftest import problem, records_path
from tierlog.api.http.access.scopes import NEEDS, OPEN_PATHS
from tierlog.api.http.routes import CALLS
from tierlog.api.http.settings import HttpSettings
from tierlog.api.serving import tokens as tokens_file
from tierlog.api.serving.grants import Scope
from tierlog.api.serving.tokens import create_token, read_entries, revoke_token
from tierlog.broker.broker import Broker
from tierlog.client.client import Client
from tierlog.client.problems import Unauthorized

READ, PRODUCE, ADMIN = Scope.READ, Scope.PRODUCE, Scope.ADMIN


class SecuredBroker:
    """A broker with a tokens file, and clients with tokens."""

    def __init__(self, root: Path) -> None:
        self.file = root / "tokens.json"
        self.admin = self.create("admin", ADMIN)
        self.url = ""
        self.app: Any = None
        self.client: httpx2.Client

    def create(self, name: str, *scopes: Scope, topics: str = "") -> str:
        return create_token(self.file, name, scopes=scopes, topics=topics, now_ms=1)

    def call(self, method: str, path: str, token: str | None = None, **rest) -> httpx2.Response:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        headers |= rest.pop("headers", {})
        return self.client.request(method, self.url + path, headers=headers, **rest)


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[SecuredBroker]:
    with secured_broker(tmp_path) as secured:
        yield secured


@pytest.fixture(scope="module")
def shared_secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredBroker]:
    """Shared by the tests of unauthenticated requests."""
    with secured_broker(tmp_path_factory.mktemp("shared_secured")) as secured:
        yield secured


@contextmanager
def secured_broker(root: Path) -> Iterator[SecuredBroker]:
    secured = SecuredBroker(root)
    settings = HttpSettings(tokens_file=secured.file)
    with (
        pytest.MonkeyPatch.context() as patch,
        served_broker(root / "data", http=settings) as served,
        httpx2.Client() as secured.client,
    ):
        patch.setattr(tokens_file, "CHECK_INTERVAL_S", 0.0)  # a change takes effect immediately
        secured.app, secured.url = served.app, served.server.url
        for topic in ("orders.eu", "orders.us", "private"):
            made = secured.call("POST", "/v1/topics", secured.admin, json={"name": topic})
            assert made.status_code == 201
        yield secured


def test_every_call_is_in_the_table_of_scopes(secured: SecuredBroker) -> None:
    calls = {(call.method, call.path) for call in secured.app.table.calls}
    assert calls == set(NEEDS)
    files = {path for path in OPEN_PATHS if path.startswith(("/console/static/", "/docs/"))}
    assert {path for method, path in calls if path in OPEN_PATHS} == OPEN_PATHS - files
    assert OPEN_PATHS - files == {"/", "/docs", "/healthz", "/readyz"}


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.method} {call.path}")
def test_only_open_paths_respond_without_a_token(shared_secured: SecuredBroker, call) -> None:
    names = dict.fromkeys(("group", "pin", "member", "transactional_id", "subject", "guid"), "x")
    numbers = dict.fromkeys(("partition", "base_offset", "node", "schema_id", "version"), 1)
    path = call.path.format(topic="private", **names, **numbers)
    for token in (None, "tierlog_guess"):
        response = shared_secured.call(call.method, path, token)
        if call.path in OPEN_PATHS:
            assert response.status_code == 200
            continue
        problem(response, 401, "unauthorized")
        expected = 'Bearer realm="tierlog"' + (', error="invalid_token"' if token else "")
        assert response.headers["www-authenticate"] == expected
        assert "TIERLOG_TOKEN" not in response.text, "advice to Python clients is theirs to give"


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
def test_unknown_paths_are_401_without_a_token(shared_secured: SecuredBroker, path: str) -> None:
    problem(shared_secured.call("GET", path), 401, "unauthorized")
    problem(shared_secured.call("PURGE", path), 401, "unauthorized")


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer  x y", "Basic dXNlcjpwdw==", "Token x", "Bearer " + "x" * 5000]
)
def test_a_malformed_authorization_header_is_401(
    shared_secured: SecuredBroker, header: str
) -> None:
    response = shared_secured.call("GET", "/v1/topics", headers={"authorization": header})
    problem(response, 401, "unauthorized")


def test_the_authorization_scheme_is_case_insensitive(secured: SecuredBroker) -> None:
    for scheme in ("bearer", "BEARER", "Bearer"):
        header = {"authorization": f"{scheme} {secured.admin}"}
        assert secured.call("GET", "/v1/topics", headers=header).status_code == 200


def test_each_scope_allows_its_calls_and_admin_allows_all(secured: SecuredBroker) -> None:
    tokens = {scope: secured.create(f"t-{scope}", scope) for scope in Scope}
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
        ("POST", "/v1/transactions", PRODUCE, {"json": {"transactional_id": "t"}}),
        ("GET", "/v1/transactions/t", PRODUCE, {}),
        ("GET", "/v1/transactions", PRODUCE, {}),
        ("PATCH", "/v1/topics/private", ADMIN, {"json": {"config": {"retention.ms": 1000000}}}),
        ("POST", records_path("private")[: -len("records")] + "trim", ADMIN, {"json": TRIM}),
    ]
    for method, path, needed, rest in calls:
        for scope, token in tokens.items():
            response = secured.call(method, path, token, **rest)
            if scope in (needed, ADMIN):
                assert response.status_code < 300, (method, path, scope, response.text)
            elif method == "HEAD":
                assert response.status_code == 403
            else:
                problem(response, 403, "forbidden")
    for token in tokens.values():
        problem(secured.call("GET", "/v1/nope", token), 404, "not-found")


TRIM = {"before_offset": 0}


def test_the_produce_scope_suffices_for_a_producer(secured: SecuredBroker) -> None:
    """It may describe its topic, but not read the records."""
    token = secured.create("writer", PRODUCE, topics="orders.")
    with Client(secured.url, token=token) as client, client.producer() as producer:
        assert producer.send("orders.eu", "value", key="key").result().offset == 0
    problem(secured.call("GET", "/v1/topics/private", token), 403, "forbidden")
    problem(secured.call("GET", records_path("orders.eu"), token), 403, "forbidden")


def test_a_client_rereads_a_rotated_token_file(secured: SecuredBroker, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(secured.create("first", READ) + "\n")
    with Client(secured.url, token_file=file) as client:
        assert client.describe_topic("private").name == "private"
        revoke_token(secured.file, "first")
        with pytest.raises(Unauthorized):
            client.describe_topic("private")
        file.unlink()
        with pytest.raises(Unauthorized):
            client.describe_topic("private")
        file.write_text(secured.create("second", READ))
        assert client.describe_topic("private").name == "private"


def test_a_token_may_have_several_scopes(secured: SecuredBroker) -> None:
    token = secured.create("both", READ, PRODUCE)
    body = {"records": [{"value": "x"}]}
    assert secured.call("POST", records_path("private"), token, json=body).status_code == 200
    assert secured.call("GET", records_path("private"), token).status_code == 200
    problem(secured.call("DELETE", "/v1/topics/private", token), 403, "forbidden")


def test_a_topic_prefix_hides_all_other_topics(secured: SecuredBroker) -> None:
    token = secured.create("orders", ADMIN, topics="orders.")
    get = "GET"
    names = secured.call(get, "/v1/topics", token).json()["topics"]
    assert [one["name"] for one in names] == ["orders.eu", "orders.us"]
    assert secured.call(get, records_path("orders.eu"), token).status_code == 200
    for topic in ("private", "no-such-topic", "order"):
        problem(secured.call(get, f"/v1/topics/{topic}", token), 403, "forbidden")
        problem(secured.call(get, records_path(topic), token), 403, "forbidden")
    for path in ("/v1/storage", "/metrics"):
        problem(secured.call(get, path, token), 403, "forbidden")
    problem(secured.call("POST", "/v1/topics", token, json={"name": "mine"}), 403, "forbidden")
    assert secured.call("POST", "/v1/topics", token, json={"name": "orders.cn"}).status_code == 201


def test_a_topic_prefix_applies_to_each_partition_of_a_fetch(secured: SecuredBroker) -> None:
    token = secured.create("orders", READ, topics="orders.")
    wanted = [{"topic": topic, "partition": 0} for topic in ("orders.eu", "private", "nothing")]
    response = secured.call("POST", "/v1/fetch", token, json={"partitions": wanted}).json()
    codes = [one.get("error", {}).get("code") for one in response["partitions"]]
    assert codes == [None, "forbidden", "forbidden"]


def test_a_topic_prefix_applies_to_group_offsets(secured: SecuredBroker) -> None:
    token = secured.create("orders", ADMIN, topics="orders.")

    def rows(*topics: str) -> dict[str, object]:
        return {"offsets": [{"topic": t, "partition": 0, "offset": 1} for t in topics]}

    put = "/v1/groups/{}/offsets"
    secured.call("PUT", put.format("mixed"), secured.admin, json=rows("orders.eu", "private"))
    secured.call("PUT", put.format("theirs"), secured.admin, json=rows("private"))
    problem(
        secured.call("PUT", put.format("g"), token, json=rows("orders.eu", "private")),
        403,
        "forbidden",
    )
    assert secured.call("PUT", put.format("g"), token, json=rows("orders.us")).status_code == 204
    groups = secured.call("GET", "/v1/groups", token).json()["groups"]
    assert [one["group"] for one in groups] == ["g", "mixed"]
    shown = secured.call("GET", "/v1/groups/mixed", token).json()["offsets"]
    assert [one["topic"] for one in shown] == ["orders.eu"]
    problem(secured.call("GET", "/v1/groups/theirs", token), 404, "unknown-group")
    problem(secured.call("DELETE", "/v1/groups/mixed", token), 403, "forbidden")
    problem(secured.call("DELETE", "/v1/groups/theirs", token), 404, "unknown-group")
    assert secured.call("DELETE", "/v1/groups/g", token).status_code == 204


def test_a_topic_prefix_applies_to_transactional_ids(secured: SecuredBroker) -> None:
    """Or its holder could fence the producers of others."""
    both = secured.create("both", READ, PRODUCE, topics="orders.")
    begun = {}
    for name, token in (("orders.etl", both), ("theirs", secured.admin)):
        body = {"transactional_id": name}
        begun[name] = secured.call("POST", "/v1/transactions", token, json=body).json()
    theirs = {"transactional_id": "theirs"}
    problem(secured.call("POST", "/v1/transactions", both, json=theirs), 403, "forbidden")
    problem(secured.call("GET", "/v1/transactions/theirs", both), 403, "forbidden")
    identity = {name: begun["theirs"][name] for name in ("producer_id", "producer_epoch")}
    for verb in ("commit", "abort"):
        path = f"/v1/transactions/theirs/{verb}"
        problem(secured.call("POST", path, both, json=identity), 403, "forbidden")
    headers = {
        "transactional-id": "theirs",
        **{name.replace("_", "-"): str(value) for name, value in identity.items()},
        "producer-sequence": "0",
    }
    record = {"json": {"records": [{"value": "x"}]}, "headers": headers}
    problem(secured.call("POST", records_path("orders.eu"), both, **record), 403, "forbidden")
    listed = secured.call("GET", "/v1/transactions", both).json()["transactions"]
    assert [one["transactional_id"] for one in listed] == ["orders.etl"]
    mine = {name: begun["orders.etl"][name] for name in identity}
    offsets = [{"topic": "private", "partition": 0, "offset": 0}]
    body = {**mine, "group": "g", "offsets": offsets}
    path = "/v1/transactions/orders.etl/offsets"
    problem(secured.call("POST", path, both, json=body), 403, "forbidden")
    body["offsets"] = [{"topic": "orders.eu", "partition": 0, "offset": 0}]
    assert secured.call("POST", path, both, json=body).status_code == 204
    writer = secured.create("writes-only", PRODUCE, topics="orders.")
    problem(secured.call("POST", path, writer, json=body), 403, "forbidden")


def test_created_and_revoked_tokens_take_effect_immediately(secured: SecuredBroker) -> None:
    token = secured.create("late", READ)
    assert secured.call("GET", "/v1/topics", token).status_code == 200
    revoke_token(secured.file, "late")
    problem(secured.call("GET", "/v1/topics", token), 401, "unauthorized")


def test_a_tail_ends_when_its_token_is_revoked(secured: SecuredBroker) -> None:
    token = secured.create("follower", READ)
    headers = {"authorization": f"Bearer {token}"}
    url = f"{secured.url}/v1/topics/private/partitions/0/tail"
    with httpx2.stream("GET", url, headers=headers, timeout=10) as response:
        lines = response.iter_lines()
        assert next(lines).startswith(":")
        secured.create("another", READ)  # an unrelated change of the file
        body = {"records": [{"value": "shown"}]}
        secured.call("POST", records_path("private"), secured.admin, json=body)
        assert "shown" in next(line for line in lines if line.startswith("data:"))
        revoke_token(secured.file, "follower")
        body = {"records": [{"value": "hidden"}]}
        secured.call("POST", records_path("private"), secured.admin, json=body)
        rest = "\n".join(lines)
    assert "event: error" in rest
    assert '"code":"unauthorized"' in rest
    assert "hidden" not in rest


@pytest.mark.parametrize("of_many", [False, True])
def test_a_long_poll_is_401_once_its_token_is_revoked(
    secured: SecuredBroker, of_many: bool
) -> None:
    name = f"waiter-{of_many}"
    token = secured.create(name, READ)
    body = {"partitions": [{"topic": "private", "partition": 0, "offset": "latest"}]}
    responses: list[httpx2.Response] = []

    def wait() -> None:
        if of_many:
            responses.append(
                secured.call(
                    "POST", "/v1/fetch", token, json={**body, "wait_ms": 20_000}, timeout=30
                )
            )
        else:
            path = records_path("private") + "?offset=latest&wait_ms=20000"
            responses.append(secured.call("GET", path, token, timeout=30))

    waiting = threading.Thread(target=wait)
    waiting.start()
    until_waiting(lambda: secured.call("GET", "/metrics", secured.admin).text)
    revoke_token(secured.file, name)
    records = {"records": [{"value": "hidden"}]}
    secured.call("POST", records_path("private"), secured.admin, json=records)
    waiting.join()
    assert "hidden" not in problem(responses[0], 401, "unauthorized")["detail"]


def test_a_missing_or_corrupt_tokens_file_refuses_everyone(secured: SecuredBroker) -> None:
    whole = secured.file.read_bytes()
    for broken in (b"", b"{", b'{"format_version":2,"tokens":[]}', whole[:-20]):
        secured.file.write_bytes(broken)
        problem(secured.call("GET", "/v1/topics", secured.admin), 401, "unauthorized")
    secured.file.unlink()
    problem(secured.call("GET", "/v1/topics", secured.admin), 401, "unauthorized")
    problem(secured.call("GET", "/v1/topics"), 401, "unauthorized")
    secured.file.write_bytes(whole)
    assert secured.call("GET", "/v1/topics", secured.admin).status_code == 200


def test_any_host_name_is_accepted_with_a_tokens_file(secured: SecuredBroker) -> None:
    foreign = {"host": "broker.example:8640", "origin": "https://console.example"}
    response = secured.call("GET", "/v1/topics", secured.admin, headers=foreign)
    assert response.status_code == 200
    problem(secured.call("GET", "/v1/topics", headers=foreign), 401, "unauthorized")


def test_a_tokens_file_created_later_is_enforced(tmp_path: Path) -> None:
    settings = HttpSettings(tokens_file=tmp_path / "new" / "tokens.json")
    with served_broker(tmp_path / "data", http=settings) as served:
        assert httpx2.get(served.server.url + "/v1/topics").status_code == 200
        create_token(settings.tokens_file, "a", scopes=(READ,), now_ms=1)
        assert httpx2.get(served.server.url + "/v1/topics").status_code == 401


def test_readyz_shows_reasons_only_to_tokens_for_all_topics(
    secured: SecuredBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Broker, "readiness", lambda _: (["private-0: lost its leadership"], ["store"])
    )
    admins = secured.call("GET", "/readyz", secured.admin)
    assert admins.status_code == 503
    assert admins.json()["reasons"]
    for token in (None, secured.create("orders", ADMIN, topics="orders.")):
        response = secured.call("GET", "/readyz", token)
        assert response.status_code == 503
        assert response.json() == {"ready": False, "reasons": [], "degraded": []}


def test_the_tokens_file_holds_only_hashes_and_tokens_are_never_logged(
    secured: SecuredBroker,
) -> None:
    with structlog.testing.capture_logs() as lines:
        token = secured.create("quiet", READ)
        secured.call("GET", "/v1/topics", token)
        secured.call("GET", "/v1/topics", "tierlog_wrong")
        secured.call("GET", "/v1/topics/none", token)
    stored = secured.file.read_text()
    assert token not in stored
    assert token.removeprefix("tierlog_") not in stored
    assert secured.file.stat().st_mode & 0o777 == 0o600
    (entry,) = (one for one in read_entries(secured.file) if one.name == "quiet")
    for line in lines:
        assert token not in str(line)
        assert "tierlog_wrong" not in str(line)
        assert entry.hash not in str(line)
    assert json.loads(stored)["format_version"] == 1


def test_a_client_beyond_its_request_rate_is_throttled_except_for_health(tmp_path: Path) -> None:
    with (
        served_broker(tmp_path / "data", http=HttpSettings(client_requests_max=5)) as served,
        httpx2.Client(base_url=served.server.url) as client,
    ):
        responses = [client.get("/v1/topics") for _ in range(30)]
        refused = [response for response in responses if response.status_code == 429]
        assert responses[0].status_code == 200
        assert refused
        assert problem(refused[0], 429, "throttled")
        assert int(refused[0].headers["retry-after"]) >= 1
        assert client.get("/healthz").status_code == 200
