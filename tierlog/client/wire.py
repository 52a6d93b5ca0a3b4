"""HTTP requests and responses as plain values, and the values of their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from operator import index
from types import MappingProxyType
from typing import Final, Literal, NamedTuple, cast
from urllib.parse import quote

import msgspec

from tierlog.record_format.errors import InvalidRequest

DEFAULT_SERVER: Final = "http://127.0.0.1:8640"
JSON: Final = "application/json"
NDJSON: Final = "application/x-ndjson"
RECORD_BATCHES: Final = "application/vnd.apache.kafka.recordbatch.v2"
NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})

encode_json: Final = msgspec.json.Encoder(enc_hook=index).encode  # also integers such as numpy's
Query = tuple[tuple[str, str], ...]


class Subject(NamedTuple):
    """What a request is about; not every problem document names it in its members."""

    topic: str = ""
    partition: int = -1
    expected_offset: int = -1


class Request(NamedTuple):
    """`path` is percent-encoded; `extra_wait_s` is added to the response time-out; `server`: of
    several, which one it goes to.
    """

    method: str
    path: str
    query: Query = ()
    headers: Mapping[str, str] = NO_HEADERS
    body: bytes = b""
    extra_wait_s: float = 0.0
    subject: Subject = Subject()
    server: str = ""


class Response(NamedTuple):
    """`headers`: keys are lower-case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def json_request(method: str, path: str, body: Mapping[str, object], subject: Subject) -> Request:
    fields = {"content-type": JSON}
    return Request(method, path, headers=fields, body=encode_json(body), subject=subject)


def path_segment(name: str, *, what: str) -> str:
    """Any text as a segment of a path. Encodes `.` and `..` as well: URL normalization would remove
    them. Raises InvalidRequest.
    """
    if not name:
        raise InvalidRequest(f"{what} must not be empty")
    encoded = quote(name, safe="")
    return encoded.replace(".", "%2E") if name in {".", ".."} else encoded


def query(**members: object) -> Query:
    """Query parameters. None is omitted; booleans become 1 and 0."""
    return tuple(
        (name, str(int(value)) if isinstance(value, bool) else str(value))
        for name, value in members.items()
        if value is not None
    )


Acks = Literal["0", "1", "all"]
Isolation = Literal["read_uncommitted", "read_committed"]
Start = int | Literal["earliest", "latest", "earliest-local"]

DEFAULT_FETCH_BYTES: Final = 1 << 20


class Limits(NamedTuple):
    """How much a fetch returns, and how long it may wait for `min_bytes`.

    With a `key`, it returns records of this key alone, and may return none before the end of the
    log. Whole batches may have others.
    """

    max_bytes: int = DEFAULT_FETCH_BYTES
    max_records: int | None = None
    min_bytes: int = 1
    wait_ms: int = 0
    isolation: Isolation = "read_uncommitted"
    key: bytes | None = None


DEFAULT_LIMITS: Final = Limits()
ACKS: Final = ("0", "1", "all")


def check_acks(acks: Acks) -> Acks:
    """Normalize to text: Kafka's clients take the numbers 0 and 1. Raises InvalidRequest."""
    if str(acks) not in ACKS:
        raise InvalidRequest(f"acks must be one of {', '.join(ACKS)}, not {acks!r}")
    return cast("Acks", str(acks))


def normalize_start(offset: Start) -> Start:
    """Convert decimal text and integer types such as numpy's to int, which offsets are compared
    with. Raises TypeError.
    """
    if isinstance(offset, str):
        return int(offset) if offset.isdecimal() else offset
    return index(offset)
