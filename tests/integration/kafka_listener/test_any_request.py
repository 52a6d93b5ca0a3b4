"""Whatever a request says, it is answered as Kafka answers, and the broker goes on."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.fakes.kafka_caller import KafkaCaller
from tests.fakes.kafka_fuzz import SERVED, TOPIC, Target, fuzzed
from tierlog.api.kafka.error_codes import Code
from tierlog.record_format.kafka_messages.apis import Api
from tierlog.record_format.kafka_messages.messages import MetadataRequest

some = settings(
    max_examples=2,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with fuzzed(tmp_path_factory.mktemp("data")) as target:
        yield target


@pytest.mark.parametrize("api", SERVED, ids=lambda api: api.name)
def test_any_request_is_answered(target: Target, api: Api) -> None:
    for version in {api.min_version, api.max_version}:
        some(given(target.requests(api, version))(target.sender(version)))()


@pytest.mark.parametrize("version", [10, 11])
def test_metadata_by_id_is_refused_in_the_versions_that_only_have_the_field(
    target: Target, version: int
) -> None:
    wanted = MetadataRequest.MetadataRequestTopic
    request = MetadataRequest([wanted(bytes(16), TOPIC), wanted(b"y" * 16, None)])
    with KafkaCaller(target.port) as caller:
        topics = caller.ask(request, version).topics
    assert [(one.error_code, one.name) for one in topics] == [
        (Code.INVALID_REQUEST, TOPIC),
        (Code.INVALID_REQUEST, ""),
    ]
