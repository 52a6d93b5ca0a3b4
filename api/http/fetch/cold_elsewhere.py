"""Reads from the bucket what another broker leads (`broker.cluster.cold_partitions`). Imported only
in a cluster.

* The leader is asked for the log's start and end, which no bucket has, by a HEAD for each read: so
  an answer from here is what the leader would have said, without its disk and its bandwidth.
* A leader that does not answer soon, or says that it cannot answer now, is not waited for, and not
  asked again for a moment: what is in the bucket is there without it.
* Only whoever was asked by a client reads so, not whoever was asked by another broker.
"""

from __future__ import annotations

import ssl
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from tierlog.api.http.cluster.peers import check_trusted
from tierlog.api.http.cluster.splitting import token_of
from tierlog.api.http.exchange import FORWARDED, Exchange
from tierlog.api.http.fetch.leader_heads import Head, LeaderHeads
from tierlog.api.http.header_values import BATCHES
from tierlog.broker.bucket.cold_reads import ColdReads
from tierlog.broker.cluster.cold_partitions import ColdPartition, Told
from tierlog.broker.partition.partition import Readable
from tierlog.broker.topics.topics import Topic
from tierlog.host.waiting import Wait, WouldBlock
from tierlog.record_format.errors import (
    CorruptDataError,
    LeaderUnknown,
    NotLeader,
    PeerUnavailable,
    RetriableError,
    TierlogError,
)

if TYPE_CHECKING:
    from tierlog.api.http.context import Context
    from tierlog.broker.cluster.cluster import Cluster

NO_ANSWER: Final = Head(503, {})
SILENCE_S: Final = 1.0  # for which a leader is not asked that did not answer


class ColdElsewhere:
    """Used on the event loop only."""

    def __init__(self, context: Context, cluster: Cluster, trusted: ssl.SSLContext) -> None:
        self._context, self._cold, self._trusted = context, cluster.cold, trusted
        self._node_id = cluster.members.me.node_id
        self._heads: dict[str, LeaderHeads] = {}  # by the url of a broker
        self._silent_until_s: dict[str, float] = {}

    async def find_partition(
        self, exchange: Exchange, name: str, number: int, *, offset: int
    ) -> Readable:
        """The partition if it is led here by now, else what the bucket has of it. Raises as
        `Topic.partition` does unless the bucket has this offset.
        """
        topic = self._context.broker.topic(name)
        try:
            return topic.partition(number)
        except NotLeader as error:
            refusal: NotLeader | LeaderUnknown = error
        except LeaderUnknown as error:
            refusal = error
        record = topic.record
        if not self._cold.may_have(record, number, offset):
            raise refusal
        await self._context.immediate.until_task()
        reads = await self._find_reads(topic, number, offset)
        if reads is None:
            raise refusal
        told = None
        if isinstance(refusal, NotLeader):
            told = await self._ask_leader(exchange, topic, number, refusal)
        return ColdPartition(
            record,
            number,
            reads,
            told=told,
            heard_end=self._cold.heard_end(record, number),
            refuse=partial(_refusal_of, topic, number),
        )

    async def _find_reads(self, topic: Topic, number: int, offset: int) -> ColdReads | None:
        find = partial(self._cold.find_reads, topic.record, number, offset)
        try:
            return find(Wait.NEVER)
        except WouldBlock:
            pass
        try:
            return await self._context.read_cold(find)
        except (RetriableError, CorruptDataError):
            return None  # the leader says why, or has it on its disk

    async def _ask_leader(
        self, exchange: Exchange, topic: Topic, number: int, leader: NotLeader
    ) -> Told | None:
        """None if it does not answer. Raises NotLeader if it is not of this opinion."""
        now_s = time.monotonic()
        if self._silent_until_s.get(leader.url, 0.0) > now_s:
            return None
        try:
            answer = await self._heads_of(leader.url).ask(self._question(exchange, topic, number))
        except PeerUnavailable:
            answer = NO_ANSWER
        if answer.status == NO_ANSWER.status:
            kept = {url: until for url, until in self._silent_until_s.items() if until > now_s}
            self._silent_until_s = {**kept, leader.url: time.monotonic() + SILENCE_S}
            return None
        if answer.status != 200 or answer.headers.get("log-topic-id") != topic.record.topic_id:
            raise leader
        return Told(
            log_start_offset=int(answer.headers["log-start-offset"]),
            high_watermark=int(answer.headers["log-high-watermark"]),
        )

    def _heads_of(self, url: str) -> LeaderHeads:
        """Raises PeerUnavailable for one that is not trusted."""
        check_trusted(url, self._context.settings.peers_ca_file)
        found = self._heads.get(url)
        if found is None:
            found = self._heads[url] = LeaderHeads(url, self._trusted)
        return found

    def _question(self, exchange: Exchange, topic: Topic, number: int) -> bytes:
        head = b"HEAD /v1/topics/%b/partitions/%d/records?offset=latest HTTP/1.1" % (
            topic.record.name.encode(),
            number,
        )
        headers = [
            *token_of(exchange),
            (FORWARDED, b"%d" % self._node_id),
            (b"accept", BATCHES.encode()),
        ]
        return b"\r\n".join([head, *(b"%b: %b" % one for one in headers)])

    def close(self) -> None:
        for one in self._heads.values():
            one.close()


def _refusal_of(topic: Topic, number: int) -> TierlogError:
    try:
        topic.partition(number)
    except TierlogError as error:
        return error
    return LeaderUnknown(f"{topic.record.name}-{number} has just come to this broker")
