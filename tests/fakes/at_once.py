"""Calls as the event loop makes them."""

from collections.abc import Callable
from typing import Any, TypeVar

from tierlog.host.waiting import Wait, WouldBlock

T = TypeVar("T")


def at_once(call: Callable[..., T], *args: Any, **kwargs: Any) -> T | None:
    """What the call returns without waiting; None if it would have to wait."""
    try:
        return call(*args, **kwargs, wait=Wait.NEVER)
    except WouldBlock:
        return None
