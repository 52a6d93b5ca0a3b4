"""The OpenAPI document's operations, made from the table of calls.

Schemas are msgspec's, of the very types that the handlers decode and encode: the document cannot
differ from the code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec

from api.http import problems
from api.http.access.scopes import OPEN_PATHS
from api.http.calls import Body, Call, OtherResponse
from api.http.docs.examples import EXAMPLES
from api.http.schemas import PROBLEM_REF

Json = dict[str, Any]

_REF: Final = "#/components/schemas/{name}"
_PATH_PARAMETERS: Final[Mapping[str, Json]] = {
    "topic": {"type": "string", "pattern": "^[a-zA-Z0-9._-]{1,249}$"},
    "partition": {"type": "integer", "minimum": 0},
    "group": {"type": "string", "minLength": 1, "maxLength": 255},
    "base_offset": {"type": "integer", "minimum": 0},
}
_QUERY_PARAMETERS: Final[Mapping[str, str]] = {
    "acks": "wait until appended (1), until flushed (all, -1), or not at all (0)",
    "deep": "read every byte of both tiers",
    "encoding": "of keys and values: text, JSON if they are JSON, or base64",
    "envelope": "each line is a record object, not a value",
    "from_offset": "begin with the segment that holds this offset",
    "internal": "also topics whose names begin with __",
    "isolation": "read_committed: up to the last stable offset, without aborted records",
    "key": "the record's key, as text",
    "key_base64": "the record's key, as bytes",
    "limit": "the most segments in a response",
    "max_bytes": "at most this much of the log, but always at least one batch or record",
    "max_records": "at most this many records, or the batches that hold them",
    "min_bytes": "with wait_ms: wait until there is this much",
    "offset": "a number, earliest, latest or earliest-local",
    "prefix": "only topics whose names begin with this",
    "timestamp": "milliseconds since the epoch, or RFC 3339 text: the first record at or after it",
    "version": "of the manifest; the current one by default",
    "wait_ms": "wait at most this long, then answer with what there is",
}
_QUERY_SHAPES: Final[Mapping[str, Json]] = {
    "offset": {"type": "string", "pattern": r"^(\d{1,19}|earliest|latest|earliest-local)$"},
    "timestamp": {
        "type": "string",
        "pattern": r"^(\d{1,19}|\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[-+]\d\d:\d\d))$",
        "examples": ["1357034400000", "2013-01-01T10:00:00Z"],
    },
}
_HEADER_SHAPES: Final[Mapping[str, Json]] = {
    "If-Offset-Match": {"type": "integer", "minimum": 0},
    "Producer-Id": {"type": "integer", "minimum": 0},
    "Producer-Epoch": {"type": "integer", "minimum": 0, "maximum": 2**15 - 1},
    "Producer-Sequence": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    "Content-Encoding": {"type": "string", "enum": ["gzip", "zstd"]},
}
COMMON_PROBLEMS: Final = (
    "invalid-request",
    "unauthorized",
    "forbidden",
    "not-acceptable",
    "throttled",
    "header-too-large",
    "shutting-down",
    "internal",
)
# Of POST, PUT and PATCH, including those that take no body.
BODY_PROBLEMS: Final = ("request-too-large", "unsupported-media-type")
# Health answers everybody, always, in one form.
_NOT_OF_OPEN_PATHS: Final = frozenset(
    ("unauthorized", "not-acceptable", "throttled", "shutting-down")
)
# If the broker has tokens; the empty requirement says that it need not.
SECURITY_SCHEMES: Final[Json] = {"token": {"type": "http", "scheme": "bearer"}}
SECURITY: Final[list[Json]] = [{"token": []}, {}]

PROBLEM_SCHEMA: Final[Json] = {
    "title": "ProblemDetails",
    "description": "RFC 9457. Further members by code.",
    "type": "object",
    "required": ["type", "title", "status", "detail", "code"],
    "properties": {
        "type": {"type": "string", "pattern": "^urn:tierlog:problem:"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "what was wrong and what to do"},
        "code": {"type": "string", "enum": sorted({k.code for k in problems.TABLE.values()})},
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["loc", "msg"],
                "properties": {"loc": {"type": "string"}, "msg": {"type": "string"}},
            },
        },
    },
}


class Schemas:
    """The components to which all operations refer."""

    def __init__(self, calls: Iterable[Call]) -> None:
        bodies = [body for call in calls for body in _bodies(call)]
        types = list(dict.fromkeys(kind for body in bodies for kind in _structs(body.schema)))
        found, components = msgspec.json.schema_components(types, ref_template=_REF)
        self._by_type = dict(zip(types, found, strict=True))
        name = PROBLEM_REF.rpartition("/")[2]
        assert name not in components, "one name, one schema"
        self.components: Json = {**components, name: PROBLEM_SCHEMA}

    def of(self, body: Body) -> Json:
        if isinstance(body.schema, dict):
            return body.schema
        shapes = [self._by_type[kind] for kind in _structs(body.schema)]
        shape = shapes[0] if len(shapes) == 1 else {"anyOf": shapes}
        if not body.listed_as:
            return shape
        return {
            "type": "object",
            "required": [body.listed_as],
            "properties": {body.listed_as: {"type": "array", "items": shape}},
        }


def completed(document: Json, calls: Iterable[Call]) -> Json:
    """FastAPI's document, completed. FastAPI itself would remove nulls from examples."""
    calls = tuple(calls)
    schemas = Schemas(calls)
    for call in calls:
        document["paths"][call.path][call.method.lower()].update(operation(call, schemas))
    document["components"] = {
        "schemas": schemas.components,
        "securitySchemes": SECURITY_SCHEMES,
    }
    document["security"] = SECURITY
    return document


