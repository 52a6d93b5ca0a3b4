"""JSON Schemas: checked by jsonschema-rs, of draft 7 if they do not say which.

Nothing is ever fetched: what a schema refers to is in the registry, or it is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jsonschema_rs
import msgspec

from tierlog.broker.schema_registry.json_compatibility import Document, json_incompatibilities
from tierlog.broker.schema_registry.json_text import decode_text, encode_text
from tierlog.record_format.schema_records import Malformed


class JsonSchema:
    """`identity`: equal for schemas that say the same."""

    def __init__(self, text: str, dependencies: Sequence[tuple[str, str]]) -> None:
        """`dependencies`: what it refers to, by name. Raises Malformed."""
        schema = decode_text(text)
        if not isinstance(schema, dict | bool):
            raise Malformed("neither an object nor a boolean")
        others = {name: decode_text(one) for name, one in dependencies}
        self._validator = _validator(schema, list(others.items()))
        self.text = encode_text(schema)
        self.identity = encode_text(schema, sort=True)
        documents: dict[str, Document] = {}
        documents |= {name: Document(one, documents) for name, one in others.items()}
        self._document = Document(schema, documents)

    def incompatibilities(self, writer: JsonSchema) -> list[str]:
        """Why not all that is valid by that schema is valid by this one; empty if it is."""
        try:
            return json_incompatibilities(writer._document, self._document)
        except RecursionError as error:
            raise Malformed("nested too deeply") from error

    def encode_value(self, text: bytes) -> bytes:
        """The JSON as it is. Raises Malformed."""
        self.check_value(text)
        return text

    def check_value(self, encoded: bytes) -> None:
        """Raises Malformed."""
        try:
            value = json.loads(encoded)
            error = next(iter(self._validator.iter_errors(value)), None)
        except (ValueError, RecursionError) as reason:
            raise Malformed(f"not JSON: {reason}") from reason
        if error is not None:
            path = "".join(f"/{part}" for part in error.instance_path)
            raise Malformed(f"{path or '/'}: {error.message[:500]}")

    def decode(self, encoded: bytes) -> Any:
        """The text itself, whether or not it is valid by the schema. Raises Malformed."""
        try:
            decode_text(encoded.decode())
        except UnicodeDecodeError as error:
            raise Malformed(f"not JSON: {error}") from error
        return msgspec.Raw(encoded)


def _validator(schema: Any, others: list[tuple[str, Any]]) -> jsonschema_rs.Validator:
    says = isinstance(schema, dict) and "$schema" in schema
    draft = None if says else jsonschema_rs.Draft7
    make = jsonschema_rs.validator_for if says else jsonschema_rs.Draft7Validator
    try:
        registry = jsonschema_rs.Registry(others, draft=draft, retriever=_refuse)
        return make(schema, registry=registry, offline=True)
    except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
        raise Malformed(str(error).partition("\n")[0]) from error
    except (ValueError, TypeError, RecursionError) as error:
        raise Malformed(str(error)) from error


def _refuse(uri: str) -> Any:
    raise ValueError(f"{uri} is not one of the references")
