"""The text of schemas that are JSON."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from tierlog.record_format.schema_records import Malformed


def decode_text(text: str) -> Any:
    """Raises Malformed."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON: {error}") from error


def encode_text(document: Any, *, sort: bool = False) -> str:
    """On one line. Raises Malformed for a number that JSON does not have."""
    try:
        return json.dumps(
            document,
            ensure_ascii=False,
            allow_nan=False,
            sort_keys=sort,
            separators=(",", ":"),
        )
    except (ValueError, RecursionError) as error:
        raise Malformed(str(error)) from error


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")