def _bodies(call: Call) -> Iterable[Body]:
    yield from call.body.values()
    yield from call.response.values()
    for other in call.other_responses.values():
        yield from other.content.values()


def _structs(schema: Any) -> tuple[type[Any], ...]:
    if isinstance(schema, dict):
        return ()
    return schema if isinstance(schema, tuple) else (schema,)


def operation(call: Call, schemas: Schemas) -> Json:
    """What FastAPI's document says about the call besides its path and summary."""
    described: Json = {
        "description": call.description or call.summary,
        "parameters": [
            *_path_parameters(call),
            *_query_parameters(call),
            *_header_parameters(call),
        ],
        "responses": _responses(call, schemas),
    }
    if call.path in OPEN_PATHS:
        described["security"] = []
    if call.body:
        described["requestBody"] = {"required": True, "content": _content(call.body, schemas)}
    return described


def _path_parameters(call: Call) -> Iterable[Json]:
    for name in re.findall(r"{(\w+)}", call.path):
        yield {"name": name, "in": "path", "required": True, "schema": _PATH_PARAMETERS[name]}


def _query_parameters(call: Call) -> Iterable[Json]:
    if call.query is None:
        return
    schema = msgspec.json.schema(call.query)
    struct = schema["$defs"][call.query.__name__]
    for name, shape in struct["properties"].items():
        yield {
            "name": name,
            "in": "query",
            "required": False,
            "description": _QUERY_PARAMETERS[name],
            "schema": _QUERY_SHAPES.get(name, shape),
        }


def _header_parameters(call: Call) -> Iterable[Json]:
    for name, description in call.headers.items():
        yield {
            "name": name,
            "in": "header",
            "required": False,
            "description": description,
            "schema": _HEADER_SHAPES.get(name, {"type": "string"}),
        }


def _content(bodies: Mapping[str, Body], schemas: Schemas) -> Json:
    content: Json = {}
    for media_type, body in bodies.items():
        content[media_type] = {"schema": schemas.of(body)}
        if (example := _example(body)) is not None:
            content[media_type]["example"] = example
    return content


def _example(body: Body) -> Any:
    if body.example is not None:
        return body.example
    found = [EXAMPLES.get(kind.__name__) for kind in _structs(body.schema)]
    if body.listed_as:
        return {body.listed_as: found}
    return found[0] if found else None


def _responses(call: Call, schemas: Schemas) -> Json:
    usual = OtherResponse(HTTPStatus(call.status).phrase, call.response, call.response_headers)
    responses = {
        str(status): _response(response, schemas)
        for status, response in {call.status: usual, **call.other_responses}.items()
    }
    of_a_body = BODY_PROBLEMS if call.method in ("POST", "PUT", "PATCH") else ()
    for code in (*_common_problems(call), *call.problems, *of_a_body):
        _add_problem(responses, code)
    return responses


def _common_problems(call: Call) -> Iterable[str]:
    for code in COMMON_PROBLEMS:
        without_body = code == "not-acceptable" and not call.response
        if not without_body and not (call.path in OPEN_PATHS and code in _NOT_OF_OPEN_PATHS):
            yield code


def _response(response: OtherResponse, schemas: Schemas) -> Json:
    headers = {**response.headers, "X-Request-Id": "names the request in the log"}
    described: Json = {
        "description": response.description,
        "headers": {
            name: {"description": description, "schema": {"type": "string"}}
            for name, description in headers.items()
        },
    }
    if response.content:
        described["content"] = _content(response.content, schemas)
    return described


def _add_problem(responses: Json, code: str) -> None:
    kind = _KINDS[code]
    response = responses.setdefault(str(kind.status), {"description": kind.title})
    content = response.setdefault("content", {})
    shown = content.setdefault(
        problems.MEDIA_TYPE, {"schema": {"$ref": PROBLEM_REF}, "examples": {}}
    )
    shown["examples"][code] = {
        "value": {
            "type": problems.TYPE_PREFIX + code,
            "title": kind.title,
            "status": kind.status,
            "detail": kind.title,
            "code": code,
        }
    }


_KINDS: Final[Mapping[str, problems.Kind]] = {  # of rows with one code, the first
    kind.code: kind for kind in reversed((*problems.TABLE.values(), problems.INTERNAL))
}
