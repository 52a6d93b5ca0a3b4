"""The OpenAPI document, compared with every answer that a test gets.

An answer of a documented call must have a status, a media type and a JSON body from the document,
and a problem's code must be among the codes that it names for the call.
"""

import re
from functools import cached_property
from typing import Any

import httpx
import jsonschema_rs

PROBLEM = "application/problem+json"


class OpenApiDocument:
    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._validators: dict[tuple[str, str, int, str], Any] = {}

    @cached_property
    def _paths(self) -> list[tuple[re.Pattern[str], str]]:
        """Fixed parts before parameters, as the broker finds its calls."""
        templates = sorted(self._document["paths"], key=lambda path: path.replace("{", "~"))
        return [(re.compile(re.sub(r"{\w+}", "[^/]+", path) + r"\Z"), path) for path in templates]

    def check(self, answer: httpx.Response) -> None:
        """Assert that the answer agrees with the document."""
        raw_path = answer.request.url.raw_path.decode().partition("?")[0]
        path = next((path for pattern, path in self._paths if pattern.match(raw_path)), None)
        if path is None:
            return
        method = answer.request.method.lower()
        operation = self._document["paths"][path].get("get" if method == "head" else method)
        if operation is None:
            return
        place = f"{method} {path} {answer.status_code}"
        response = operation["responses"].get(str(answer.status_code))
        assert response is not None, f"{place} is not in the document: {answer.text[:300]}"
        missing = set(response.get("headers", ())) - set(answer.headers)
        assert not {name for name in missing if name.lower() not in answer.headers}, (
            place,
            missing,
        )
        if method == "head" or not answer.content:
            return
        media_type = answer.headers["content-type"].partition(";")[0]
        content = response.get("content", {}).get(media_type)
        assert content is not None, f"{place}: {media_type} is not in the document"
        if not media_type.endswith("json") or media_type.endswith("ndjson"):
            return
        found = answer.json()
        key = (method, path, answer.status_code, media_type)
        if key not in self._validators:
            whole = {**content["schema"], "components": self._document["components"]}
            self._validators[key] = jsonschema_rs.validator_for(whole)
        error = next(self._validators[key].iter_errors(found), None)
        assert error is None, f"{place}: {error}"
        if media_type == PROBLEM:
            assert found["code"] in content["examples"], f"{place}: {found['code']}"
