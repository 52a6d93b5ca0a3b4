"""Calls as methods of the two clients: what a call takes, its defaults and its docstring are said
once, in `calls` and `group_calls`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from inspect import Parameter, signature
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from tierlog.client.exchange import Call

P = ParamSpec("P")
T = TypeVar("T")


class Client(Protocol):
    def call(self, call: Call[T]) -> T: ...


class AsyncClient(Protocol):
    async def call(self, call: Call[T]) -> T: ...


def called(make: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    @wraps(make)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.call(make(*args, **kwargs))

    _show(method)
    return method


def awaited(
    make: Callable[P, Call[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    @wraps(make)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.call(make(*args, **kwargs))

    _show(method)
    return method


def _show(method: Any) -> None:
    """To `help` and notebooks: with `self`, and what the call's answer is read into."""
    made = signature(method)
    own = Parameter("self", Parameter.POSITIONAL_ONLY)
    answer = made.return_annotation.removeprefix("Call[").removesuffix("]")
    method.__signature__ = made.replace(
        parameters=[own, *made.parameters.values()], return_annotation=answer
    )
