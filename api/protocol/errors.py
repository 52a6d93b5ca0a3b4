"""Errors of the connection itself, which no handler sees."""

from record_format.errors import RequestError


class HeaderTooLarge(RequestError):
    """The request line and the headers together."""

    def __init__(self, *, limit_bytes: int, size_bytes: int) -> None:
        super().__init__(
            f"the request's head has {size_bytes} bytes or more; at most {limit_bytes} are taken"
        )
        self.limit_bytes, self.size_bytes = limit_bytes, size_bytes


class ClientDisconnected(Exception):
    """The client closed the connection: there is nobody to answer."""
