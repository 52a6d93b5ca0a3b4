"""Problem documents (RFC 9457): the status, code and members of every error, in one table; and the
errors that exist only in HTTP. All others are of the packages below, from `record_format.errors`.

* An exception without a class in `TABLE` is a bug: 500 `internal`, without anything of the
  exception in the response. The request id leads to the log.
* `detail` is the exception's own text, which says what was wrong and what to do. A local path in it
  is reduced to the partition's folder and the file: where a broker keeps its data does not concern
  its clients. An object is named by its key within the store's prefix: of a store in a folder, the
  prefix is a local path.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final, NamedTuple

import msgspec

from tierlog.api.protocol.messages import HeaderTooLarge
from tierlog.record_format import errors
from tierlog.record_format.errors import RequestError, ShuttingDown, TierlogError

MEDIA_TYPE: Final = "application/problem+json"
TYPE_PREFIX: Final = "urn:tierlog:problem:"
_TEXT_MAX: Final = 1000
HeaderList = list[tuple[bytes, bytes]]
Members = Callable[[Any], Mapping[str, object]]
_NOT_WITHIN_A_PATH: Final = r"(?<![\w/:.-])"
_PART: Final = r"/[\w.@+-]+"
# An absolute path of three or more parts, as in errors of the operating system.
_LOCAL_PATH: Final = re.compile(f"{_NOT_WITHIN_A_PATH}(?:{_PART}){{3,}}")


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


class ForeignOrigin(RequestError):
    """A page of another origin wants to change something."""


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


class PeerProblem(TierlogError):
    """Another broker of the cluster refused its part of a call, with this problem document."""

    def __init__(
        self, status: int, document: Mapping[str, object], headers: HeaderList | None = None
    ) -> None:
        super().__init__(str(document.get("detail", "")))
        self.status, self.document, self.headers = status, document, headers

    @property
    def kind(self) -> Kind:
        code, title = (str(self.document.get(name, "")) for name in ("code", "title"))
        return Kind(self.status, code, title)


class AbortedByShutdown(ShuttingDown):
    """The server stopped before the request had finished; its writes may have happened."""


def short_path(path: str) -> str:
    """The partition's folder and the file, without the rest of the local path."""
    return "/".join(PurePath(path).parts[-2:]) if path else ""


def shorten_paths(text: str) -> str:
    """Reduce the local paths in a text, in which a path ends at a space."""
    return _LOCAL_PATH.sub(lambda found: short_path(found.group()), text)


def path_shortener(data_dir: PurePath) -> Callable[[str], str]:
    """As `shorten_paths`, for a broker: the path of its data folder may contain a space."""
    if not data_dir.is_absolute():
        return shorten_paths
    inside = re.compile(f"{_NOT_WITHIN_A_PATH}{re.escape(str(data_dir))}((?:{_PART})*)")

    def shorten(text: str) -> str:
        text = inside.sub(lambda found: short_path(data_dir.name + found[1]), text)
        return shorten_paths(text)

    return shorten


class Kind(NamedTuple):
    """One row: `members` takes from the exception the facts that a client may use."""

    status: int
    code: str
    title: str
    members: Members | None = None


class Problem(NamedTuple):
    """A problem document, ready to be sent."""

    status: int
    code: str
    headers: HeaderList
    document: dict[str, object]

    def body(self) -> bytes:
        return msgspec.json.encode(self.document)

    def add_confluents_members(self) -> None:
        """What the clients of Confluent's registry read."""
        self.document.setdefault("error_code", self.status)
        self.document["message"] = self.document["detail"]


def _take(*names: str) -> Members:
    return lambda error: {name: getattr(error, name) for name in names}


def _cut(text: str) -> str:
    """A text with something of the request in it, which may be as long as a request."""
    return text if len(text) <= _TEXT_MAX else text[:_TEXT_MAX] + "..."


def _errors(error: errors.InvalidRequest) -> Mapping[str, object]:
    return {"errors": [{"loc": _cut(loc), "msg": _cut(msg)} for loc, msg in error.problems]}


def _no_errors(_: Exception) -> Mapping[str, object]:
    return {"errors": []}


def _local_file(error: errors.CorruptDataError) -> Mapping[str, object]:
    return {"file": short_path(error.file), "position": error.position}


