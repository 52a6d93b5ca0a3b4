"""The bucket as a member of a partition's in-sync set: what a broker does for it, and with it
(docs/cluster.md, "The bucket as a member").

| when                               | what                                                        |
|------------------------------------|-------------------------------------------------------------|
| it leads, and STORE is wanted      | it writes what the manifest lacks of its log into its chain |
| it claims, and STORE is to stay    | the same, under the epoch that it claims, before it claims  |
| no member is there to claim        | it closes the chain in force, makes its log that of STORE,  |
|                                    | and goes on as above                                        |
| it leads no more, or did not claim | it writes no more                                           |
"""

from __future__ import annotations

from typing import Final

import structlog

from tierlog.broker.replicas.replica import Replica
from tierlog.broker.replication.in_sync import InForce
from tierlog.broker.replication.store_writer import Feed, StoreWriter
from tierlog.broker.replication.write_ahead_chain import ClosedChains
from tierlog.cold_tier.write_ahead_object import Place
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.checkpoint_files import parse_topic_id
from tierlog.record_format.errors import StoreUnavailable

log = structlog.get_logger(__name__)

PATIENCE_S: Final = 10.0  # with a bucket that takes nothing, while a claim waits for it


class StoreMember:
    """Thread-safe; each call is about one replica, by one thread at a time for it."""

    def __init__(self, writer: StoreWriter, store: ObjectStore) -> None:
        self._writer, self._chains = writer, ClosedChains(store)

    def open_feed(self, replica: Replica, epoch: int) -> Feed:
        """Write what the manifest lacks, and what comes after. Raises StoreUnavailable,
        CorruptDataError, ShuttingDown.
        """
        self.close_feed(replica)
        assert replica.cold is not None, "a replica has a bucket"
        manifest = replica.cold.load_newest()
        start = 0 if manifest is None else manifest.end_offset
        replica.feed = self._writer.open_feed(
            replica.log, _place_of(replica), epoch, start_offset=start
        )
        return replica.feed

    def close_feed(self, replica: Replica) -> None:
        feed, replica.feed = replica.feed, None
        if feed is not None:
            self._writer.close_feed(feed)

    def write_tail(self, replica: Replica, epoch: int) -> str:
        """The chain that has all of the log that the manifest lacks, under the epoch that is to be
        claimed. Raises StoreUnavailable, and what `open_feed` does.
        """
        feed, end_offset = self.open_feed(replica, epoch), replica.log.flushed_end
        if not self._writer.wait_until_stored(feed, end_offset, patience_s=PATIENCE_S):
            self.close_feed(replica)
            raise StoreUnavailable(f"{replica}: the bucket does not take the log's end")
        return feed.chain

    def take_log(self, replica: Replica, in_force: InForce) -> None:
        """Make its log that of STORE. Nobody acknowledges anything in that any more. Raises
        StoreUnavailable, MissingObject, CorruptDataError, OSError.
        """
        assert in_force.wal is not None, "it makes STORE a member"
        assert replica.cold is not None, "a replica has a bucket"
        chain = self._chains.close(in_force.wal)
        manifest = replica.cold.load_newest()
        end_offset = 0 if manifest is None else manifest.end_offset
        replica.begin_with_store(manifest)
        parts = chain.parts(_place_of(replica), epoch=in_force.epoch, end_offset=end_offset)
        for number, part in parts:
            if part.end_offset > replica.log.log_end_offset:
                replica.append_stored(part, chain.read(number, part))
        replica.log.writer.flush()
        replica.follow_manifest(manifest)  # a trim that was answered is in there
        log.warning(
            "a replica has the bucket's log",
            partition=str(replica),
            end_offset=replica.log.log_end_offset,
            objects=len(parts),
        )


def _place_of(replica: Replica) -> Place:
    topic_id, number = replica.place
    return Place(parse_topic_id(topic_id).bytes, number)
