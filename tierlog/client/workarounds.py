"""What the client knows of the inside of httpx2 and anyio, and what would make it needless."""

from __future__ import annotations

from typing import Final

import httpx2

# httpcore2 has one class for this and for a response that is cut short.
_NO_RESPONSE: Final = "Server disconnected without sending a response"


def is_without_response(error: httpx2.RequestError) -> bool:
    """Until httpx2 tells a connection that was closed before its response by a class."""
    return isinstance(error, httpx2.RemoteProtocolError) and _NO_RESPONSE in str(error)


def is_closed_at_once(error: AttributeError) -> bool:
    """Until anyio raises an OSError where uvloop has no socket for a new connection any more, since
    it was closed at once: a broker that is stopping.
    """
    return error.name == "getpeername"
