"""Problem documents (RFC 9457) back into the error tree: the same class the broker raised.

One table from `code` to the class that says what the caller does next. A code that is not in it
(from a newer broker) is mapped by its status: 4xx mend the request, 429 and 503 try again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Final, NamedTuple

import msgspec

from record_format import errors, typed_json
from record_format.errors import FieldProblem, RequestError, RetriableError, TierlogError
from tierlog.client.wire import Place, Reply, Request

REFUSED_FOR_NOW: Final = frozenset(
    ("throttled", "starting", "store-unavailable", "shutting-down", "disk-full")
)


DAY_S: Final = 86_400.0


class Unauthorized(RequestError):
    """No token, or an unknown one."""


class NotOfferedHere(RequestError):
    """The broker lacks the path, method or media type: an older or newer version?"""


class RangeNotSatisfiable(RequestError):
    """A byte range outside a segment."""


class BrokerFault(TierlogError):
    """The broker failed unexpectedly; `request_id` is in its log."""

    def __init__(self, detail: str, *, request_id: str) -> None:
        super().__init__(f"{detail} (request {request_id})" if request_id else detail)
        self.request_id = request_id


class UnexpectedAnswer(TierlogError):
    """What answered is not a tierlog broker, or a proxy in between answered for it."""


class AppendedInPart(TierlogError):
    """A fault part way through a produce: `results` were appended, the rest was not."""

    def __init__(self, detail: str, *, results: tuple[Mapping[str, int], ...]) -> None:
        super().__init__(detail)
        self.results = results


class Problem(msgspec.Struct, frozen=True):
    """The document's members that this side uses."""

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
    object_key: str = ""
    file: str = ""
    results: tuple[dict[str, object], ...] = ()


class Facts(NamedTuple):
    """All that an error may be made of."""

    problem: Problem
    detail: str
    place: Place
    retry_after_s: float


Make = Callable[[Facts], TierlogError]


def error_of(reply: Reply, request: Request) -> TierlogError:
    """The error for a reply that is not an answer: 400 and above, or a redirection."""
    problem = parse_problem(reply.body)
    if problem is None:
        server, place = reply.headers.get("server"), reply.headers.get("location")
        sent_on = f", which sends on to {place}" if place else ""
        return UnexpectedAnswer(
            f"{request.method} {request.path}: status {reply.status} by "
            f"{server or 'an unnamed server'}{sent_on}, without a problem document: is that a "
            "tierlog broker?"
        )
    return error_of_problem(problem, reply, request.place)


def error_of_problem(problem: Problem, reply: Reply, place: Place) -> TierlogError:
    """The error of a problem document that came as `reply`, or inside one."""
    facts = Facts(problem, _detail(problem), place, retry_after_s(reply))
    if problem.results:
        return _appended_in_part(facts)
    if problem.outcome == "unknown":
        return errors.OutcomeUnknownError(facts.detail)
    make = _BY_CODE.get(problem.code) or _by_status(reply.status)
    return make(facts)


def parse_problem(body: bytes) -> Problem | None:
    """None if the body is no problem document."""
    try:
        problem = typed_json.decode(body, Problem)
    except msgspec.DecodeError:
        return None
    return problem if problem.code else None


def is_refusal(reply: Reply) -> bool:
    """Whether the broker refused for now and changed nothing: the request may be sent again."""
    if reply.status not in {429, 503, 507}:
        return False
    problem = parse_problem(reply.body)
    if problem is None or problem.results or problem.outcome == "unknown":
        return False
    return problem.code in REFUSED_FOR_NOW


def is_by_gateway(reply: Reply) -> bool:
    """Whether something between here and the broker answered that it could not reach it."""
    return reply.status in {502, 503, 504} and parse_problem(reply.body) is None


def is_cut_by_stop(reply: Reply) -> bool:
    """Whether the broker stopped in the middle of the request, which may have taken effect."""
    problem = parse_problem(reply.body) if reply.status == 503 else None
    return problem is not None and (problem.code, problem.outcome) == ("shutting-down", "unknown")


def retry_after_s(reply: Reply) -> float:
    """`Retry-After` in seconds, a day at most; 0 if there is none (or a date, which a broker never
    sends).
    """
    text = reply.headers.get("retry-after", "")
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


