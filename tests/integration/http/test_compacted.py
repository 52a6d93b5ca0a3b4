"""What compaction took away is not shown any more, by any form of reading."""

import json

import pytest

from tests.fakes.records import iter_records
from tests.integration.http.conftest import BATCHES, NDJSON, Api, records_path


@pytest.mark.parametrize("accept", ["application/json", NDJSON])
def test_a_page_read_before_a_compaction_is_not_answered_after_it(api: Api, accept: str) -> None:
    topic = api.topic(
        segment_bytes=1024,
        cleanup_policy="compact",
        min_cleanable_dirty_ratio=0.01,
        remote_storage_enable=False,
    )
    for number in range(30):
        assert api.produce(topic, {"key": "k", "value": f"{number:0200}"}).status_code == 200
    before = offsets(api, topic, accept)
    assert before == list(range(30))
    api.broker.partition(topic, 0).log.roll()
    api.broker.background.compactor.run_round()
    left = [r.offset for r in iter_records(api.fetch(topic, accept=BATCHES).content)]
    assert left == [29]
    assert offsets(api, topic, accept) == left


def offsets(api: Api, topic: str, accept: str) -> list[int]:
    answer = api.get(records_path(topic), headers={"accept": accept})
    if accept == NDJSON:
        return [json.loads(line)["offset"] for line in answer.text.splitlines()]
    return [record["offset"] for record in answer.json()["records"]]
