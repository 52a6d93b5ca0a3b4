"""What the Kafka listener serves: a row for each API, with the type to decode and its handler."""

from __future__ import annotations

from tierlog.api.kafka.calls import Calls, Row
from tierlog.api.kafka.metadata import metadata
from tierlog.api.kafka.versions import api_versions
from tierlog.record_format.kafka_messages.messages import ApiVersionsRequest, MetadataRequest


def all_calls() -> Calls:
    calls = {
        "Metadata": Row(MetadataRequest, metadata),
    }
    calls["ApiVersions"] = Row(ApiVersionsRequest, api_versions(calls), is_open=True)
    return calls
