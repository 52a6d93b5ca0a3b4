"""Any request that can be written, sent to a broker: it is answered, and nothing else happens.

* Or its connection ends with a line in the log, as Kafka ends it.
* No answer has UNKNOWN_SERVER_ERROR, and nothing is logged as an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import structlog
from hypothesis import strategies as st

from tests.fakes.kafka_caller import KafkaCaller
from tests.fakes.kafka_values import Likely, messages
from tests.fakes.served_broker import served_broker
from tierlog.api.kafka.error_codes import Code
from tierlog.api.kafka.handlers import HANDLERS
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.record_format.checkpoint_files import parse_topic_id
from tierlog.record_format.kafka_messages.apis import APIS, Api

SERVED = [api for api in APIS.values() if api.name in HANDLERS]
TOPIC = "flights"
NAMES = (TOPIC, "group", "copier", "consumer", "range", "retention.ms", "__consumer_offsets", "0")
WAITS = {"max_wait_ms": 0, "rebalance_timeout_ms": 10}  # else a test would wait as long as it says


class Target:
    def __init__(self, port: int, topic_id: bytes, logs: Sequence[Mapping[str, Any]]) -> None:
        self.port, self._logs = port, logs
        self._likely = Likely(NAMES, (bytes(16), topic_id), range(-3, 7))

    def requests(self, api: Api, version: int) -> st.SearchStrategy[msgspec.Struct]:
        drawn: st.SearchStrategy[msgspec.Struct] = messages(
            f"{api.name}Request", version, self._likely
        )
        return drawn

    def sender(self, version: int) -> Callable[[msgspec.Struct], None]:
        return lambda request: self.send(request, version)

    def send(self, request: msgspec.Struct, version: int) -> None:
        for name, value in WAITS.items():
            if hasattr(request, name):
                setattr(request, name, value)
        before = len(self._logs)
        with KafkaCaller(self.port) as caller:
            caller.send(request, version)
            answer = None if is_silent(request) else answer_or_end(caller, request, version)
        logged = list(self._logs[before:])
        assert not [one for one in logged if one["log_level"] == "error"], (request, logged)
        assert answer or is_silent(request) or logged, (request, "ended without a word")
        assert Code.UNKNOWN_SERVER_ERROR not in codes_in(answer), (request, answer)


def is_silent(request: msgspec.Struct) -> bool:
    return getattr(request, "acks", None) == 0


def answer_or_end(caller: KafkaCaller, request: msgspec.Struct, version: int) -> Any:
    try:
        return caller.answer(request, version)
    except (AssertionError, ConnectionResetError):  # the former: it was closed
        return None


def codes_in(answer: Any) -> Iterator[int]:
    if isinstance(answer, list):
        for one in answer:
            yield from codes_in(one)
    elif isinstance(answer, msgspec.Struct):
        for name in answer.__struct_fields__:
            if name == "error_code":
                yield getattr(answer, name)
            yield from codes_in(getattr(answer, name))


@contextmanager
def fuzzed(folder: Path) -> Iterator[Target]:
    with served_broker(folder, kafka=KafkaSettings()) as served:
        served.broker.create_topic(TOPIC, partitions=3)
        topic_id = parse_topic_id(served.broker.topic(TOPIC).record.topic_id).bytes
        with structlog.testing.capture_logs() as logs:
            yield Target(served.kafka_port, topic_id, logs)
