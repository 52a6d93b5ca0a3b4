"""Parallel maps for work that waits for the network, such as planning a read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, TypeVar

PARALLELISM: Final = 16

T = TypeVar("T")
R = TypeVar("R")


def map_ahead(work: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
    """Results of `work` in the order of `items`, with up to `PARALLELISM` calls in flight. Nested
    calls use threads of their own. An error is raised where its result would be.
    """
    with ThreadPoolExecutor(PARALLELISM, thread_name_prefix="tierlog-plan") as pool:
        pending: deque[Future[R]] = deque()
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) == PARALLELISM:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def parallel_map(work: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """As `map_ahead`, but returns a list, and starts no thread for a single item."""
    listed = list(items)
    return list(map(work, listed) if len(listed) < 2 else map_ahead(work, listed))
