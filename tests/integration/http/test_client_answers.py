"""What a Python client gives back: types, and a warning of records that retention deletes."""

import asyncio
import logging
import warnings

import pytest

import tierlog
from tests.integration.http.conftest import Api

OLD = tierlog.NewRecord("old", timestamp="2013-01-01T00:00:00Z")


def test_what_calls_return_has_a_name_to_annotate_with(api: Api) -> None:
    name = api.topic()
    with tierlog.Client(str(api.base_url)) as client:
        with client.producer() as producer:
            placed = producer.send(name, "v")
        assert isinstance(placed, tierlog.Delivery)
        assert isinstance(placed.result(), tierlog.RecordMetadata)
        assert all(isinstance(topic, tierlog.Topic) for topic in client.list_topics())
        assert isinstance(client.fetch(name, 0).records[0], tierlog.Record)


def test_a_produce_warns_at_the_line_that_calls_it(api: Api) -> None:
    topic = api.topic()
    client = tierlog.Client(str(api.base_url))
    with client, pytest.warns(tierlog.errors.AppendWarning, match="retention.ms=-1 keeps") as shown:
        response = client.produce(topic, [OLD])
    assert shown[0].filename == __file__
    assert response.warning_details["older-than-retention"] == str(shown[0].message)


def test_an_awaited_produce_warns_at_the_line_that_calls_it(api: Api) -> None:
    async def produce() -> None:
        async with tierlog.AsyncClient(str(api.base_url)) as client:
            await client.produce(api.topic(), [OLD])

    with pytest.warns(tierlog.errors.AppendWarning) as shown:
        asyncio.run(produce())
    assert shown[0].filename == __file__


def test_a_producer_warns_and_its_records_are_appended(api: Api) -> None:
    topic = api.topic()
    with tierlog.Client(str(api.base_url)) as client:
        with pytest.warns(tierlog.errors.AppendWarning), client.producer() as producer:
            placed = producer.send(topic, "old", timestamp=OLD.timestamp)
        assert placed.result().offset == 0


def test_a_filter_that_raises_does_not_end_a_producer(
    api: Api, caplog: pytest.LogCaptureFixture
) -> None:
    topic = api.topic()
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        with tierlog.Client(str(api.base_url)) as client, client.producer() as producer:
            placed = producer.send(topic, "old", timestamp=OLD.timestamp)
            assert placed.result().offset == 0
            assert producer.send(topic, "new").result().offset == 1
    assert "retention.ms=-1 keeps" in caplog.text
