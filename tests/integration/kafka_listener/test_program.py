"""`tierlog dev` and `tierlog serve` say where Kafka clients connect, and they can."""

import re
import socket
from pathlib import Path

import kafka

from tests.fakes.command_line import RunningBroker
from tests.fakes.kafka_caller import KafkaCaller
from tests.fakes.served_broker import served_broker
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.record_format.kafka_messages.messages import MetadataRequest


def test_dev_takes_the_next_free_port_and_prints_it(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    brokers = [RunningBroker("dev", "--port", "0", cwd=folder) for folder in folders]
    try:
        shown = [(folder / "broker.log").read_text() for folder in folders]
        found = [re.search(r"bootstrap\.servers=(127\.0\.0\.1:9\d+)", text) for text in shown]
        servers = [one[1] for one in found if one]
        assert len(set(servers)) == 2
        for server, text in zip(servers, shown, strict=True):
            assert f"kcat -b {server}" in text
            consumer = kafka.KafkaConsumer(bootstrap_servers=server)
            assert consumer.topics() == set()
            consumer.close()
    finally:
        for broker in brokers:
            assert broker.stop() == 0


def test_serve_says_where_kafka_clients_connect(tmp_path: Path) -> None:
    flags = ("--data-dir", "data", "--kafka-listen", "127.0.0.1:0", "--listen", "127.0.0.1:0")
    broker = RunningBroker("serve", *flags, "--kafka-advertised", "broker.test:1234", cwd=tmp_path)
    try:
        shown = (tmp_path / "broker.log").read_text()
        assert "Kafka clients connect to broker.test:1234," in shown
    finally:
        assert broker.stop() == 0


def test_an_address_that_means_all_is_never_advertised(tmp_path: Path) -> None:
    for number, host in enumerate(("0.0.0.0", "::")):
        settings = KafkaSettings(advertised=(host, 4711))
        with (
            served_broker(tmp_path / str(number), kafka=settings) as served,
            KafkaCaller(served.kafka_port) as caller,
        ):
            (broker,) = caller.ask(MetadataRequest(topics=[]), 9).brokers
            assert (broker.host, broker.port) == ("127.0.0.1", 4711)


def test_a_client_is_told_the_address_that_it_connected_to(tmp_path: Path) -> None:
    with served_broker(tmp_path, kafka=KafkaSettings()) as served:
        caller = KafkaCaller(served.kafka_port)
        (broker,) = caller.ask(MetadataRequest(topics=[]), 9).brokers
        assert (broker.host, broker.port) == caller.sock.getpeername()
        assert caller.sock.family == socket.AF_INET
        caller.close()
