"""How kernels are compiled, and where their machine code is kept.

* numba keeps it on disk if it finds a folder. Whether there is one is asked here, once: for code in
  a zip numba takes the user's own folder, without checking that it is writable.
* numba forgets what it kept when the kernel's own file changes. What a kernel takes from another
  file is compiled into it, so those files (`_TAKEN_FROM`) are part of the name under which it is
  kept.
* numba does not sync: a power cut may leave empty files, on which it would fail for ever. They are
  removed.

Only modules of kernels import this one: numba takes a second to import.
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
    raise ImportError("kernels are for numba's compiler alone: unset NUMBA_DISABLE_JIT")

_TAKEN_FROM: Final = ("batch", "kernel_bytes", "native_walk", "record_walk")


def compiled(*signature: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Numba's `njit`: compiles at definition if there is a signature, else at the first call. It
    runs without the GIL unless `options` say otherwise.
    """

    def compile_it(function: Callable[..., Any]) -> Any:
        function.__qualname__ += _version()
        return njit(*signature, **{"cache": has_cache(), "nogil": True, **options})(function)

    return compile_it


@cache
def has_cache() -> bool:
    """Whether machine code can be kept: if not, each process compiles again what it calls."""
    try:
        folder = Path(njit(cache=True)(_any_function).stats.cache_path)
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
        for kept in folder.glob("*.nb[ic]"):
            if not kept.stat().st_size:
                kept.unlink(missing_ok=True)
    except (RuntimeError, OSError):  # RuntimeError: numba found none
        return False
    return True


def _any_function() -> None:
    """For numba to look where it would keep it."""


@cache
def _version() -> str:
    sources = (pkgutil.get_data(__package__, f"{name}.py") or b"" for name in _TAKEN_FROM)
    return f"_{crc32(b''.join(sources)):08x}"
