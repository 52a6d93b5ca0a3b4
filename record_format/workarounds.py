"""What stands here because a library has a fault, and goes when the library mends it.

| of            | what          | waits for                                                        |
|---------------|---------------|------------------------------------------------------------------|
| msgspec 0.22  | `json_decoder`| decoders that are safe to make in two threads at once: #401 made |
|               |               | only their methods so. The test dies without the lock.           |
"""

from __future__ import annotations

import threading
from typing import Any, Final, TypeVar

import msgspec

T = TypeVar("T")

_lock: Final = threading.Lock()
_decoders: Final[dict[Any, msgspec.json.Decoder[Any]]] = {}


def json_decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    """A decoder of this type, in any thread.

    msgspec (0.22) builds what it needs of a type on first use, and two threads that do so at once
    can crash the process with SIGSEGV. So decoders are made here, under a lock, or when a module is
    imported.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        with _lock:
            decoder = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return decoder


def decode_json(data: bytes | bytearray | memoryview | str, kind: type[T]) -> T:
    """`data` as a `kind`. Raises msgspec's DecodeError (a ValidationError is one)."""
    try:
        return json_decoder(kind).decode(data)
    except (UnicodeDecodeError, RecursionError) as error:  # which msgspec does not wrap
        raise msgspec.DecodeError(str(error)) from error
