"""What every Kafka handler is given: the broker, the limits, and the threads for blocking calls."""

from __future__ import annotations

from asyncio import wrap_future
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from tierlog.api.kafka.access import Access
from tierlog.api.kafka.fetch_sessions import FetchSessions
from tierlog.api.kafka.request_memory import RequestMemory
from tierlog.api.kafka.settings import BrokerConfig, KafkaSettings
from tierlog.api.kafka.share_sessions import ShareSessions
from tierlog.api.serving.client_rates import ClientRates
from tierlog.api.serving.kafka_counts import KafkaCounts
from tierlog.api.serving.tokens import TokensFile
from tierlog.api.serving.waiting_requests import WaitingRequests
from tierlog.api.serving.workers import Workers
from tierlog.broker.broker import Broker
from tierlog.host.clock import monotonic_ms

P = ParamSpec("P")
T = TypeVar("T")


class KafkaContext:
    """`waiting`, `workers`, `tokens`, `rates` and `counts` are those of the HTTP server."""

    def __init__(
        self,
        broker: Broker,
        settings: KafkaSettings,
        *,
        waiting: WaitingRequests,
        workers: Workers,
        tokens: TokensFile | None,
        rates: ClientRates | None,
        counts: KafkaCounts,
        broker_configs: Sequence[BrokerConfig],
    ) -> None:
        self.broker, self.settings = broker, settings
        self.broker_configs = broker_configs
        self.waiting, self.workers = waiting, workers
        self.memory = RequestMemory(settings.queued_max_bytes)
        self.fetch_sessions = FetchSessions(settings.fetch_sessions_max, clock=monotonic_ms)
        self.share_sessions = ShareSessions(
            settings.share_sessions_max,
            release=broker.share_groups.release,
            close_group=broker.share_groups.close_group,
        )
        self.counts = counts
        counts.request_memory_bytes = lambda: self.memory.held
        self.access = Access(settings, tokens=tokens, rates=rates, threads=workers.parsers)

    async def write(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call that writes to disk."""
        return await wrap_future(self.workers.writers.submit(call, *args, **kwargs))

    async def write_cold(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call that writes, and may wait for the bucket."""
        return await wrap_future(self.workers.cold_writers.submit(call, *args, **kwargs))

    async def parse(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call that computes at length."""
        return await wrap_future(self.workers.parsers.submit(call, *args, **kwargs))

    async def read(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call that may wait for the disk."""
        return await wrap_future(self.workers.readers.submit(call, *args, **kwargs))
