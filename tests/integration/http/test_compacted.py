"""Records removed by compaction are no longer served, in any media type."""

import json

import pytest

from tests.fakes.records import iter_records
from tests.fakes.waiting import until
from tests.integration.http.conftest import BATCHES, NDJSON, Api, records_path


@pytest.mark.parametrize("accept", ["application/json", NDJSON])
def test_a_page_cached_before_compaction_is_not_served_after_it(api: Api, accept: str) -> None:
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
    api.broker.partition(topic, 0).upkeep.roll()
    api.broker.background.compactor.run_round()
    # While the background compactor holds the log, this round skips it; its next is in a minute.
    until(lambda: batch_offsets(api, topic) == [29], patience_s=90)
    assert offsets(api, topic, accept) == [29]


def batch_offsets(api: Api, topic: str) -> list[int]:
    return [record.offset for record in iter_records(api.fetch(topic, accept=BATCHES).content)]


def offsets(api: Api, topic: str, accept: str) -> list[int]:
    response = api.get(records_path(topic), headers={"accept": accept})
    if accept == NDJSON:
        return [json.loads(line)["offset"] for line in response.text.splitlines()]
    return [record["offset"] for record in response.json()["records"]]
