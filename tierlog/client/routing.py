"""Which broker of a cluster a request goes to. No sockets.

* With one server, everything goes there, and that broker passes on what another leads.
* With several, what is about a partition goes to its leader: the broker that was asked names it
  (421), and so does one that led it before. The rest goes to one server, until it fails.
* A leader that cannot be reached is not asked: the servers that were given pass requests on.
* What is known of leaders only saves time. It is bounded, and may be wrong.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar
from urllib.parse import urlsplit

from tierlog.client.exchange import ConnectionLost, NotSent, Outcome, Steps
from tierlog.client.problems import parse_problem
from tierlog.client.wire import Request, Response

T = TypeVar("T")

LEADERS_MAX: Final = 10_000
HOPS_MAX: Final = 4  # of one request: a leader may have handed over since, and names the next
AVOIDED_S: Final = 30.0  # a leader that could not be reached
_DIRECT: Final = {"tierlog-route": "direct"}
_NOT_HERE: Final = frozenset(("leader-unknown", "shutting-down", "starting"))

Place = tuple[str, int]


class Routes:
    """Thread-safe: each change is one step. `servers`: without a slash at the end."""

    def __init__(
        self, servers: Sequence[str], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._servers, self._clock = tuple(servers), clock
        self._turn = 0
        self._leaders: dict[Place, str] = {}
        self._avoided: dict[str, float] = {}

    def follow(self, steps: Steps[T]) -> Steps[T]:
        """The same steps, with each request on its way to the right broker."""
        if len(self._servers) == 1:
            return (yield from steps)
        outcome: Outcome = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as done:
                result: T = done.value
                return result
            if isinstance(step, Request):
                outcome = yield from self._send(step)
            else:
                outcome = yield step

    def _send(self, request: Request) -> Steps[Outcome]:
        left = HOPS_MAX + len(self._servers)
        while True:
            routed, left = self._routed(request), left - 1
            outcome = yield routed
            if not self._learn(routed, outcome) or not left:
                return outcome

    def _routed(self, request: Request) -> Request:
        subject = request.subject
        if not subject.topic or subject.partition < 0 or self._is_roundabout(request):
            return request._replace(server=self._server)
        leader = self._leaders.get(subject[:2])
        return request._replace(
            server=leader or self._server, headers={**request.headers, **_DIRECT}
        )

    def _is_roundabout(self, request: Request) -> bool:
        """Whether a server has to pass it on: its leader cannot be reached from here."""
        now_s = self._clock()
        avoided = {url: until_s for url, until_s in self._avoided.items() if until_s > now_s}
        self._avoided = avoided
        return bool(avoided) and self._leaders.get(request.subject[:2]) in {None, *avoided}

    @property
    def _server(self) -> str:
        return self._servers[self._turn % len(self._servers)]

    def _learn(self, sent: Request, outcome: Outcome) -> bool:
        """Whether to send the request again at once."""
        if isinstance(outcome, Response):
            return outcome.status in (421, 503) and self._learn_refusal(sent, outcome)
        if isinstance(outcome, (NotSent, ConnectionLost)):
            return self._learn_loss(sent, is_sent=isinstance(outcome, ConnectionLost))
        return False

    def _learn_refusal(self, sent: Request, response: Response) -> bool:
        problem = parse_problem(response.body)
        if problem is None:
            return False
        place = sent.subject[:2]
        leader = problem.leader.get("url") if problem.code == "not-leader" else None
        if isinstance(leader, str) and self._may_follow(leader):
            if len(self._leaders) >= LEADERS_MAX:
                self._leaders.clear()
            self._leaders[place] = leader.rstrip("/")
            return True
        if problem.code in _NOT_HERE and problem.outcome != "unknown":
            self._leaders.pop(place, None)
            self._take_another(sent.server)
        return False

    def _may_follow(self, leader: str) -> bool:
        """A token that is given to https:// is not sent to http://."""
        return urlsplit(leader).scheme == "https" or urlsplit(self._server).scheme == "http"

    def _learn_loss(self, sent: Request, *, is_sent: bool) -> bool:
        place = sent.subject[:2]
        if self._leaders.get(place) == sent.server:
            self._avoided = {**self._avoided, sent.server: self._clock() + AVOIDED_S}
            self._leaders.pop(place)
        self._take_another(sent.server)
        return not is_sent

    def _take_another(self, server: str) -> None:
        if self._server == server:
            self._turn += 1
