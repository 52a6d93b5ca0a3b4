"""A call of the API, and the table that routes a path to it.

A `Call` is the single description of an endpoint: routing, validation of its parameters and the
OpenAPI document are all derived from it.

Paths are split before they are percent-decoded: an encoded slash never changes the path.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from fastapi import Response as FastApiResponse

from tierlog.api.http import strict_json
from tierlog.api.http.access.scopes import OPEN_PATHS
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.header_values import JSON, REGISTRY_JSON
from tierlog.api.http.responses import AnyResponse

Endpoint = Callable[..., Awaitable[FastApiResponse]]
Handler = Callable[[Context, Exchange], Coroutine[Any, Any, AnyResponse]]

# What the tables of calls share: paths, a body of bytes, and the problems of many calls.
TOPIC: Final = "/v1/topics/{topic}"
PARTITION: Final = TOPIC + "/partitions/{partition}"
BINARY: Final[Any] = {"type": "string", "format": "binary"}
NO_TOPIC: Final = ("unknown-topic",)
NO_PARTITION: Final = ("unknown-topic", "unknown-partition")
# In a cluster: the first to a direct client alone.
ELSEWHERE: Final = ("not-leader", "leader-unknown", "broker-unavailable")

_CACHED_PATHS_MAX: Final = 4096
_CACHED_PATH_BYTES_MAX: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A body of one media type. `schema`: a struct, a tuple of structs (any of them), or a JSON
    schema. `listed_as`: the body is an object with a list of these under that name. `of_items`:
    it is a stream, and this is the schema of each line or event.
    """

    schema: Any
    listed_as: str = ""
    of_items: bool = False
    example: Any = None


@dataclass(frozen=True, slots=True)
class OtherResponse:
    """A successful response with another status than the call's usual one."""

    description: str
    content: Mapping[str, Body] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """`query`: a struct of the parameters. `problems`: codes it may return besides the common ones.

    Either `endpoint`, a handler with FastAPI's dependencies, or `handler`, which is called without
    them: of calls that carry records, and of the console's views. Some of those are streams, which
    a route would have to collect, and the others are written like them.

    `immediate`: the handler is begun in the parser's callback, and calls `until_task` before it
    waits. `only_reads`: a POST that changes nothing.
    """

    method: str
    path: str
    endpoint: Endpoint | None = None
    handler: Handler | None = None
    summary: str
    tag: str
    description: str = ""
    query: type[Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Body] = field(default_factory=dict)
    status: int = 200
    response: Mapping[str, Body] = field(default_factory=dict)
    response_headers: Mapping[str, str] = field(default_factory=dict)
    other_responses: Mapping[int, OtherResponse] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    only_reads: bool = False
    immediate: bool = False

    @property
    def name(self) -> str:
        handler = self.endpoint or self.handler
        assert handler is not None, "a call has one of both"
        return handler.__name__

    @property
    def writes(self) -> bool:
        return self.method != "GET" and not self.only_reads

    @property
    def returns_only_json(self) -> bool:
        """By whatever name. Except for health, which ignores `Accept`."""
        is_json = JSON in self.response and self.response.keys() <= {JSON, REGISTRY_JSON}
        return is_json and self.path not in OPEN_PATHS


class Route(NamedTuple):
    """The calls of a path, and its parameters. Shared by all requests for the path."""

    by_method: Mapping[str, Call]
    params: Mapping[str, str]


class CallTable:
    """Routes by a tree of path segments."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self.calls = tuple(calls)
        self._root = _Node()
        self._cached: dict[bytes, Route] = {}  # the same few paths are requested again and again
        for call in self.calls:
            node = self._root
            for part in call.path.split("/")[1:]:
                node = node.child(part)
            assert call.method not in node.calls, f"duplicate call: {call.method} {call.path}"
            node.calls[call.method] = call

    def find_route(self, raw_path: bytes) -> Route | None:
        """None if no call has this path. Raises InvalidRequest if a parameter is not UTF-8."""
        route = self._cached.get(raw_path)
        if route is None:
            route = self._walk(raw_path)
            if route is not None and len(raw_path) <= _CACHED_PATH_BYTES_MAX:
                if len(self._cached) >= _CACHED_PATHS_MAX:
                    self._cached.clear()
                self._cached[raw_path] = route
        return route

    def _walk(self, raw_path: bytes) -> Route | None:
        node = self._root
        params: dict[str, str] = {}
        for part in raw_path.decode("ascii", "replace").split("/")[1:]:
            text = unquote(part) if "%" in part else part
            child = node.literals.get(text)
            if child is None:
                child = node.parameter
                if child is None or not text:
                    return None
                params[child.name] = _decoded(part, child.name)
            node = child
        return Route(node.calls, params) if node.calls else None


def _decoded(part: str, name: str) -> str:
    try:
        return unquote(part, errors="strict")
    except UnicodeDecodeError:
        strict_json.refuse_field(name, "not percent-encoded UTF-8")


class _Node:
    __slots__ = ("calls", "literals", "name", "parameter")

    def __init__(self, name: str = "") -> None:
        self.name = name  # of the path parameter
        self.literals: dict[str, _Node] = {}
        self.parameter: _Node | None = None
        self.calls: dict[str, Call] = {}

    def child(self, part: str) -> _Node:
        """The child for a segment of a path template, created if necessary."""
        if not part.startswith("{"):
            return self.literals.setdefault(part, _Node())
        if self.parameter is None:
            self.parameter = _Node(part[1:-1])
        assert self.parameter.name == part[1:-1], "one position in a path has one parameter name"
        return self.parameter
