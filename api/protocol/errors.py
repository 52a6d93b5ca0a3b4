"""Errors of the connection itself, which are raised outside handlers."""

from tierlog.record_format.errors import RequestError


class HeaderTooLarge(RequestError):
    """The request line and the headers together."""

    def __init__(self, *, limit_bytes: int, size_bytes: int) -> None:
        super().__init__(
            f"the request line and headers have {size_bytes} bytes or more; the limit is "
            f"{limit_bytes}"
        )
        self.limit_bytes, self.size_bytes = limit_bytes, size_bytes


class ClientDisconnected(Exception):
    """The client closed the connection, so there is no response to send."""


class ResponseCutShort(Exception):
    """A response has to end before its length. The application has logged why."""
