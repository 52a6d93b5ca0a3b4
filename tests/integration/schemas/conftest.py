"""A broker with a Kafka listener, and Confluent's client of its schema registry."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient

from tests.fakes.served_broker import Served, served_broker
from tierlog.api.kafka.settings import KafkaSettings


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = tmp_path_factory.mktemp("registry")
    with served_broker(folder / "data", kafka=KafkaSettings()) as found:
        yield found


@pytest.fixture(scope="module")
def registry(served: Served) -> Iterator[SchemaRegistryClient]:
    with SchemaRegistryClient({"url": served.server.url}) as client:
        yield client
