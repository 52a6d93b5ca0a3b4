"""schemathesis: what a fuzzer makes of the OpenAPI document is answered as the document says.

Requests that the document allows and such that it does not; refusals of the former are no fault
(a topic may be missing), acceptance of the latter is.
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
def as_it_is(_: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


@pytest.fixture(scope="module")
def operations(api: Api) -> list[Any]:
    api.post("/v1/topics", json={"name": "flights", "partitions": 2})
    schema = schemathesis.openapi.from_dict(api.get("/openapi.json").json())
    return [found.ok() for found in schema.get_all_operations() if "tail" not in found.ok().path]


# Of the broker's threads, which draw their jitter while a strategy draws, hypothesis cannot tell.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_what_a_fuzzer_sends_is_answered_as_the_document_says(
    api: Api, operations: list[Any], mode: GenerationMode
) -> None:
    for operation in operations:
        ask(api, operation, mode)


def ask(api: Api, operation: Any, mode: GenerationMode) -> None:
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(max_examples=4, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def asked(case: Case) -> None:
        if mode is GenerationMode.POSITIVE:  # nobody writes while a long poll would wait
            for place in (case.query, case.body):
                if isinstance(place, dict):
                    place.pop("wait_ms", None)
        case.call_and_validate(base_url=str(api.base_url), checks=CHECKS)

    with suppress(Unsatisfiable):  # a call that takes nothing has nothing to get wrong
        asked()
