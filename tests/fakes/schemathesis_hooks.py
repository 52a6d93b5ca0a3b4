"""What schemathesis has to know of the API that OpenAPI has no words for: rules between parameters,
bytes of Kafka's format, and which topics there are. Loaded by its command line.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from typing import Any, Final

import schemathesis
from hypothesis import strategies as st
from schemathesis import Case

from tierlog.api.http.header_values import BATCHES, EVENTS, NDJSON, OCTETS
from tierlog.api.http.strict_json import parse_time
from tierlog.hot_tier.log_config import KEYS_BY_NAME, LogConfig
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import InvalidConfig

TOPIC, ALTERED, TRIMMED, DELETED = "flights", "altered", "trimmed", "deleted"
TOPICS: Final = (TOPIC, ALTERED, TRIMMED, DELETED)
TRANSACTION_MAX_TIMEOUT_MS: Final = 900_000  # by default
PARTITIONS, RECORDS = 3, 5  # of each topic, and in each partition at first
_PRODUCER: Final = ("Producer-Id", "Producer-Epoch", "Producer-Sequence")
_turns: Final[Iterator[int]] = itertools.count()


def _batch_of(values: list[bytes | None]) -> bytes:
    return bytes(encode_batch(values, timestamps=[1_795_860_000_000] * len(values)))


schemathesis.openapi.media_type(BATCHES, st.lists(st.binary(), min_size=1).map(_batch_of))


@schemathesis.serializer(NDJSON, OCTETS)
def _as_bytes(_: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


@schemathesis.hook
def before_call(_: Any, case: Case, **__: Any) -> None:
    _ask_for_each_form(case)
    for name, value in case.headers.items():  # one taken from an earlier answer is a number
        case.headers[name] = value if isinstance(value, (str, bytes)) else str(value)
    for name, value in case.path_parameters.items():
        if value in ("", ".", ".."):  # the path would be another: clients resolve dots
            case.path_parameters[name] = "x"
    if _deletes_topic(case) and case.path_parameters.get("topic") in TOPICS:
        case.path_parameters["topic"] = DELETED
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return
    _name_what_exists(case)
    if case.headers.get("Accept") == EVENTS:
        _read_from_the_start(case)
    if case.headers.get("Accept") in (BATCHES, EVENTS):
        case.query.pop("decode", None)
    _keep_rules_of_query(case.query, case.media_type or "")
    _keep_rules_of_headers(case.headers, case.media_type or "")
    if case.media_type == NDJSON:
        case.body = _lines(case.body)
    elif isinstance(case.body, dict):
        case.body = _with_integers(case.body)
        _keep_rules_of_body(case.body, to_partition="partition" in case.path_parameters)
        if case.method == "PATCH" and "config" in case.body:  # what is set may contradict it
            kept = {"remote.storage.enable": None}  # the bucket may have segments
            case.body["config"] = dict.fromkeys(KEYS_BY_NAME) | case.body["config"] | kept


def _deletes_topic(case: Case) -> bool:
    return case.method == "DELETE" and case.path.endswith("{topic}")


def _ask_for_each_form(case: Case) -> None:
    """In turn; of events, schemathesis reads a few."""
    answer = case.operation.definition.raw["responses"].get("200", {})
    forms = list(answer.get("content", {}))
    if forms:
        case.headers["Accept"] = forms[next(_turns) % len(forms)]


def _name_what_exists(case: Case) -> None:
    """Otherwise most answers would be 404. What is altered or trimmed is a topic of its own: there
    may be no records then, or none that it takes.
    """
    given = case.path_parameters
    if case.path.endswith("/members"):
        given["group"] = f"joined {next(_turns)}"  # in a group of others it would wait for them
    if "topic" in given and not _deletes_topic(case):
        altered = ALTERED if case.method == "PATCH" else TOPIC
        given["topic"] = TRIMMED if case.path.endswith("/trim") else altered
    if isinstance(given.get("partition"), int):
        given["partition"] %= PARTITIONS


def _read_from_the_start(case: Case) -> None:
    """Without records a stream would not end. Of its parameters a fetch of events has a tail's."""
    case.headers.pop("Last-Event-ID", None)
    case.query["offset"] = "earliest"
    for name in ("min_bytes", "max_records", "max_bytes"):
        case.query.pop(name, None)


def _keep_rules_of_query(query: MutableMapping[str, Any], media_type: str) -> None:
    query.pop("wait_ms", None)  # nothing is produced meanwhile
    if "offset" in query:
        query.pop("timestamp", None)
    if media_type != OCTETS or "key" in query:
        query.pop("key_base64", None)
    if media_type != OCTETS:
        query.pop("key", None)
    query.pop("envelope", None)
    for part in ("key", "value"):
        # Without an envelope a line is a value.
        if media_type in (OCTETS, BATCHES) or (part == "key" and media_type == NDJSON):
            query.pop(f"{part}_schema_id", None)
            query.pop(f"{part}_schema_version", None)
        if f"{part}_schema_id" in query:
            query.pop(f"{part}_schema_version", None)


def _keep_rules_of_headers(headers: MutableMapping[str, Any], media_type: str) -> None:
    headers.pop("Content-Encoding", None)  # bodies are generated as they are
    if media_type == BATCHES or not all(name in headers for name in _PRODUCER):
        for name in (*_PRODUCER, "Transactional-Id"):
            headers.pop(name, None)


def _lines(body: Any) -> str:
    """A value is a line of its own; an example is lines already, if it is not empty."""
    if isinstance(body, str) and body:
        with suppress(ValueError):
            for line in body.splitlines():
                json.loads(line)
            return body
    return json.dumps(body)


def _with_integers(value: Any) -> Any:
    """A whole number is written without a fraction; to JSON Schema 1.0 is an integer too."""
    if isinstance(value, dict):
        return {key: _with_integers(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_integers(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _keep_rules_of_body(body: dict[str, Any], *, to_partition: bool) -> None:
    body.pop("wait_ms", None)
    if "partitions" in body and isinstance(body["partitions"], int):
        body["partitions"] = min(body["partitions"], 2 * PARTITIONS)
    if set(body) != {"replicas"}:  # but for a reassignment: there is one broker
        for name in ("replication_factor", "replicas"):
            body.pop(name, None)
    if "config" in body and not _fits(body["config"]):
        body["config"] = {}
    if isinstance(body.get("timeout_ms"), int):
        body["timeout_ms"] = min(body["timeout_ms"], TRANSACTION_MAX_TIMEOUT_MS)
    if isinstance(body.get("before_offset"), int):
        body["before_offset"] %= RECORDS + 1
    for name in ("offsets", "together"):  # each partition, and each id, once
        if body.get(name):
            body[name] = body[name][:1]
    for record in body.get("records", ()):
        if not _is_past(record.get("timestamp")):
            del record["timestamp"]
        if to_partition or record.get("partition"):
            record.pop("partition", None)


def _fits(config: dict[str, Any]) -> bool:
    """Keys may contradict each other, and text holds numbers. There is one replica."""
    try:
        parsed = LogConfig.parse({name: one for name, one in config.items() if one is not None})
    except InvalidConfig:
        return False
    return parsed.min_in_sync(1) == 1


def _is_past(timestamp: object) -> bool:
    """A topic refuses times more than an hour ahead; and a month has its number of days."""
    with suppress(ValueError):
        return timestamp is None or parse_time(str(timestamp)) <= time.time() * 1000
    return False
