"""Decodes JSON, query parameters and times, and names what is wrong with them.

* Unknown members and parameters are refused by name, and so is a parameter given twice.
* A problem's `loc` is a path into the request: `records[3].timestamp`, or a parameter's name.
* A time is integer milliseconds since the epoch, or RFC 3339 text. Text without a UTC offset is
  refused: a local time would depend on the machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any, Final, Literal, NamedTuple, NoReturn, TypeVar, cast, get_args, get_origin
from urllib.parse import unquote_plus

import msgspec
from msgspec import UnsetType, inspect

from tierlog.api.http.workarounds import read_message, with_key
from tierlog.record_format.errors import FieldProblem, InvalidRequest, did_you_mean
from tierlog.record_format.workarounds import json_decoder

T = TypeVar("T")

REPEATED: Final = "given more than once"
_PROBLEMS_MAX: Final = 100  # in a response
_STEPS: Final = re.compile(r"\[[^\]]*\]|[^.\[]+")  # of a path: members and indexes
_TOO_DEEP: Final = "nested too deeply"


def decode(body: bytes | bytearray, decoder: msgspec.json.Decoder[T]) -> T:
    """Raises InvalidRequest with the path of the first problem."""
    _check_not_empty(body)
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        refuse(error, kind=decoder.type)


def _check_not_empty(body: bytes | bytearray) -> None:
    if not body:
        refuse_field("", "the body is empty: a JSON object is expected")


def decode_control(body: bytes | bytearray, kind: type[T]) -> T:
    """As `decode`, for small bodies: a repeated member is refused, since one of its values would be
    ignored, and an invalid value in a map is reported with its key.
    """
    _check_not_empty(body)
    decoder = json_decoder(kind)
    with suppress(ValueError, RecursionError):  # the decoder reports malformed JSON better
        repeated = find_repeated(json.loads(body, object_pairs_hook=Members))
        if repeated is not None:
            refuse_field(repeated, REPEATED)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        refuse(with_key(error, body, decoder), kind=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        refuse(error)


class Members(list[tuple[str, object]]):
    """The members of a JSON object in source order, including repeated ones."""

    def repeated(self) -> str | None:
        seen: set[str] = set()
        for name, _ in self:
            if name in seen:
                return name
            seen.add(name)
        return None


def find_repeated(value: object) -> str | None:
    """The path of a repeated member. Joined only once it is found: names may be long, and many."""
    if isinstance(value, Members):
        name = value.repeated()
        if name is not None:
            return name
        parts: Iterable[tuple[str, object]] = value
    elif isinstance(value, list):
        parts = ((f"[{index}]", item) for index, item in enumerate(value))
    else:
        return None
    for part, inner in parts:
        if isinstance(inner, list) and (found := find_repeated(inner)) is not None:
            return join(part, found)
    return None


def refuse(error: Exception, *, within: str = "", kind: Any = None) -> NoReturn:
    """Raise InvalidRequest for an error of msgspec. `within` is the path of what was decoded, as
    this struct.
    """
    problem = problem_of(error, within=within, kind=kind)
    raise InvalidRequest(
        f"{problem.loc}: {problem.msg}" if problem.loc else problem.msg, problems=(problem,)
    ) from error


def problem_of(
    error: Exception, *, within: str = "", kind: type[Any] | None = None
) -> FieldProblem:
    if isinstance(error, RecursionError):
        return FieldProblem(within, _TOO_DEEP)
    if isinstance(error, UnicodeDecodeError):
        return FieldProblem(within, f"not UTF-8: {error.reason} at byte {error.start}")
    path, text, unknown, missing = read_message(error)
    if unknown is not None and kind is not None:
        text = _unknown("member", unknown, _members_at(kind, path))
    return FieldProblem(join(within, join(path, unknown or missing or "")), text)


def _unknown(what: str, name: str, known: Collection[str]) -> str:
    """With the most similar name that is known, or all of them."""
    near = did_you_mean(name, known)
    listed = f"; known {what}s: {', '.join(known)}" if known else ""
    return f"unknown {what}{near or listed}"


def _members_at(kind: type[Any], path: str) -> list[str]:
    """The members that the object at this path may have; none if it is no struct."""
    at: Any = inspect.type_info(kind)
    for step in _STEPS.findall(path):
        if step.startswith("["):
            items = _part_of(at, inspect.ListType)
            at = items and items.item_type
        else:
            at = _fields(at).get(step)
    return list(_fields(at))


def _fields(info: Any) -> dict[str, Any]:
    struct = _part_of(info, inspect.StructType)
    return {field.encode_name: field.type for field in struct.fields} if struct else {}


def _part_of(info: Any, kind: type[T]) -> T | None:
    """The type, or the one of its union, that is of this kind."""
    parts = info.types if isinstance(info, inspect.UnionType) else (info,)
    return next((part for part in parts if isinstance(part, kind)), None)


def join(outer: str, inner: str) -> str:
    """Join two paths into a request."""
    if not outer or not inner:
        return outer or inner
    return outer + inner if inner.startswith("[") else f"{outer}.{inner}"


# --- query parameters -----------------------------------------------------------------------------


def parse_query(query_string: bytes, struct: type[T]) -> T:
    """Decode the parameters as `struct`, by the names of its fields. Raises InvalidRequest."""
    if not query_string:
        return struct()
    fields = _field_kinds(cast(Hashable, struct))
    given = _split(query_string, fields)
    unknown = [name for name in given if name not in fields][:_PROBLEMS_MAX]
    problems = [FieldProblem(name, _unknown("parameter", name, fields)) for name in unknown]
    values: dict[str, object] = {}
    for name, text in given.items():
        kind = fields.get(name, _TEXT)
        if not kind.accepts(text):
            problems.append(FieldProblem(name, f"expected {kind.expected}, not {text[:64]!r}"))
        elif kind.is_integer:
            values[name] = int(text)  # msgspec refuses leading zeros
    if problems:
        refuse_all(problems)
    try:
        return msgspec.convert(given | values, struct, strict=False)
    except msgspec.ValidationError as error:
        loc, msg = problem_of(error)
        refuse_field(loc, f"{msg}, not {given[loc][:64]!r}" if loc in given else msg)


def refuse_all(problems: list[FieldProblem]) -> NoReturn:
    detail = "; ".join(f"{loc}: {msg}" if loc else msg for loc, msg in problems[:5])
    raise InvalidRequest(detail, problems=tuple(problems[:_PROBLEMS_MAX]))


def refuse_field(loc: str, msg: str) -> NoReturn:
    refuse_all([FieldProblem(loc, msg)])


def parse_natural(text: str) -> int | None:
    """Parse a whole number of at most 19 digits, plus leading zeros; None for any other text."""
    digits = text.lstrip("0") or "0"
    return int(digits) if text.isascii() and text.isdigit() and len(digits) <= 19 else None


def _split(query_string: bytes, fields: Mapping[str, _Kind]) -> dict[str, Any]:
    """Texts, or lists of them."""
    given: dict[str, Any] = {}
    try:
        text = query_string.decode("ascii")
        escaped = "%" in text or "+" in text
        for pair in text.split("&"):
            if not pair:
                continue
            name, _, value = pair.partition("=")
            if escaped:
                name, value = (
                    unquote_plus(name, errors="strict"),
                    unquote_plus(value, errors="strict"),
                )
            if fields.get(name, _TEXT) is _TEXTS:
                given.setdefault(name, []).append(value)
                continue
            if name in given:
                refuse_field(name, REPEATED)
            given[name] = value
    except UnicodeDecodeError as error:
        refuse_field("", f"the query is not percent-encoded UTF-8: {error.object[:64]!r}")
    return given


class _Kind(NamedTuple):
    """The text that a parameter accepts."""

    accepts: Callable[[str], object]
    expected: str
    is_integer: bool = False


_TEXT: Final = _Kind(lambda _: True, "text")
_TEXTS: Final = _Kind(lambda _: True, "text, once or more")
_INTEGER: Final = _Kind(
    re.compile(r"-?[0-9]{1,100}", re.ASCII).fullmatch, "a whole number", is_integer=True
)
_BOOLEAN: Final = _Kind(re.compile("true|false|[01]", re.I).fullmatch, "true or false")


@cache
def _field_kinds(struct: Hashable) -> dict[str, _Kind]:
    fields = msgspec.structs.fields(cast(Any, struct))
    return {field.encode_name: _kind_of(field.type) for field in fields}


def _kind_of(wanted: Any) -> _Kind:
    if wanted is int:
        return _INTEGER
    if wanted is bool:
        return _BOOLEAN
    if get_origin(wanted) is list:
        return _TEXTS
    parts = [part for part in get_args(wanted) if part is not UnsetType]
    if get_origin(wanted) is Literal:
        return _Kind(frozenset(parts).__contains__, f"one of {', '.join(parts)}")
    return _kind_of(parts[0]) if parts else _TEXT  # of `Annotated`, or of a union with UnsetType


MAX_TIMESTAMP: Final = 2**63 - 1

_MILLISECONDS: Final = re.compile(r"-?[0-9]{1,19}\Z", re.ASCII)
# A space before the offset is a plus sign that was not percent-encoded in a query.
_RFC3339: Final = re.compile(
    r"(\d{4}-\d\d-\d\d)[Tt ](\d\d:\d\d:\d\d)(?:\.(\d+))?(?:([Zz])|([-+ ])(\d\d):(\d\d))\Z", re.ASCII
)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
_DAY_MS: Final = timedelta(days=1) // _MILLISECOND


def parse_time(text: str) -> int:
    """Milliseconds since the epoch; smaller fractions are truncated, and a leap second becomes the
    second after it, since epoch time has none.

    Raises ValueError with a message for the user.
    """
    if _MILLISECONDS.match(text):
        return _checked(int(text))
    match = _RFC3339.match(text)
    if match is None:
        raise ValueError(_expected(text))
    date, clock, fraction, _, sign, hours, minutes = match.groups()
    leap = clock.endswith(":60")
    try:
        moment = datetime.fromisoformat(f"{date}T{clock[:-2] + '59' if leap else clock}+00:00")
    except ValueError as error:
        raise ValueError(f"{_expected(text)}: {error}") from None
    shift = timedelta(hours=int(hours or 0), minutes=int(minutes or 0))
    if shift >= timedelta(days=1) or int(minutes or 0) > 59:
        raise ValueError(_expected(text))
    ms = (moment - _EPOCH) // _MILLISECOND + int((fraction or "0")[:3].ljust(3, "0"))
    shift_ms = shift // _MILLISECOND
    utc_ms = (ms + shift_ms if sign == "-" else ms - shift_ms) + 1000 * leap
    if leap and utc_ms % _DAY_MS >= 1000:  # only at the end of a UTC day (RFC 3339, 5.7)
        raise ValueError(_expected(text))
    return _checked(utc_ms)


def _checked(ms: int) -> int:
    if not 0 <= ms <= MAX_TIMESTAMP:
        raise ValueError(f"a time must be between 0 and {MAX_TIMESTAMP}, not {ms}")
    return ms


def _expected(text: str) -> str:
    return (
        "expected milliseconds since the epoch or RFC 3339 text with a UTC offset, "
        f"not {text[:64]!r}"
    )
