"""The hints that the command line adds to the errors of its client."""

import httpx
import pytest

import tierlog
from tierlog.cli.client_options import _near_topic


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("ordes", "; did you mean 'orders'?"),
        ("payments", "; `tierlog topic list` lists the topics"),
        ("orders", ""),  # it was re-created: the error is about its former self
    ],
)
def test_an_unknown_topic_is_compared_with_the_topics_there_are(topic: str, hint: str) -> None:
    listed = {"name": "orders", "topic_id": "x", "partitions": 1, "config": {}}
    response = httpx.Response(200, json={"topics": [listed]})
    with tierlog.Client(transport=httpx.MockTransport(lambda _: response)) as client:
        assert _near_topic(client, topic) == hint
