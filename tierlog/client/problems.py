"""Maps problem documents (RFC 9457) to the error classes that the broker raised.

One table maps `code` to the class, which tells the caller what to do. An unknown code (from a newer
broker) is mapped by its status: 4xx fix the request; 429, 503 and 507 try again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import msgspec

from tierlog.client.wire import Request, Response, Subject
from tierlog.record_format import errors
from tierlog.record_format.errors import FieldProblem, RequestError, RetriableError, TierlogError
from tierlog.record_format.workarounds import decode_json

RETRIABLE_CODES: Final = frozenset(
    (
        "throttled",
        "starting",
        "store-unavailable",
        "shutting-down",
        "disk-full",
        "concurrent-transactions",
        "leader-unknown",
        "not-leader",
        "broker-unavailable",
        "not-enough-replicas",
        "watermark-unknown",
    )
)


DAY_S: Final = 86_400.0
_ENDED: Final = ("shutting-down", "broker-unavailable", "leader-changed", "not-enough-replicas")


class Unauthorized(RequestError):
    """No token, or an unknown one."""


class NotOfferedHere(RequestError):
    """The broker does not support the path, method or media type: is it another version?"""


class RangeNotSatisfiable(RequestError):
    """A byte range outside a segment."""


class BrokerFault(TierlogError):
    """An internal error of the broker, logged there with `request_id`."""

    def __init__(self, detail: str, *, request_id: str) -> None:
        super().__init__(f"{detail} (request {request_id})" if request_id else detail)
        self.request_id = request_id


class UnexpectedAnswer(TierlogError):
    """The response is not from a tierlog broker: from a proxy, or another server."""


class AppendedInPart(TierlogError):
    """A produce failed part way: `results` were appended, the rest was not."""

    def __init__(self, detail: str, *, results: tuple[Mapping[str, int], ...]) -> None:
        super().__init__(detail)
        self.results = results


class AppendWarning(UserWarning):
    """The records were appended, and something about them will surprise: they expire at once."""


class Problem(msgspec.Struct, frozen=True):
    """The document's members that clients use."""

    code: str = ""
    detail: str = ""
    title: str = ""
    request_id: str = ""
    outcome: str = ""
    errors: tuple[dict[str, object], ...] = ()
    position: int | None = None
    log_start_offset: int = -1
    high_watermark: int = -1
    log_end_offset: int = -1
    limit_bytes: int = -1
    size_bytes: int = -1
    reason: str = ""
    object_key: str = ""
    file: str = ""
    results: tuple[dict[str, object], ...] = ()
    leader: dict[str, object] = {}
    error_code: int = 0


class ErrorContext(NamedTuple):
    """What an error is created from."""

    problem: Problem
    detail: str
    subject: Subject
    retry_after_s: float


ErrorFactory = Callable[[ErrorContext], TierlogError]


def error_from_response(response: Response, request: Request) -> TierlogError:
    """The error for an unsuccessful response: 400 and above, or a redirection."""
    problem = parse_problem(response.body)
    if problem is None:
        server, location = response.headers.get("server"), response.headers.get("location")
        redirect = f", redirecting to {location}" if location else ""
        received = (
            f"{request.method} {request.path}: status {response.status} from "
            f"{server or 'an unnamed server'}{redirect}, without a problem document"
        )
        if response.status == 429:
            return errors.Throttled(received, retry_after_s=retry_after_s(response) or 1.0)
        return UnexpectedAnswer(f"{received}: is that a tierlog broker?")
    context = ErrorContext(problem, _detail(problem), request.subject, retry_after_s(response))
    if problem.results:
        return _appended_in_part(context)
    if problem.outcome == "unknown":
        return errors.OutcomeUnknownError(context.detail)
    create = _BY_CODE.get(problem.code) or _by_status(response.status)
    return create(context)


def parse_problem(body: bytes) -> Problem | None:
    """None if the body is not a problem document."""
    try:
        problem = decode_json(body, Problem)
    except msgspec.DecodeError:
        return None
    return problem if problem.code else None