def _object_key(error: errors.CorruptDataError) -> Mapping[str, object]:
    return {"object_key": error.file}


_OUTCOME_UNKNOWN: Final = (
    errors.LogOfflineError,
    errors.OutcomeUnknownError,
    AbortedByShutdown,
)
REGISTRY_PATHS: Final = (
    "/subjects",
    "/schemas",
    "/compatibility",
    "/config",
    "/mode",
    "/contexts",
    "/associations",
)
_OFFSETS = _take("log_start_offset", "high_watermark")
_SIZES = _take("limit_bytes", "size_bytes")
TABLE: Final[Mapping[type[Exception], Kind]] = {
    errors.InvalidRequest: Kind(400, "invalid-request", "The request is not valid", _errors),
    errors.InvalidRecord: Kind(400, "invalid-record", "A record was refused", _errors),
    errors.SchemaMismatch: Kind(
        422, "schema-mismatch", "A record's value has no schema of its topic", _errors
    ),
    errors.InvalidConfig: Kind(400, "invalid-config", "The configuration is not valid", _errors),
    errors.InvalidTopicName: Kind(
        400, "invalid-topic-name", "The topic name is not valid", _errors
    ),
    errors.InvalidReplicationFactor: Kind(
        400, "invalid-replication-factor", "The replication factor is not valid", _errors
    ),
    errors.InvalidReplicaAssignment: Kind(
        400, "invalid-replica-assignment", "The replicas are not valid", _errors
    ),
    errors.InvalidBatch: Kind(400, "corrupt-batch", "A record batch is corrupt", _take("position")),
    StalledBody: Kind(400, "invalid-request", "The body did not arrive", _no_errors),
    Unauthorized: Kind(401, "unauthorized", "No valid token"),
    ForeignHost: Kind(403, "forbidden", "Not a loopback host"),
    ForeignOrigin: Kind(403, "forbidden", "Not a page of this broker"),
    errors.Forbidden: Kind(403, "forbidden", "Not allowed"),
    errors.UnknownTopic: Kind(404, "unknown-topic", "No such topic"),
    errors.UnknownTopicOrPartition: Kind(404, "unknown-partition", "No such partition"),
    errors.UnknownSegment: Kind(404, "unknown-segment", "No such segment"),
    errors.UnknownGroup: Kind(404, "unknown-group", "No such group"),
    errors.GroupRefused: Kind(
        409, "group-refused", "The group's coordinator refuses it", _take("reason")
    ),
    errors.UnknownTransaction: Kind(404, "unknown-transaction", "No such transactional id"),
    errors.UnknownSchema: Kind(
        404, "unknown-schema", "No such subject, version or schema", _take("error_code")
    ),
    errors.IncompatibleSchema: Kind(
        409, "incompatible-schema", "The schema is not compatible", _take("error_code")
    ),
    errors.InvalidSchema: Kind(
        422, "invalid-schema", "The schema is not valid", _take("error_code")
    ),
    errors.TransactionRefused: Kind(
        409, "transaction-refused", "The transaction's coordinator refuses it", _take("reason")
    ),
    errors.UnknownManifestVersion: Kind(
        404, "unknown-manifest-version", "No such manifest version"
    ),
    NotFound: Kind(404, "not-found", "No such path"),
    MethodNotAllowed: Kind(405, "method-not-allowed", "The path does not support this method"),
    NotAcceptable: Kind(406, "not-acceptable", "No acceptable media type", _take("offered")),
    errors.TopicExists: Kind(409, "topic-exists", "The topic already exists"),
    errors.PinExists: Kind(409, "pin-exists", "The pin already exists"),
    errors.OutOfOrderSequence: Kind(409, "out-of-order-sequence", "The sequence leaves a gap"),
    errors.ProducerFenced: Kind(409, "producer-fenced", "The producer has a newer epoch"),
    errors.UnknownBroker: Kind(404, "unknown-broker", "No such broker"),
    errors.BrokerInUse: Kind(409, "broker-in-use", "The broker is in use"),
    errors.NoReassignment: Kind(409, "no-reassignment", "No reassignment is in progress"),
    errors.NotInCluster: Kind(409, "not-in-cluster", "This broker is alone"),
    errors.InvalidPartitionCount: Kind(
        409, "invalid-partition-count", "Partitions can only be added"
    ),
    errors.FencedError: Kind(409, "leadership-lost", "Another broker owns this partition"),
    errors.OffsetTrimmed: Kind(410, "offset-trimmed", "Below the start of the log", _OFFSETS),
    errors.OffsetMismatch: Kind(
        412, "offset-mismatch", "The log ends at another offset", _take("log_end_offset")
    ),
    PreconditionFailed: Kind(412, "precondition-failed", "If-Match does not match"),
    errors.RecordTooLarge: Kind(413, "record-too-large", "A record is too large", _SIZES),
    errors.RequestTooLarge: Kind(413, "request-too-large", "The request is too large", _SIZES),
    errors.TooManyRecords: Kind(
        413, "request-too-large", "The request is too large", _take("limit_records", "records")
    ),
    UnsupportedMediaType: Kind(
        415, "unsupported-media-type", "Unsupported media type", _take("accepted")
    ),
    errors.OffsetPastEnd: Kind(416, "offset-past-end", "Above the high watermark", _OFFSETS),
    RangeNotSatisfiable: Kind(
        416, "range-not-satisfiable", "Outside the segment", _take("size_bytes")
    ),
    errors.NotLeader: Kind(
        421, "not-leader", "Another broker leads it", _take("leader", "leader_epoch")
    ),
    HeaderTooLarge: Kind(431, "header-too-large", "The request head is too large", _SIZES),
    errors.Throttled: Kind(429, "throttled", "Too many requests"),
    errors.CorruptDataError: Kind(500, "corrupt-log", "A local file fails its check", _local_file),
    errors.MissingObject: Kind(
        502, "cold-object-missing", "An object is missing from the bucket", _object_key
    ),
    errors.CorruptObject: Kind(
        502, "cold-object-corrupt", "An object fails its checksum", _object_key
    ),
    errors.CorruptManifest: Kind(
        502, "cold-object-corrupt", "A manifest fails its checksum", _object_key
    ),
    errors.RetriableError: Kind(503, "store-unavailable", "Try again later"),
    errors.StoreUnavailable: Kind(503, "store-unavailable", "The object store does not respond"),
    errors.OutcomeUnknownError: Kind(503, "store-unavailable", "The store did not confirm a write"),
    errors.ConcurrentTransactions: Kind(
        503, "concurrent-transactions", "The last transaction is still being ended"
    ),
    errors.ConfigurationError: Kind(
        503, "store-unavailable", "The object store refuses this broker"
    ),
    errors.LogOfflineError: Kind(503, "log-offline", "The local disk failed under this log"),
    errors.LeaderUnknown: Kind(503, "leader-unknown", "No broker is known to lead it"),
    errors.NotEnoughReplicas: Kind(
        503, "not-enough-replicas", "Too few replicas are in sync for a write"
    ),
    errors.NotReplicated: Kind(
        503, "not-enough-replicas", "Too few replicas are in sync to commit a write"
    ),
    errors.WatermarkUnknown: Kind(
        503, "watermark-unknown", "The new leader does not know the high watermark yet"
    ),
    errors.LeaderChanged: Kind(
        503, "leader-changed", "Another broker leads it before the write was committed"
    ),
    errors.PeerUnavailable: Kind(503, "broker-unavailable", "Another broker does not answer"),
    errors.PeerAnswerLost: Kind(
        503, "broker-unavailable", "Another broker did not confirm a write"
    ),
    errors.Starting: Kind(503, "starting", "The broker is starting"),
    errors.ShuttingDown: Kind(503, "shutting-down", "The broker is shutting down"),
    errors.DiskFull: Kind(507, "disk-full", "The disk is full"),
    errors.TooManyOpenFiles: Kind(429, "throttled", "Too many open files"),
    errors.TooManyThreads: Kind(429, "throttled", "Too many threads"),
}
_IN_BUCKET: Final = (errors.MissingObject, errors.CorruptObject, errors.CorruptManifest)
_TOPIC_OF_FILE: Final = re.compile(r"([a-zA-Z0-9._-]+)-\d+/")
_TOPIC_OF_OBJECT: Final = re.compile(r"topics/([a-zA-Z0-9._-]+)/[^/]+/\d+/")
INTERNAL: Final = Kind(500, "internal", "Internal error")
NEEDS_RETRY_AFTER: Final = frozenset((429, 503, 507))


