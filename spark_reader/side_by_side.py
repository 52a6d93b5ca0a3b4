"""Work that waits for the network, many at a time: what planning a read is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

PARALLEL: Final = 16

T = TypeVar("T")
R = TypeVar("R")


def in_parallel(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """`work` of each item, in their order; `PARALLEL` of a call's wait for the network together,
    and those of a call within a call beside them.
    """
    listed = list(items)
    if len(listed) < 2:
        return list(map(work, listed))
    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="tierlog-plan") as pool:
        return list(pool.map(work, listed))