def is_retriable_refusal(response: Response) -> bool:
    """Whether the broker refused temporarily and changed nothing: the request may be retried. So
    it may if a gateway limits the rate of requests, which then forwarded nothing.
    """
    if response.status not in {421, 429, 503, 507}:
        return False
    problem = parse_problem(response.body)
    if problem is None:
        return response.status == 429
    if problem.results or problem.outcome == "unknown":
        return False
    return problem.code in RETRIABLE_CODES


def is_gateway_error(response: Response) -> bool:
    """Whether a gateway reported that it could not reach the broker."""
    return response.status in {502, 503, 504} and parse_problem(response.body) is None


def is_interrupted_by_shutdown(response: Response) -> bool:
    """Whether the broker, or one of its cluster that it had sent the request to, ended, or lost the
    partition or its replicas meanwhile: it may have taken effect.
    """
    problem = parse_problem(response.body) if response.status == 503 else None
    return problem is not None and problem.code in _ENDED and problem.outcome == "unknown"


def retry_after_s(response: Response) -> float:
    """`Retry-After` in seconds, at most a day; 0 if there is none (or a date: no broker sends
    one).
    """
    text = response.headers.get("retry-after", "")
    return min(float(text), DAY_S) if text.isascii() and text.isdigit() else 0.0


def _detail(problem: Problem) -> str:
    detail = problem.detail or problem.title or problem.code
    fields = _fields(problem)
    more = "; ".join(f"{field.loc}: {field.msg}" for field in fields if field.msg not in detail)
    return f"{detail} ({more})" if more else detail


def _fields(problem: Problem) -> tuple[FieldProblem, ...]:
    return tuple(
        FieldProblem(str(field.get("loc", "")), str(field.get("msg", "")))
        for field in problem.errors
    )


def _appended_in_part(context: ErrorContext) -> TierlogError:
    results = tuple(
        {name: value for name, value in result.items() if isinstance(value, int)}
        for result in context.problem.results
    )
    return AppendedInPart(context.detail, results=results)


def _plain(kind: Callable[[str], TierlogError]) -> ErrorFactory:
    return lambda context: kind(context.detail)


def _invalid(kind: type[errors.InvalidRequest]) -> ErrorFactory:
    return lambda context: kind(context.detail, problems=_fields(context.problem))


def _too_large(kind: type[errors.TooLarge]) -> ErrorFactory:
    return lambda context: kind(
        context.detail,
        limit_bytes=context.problem.limit_bytes,
        size_bytes=context.problem.size_bytes,
    )


def _out_of_range(kind: type[errors.OffsetOutOfRange]) -> ErrorFactory:
    return lambda context: kind(
        context.detail,
        log_start_offset=context.problem.log_start_offset,
        high_watermark=context.problem.high_watermark,
    )


def _retriable(kind: type[RetriableError]) -> ErrorFactory:
    return lambda context: kind(context.detail, retry_after_s=context.retry_after_s or 1.0)


def _disk_full(context: ErrorContext) -> TierlogError:
    """Not the disk of whoever reads it."""
    return errors.DiskFull(
        f"the broker's disk is full: {context.detail}", retry_after_s=context.retry_after_s or 1.0
    )


def _corrupt(kind: type[errors.CorruptDataError]) -> ErrorFactory:
    def create(context: ErrorContext) -> TierlogError:
        problem = context.problem
        error = kind(
            context.detail, file=problem.object_key or problem.file, position=problem.position
        )
        error.args = (context.detail,)  # it names the file and the position already
        return error

    return create


def _invalid_batch(context: ErrorContext) -> TierlogError:
    return errors.InvalidBatch(context.detail, position=context.problem.position or 0)


def _unknown_topic(context: ErrorContext) -> TierlogError:
    if context.subject.topic:
        return errors.UnknownTopic(context.subject.topic, detail=context.detail)
    return errors.UnknownTopicOrPartition(context.detail)


def _unknown_partition(context: ErrorContext) -> TierlogError:
    if context.subject.topic and context.subject.partition >= 0:
        return errors.UnknownPartition(context.subject.topic, context.subject.partition)
    return errors.UnknownTopicOrPartition(context.detail)


def _unauthorized(context: ErrorContext) -> TierlogError:
    return Unauthorized(
        f"{context.detail}; set TIERLOG_TOKEN or TIERLOG_TOKEN_FILE, or pass --token-file on the "
        "command line"
    )


def _group_refused(context: ErrorContext) -> TierlogError:
    return errors.GroupRefused(context.problem.reason, context.detail)


