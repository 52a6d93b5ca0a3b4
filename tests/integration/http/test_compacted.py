"""What compaction took away is not shown any more, by any form of reading."""

import json

import pytest

from tests.fakes.records import iter_records
from tests.fakes.waiting import until
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
    # If the background compactor is at this log already, the round is repeated after a minute.
    until(lambda: batch_offsets(api, topic) == [29], patience_s=90)
    assert offsets(api, topic, accept) == [29]


def batch_offsets(api: Api, topic: str) -> list[int]:
    return [record.offset for record in iter_records(api.fetch(topic, accept=BATCHES).content)]


def offsets(api: Api, topic: str, accept: str) -> list[int]:
    answer = api.get(records_path(topic), headers={"accept": accept})
    if accept == NDJSON:
        return [json.loads(line)["offset"] for line in answer.text.splitlines()]
    return [record["offset"] for record in answer.json()["records"]]
