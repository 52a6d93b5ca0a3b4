"""Calls as methods of both clients, with the parameters, defaults and docstrings of `calls` and
`group_calls`.
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


def sync_method(make: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    @wraps(make)
    def method(self: Client, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.call(make(*args, **kwargs))

    _set_signature(method)
    return method


def async_method(
    make: Callable[P, Call[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    @wraps(make)
    async def method(self: AsyncClient, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.call(make(*args, **kwargs))

    _set_signature(method)
    return method


def _set_signature(method: Any) -> None:
    """What `help` and notebooks show: with `self`, and the call's result as the return type."""
    of_call = signature(method)
    self_parameter = Parameter("self", Parameter.POSITIONAL_ONLY)
    result = of_call.return_annotation.removeprefix("Call[").removesuffix("]")
    method.__signature__ = of_call.replace(
        parameters=[self_parameter, *of_call.parameters.values()], return_annotation=result
    )