def kind_of(error: Exception) -> Kind:
    """The row of the error's class, or of its nearest base that has one."""
    for base in type(error).__mro__:
        kind = TABLE.get(base)
        if kind is not None:
            return kind
    return INTERNAL


def to_problem(
    error: Exception,
    *,
    request_id: str,
    writing: bool = False,
    full_key: Callable[[str], str] = str,
    shorten: Callable[[str], str] = shorten_paths,
) -> Problem:
    """The problem document of an exception.

    `writing`: the call may have changed something. `full_key` turns an object's name within the
    store's prefix into its whole key in the bucket, as `/segments` shows it. `shorten` reduces the
    local paths in a text.
    """
    in_part = error if isinstance(error, AppendedInPart) else None
    error = error if in_part is None else in_part.cause
    kind = error.kind if isinstance(error, PeerProblem) else kind_of(error)
    document: dict[str, object] = {
        "type": TYPE_PREFIX + kind.code,
        "title": kind.title,
        "status": kind.status,
        "detail": _detail(error, kind, shorten),
        "code": kind.code,
    }
    if isinstance(error, PeerProblem):
        document.update(error.document)
    if kind.members is not None:
        document.update(kind.members(error))
    if kind.members is _object_key and document["object_key"]:
        document["object_key"] = full_key(str(document["object_key"]))
    if kind is INTERNAL:
        document["request_id"] = request_id
    if writing and isinstance(error, _OUTCOME_UNKNOWN):
        document["outcome"] = "unknown"
    if in_part is not None:
        document["results"] = in_part.results
    return Problem(kind.status, kind.code, _headers(error, kind), document)


