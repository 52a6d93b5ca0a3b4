"""Compiles kernels with numba, and gives them their tools: pointers, varints, integers, headers.

* numba caches on disk if it finds a folder. Whether it does is checked here, once per process: for
  code in a zip numba picks a folder in the user's home, without checking that it is writable.
* numba invalidates a cached kernel when the kernel's own file changes. What a kernel uses from
  other files is compiled into it, so a checksum of those files (`_INLINED_FROM`) is part of its
  cached name.
* numba does not fsync its cache: after a power failure there may be empty files, on which it would
  fail forever. They are removed.
* numba counts the references of an array wherever a function takes it: two locked instructions per
  call, a third of the time in loops that call once per varint. A pointer is not reference-counted,
  and its indexes are not tested for being negative. The caller keeps the array alive and checks
  every index itself.

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

import numpy as np
from numba import config, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from tierlog.record_format.batch import (
    CODEC_MASK,
    HEADER_SIZE,
    LOG_OVERHEAD,
    MAGIC,
    MIN_RECORD_SIZE,
)

if config.DISABLE_JIT:
    raise ImportError("kernels run only if compiled: unset NUMBA_DISABLE_JIT")

_INLINED_FROM: Final = (
    "batch",
    "column_kernel",
    "compiled",
    "key_filter",
    "key_kernel",
    "record_kernel",
    "record_walk",
)


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


BYTES: Final = types.CPointer(types.uint8)
_I64: Final = types.int64
READ_ONLY: Final = types.Array(types.uint8, 1, "C", readonly=True)


@intrinsic
def pointer_to(typing_context, array):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """A pointer to the first element of a contiguous array."""
    signature = types.CPointer(array.dtype)(array)

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return context.make_array(signature.args[0])(context, builder, arguments[0]).data

    return signature, generate


@intrinsic
def copy_bytes(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    typing_context,  # noqa: ARG001
    target,
    target_at,  # noqa: ARG001
    source,
    source_at,  # noqa: ARG001
    size,  # noqa: ARG001
):
    """C's memcpy between pointers. A loop would be slower: numba cannot rule out an overlap."""
    signature = types.void(target, types.int64, source, types.int64, types.int64)

    def generate(context, builder, _signature, arguments):  # type: ignore[no-untyped-def]
        to, to_at, origin, origin_at, count = arguments
        cgutils.raw_memcpy(
            builder, builder.gep(to, [to_at]), builder.gep(origin, [origin_at]), count, 1
        )
        return context.get_dummy_value()

    return signature, generate


_NUMBER: Final = types.UniTuple(_I64, 2)(BYTES, _I64, _I64)


@compiled(_NUMBER)
def varint(source, at, end):  # type: ignore[no-untyped-def]
    """(32-bit zig-zag value, position after it); the position is -1 if truncated or too long."""
    raw = np.int64(0)
    shift = 0
    while at < end and shift < 35:
        byte = np.int64(source[at])
        at += 1
        raw |= (byte & 0x7F) << shift
        if byte < 0x80:
            if raw >> 32:
                break
            return (raw >> 1) ^ -(raw & 1), at
        shift += 7
    return np.int64(0), np.int64(-1)


@compiled(_NUMBER)
def varlong(source, at, end):  # type: ignore[no-untyped-def]
    """`varint` for 64 bits."""
    raw = np.uint64(0)
    shift = 0
    while at < end and shift < 70:
        byte = np.uint64(source[at])
        at += 1
        if shift == 63 and byte > np.uint64(1):
            break
        raw |= (byte & np.uint64(0x7F)) << np.uint64(shift)
        if byte < np.uint64(0x80):
            return np.int64(raw >> np.uint64(1)) ^ -np.int64(raw & np.uint64(1)), at
        shift += 7
    return np.int64(0), np.int64(-1)


@compiled(_I64(BYTES, _I64, _I64), inline="always")
def big_endian(source, at, size):  # type: ignore[no-untyped-def]
    """A signed integer of `size` bytes."""
    value = np.int64(np.int8(source[at]))
    for index in range(1, size):
        value = (value << 8) | np.int64(source[at + index])
    return value


@compiled(types.UniTuple(_I64, 10)(BYTES, _I64), inline="always")
def batch_header(source, at):  # type: ignore[no-untyped-def]
    """(size, base offset, CRC, attributes, last offset delta, base timestamp, max timestamp,
    producer id, record count, valid) of the 61 bytes at `at`; valid if `parse_header` accepts it.
    """
    base_offset = big_endian(source, at, 8)
    size = big_endian(source, at + 8, 4) + LOG_OVERHEAD
    attributes = big_endian(source, at + 21, 2)
    delta = big_endian(source, at + 23, 4)
    count = big_endian(source, at + 57, 4)
    valid = (
        source[at + 16] == MAGIC
        and size >= HEADER_SIZE
        and base_offset >= 0
        and delta >= 0
        and 0 <= count <= delta + 1
        and (attributes & CODEC_MASK or count * MIN_RECORD_SIZE <= size - HEADER_SIZE)
    )
    return (
        size,
        base_offset,
        big_endian(source, at + 17, 4) & 0xFFFFFFFF,
        attributes,
        delta,
        big_endian(source, at + 27, 8),
        big_endian(source, at + 35, 8),
        big_endian(source, at + 43, 8),
        count,
        1 if valid else 0,
    )
