"""Compares every response that a test gets with the OpenAPI document.

The response of a documented call must have a documented status, media type and JSON body, and a
problem's code must be documented for the call.
"""

import re
from functools import cached_property
from typing import Any

import httpx2
import jsonschema_rs

PROBLEM = "application/problem+json"
_FRAMING_HEADERS = {"date", "content-type", "content-length", "transfer-encoding", "connection"}


class OpenApiDocument:
    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._validators: dict[tuple[str, str, int, str], Any] = {}

    @cached_property
    def _paths(self) -> list[tuple[re.Pattern[str], str]]:
        """Fixed parts before parameters, as the broker matches its routes."""
        templates = sorted(self._document["paths"], key=lambda path: path.replace("{", "~"))
        return [(re.compile(re.sub(r"{\w+}", "[^/]+", path) + r"\Z"), path) for path in templates]

    def check(self, response: httpx2.Response) -> None:
        """Assert that the response agrees with the document."""
        raw_path = response.request.url.raw_path.decode().partition("?")[0]
        path = next((path for pattern, path in self._paths if pattern.match(raw_path)), None)
        if path is None:
            return
        method = response.request.method.lower()
        operation = self._document["paths"][path].get("get" if method == "head" else method)
        if operation is None:
            return
        place = f"{method} {path} {response.status_code}"
        documented = operation["responses"].get(str(response.status_code))
        assert documented is not None, f"{place} is not in the document: {response.text[:300]}"
        documented_headers = {name.lower() for name in documented["headers"]}
        assert documented_headers - set(response.headers) == set(), place
        assert set(response.headers) - documented_headers - _FRAMING_HEADERS == set(), place
        if method == "head" or not response.content:
            return
        media_type = response.headers["content-type"].partition(";")[0]
        content = documented.get("content", {}).get(media_type)
        assert content is not None, f"{place}: {media_type} is not in the document"
        if not media_type.endswith("json") or media_type.endswith("ndjson"):
            return
        found = response.json()
        key = (method, path, response.status_code, media_type)
        if key not in self._validators:
            whole = {**content["schema"], "components": self._document["components"]}
            self._validators[key] = jsonschema_rs.validator_for(whole)
        error = next(self._validators[key].iter_errors(found), None)
        assert error is None, f"{place}: {error}"
        if media_type == PROBLEM:
            assert found["code"] in content["examples"], f"{place}: {found['code']}"
