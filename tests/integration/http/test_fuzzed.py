"""Requests that schemathesis generates from the OpenAPI document get the responses it describes.

Both valid and invalid requests: a valid one may be refused (a topic may be missing), an invalid one
must be.
"""

from contextlib import suppress
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    negative_data_rejection,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.integration.http.conftest import BATCHES, NDJSON, Api

CHECKS = [
    content_type_conformance,
    negative_data_rejection,
    not_a_server_error,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
]


@schemathesis.serializer(NDJSON, BATCHES, "application/octet-stream")
def as_bytes(_: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture(scope="module")
def operations(api: Api) -> list[Any]:
    api.post("/v1/topics", json={"name": "flights", "partitions": 2})
    schema = schemathesis.openapi.from_dict(api.get("/openapi.json").json())
    return [found.ok() for found in schema.get_all_operations() if "tail" not in found.ok().path]


# hypothesis cannot tell the broker's threads, which draw jitter, from its strategies.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_generated_requests_get_documented_responses(
    api: Api, operations: list[Any], mode: GenerationMode
) -> None:
    for operation in operations:
        run(api, operation, mode)


def run(api: Api, operation: Any, mode: GenerationMode) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=4, suppress_health_check=list(HealthCheck))
    def call(case: Case) -> None:
        if mode is GenerationMode.POSITIVE:  # a long poll would wait: nothing is produced
            for place in (case.query, case.body):
                if isinstance(place, dict):
                    place.pop("wait_ms", None)
        case.call_and_validate(base_url=str(api.base_url), checks=CHECKS)

    with suppress(Unsatisfiable):  # no invalid request exists for a call without parameters
        call()
