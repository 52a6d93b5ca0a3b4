"""A call of the API, and the table that finds it by its path.

A `Call` is the single description of an endpoint: the router, the check of its parameters and the
OpenAPI document are all made from it.

Paths are matched by their raw parts, decoded one by one: an encoded slash never changes the path.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from api.http.access.scopes import OPEN_PATHS
from api.http.context import Context
from api.http.exchange import Exchange
from api.http.request.media_types import JSON
from api.http.responses import AnyResponse

Handler = Callable[[Context, Exchange], Awaitable[AnyResponse]]
TryHandler = Callable[[Context, Exchange], AnyResponse | None]

_KEPT_MAX: Final = 4096
_LONGEST_KEPT: Final = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A body by media type. `schema`: a struct, a tuple of them (one of), or a JSON schema.

    `listed_as`: the body is an object with a list of these under that name.
    """

    schema: Any
    listed_as: str = ""
    example: Any = None


@dataclass(frozen=True, slots=True)
class OtherResponse:
    """A response that is not a problem, with another status than the usual one."""

    description: str
    content: Mapping[str, Body] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """`query`: a struct of the parameters. `problems`: codes it may return besides the common ones.

    `try_handler` is asked before `handler`: the response if it waits for nothing, otherwise None.
    `only_reads`: a POST that changes nothing, whatever becomes of it.
    """

    method: str
    path: str
    handler: Handler
    try_handler: TryHandler | None = None
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

    @property
    def writes(self) -> bool:
        return self.method != "GET" and not self.only_reads

    @property
    def returns_json(self) -> bool:
        """And nothing else. Health, which is open, answers whatever is asked for."""
        return self.response.keys() == {JSON} and self.path not in OPEN_PATHS


class Found(NamedTuple):
    """What a path leads to. Shared by all its requests."""

    by_method: Mapping[str, Call]
    params: Mapping[str, str]


class CallTable:
    """Finds a path's calls by walking its parts."""

    def __init__(self, calls: Iterable[Call]) -> None:
        self.calls = tuple(calls)
        self._root = _Node()
        self._found: dict[bytes, Found] = {}  # the same paths are asked for again and again
        for call in self.calls:
            node = self._root
            for part in _template_parts(call.path):
                node = node.child(part)
            assert call.method not in node.calls, f"{call.method} {call.path} is there twice"
            node.calls[call.method] = call

    def find(self, raw_path: bytes) -> Found | None:
        """(the path's calls by method, its parameters), or None if there is no such path."""
        found = self._found.get(raw_path)
        if found is None:
            found = self._walk(raw_path)
            if found is not None and len(raw_path) <= _LONGEST_KEPT:
                if len(self._found) >= _KEPT_MAX:
                    self._found.clear()
                self._found[raw_path] = found
        return found

    def _walk(self, raw_path: bytes) -> Found | None:
        node = self._root
        params: dict[str, str] = {}
        for part in raw_path.decode("ascii", "replace").split("/")[1:]:
            text = unquote(part) if "%" in part else part
            following = node.fixed.get(text)
            if following is None:
                following = node.any
                if following is None or not text:
                    return None
                params[following.name] = text
            node = following
        return Found(node.calls, params) if node.calls else None


class _Node:
    __slots__ = ("any", "calls", "fixed", "name")

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.fixed: dict[str, _Node] = {}
        self.any: _Node | None = None
        self.calls: dict[str, Call] = {}

    def child(self, part: str) -> _Node:
        if not part.startswith("{"):
            return self.fixed.setdefault(part, _Node())
        if self.any is None:
            self.any = _Node(part[1:-1])
        assert self.any.name == part[1:-1], "one place of a path has one name"
        return self.any


def _template_parts(path: str) -> list[str]:
    return path.split("/")[1:]