def _appended_in_part(facts: Facts) -> TierlogError:
    results = tuple(
        {name: value for name, value in result.items() if isinstance(value, int)}
        for result in facts.problem.results
    )
    return AppendedInPart(facts.detail, results=results)


def _plain(kind: Callable[[str], TierlogError]) -> Make:
    return lambda facts: kind(facts.detail)


def _invalid(kind: type[errors.InvalidRequest]) -> Make:
    return lambda facts: kind(facts.detail, problems=_fields(facts.problem))


def _too_large(kind: type[errors.TooLarge]) -> Make:
    return lambda facts: kind(
        facts.detail,
        limit_bytes=facts.problem.limit_bytes,
        size_bytes=facts.problem.size_bytes,
    )


def _out_of_range(kind: type[errors.OffsetOutOfRange]) -> Make:
    return lambda facts: kind(
        facts.detail,
        log_start_offset=facts.problem.log_start_offset,
        high_watermark=facts.problem.high_watermark,
    )


def _later(kind: type[RetriableError]) -> Make:
    return lambda facts: kind(facts.detail, retry_after_s=facts.retry_after_s or 1.0)


def _corrupt(kind: type[errors.CorruptDataError]) -> Make:
    def make(facts: Facts) -> TierlogError:
        problem = facts.problem
        error = kind(
            facts.detail, file=problem.object_key or problem.file, position=problem.position
        )
        if PurePath(error.file).name in facts.detail:  # older brokers told the place apart
            error.args = (facts.detail,)
        return error

    return make


def _invalid_batch(facts: Facts) -> TierlogError:
    return errors.InvalidBatch(facts.detail, position=facts.problem.position or 0)


def _unknown_topic(facts: Facts) -> TierlogError:
    if facts.place.topic:
        return errors.UnknownTopic(facts.place.topic, detail=facts.detail)
    return errors.UnknownTopicOrPartition(facts.detail)


def _unknown_partition(facts: Facts) -> TierlogError:
    if facts.place.topic and facts.place.partition >= 0:
        return errors.UnknownPartition(facts.place.topic, facts.place.partition)
    return errors.UnknownTopicOrPartition(facts.detail)


def _unauthorized(facts: Facts) -> TierlogError:
    return Unauthorized(
        f"{facts.detail}; a client takes its token from TIERLOG_TOKEN, from the file that "
        "TIERLOG_TOKEN_FILE names, and on the command line from --token-file"
    )


def _offset_mismatch(facts: Facts) -> TierlogError:
    return errors.OffsetMismatch(
        expected_offset=facts.place.expected_offset,
        log_end_offset=facts.problem.log_end_offset,
    )


def _fault(facts: Facts) -> TierlogError:
    return BrokerFault(facts.detail, request_id=facts.problem.request_id)


def _by_status(status: int) -> Make:
    if status in {429, 503, 507}:
        return _later(RetriableError)
    return _plain(RequestError) if status < 500 else _fault


_BY_CODE: Final[Mapping[str, Make]] = {
    "invalid-request": _invalid(errors.InvalidRequest),
    "invalid-record": _invalid(errors.InvalidRecord),
    "invalid-config": _invalid(errors.InvalidConfig),
    "invalid-topic-name": _invalid(errors.InvalidTopicName),
    "corrupt-batch": _invalid_batch,
    "unauthorized": _unauthorized,
    "forbidden": _plain(errors.Forbidden),
    "unknown-topic": _unknown_topic,
    "unknown-partition": _unknown_partition,
    "unknown-segment": _plain(errors.UnknownSegment),
    "unknown-group": _plain(errors.UnknownGroup),
    "unknown-manifest-version": _plain(errors.UnknownManifestVersion),
    "not-found": _plain(NotOfferedHere),
    "method-not-allowed": _plain(NotOfferedHere),
    "not-acceptable": _plain(NotOfferedHere),
    "unsupported-media-type": _plain(NotOfferedHere),
    "topic-exists": _plain(errors.TopicExists),
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
    "throttled": _later(errors.Throttled),
    "store-unavailable": _later(errors.StoreUnavailable),
    "log-offline": _plain(errors.LogOfflineError),
    "starting": _later(errors.Starting),
    "shutting-down": _later(errors.ShuttingDown),
    "disk-full": _later(errors.DiskFull),
    "internal": _fault,
}
