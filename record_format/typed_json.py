"""Decodes JSON into a type, from any thread.

msgspec builds the decoder of a type on first use, and two threads that do so at once can crash the
process with SIGSEGV (seen in 0.22, by `make soak`). So decoders are created either when a module is
imported, or here, under a lock.
"""

from __future__ import annotations

import threading
from typing import Any, Final, TypeVar, cast

import msgspec

T = TypeVar("T")

_lock: Final = threading.Lock()
_decoders: Final[dict[Any, msgspec.json.Decoder[Any]]] = {}


def decode(data: bytes | bytearray | memoryview | str, kind: type[T]) -> T:
    """`data` as a `kind`. Raises msgspec's DecodeError (a ValidationError is one)."""
    decoder = _decoders.get(kind)
    if decoder is None:
        with _lock:
            decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    try:
        return cast(T, decoder.decode(data))
    except (UnicodeDecodeError, RecursionError) as error:  # which msgspec does not wrap
        raise msgspec.DecodeError(str(error)) from error
