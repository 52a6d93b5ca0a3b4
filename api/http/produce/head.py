"""The head of a produce request: all that can be checked before a byte of the body is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from tierlog.api.http import strict_json
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.http_errors import UnsupportedMediaType
from tierlog.api.http.produce.batches import ProducerState
from tierlog.api.http.request import media_types
from tierlog.api.http.settings import MAX_OFFSET
from tierlog.broker.partition import Partition
from tierlog.broker.topic_registry import INTERNAL_PREFIX
from tierlog.broker.topics import Topic
from tierlog.hot_tier.log_writer import Acks
from tierlog.record_format.errors import Forbidden

_ACKS: Final[Mapping[str, Acks]] = {
    "0": Acks.NONE,
    "1": Acks.LEADER,
    "all": Acks.ALL,
    "-1": Acks.ALL,
}
_RECORD_FORMS: Final = (media_types.JSON, media_types.NDJSON, media_types.OCTETS)
_ALL_FORMS: Final = (*_RECORD_FORMS, media_types.BATCHES)
_PRODUCER_HEADERS: Final = (b"producer-id", b"producer-epoch", b"producer-sequence")
_PRODUCER_LIMITS: Final = (2**63 - 1, 2**15 - 1, 2**31 - 1)


class ProduceQuery(msgspec.Struct, forbid_unknown_fields=True):
    acks: Literal["0", "1", "all", "-1"] = "all"
    envelope: bool = False
    key: str | UnsetType = UNSET
    key_base64: str | UnsetType = UNSET


class ProduceRequest(NamedTuple):
    """A produce request without its body."""

    topic: Topic
    partition: Partition | None
    media_type: str
    acks: Acks
    query: ProduceQuery
    expected_offset: int | None
    producer: ProducerState | None


def refuse_internal(topic: str) -> None:
    """Raises Forbidden by the name alone: the broker makes such a topic when it first needs it."""
    if topic.startswith(INTERNAL_PREFIX):
        raise Forbidden(f"{topic} is internal: HTTP clients cannot produce to it")


def read_head(context: Context, exchange: Exchange, partition: Partition | None) -> ProduceRequest:
    """Raises InvalidRequest, UnsupportedMediaType, Forbidden, UnknownTopic."""
    topic = context.broker.topic(exchange.topic)
    query = exchange.query(ProduceQuery)
    media_type = _media_type(exchange, partition)
    _check_parameters(query, media_type)
    producer, expected_offset = _producer_state(exchange), _expected_offset(exchange)
    if partition is None and (producer is not None or expected_offset is not None):
        strict_json.refuse_field(
            "If-Offset-Match" if producer is None else "Producer-Id",
            "only supported on a partition's path",
        )
    if producer is not None and media_type == media_types.BATCHES:
        strict_json.refuse_field(
            "Producer-Id", "raw batches contain their producer's id, epoch and sequence"
        )
    return ProduceRequest(
        topic, partition, media_type, _ACKS[query.acks], query, expected_offset, producer
    )


def _media_type(exchange: Exchange, partition: Partition | None) -> str:
    header = exchange.header(b"content-type")
    if partition is not None:
        return media_types.content_type(header, accepted=_ALL_FORMS)
    if header == media_types.BATCHES:
        raise UnsupportedMediaType(
            "raw batches are only accepted on a partition's path", accepted=_RECORD_FORMS
        )
    return media_types.content_type(header, accepted=_RECORD_FORMS)


def _check_parameters(query: ProduceQuery, media_type: str) -> None:
    if query.envelope and media_type != media_types.NDJSON:
        strict_json.refuse_field("envelope", f"only supported with {media_types.NDJSON}")
    for name, given in (("key", query.key), ("key_base64", query.key_base64)):
        if given is not UNSET and media_type != media_types.OCTETS:
            strict_json.refuse_field(name, f"only supported with {media_types.OCTETS}")
    if query.key is not UNSET and query.key_base64 is not UNSET:
        strict_json.refuse_field("key_base64", "give key or key_base64, not both")


def _producer_state(exchange: Exchange) -> ProducerState | None:
    texts = [exchange.header(name) for name in _PRODUCER_HEADERS]
    if not any(text is not None for text in texts):
        return None
    numbers = [
        _header_number(name, text, most=most)
        for name, text, most in zip(_PRODUCER_HEADERS, texts, _PRODUCER_LIMITS, strict=True)
    ]
    return ProducerState(*numbers)


def _expected_offset(exchange: Exchange) -> int | None:
    text = exchange.header(b"if-offset-match")
    if text is None:
        return None
    return _header_number(b"if-offset-match", text, most=MAX_OFFSET)


def _header_number(name: bytes, text: str | None, *, most: int) -> int:
    title = name.decode().title()
    if text is None:
        strict_json.refuse_field(
            title, "missing: Producer-Id, Producer-Epoch and Producer-Sequence are sent together"
        )
    if not text.isascii() or not text.isdigit() or len(text) > 19 or int(text) > most:
        strict_json.refuse_field(title, f"expected a whole number up to {most}, not {text[:64]!r}")
    return int(text)
