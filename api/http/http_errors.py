"""Errors that exist only in HTTP: paths, methods, media types, byte ranges, hosts.

All others are raised by the packages below, from `record_format.errors`. `problems.TABLE` gives the
status of each.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierlog.record_format.errors import RequestError, ShuttingDown


class NotFound(RequestError):
    """The path is not one of the API's."""


class MethodNotAllowed(RequestError):
    def __init__(self, method: str, *, allowed: Sequence[str]) -> None:
        super().__init__(f"this path does not support {method}, only {', '.join(allowed)}")
        self.allowed = tuple(allowed)


class NotAcceptable(RequestError):
    def __init__(self, accept: str, *, offered: Sequence[str]) -> None:
        super().__init__(f"no media type of this call matches Accept: {accept!r}; see `offered`")
        self.offered = list(offered)


class UnsupportedMediaType(RequestError):
    """A Content-Type or Content-Encoding that the call does not accept."""

    def __init__(self, detail: str, *, accepted: Sequence[str]) -> None:
        super().__init__(detail)
        self.accepted = list(accepted)


class RangeNotSatisfiable(RequestError):
    def __init__(self, detail: str, *, size_bytes: int) -> None:
        super().__init__(detail)
        self.size_bytes = size_bytes


class PreconditionFailed(RequestError):
    """If-Match does not match the current ETag."""


class ForeignHost(RequestError):
    """A Host or Origin that is not loopback, on a broker without tokens (DNS rebinding)."""


class Unauthorized(RequestError):
    """A token is required. `given`: one was sent, but it is not valid."""

    def __init__(self, *, given: bool) -> None:
        super().__init__(
            "the token is not valid here: it may have been revoked"
            if given
            else "this broker requires a token, as Authorization: Bearer ..."
        )
        self.given = given


class StalledBody(RequestError):
    """The body stopped arriving, or arrived too slowly."""


class AppendedInPart(Exception):
    """Some partitions appended their records and another did not. `results`: what was appended."""

    def __init__(self, cause: Exception, *, results: Sequence[object]) -> None:
        super().__init__(str(cause))
        self.cause, self.results = cause, list(results)


class AbortedByShutdown(ShuttingDown):
    """The server stopped before the request had finished; its writes may have happened."""
