"""The settings of the Kafka listener, with Kafka's names where Kafka has them. Read at the edge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

KIB: Final = 1 << 10
MIB: Final = 1 << 20


class BrokerConfig(NamedTuple):
    """One of all the broker's settings, as DescribeConfigs shows it."""

    name: str
    value: object
    default: object
    doc: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaSettings:
    """`advertised`: host and port that clients are told to connect to; None: those that they have
    connected to.
    """

    advertised: tuple[str, int] | None = None
    request_max_bytes: int = 100 * MIB  # socket.request.max.bytes
    # Before a client has authenticated: of all connections together it is far from the next one.
    first_request_max_bytes: int = 16 * KIB
    queued_max_bytes: int = 512 * MIB  # queued.max.request.bytes: of all requests in progress
    expanded_max_bytes: int = 256 * MIB  # of a partition's records in a Produce, decompressed
    records_max: int = 1_000_000  # of a partition, in a Produce
    connections_max: int = 10_000  # max.connections
    connections_max_idle_ms: int = 600_000  # connections.max.idle.ms
    connections_max_reauth_ms: int = 0  # connections.max.reauth.ms; 0: never again
    failed_authentication_delay_ms: int = 100  # connection.failed.authentication.delay.ms
    request_idle_timeout_ms: int = 30_000  # of a request that is only there in part
    send_idle_timeout_ms: int = 120_000
    auto_create_topics: bool = True  # auto.create.topics.enable
    num_partitions: int = 1  # num.partitions, of a topic that is created by default
    fetch_max_bytes: int = 55 * MIB  # fetch.max.bytes
    remote_fetch_max_wait_ms: int = 500  # remote.fetch.max.wait.ms
    fetch_sessions_max: int = 1000  # max.incremental.fetch.session.cache.slots
    share_sessions_max: int = 2000  # group.share.max.share.sessions