def _detail(error: Exception, kind: Kind, shorten: Callable[[str], str]) -> str:
    if kind is INTERNAL:
        return "the broker failed unexpectedly; see its log, by the request id"
    if isinstance(error, errors.CorruptDataError):
        return corruption_detail(error)
    if isinstance(error, errors.RequestError):
        return _cut(str(error))  # about the request: a path in it is not a local path
    return shorten(str(error))


def corruption_detail(error: errors.CorruptDataError) -> str:
    """Where the bytes are, and which commands help unless the error names one already."""
    in_bucket = isinstance(error, _IN_BUCKET) and not PurePath(error.file).is_absolute()
    file = error.file if in_bucket else short_path(error.file)
    position, offset = error.position, error.offset
    text = str(errors.CorruptDataError(error.detail, file=file, position=position, offset=offset))
    topic = (_TOPIC_OF_OBJECT if in_bucket else _TOPIC_OF_FILE).match(file)
    if topic is None or "`" in error.detail or isinstance(error, errors.UnknownFormatVersion):
        return text
    return (
        f"{text}; `tierlog storage verify {topic[1]} --deep` reports what else is corrupt, "
        f"`tierlog storage repair {topic[1]}` repairs it"
    )


def _headers(error: Exception, kind: Kind) -> HeaderList:
    if isinstance(error, PeerProblem) and error.headers is not None:
        return error.headers
    headers: HeaderList = [(b"content-type", MEDIA_TYPE.encode()), (b"cache-control", b"no-store")]
    if kind.status in NEEDS_RETRY_AFTER:
        seconds = max(1, math.ceil(getattr(error, "retry_after_s", 1.0)))
        headers.append((b"retry-after", str(seconds).encode()))
    if isinstance(error, Unauthorized):  # RFC 6750, 3
        unknown = b', error="invalid_token"' if error.given else b""
        headers.append((b"www-authenticate", b'Bearer realm="tierlog"' + unknown))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", ", ".join(error.allowed).encode()))
    if isinstance(error, RangeNotSatisfiable):
        headers.append((b"content-range", f"bytes */{error.size_bytes}".encode()))
    if isinstance(error, StalledBody):
        headers.append((b"connection", b"close"))
    if isinstance(error, errors.OffsetOutOfRange):  # a HEAD has no document to read them from
        headers.append((b"log-start-offset", str(error.log_start_offset).encode()))
        headers.append((b"log-high-watermark", str(error.high_watermark).encode()))
    return headers
