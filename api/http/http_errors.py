"""Refusals that only HTTP knows: paths, methods, media types, byte ranges, hosts.

Everything else that a call refuses is raised by the rooms below, from `record_format.errors`.
`problems.TABLE` says which status each of them gets.
"""

from __future__ import annotations

from collections.abc import Sequence

from record_format.errors import RequestError, ShuttingDown


class NotFound(RequestError):
    """The path is not one of the API's."""


class MethodNotAllowed(RequestError):
    def __init__(self, method: str, *, allowed: Sequence[str]) -> None:
        super().__init__(f"{method} is not a call on this path; it takes {', '.join(allowed)}")
        self.allowed = tuple(allowed)


class NotAcceptable(RequestError):
    def __init__(self, accept: str, *, offered: Sequence[str]) -> None:
        super().__init__(f"Accept: {accept!r} leaves nothing to answer with; send one of `offered`")
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
    """If-Match names nothing that is there."""


class ForeignHost(RequestError):
    """Without tokens: a Host or Origin that is not loopback (DNS rebinding)."""


class Unauthorized(RequestError):
    """Tokens are required. `given`: one was sent, but it is not known."""

    def __init__(self, *, given: bool) -> None:
        super().__init__(
            "this token is not known here: it may have been revoked"
            if given
            else "this broker takes calls with a token, as Authorization: Bearer ..."
        )
        self.given = given


class StalledBody(RequestError):
    """The client stopped sending in the middle of its body."""


class AppendedInPart(Exception):
    """Some partitions appended their records and another did not. `results`: what was appended."""

    def __init__(self, cause: Exception, *, results: Sequence[object]) -> None:
        super().__init__(str(cause))
        self.cause, self.results = cause, list(results)


class AbortedByShutdown(ShuttingDown):
    """The server stopped before the request was done: what it writes may have been written."""
