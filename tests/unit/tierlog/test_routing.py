"""Which broker a request goes to, without one."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tierlog.client.exchange import ConnectionLost, NotSent, Outcome, Steps
from tierlog.client.routing import AVOIDED_S, LEADERS_MAX, Routes
from tierlog.client.wire import Request, Response, Subject

A, B, C = "http://a", "http://b", "http://c"
OK = Response(200, {}, b"{}")
FETCH = Request("GET", "/v1/topics/t/partitions/0/records", subject=Subject("t", 0))
TOPICS = Request("GET", "/v1/topics")


def refusal(status: int, code: str, **members: object) -> Response:
    return Response(status, {}, json.dumps({"code": code, **members}).encode())


def led_by(url: str) -> Response:
    return refusal(421, "not-leader", leader={"node_id": 1, "url": url})


def once(request: Request) -> Steps[Outcome]:
    return (yield request)


def went(
    routes: Routes, request: Request, answer: Callable[[Request], Outcome]
) -> tuple[list[str], Outcome]:
    """Where a request was sent, and its outcome."""
    steps, outcome, servers = routes.follow(once(request)), None, list[str]()
    while True:
        try:
            step = steps.send(outcome)
        except StopIteration as done:
            return servers, done.value
        assert isinstance(step, Request)
        is_direct = step.headers.get("tierlog-route") == "direct"
        servers.append(step.server + (" directly" if is_direct else ""))
        outcome = answer(step)


def answers(**known: Outcome) -> Callable[[Request], Outcome]:
    return lambda request: known[request.server.removeprefix("http://")]


@pytest.fixture
def routes() -> Routes:
    return Routes([A, B, C], clock=lambda: 0.0)


def test_with_one_server_nothing_is_routed() -> None:
    assert went(Routes([A]), FETCH, lambda _: OK) == ([""], OK)


def test_a_leader_is_learnt_once_and_kept(routes: Routes) -> None:
    replies = answers(a=led_by(C + "/"), c=OK)
    assert went(routes, FETCH, replies) == ([f"{A} directly", f"{C} directly"], OK)
    assert went(routes, FETCH, replies) == ([f"{C} directly"], OK)
    replies = answers(a=OK)
    assert went(routes, TOPICS, replies)[0] == [A]


def test_after_a_move_the_one_that_led_names_the_next(routes: Routes) -> None:
    went(routes, FETCH, answers(a=led_by(C), c=OK))
    assert went(routes, FETCH, answers(c=led_by(B), b=OK))[0] == [f"{C} directly", f"{B} directly"]


def test_a_server_that_cannot_be_reached_is_left_for_the_next(routes: Routes) -> None:
    assert went(routes, TOPICS, answers(a=NotSent("refused"), b=OK))[0] == [A, B]
    assert went(routes, TOPICS, answers(b=OK))[0] == [B]


def test_all_servers_are_tried_and_then_it_is_over(routes: Routes) -> None:
    servers, outcome = went(routes, TOPICS, lambda _: NotSent("refused"))
    assert set(servers) == {A, B, C}
    assert outcome == NotSent("refused")


def test_a_leader_that_cannot_be_reached_is_asked_through_another_for_a_while() -> None:
    now_s = 0.0
    routes = Routes([A, B], clock=lambda: now_s)
    unreachable = answers(a=led_by(C), c=NotSent("no route"))
    went(routes, FETCH, answers(a=led_by(C), c=OK))
    servers, _ = went(routes, FETCH, lambda one: OK if one.server == A else NotSent("no route"))
    assert servers == [f"{C} directly", A], "which passes it on"
    now_s += AVOIDED_S
    servers, _ = went(routes, FETCH, lambda one: OK if not one.headers else unreachable(one))
    assert servers == [f"{A} directly", f"{C} directly", A]


def test_a_lost_connection_is_for_the_retries_to_judge(routes: Routes) -> None:
    lost = ConnectionLost("reset")
    assert went(routes, FETCH, lambda _: lost) == ([f"{A} directly"], lost)
    assert went(routes, FETCH, lambda _: OK)[0] == [f"{B} directly"]


@pytest.mark.parametrize("code", ["leader-unknown", "shutting-down"])
def test_a_refusal_by_who_leads_no_more_is_retried_elsewhere(routes: Routes, code: str) -> None:
    servers, outcome = went(routes, FETCH, lambda _: refusal(503, code))
    assert servers == [f"{A} directly"]
    assert isinstance(outcome, Response)
    assert went(routes, FETCH, lambda _: OK)[0] == [f"{B} directly"]


def test_brokers_that_name_each_other_do_not_go_on_for_ever(routes: Routes) -> None:
    servers, outcome = went(routes, FETCH, answers(a=led_by(B), b=led_by(A)))
    assert len(servers) < 10
    assert isinstance(outcome, Response)


def test_a_token_for_https_is_not_sent_to_http() -> None:
    routes = Routes(["https://a", "https://b"])
    assert went(routes, FETCH, lambda _: led_by("http://a"))[0] == ["https://a directly"]


def test_what_is_remembered_is_bounded(routes: Routes) -> None:
    for number in range(LEADERS_MAX + 10):
        request = FETCH._replace(subject=Subject("t", number))
        went(routes, request, lambda one: led_by(B) if one.server == A else OK)
    assert len(routes._leaders) <= LEADERS_MAX
