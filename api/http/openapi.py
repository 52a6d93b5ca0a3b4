"""The OpenAPI document's operations, made from the table of calls.

Schemas are msgspec's, of the very types that the handlers decode and encode: the document cannot
say something else than the code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any, Final

import msgspec

from api.http import problems
from api.http.calls import Body, Call

Json = dict[str, Any]

_REF: Final = "#/components/schemas/{name}"
_PROBLEM_REF: Final = {"$ref": _REF.format(name="Problem")}
_PATH_PARAMETERS: Final[Mapping[str, Json]] = {
    "topic": {"type": "string", "pattern": "^[a-zA-Z0-9._-]{1,249}$"},
    "partition": {"type": "integer", "minimum": 0},
    "group": {"type": "string", "minLength": 1, "maxLength": 255},
    "base_offset": {"type": "integer", "minimum": 0},
}
_COMMON_PROBLEMS: Final = (
    "invalid-request",
    "unauthorized",
    "forbidden",
    "not-acceptable",
    "throttled",
    "internal",
)
# Where the broker has tokens; the empty requirement says that it need not.
SECURITY_SCHEMES: Final[Json] = {"token": {"type": "http", "scheme": "bearer"}}
SECURITY: Final[list[Json]] = [{"token": []}, {}]

PROBLEM_SCHEMA: Final[Json] = {
    "title": "Problem",
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
    """The components that all operations refer to."""

    def __init__(self, calls: Iterable[Call]) -> None:
        bodies = [body for call in calls for body in (*call.body.values(), *call.answer.values())]
        types = list(dict.fromkeys(kind for body in bodies for kind in _structs(body.schema)))
        found, components = msgspec.json.schema_components(types, ref_template=_REF)
        self._by_type = dict(zip(types, found, strict=True))
        self.components: Json = {**components, "Problem": PROBLEM_SCHEMA}

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


def _structs(schema: Any) -> tuple[type[Any], ...]:
    if isinstance(schema, dict):
        return ()
    return schema if isinstance(schema, tuple) else (schema,)


def operation(call: Call, schemas: Schemas) -> Json:
    """What FastAPI's document says about the call, beyond its path and summary."""
    described: Json = {
        "description": call.description or call.summary,
        "parameters": [
            *_path_parameters(call),
            *_query_parameters(call),
            *_header_parameters(call),
        ],
        "responses": _responses(call, schemas),
    }
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
        yield {"name": name, "in": "query", "required": False, "schema": shape}


def _header_parameters(call: Call) -> Iterable[Json]:
    for name, description in call.headers.items():
        yield {
            "name": name,
            "in": "header",
            "required": False,
            "description": description,
            "schema": {"type": "string"},
        }


def _content(bodies: Mapping[str, Body], schemas: Schemas) -> Json:
    content: Json = {}
    for media_type, body in bodies.items():
        content[media_type] = {"schema": schemas.of(body)}
        if body.example is not None:
            content[media_type]["example"] = body.example
    return content


def _responses(call: Call, schemas: Schemas) -> Json:
    success: Json = {"description": HTTPStatus(call.status).phrase}
    if call.answer:
        success["content"] = _content(call.answer, schemas)
    headers = {**call.answer_headers, "X-Request-Id": "names the request in the log"}
    success["headers"] = {
        name: {"description": description, "schema": {"type": "string"}}
        for name, description in headers.items()
    }
    responses = {str(call.status): success}
    for status, description in call.other_answers.items():
        responses[str(status)] = {"description": description}
    for code in (*_COMMON_PROBLEMS, *call.problems):
        _add_problem(responses, code)
    return responses


def _add_problem(responses: Json, code: str) -> None:
    kind = _KINDS[code]
    response = responses.setdefault(str(kind.status), {"description": kind.title})
    content = response.setdefault("content", {})
    shown = content.setdefault(problems.MEDIA_TYPE, {"schema": _PROBLEM_REF, "examples": {}})
    shown["examples"][code] = {
        "value": {
            "type": problems.TYPE_PREFIX + code,
            "title": kind.title,
            "status": kind.status,
            "detail": kind.title,
            "code": code,
        }
    }


_KINDS: Final[Mapping[str, problems.Kind]] = {
    kind.code: kind for kind in (*problems.TABLE.values(), problems.INTERNAL)
}
