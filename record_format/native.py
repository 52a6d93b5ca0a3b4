"""Switches to the compiled implementations, if numba and numpy are installed.

Nothing depends on it: until `load` is called, or without numba, the plain implementations return
the same results, more slowly. They take a second and 120 MB to load, which a process that has
little to walk can do without.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Final

from tierlog.record_format import batch_runs, key_filter, record_walk
from tierlog.record_format.batch import MIN_RECORD_SIZE, Buffer
from tierlog.record_format.record_walk import Walk, WalkRequest, walk_plain

BUSY_BYTES: Final = 1 << 20  # some 30 ms of work for the plain walk
_PACKAGES: Final = ("numba", "numpy")


def is_available() -> bool:
    """Whether the optional packages are installed (`pip install tierlog[arrow]`)."""
    return all(importlib.util.find_spec(name) is not None for name in _PACKAGES)


def can_compile() -> bool:
    """Whether compiling kernels pays off: numba is there, its compiler is not disabled, and it can
    cache their machine code on disk.

    Without a cache, every process would compile them again.
    """
    if not is_available():
        return False
    from numba import config

    if config.DISABLE_JIT:
        return False
    from tierlog.record_format.compiled import has_cache

    return has_cache()


def call_when_busy(load: Callable[[], None]) -> None:
    """Call `load` once, when the plain walk has read BUSY_BYTES of records; in the thread that
    walked, which waits for it.
    """
    walked_bytes, once = 0, iter((load,))

    def walk_and_count(records: Buffer, request: WalkRequest) -> Walk:
        nonlocal walked_bytes
        walked_bytes += len(records)
        if walked_bytes >= BUSY_BYTES:
            record_walk.use(walk_plain)
            for call in once:  # of many threads, one gets it
                call()
        return walk_plain(records, request)

    record_walk.use(walk_and_count)


def load() -> bool:
    """Import, warm up and switch to the compiled implementations; False if that is not possible.

    Takes about a second, or more if nothing is cached on disk yet: call it once, in a thread.
    """
    if not can_compile():
        return False
    from tierlog.record_format.record_kernel import summarize_native, walk_native

    smallest = bytes((2 * MIN_RECORD_SIZE - 2, 0, 0, 0, 1, 1, 0))
    warm = walk_native(smallest, WalkRequest(1, 0, 0, dense=True, with_columns=False))
    assert not warm.problem, warm
    record_walk.use(walk_native)
    batch_runs.use_summary(summarize_native)
    key_filter.use(_make_filter)
    return True


def _make_filter(batches: Buffer, size_bytes: int | None) -> bytes | None:
    """`make_filter_native`, which only those who upload have to load."""
    from tierlog.record_format.filter_kernel import make_filter_native

    return make_filter_native(batches, size_bytes)
