"""What is counted of Kafka clients: plain integers, written on the event loop, read by scrapes.

It stands here since HTTP serves the metrics, and the Kafka listener does the counting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class KafkaCounts:
    connections: int = 0
    received_bytes: int = 0
    sent_bytes: int = 0
    failed_authentications: int = 0
    throttled_requests: int = 0
    request_memory_bytes: Callable[[], int] = int
    requests: dict[tuple[str, ...], float] = field(default_factory=dict)  # by API and error

    def answered(self, api: str, error: str) -> None:
        """Count an answered request, once under each of its errors. Both have few values: never
        text that a client chose.
        """
        labels = (api, error)
        self.requests[labels] = self.requests.get(labels, 0) + 1
