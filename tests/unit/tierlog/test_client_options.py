"""The hints that the command line adds to the errors of its client."""

from functools import partial

import httpx2
import pytest

import tierlog
from tierlog.cli.options import ClientOptions, _near_topic, with_client
from tierlog.client.problems import NotOfferedHere


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
    response = httpx2.Response(200, json={"topics": [listed]})
    with tierlog.Client(transport=httpx2.MockTransport(lambda _: response)) as client:
        assert _near_topic(client, topic) == hint


@pytest.mark.parametrize(
    ("server", "is_explained"), [("localhost:1/v1/", True), ("http://localhost:1", False)]
)
def test_an_address_with_the_prefix_of_the_paths_is_explained(
    server: str, is_explained: bool
) -> None:
    def call(_: tierlog.Client) -> None:
        raise NotOfferedHere("/v1/v1/topics is not a path of this API")

    with pytest.raises(NotOfferedHere) as refused:
        with_client(ClientOptions(server=server), partial(call))
    assert ("without /v1" in str(refused.value)) == is_explained
