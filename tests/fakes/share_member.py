"""A member of a share group, by the calls themselves: a share consumer in thirty lines."""

from __future__ import annotations

from typing import Any

from tests.fakes.kafka_caller import KafkaCaller, api_of_request
from tests.fakes.waiting import until
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.decode import decode_batch
from tierlog.record_format.kafka_messages import messages as m

Fetch = m.ShareFetchRequest
Place = tuple[bytes, int]


class ShareMember:
    """A context manager. `acquired`: by partition, the offsets and deliveries of the last fetch."""

    def __init__(self, port: int, member: str, *topics: str, group: str = "g") -> None:
        self.caller = KafkaCaller(port)
        self.group, self.member, self.topics = group, member, topics
        self.epoch = self.session_epoch = 0
        self.places: list[Place] = []
        self.acquired: dict[Place, dict[int, int]] = {}

    def __enter__(self) -> ShareMember:
        return self

    def __exit__(self, *_: object) -> None:
        self.caller.close()

    def ask(self, request: Any) -> Any:
        return self.caller.ask(request, api_of_request(request).max_version)

    def beat(self) -> Any:
        topics = list(self.topics) if self.epoch == 0 else None
        kind = m.ShareGroupHeartbeatRequest
        answer = self.ask(kind(self.group, self.member, self.epoch, None, topics))
        if answer.error_code == 0:
            self.epoch = answer.member_epoch
            if answer.assignment is not None:
                given = answer.assignment.topic_partitions
                self.places = [(one.topic_id, n) for one in given for n in one.partitions]
        return answer

    def join(self, partitions: int = 1) -> ShareMember:
        """Until it has so many partitions."""

        def has_them() -> bool:
            self.beat()
            return len(self.places) >= partitions

        until(has_them, patience_s=30)
        return self

    def fetch(
        self, acks: dict[Place, list[tuple[int, int, int]]] | None = None, **fields: Any
    ) -> Any:
        """`acks`: first and last offset, and the type."""
        given = {
            "max_wait_ms": 300,
            "min_bytes": 1,
            "max_bytes": 8 << 20,
            "max_records": 500,
            "batch_size": 500,
            **fields,
        }
        rows: dict[bytes, list[Any]] = {}
        for place in self.places if self.session_epoch == 0 else acks or {}:
            batches = [
                Fetch.AcknowledgementBatch(first, last, [kind])
                for first, last, kind in (acks or {}).get(place, ())
            ]
            part = Fetch.FetchPartition(place[1], acknowledgement_batches=batches)
            rows.setdefault(place[0], []).append(part)
        topics = [Fetch.FetchTopic(*one) for one in rows.items()]
        request = Fetch(self.group, self.member, self.session_epoch, topics=topics, **given)
        answer = self.ask(request)
        if answer.error_code == 0:
            self.session_epoch += 1
        self.acquired = {
            (topic.topic_id, part.partition_index): {
                offset: one.delivery_count
                for one in part.acquired_records
                for offset in range(one.first_offset, one.last_offset + 1)
            }
            for topic in answer.responses
            for part in topic.partitions
            if part.acquired_records
        }
        return answer

    def accept_all(self, **fields: Any) -> Any:
        """Accept what the last fetch gave, and fetch."""
        acks = {place: _ranges(given, 1) for place, given in self.acquired.items()}
        return self.fetch(acks, **fields)


def _ranges(offsets: dict[int, int], kind: int) -> list[tuple[int, int, int]]:
    found: list[tuple[int, int, int]] = []
    for offset in sorted(offsets):
        if found and found[-1][1] + 1 == offset:
            found[-1] = (found[-1][0], offset, kind)
        else:
            found.append((offset, offset, kind))
    return found


def values(answer: Any) -> list[bytes]:
    """Of all the records that came, also those that are not the member's."""
    return [
        bytes(record.value or b"")
        for topic in answer.responses
        for part in topic.partitions
        for header in iter_headers(part.records)
        if not header.is_control
        for record in decode_batch(part.records, header)
    ]
