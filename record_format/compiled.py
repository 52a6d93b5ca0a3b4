"""Compiles kernels with numba, and decides whether their machine code is cached on disk.

* numba caches on disk if it finds a folder. Whether it does is checked here, once per process: for
  code in a zip numba picks a folder in the user's home, without checking that it is writable.
* numba invalidates a cached kernel when the kernel's own file changes. What a kernel uses from
  other files is compiled into it, so a checksum of those files (`_INLINED_FROM`) is part of its
  cached name.
* numba does not fsync its cache: after a power failure there may be empty files, on which it would
  fail forever. They are removed.

Only kernel modules import this one: numba takes a second to import.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final
from zlib import crc32

from numba import config, njit

if config.DISABLE_JIT:
    raise ImportError("kernels run only if compiled: unset NUMBA_DISABLE_JIT")

_INLINED_FROM: Final = ("batch", "kernel_bytes", "native_walk", "record_walk")


def compiled(*signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Numba's `njit`: compiles at definition if given a signature, else at the first call.

    The kernel runs without the GIL unless `options` say otherwise.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        function.__qualname__ += _version()
        return njit(*signature, **{"cache": has_cache(), "nogil": True, **options})(function)

    return decorate


@cache
def has_cache() -> bool:
    """Whether machine code can be cached on disk; otherwise each process compiles its kernels."""
    try:
        folder = Path(njit(cache=True)(_probe).stats.cache_path)
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
        for kept in folder.glob("*.nb[ic]"):
            if not kept.stat().st_size:
                kept.unlink(missing_ok=True)
    except (RuntimeError, OSError):  # RuntimeError: numba found no folder
        return False
    return True


def _probe() -> None:
    """Never called: only asks numba where it would cache a function of this file."""


@cache
def _version() -> str:
    sources = (pkgutil.get_data(__package__, f"{name}.py") or b"" for name in _INLINED_FROM)
    return f"_{crc32(b''.join(sources)):08x}"
