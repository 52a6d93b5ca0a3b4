"""What the client knows of the inside of httpx2 and anyio: each with its issue where there is one,
and with what would make it needless.
"""

from __future__ import annotations

import errno
import os
import re
import ssl
from typing import Final

import httpx2

# httpcore2 has one class for this and for a response that is cut short.
_NO_RESPONSE: Final = "Server disconnected without sending a response"


def is_without_response(error: httpx2.RequestError) -> bool:
    """encode/httpx#2983: until a connection that was closed before its response has a class."""
    return isinstance(error, httpx2.RemoteProtocolError) and _NO_RESPONSE in str(error)


_ERRNO: Final = re.compile(r"^\[Errno -?\d+\] ")


def text_of(error: httpx2.RequestError) -> str:
    """Until httpx2 keeps the OSError, and not its text alone: what it says, without its number."""
    return _ERRNO.sub("", str(error))


def is_refused(reason: str) -> bool:
    """As `text_of`: whether nobody listens at the address, of what was made of its text."""
    return os.strerror(errno.ECONNREFUSED) in reason


def tls_error_of(error: httpx2.RequestError) -> ssl.SSLError | None:
    """Until httpcore2 names what it raises an error for as its cause: it does so `from None`."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, ssl.SSLError):
        found = found.__cause__ or found.__context__
    return found


def is_closed_at_once(error: AttributeError) -> bool:
    """Akin to MagicStack/uvloop#560: until anyio raises an OSError where uvloop has no socket for a
    new connection any more, since it was closed at once, by a broker that is stopping.
    """
    return error.name == "getpeername"
