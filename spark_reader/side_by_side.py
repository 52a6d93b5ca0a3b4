"""Work that waits for the network, many at a time: what planning a read is."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

PARALLEL: Final = 16

T = TypeVar("T")
R = TypeVar("R")


def ahead(work: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
    """`work` of each item, in their order; up to `PARALLEL` of them wait for the network together,
    and those of a call within a call beside them. An error is raised where it is reached.
    """
    with ThreadPoolExecutor(PARALLEL, thread_name_prefix="tierlog-plan") as pool:
        begun: deque[Future[R]] = deque()
        for item in items:
            begun.append(pool.submit(work, item))
            if len(begun) == PARALLEL:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()


def in_parallel(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """All of it at once: as `ahead`, but a single item starts no thread."""
    listed = list(items)
    return list(map(work, listed) if len(listed) < 2 else ahead(work, listed))