def _transaction_refused(context: ErrorContext) -> TierlogError:
    return errors.TransactionRefused(context.problem.reason, context.detail)


def _offset_mismatch(context: ErrorContext) -> TierlogError:
    return errors.OffsetMismatch(
        expected_offset=context.subject.expected_offset,
        log_end_offset=context.problem.log_end_offset,
    )


def _fault(context: ErrorContext) -> TierlogError:
    return BrokerFault(context.detail, request_id=context.problem.request_id)


def _by_status(status: int) -> ErrorFactory:
    if status in {429, 503, 507}:
        return _retriable(RetriableError)
    return _plain(RequestError) if status < 500 else _fault


_BY_CODE: Final[Mapping[str, ErrorFactory]] = {
    "invalid-request": _invalid(errors.InvalidRequest),
    "invalid-record": _invalid(errors.InvalidRecord),
    "invalid-config": _invalid(errors.InvalidConfig),
    "invalid-topic-name": _invalid(errors.InvalidTopicName),
    "unknown-schema": lambda context: errors.UnknownSchema(
        context.detail, error_code=context.problem.error_code
    ),
    "invalid-replication-factor": _invalid(errors.InvalidReplicationFactor),
    "invalid-replica-assignment": _invalid(errors.InvalidReplicaAssignment),
    "corrupt-batch": _invalid_batch,
    "unauthorized": _unauthorized,
    "forbidden": _plain(errors.Forbidden),
    "unknown-topic": _unknown_topic,
    "unknown-partition": _unknown_partition,
    "unknown-segment": _plain(errors.UnknownSegment),
    "unknown-group": _plain(errors.UnknownGroup),
    "group-refused": _group_refused,
    "unknown-transaction": _plain(errors.UnknownTransaction),
    "transaction-refused": _transaction_refused,
    "concurrent-transactions": _retriable(errors.ConcurrentTransactions),
    "unknown-manifest-version": _plain(errors.UnknownManifestVersion),
    "not-found": _plain(NotOfferedHere),
    "method-not-allowed": _plain(NotOfferedHere),
    "not-acceptable": _plain(NotOfferedHere),
    "unsupported-media-type": _plain(NotOfferedHere),
    "unknown-broker": _plain(errors.UnknownBroker),
    "broker-in-use": _plain(errors.BrokerInUse),
    "no-reassignment": _plain(errors.NoReassignment),
    "not-in-cluster": _plain(errors.NotInCluster),
    "leader-unknown": _retriable(errors.LeaderUnknown),
    "not-leader": _retriable(errors.LeaderUnknown),
    "broker-unavailable": _retriable(errors.PeerUnavailable),
    "not-enough-replicas": _retriable(errors.NotEnoughReplicas),
    "watermark-unknown": _retriable(errors.WatermarkUnknown),
    "leader-changed": _plain(errors.LeaderChanged),
    "topic-exists": _plain(errors.TopicExists),
    "pin-exists": _plain(errors.PinExists),
    "out-of-order-sequence": _plain(errors.OutOfOrderSequence),
    "producer-fenced": _plain(errors.ProducerFenced),
    "invalid-partition-count": _plain(errors.InvalidPartitionCount),
    "leadership-lost": _plain(errors.FencedError),
    "offset-trimmed": _out_of_range(errors.OffsetTrimmed),
    "offset-past-end": _out_of_range(errors.OffsetPastEnd),
    "range-not-satisfiable": _plain(RangeNotSatisfiable),
    "offset-mismatch": _offset_mismatch,
    "record-too-large": _too_large(errors.RecordTooLarge),
    "request-too-large": _too_large(errors.RequestTooLarge),
    "cold-object-missing": _corrupt(errors.MissingObject),
    "cold-object-corrupt": _corrupt(errors.CorruptObject),
    "corrupt-log": _corrupt(errors.CorruptDataError),
    "throttled": _retriable(errors.Throttled),
    "store-unavailable": _retriable(errors.StoreUnavailable),
    "log-offline": _plain(errors.LogOfflineError),
    "starting": _retriable(errors.Starting),
    "shutting-down": _retriable(errors.ShuttingDown),
    "disk-full": _disk_full,
    "internal": _fault,
}
