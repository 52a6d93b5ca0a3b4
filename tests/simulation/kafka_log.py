"""A partition written by a Kafka with transactional producers, and the model of it."""

from collections.abc import Callable
from pathlib import Path
from random import Random

from tests.fakes.control_markers import marker_key, marker_value
from tests.simulation.topic_model import Line, TopicModel, headers_of
from tierlog.hot_tier.log_config import LogConfig
from tierlog.record_format.encode import encode_batch

PRODUCERS = range(50, 54)
KEPT = LogConfig.parse({"retention.ms": -1, "retention.bytes": -1})

NewLines = Callable[[int], tuple[list[int], list[Line]]]
"""Makes that many new records: their numbers, and the records."""


def encoded(numbers: list[int], lines: list[Line], **fields: object) -> bytearray:
    return encode_batch(
        [line.value for line in lines],
        keys=[line.key for line in lines],
        timestamps=[line.timestamp for line in lines],
        headers=[headers_of(number) for number in numbers],
        **fields,
    )


def write_kafka_log(folder: Path, new_lines: NewLines, random: Random, now_ms: int) -> TopicModel:
    """Write interleaved transactions, some aborted, rarely some still open; return the model."""
    log = _Log(new_lines, random, now_ms)
    segments, start = {}, 0
    for _ in range(random.randrange(60)):
        log.turn(random.choice(PRODUCERS))
        if len(log.data) > 1500:
            segments[start], start = bytes(log.data), log.end
            log.data.clear()
    if random.random() < 0.8:
        for producer_id in list(log.open):
            log.end_transaction(producer_id)
    segments[start] = bytes(log.data)
    folder.mkdir(parents=True)
    for base_offset, data in segments.items():
        (folder / f"{base_offset:020}.log").write_bytes(data)
    return log.model


class _Log:
    """`open`: numbers of the records of open transactions, by producer."""

    def __init__(self, new_lines: NewLines, random: Random, now_ms: int) -> None:
        self._new_lines, self._random, self._now_ms = new_lines, random, now_ms
        self.model, self.data, self.end = TopicModel(KEPT), bytearray(), 0
        self.open: dict[int, list[int]] = {}
        self._sequences = dict.fromkeys(PRODUCERS, 0)

    def turn(self, producer_id: int) -> None:
        if producer_id in self.open and self._random.random() < 0.4:
            self.end_transaction(producer_id)
        else:
            self._write(producer_id)

    def _write(self, producer_id: int) -> None:
        numbers, lines = self._new_lines(self._random.randint(1, 3))
        for offset, (number, line) in enumerate(zip(numbers, lines, strict=True), self.end):
            self.model.sent[number] = line._replace(aborted=True)  # until it is committed
            self.model.acknowledge(number, offset)
        self.open.setdefault(producer_id, []).extend(numbers)
        sequence = self._sequences[producer_id]
        self._sequences[producer_id] += len(numbers)
        self.data += encoded(numbers, lines, base_sequence=sequence, **self._of(producer_id))
        self.end += len(numbers)

    def end_transaction(self, producer_id: int) -> None:
        committed = self._random.random() < 0.5
        for number in self.open.pop(producer_id):
            sent = self.model.sent[number]
            self.model.sent[number] = sent._replace(aborted=not committed)
        self.data += encode_batch(
            [marker_value(coordinator_epoch=0)],
            keys=[marker_key(committed=committed)],
            timestamps=[self._now_ms],
            control=True,
            **self._of(producer_id),
        )
        self.end += 1

    def _of(self, producer_id: int) -> dict[str, object]:
        return {
            "producer_id": producer_id,
            "producer_epoch": 0,
            "base_offset": self.end,
            "leader_epoch": 0,
            "transactional": True,
        }
