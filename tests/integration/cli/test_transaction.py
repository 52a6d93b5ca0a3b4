import json

import pytest

from tierlog.client.client import Client
from tierlog.client.group_calls import OffsetCommit
from tierlog.record_format.errors import ProducerFenced


def test_a_transaction_that_hangs_is_listed_described_and_aborted(tierlog):
    tierlog.ok("topic", "create", "t-topic", "--partitions", "2")
    with Client(tierlog.server) as client:
        with client.transaction("my etl") as done:
            done.produce("t-topic", ["a"], partition=1)
        hanging = client.transaction("my etl")
        tx = hanging.__enter__()
        tx.produce("t-topic", ["b", "c"], partition=1)
        tx.commit_offsets("t-group", [OffsetCommit("t-topic", 0, 0)])
        listed = json.loads(tierlog.ok("transaction", "list", "--state", "Ongoing"))
        (one,) = listed["transactions"]
        assert (one["transactional_id"], one["partitions"]) == ("my etl", 2)
        assert b"my etl" in tierlog.ok("transaction", "list", "--output", "text")
        shown = json.loads(tierlog.ok("transaction", "describe", "my etl"))
        of_group, of_topic = shown["partitions"]
        assert of_group["topic"] == "__consumer_offsets"
        held = {"partition": 1, "last_stable_offset": 2, "high_watermark": 4}
        assert of_topic == {"topic": "t-topic", **held}
        text = tierlog.ok("transaction", "describe", "my etl", "--output", "text")
        assert b"my etl: Ongoing for" in text
        assert b"held back" in text
        assert "--yes" in tierlog.fails(2, "transaction", "abort", "my etl")
        aborted = json.loads(tierlog.ok("transaction", "abort", "my etl", "--yes"))
        assert aborted == {"fenced": "my etl", "was": "Ongoing"}
        assert client.offsets("t-topic", 1).last_stable_offset == 5
        with pytest.raises(ProducerFenced):
            hanging.__exit__(None, None, None)
    shown = json.loads(tierlog.ok("transaction", "describe", "my etl"))
    assert (shown["state"], shown["partitions"]) == ("Empty", [])
    assert "no transactional id" in tierlog.fails(1, "transaction", "describe", "nobody")
    assert "state" in tierlog.fails(1, "transaction", "list", "--state", "Hanging")
